"""What a checkpoint is: families, formats, quantisation, layers and experts, read once."""
