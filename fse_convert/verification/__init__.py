"""The proof of an output against its source."""
