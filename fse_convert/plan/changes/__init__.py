"""Changes of format, one operation per file: what each does to tensors and to config.json; decided from headers and config."""
