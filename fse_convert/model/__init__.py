"""The checkpoint as a model: families, formats, quantisation, layers and experts, read once."""
