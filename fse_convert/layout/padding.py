"""Zero padding of matrices of bytes; at which ends is in `fse_convert.model.padding_ends`.

Weights get 0x00, scales the code of 1.0, so
that a padded channel computes ``silu(0) * 0 = 0`` exactly and no NaN or sub-minimal scale can enter (vLLM #56568;
DeepGEMM 2.8.2 section 7.3).
"""

from __future__ import annotations

from collections.abc import Sequence


def filled(size: int, fill: bytes) -> bytearray:
    """Repeat ``fill``, the bytes of one element, up to ``size`` bytes. Raises ValueError when that splits an element."""
    if size % len(fill):
        raise ValueError(f"{size} bytes split elements of {len(fill)}")
    return bytearray(fill) * (size // len(fill))


def padded(rows: Sequence[bytes], new_rows: int, new_row_bytes: int, fill: bytes) -> list[bytes]:
    """Grow rows of one-byte elements to ``[new_rows, new_row_bytes]``. Raises ValueError when that would be smaller."""
    if len(rows) > new_rows or any(len(row) > new_row_bytes for row in rows[:1]):
        raise ValueError(f"cannot pad {len(rows)} rows to [{new_rows}, {new_row_bytes}] bytes")
    return [row.ljust(new_row_bytes, fill) for row in rows] + [fill * new_row_bytes] * (new_rows - len(rows))
