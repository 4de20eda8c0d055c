"""Checkpoints on disk: strict safetensors headers, and the cross-checked folder."""
