"""Checkpoints on disk: strict safetensors headers, the cross-checked folder, byte-range copies, and the way a new one appears."""
