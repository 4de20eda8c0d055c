"""Proof: the bytes (storage), the numbers (reference) and the real kernel."""
