"""Codes of elements that are special: NaN, which no expert may hold, and 1.0, with which scales are padded.

The proof has a table of its own, on purpose: `fse_convert.verification.code_of_one`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

E8M0_ONE, E8M0_NAN = 0x7F, 0xFF
E4M3_NAN = 0x7F
"""Of either sign."""
BF16_INFINITY = 0x7F80


class NaN(str, Enum):
    """The elements that have NaN codes."""

    E4M3 = "e4m3"
    E8M0 = "e8m0"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


NAN_BYTES: Mapping[NaN, tuple[int, ...]] = {NaN.E4M3: (E4M3_NAN, 0x80 | E4M3_NAN), NaN.E8M0: (E8M0_NAN,)}
"""NaN codes of the elements that are single bytes."""
NAN_WORDS: Mapping[NaN, tuple[int, int]] = {NaN.BF16: (2, BF16_INFINITY), NaN.F16: (2, 0x7C00), NaN.F32: (4, 0x7F800000)}
"""Of wider elements their bytes, and the code of infinity: those above it are NaN, without the sign bit."""
ONES: Mapping[NaN, bytes] = {
    NaN.E4M3: b"\x38", NaN.E8M0: bytes([E8M0_ONE]), NaN.BF16: b"\x80\x3f", NaN.F32: b"\0\0\x80\x3f",
}  # fmt: skip
"""The code of 1.0, little-endian."""
