"""The code of 1.0, with which scales are padded, as the proof knows it: apart from `fse_convert.layout.nan_and_one` on purpose."""

from __future__ import annotations

ONES = {"F8_E8M0": b"\x7f", "U8": b"\x7f", "F32": b"\0\0\x80\x3f", "F8_E4M3": b"\x38", "BF16": b"\x80\x3f"}
"""By the dtype of the scales; weights are padded with zero bytes."""
E8M0_ONE = ONES["F8_E8M0"][0]
