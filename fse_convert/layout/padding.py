"""Zero padding of 2-D byte tensors.

Gate and up grow at the end of their rows, down at the end of its columns; weights get 0x00, scales the code of 1.0, so
that a padded channel computes ``silu(0) * 0 = 0`` exactly and no NaN or sub-minimal scale can enter (vLLM #56568;
DeepGEMM 2.8.2 section 7.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def pad(x_nb: Tensor, rows: int, row_bytes: int, fill: bytes) -> Tensor:
    """Grow ``uint8 [n, b]`` to ``[rows, row_bytes]``, repeating ``fill`` (the bytes of one element) in what is new.

    Raises ValueError when the result would be smaller than the input or would split an element.
    """
    n, b = x_nb.shape
    if rows < n or row_bytes < b or row_bytes % len(fill) or b % len(fill):
        raise ValueError(f"cannot pad [{n}, {b}] bytes to [{rows}, {row_bytes}] in elements of {len(fill)}")
    element = torch.tensor(list(fill), dtype=torch.uint8)
    out = torch.empty(rows, row_bytes, dtype=torch.uint8)
    out[:n, :b] = x_nb
    out[:n, b:].view(n, (row_bytes - b) // len(fill), len(fill))[:] = element
    out[n:].view(rows - n, row_bytes // len(fill), len(fill))[:] = element
    return out
