"""The way back from an output to the checkpoint that it was made from, bit for bit and without that checkpoint."""
