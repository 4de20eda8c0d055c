"""Integer arithmetic of blocks and alignments, without torch."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``a``."""
    return ceil_div(a, multiple) * multiple
