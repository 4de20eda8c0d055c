"""What a checkpoint's tensor names mean: families as data, layers and experts as values."""
