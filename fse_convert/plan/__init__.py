"""Decide what a conversion writes, as values."""
