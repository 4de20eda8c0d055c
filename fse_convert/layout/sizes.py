"""Sizes of groups, blocks and alignments, without torch."""

from __future__ import annotations

GROUP = 32
"""Consecutive elements along K that share one scale, in MX formats and in the kernel (recipe (1, 1, 32))."""


def ceil_div(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``a``."""
    return ceil_div(a, multiple) * multiple
