"""`fse_convert.layout` on tensors: what the package does with rows of bytes, for tests that compare tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fse_convert.layout import megamoe, padding


def rows(x_nb: Tensor) -> list[bytes]:
    """Rows of uint8 ``[n, b]``."""
    return [bytes(row) for row in x_nb.tolist()]


def interleave(gate_ik: Tensor, up_ik: Tensor) -> Tensor:
    return torch.stack(megamoe.interleave(gate_ik, up_ik))


def pack(sf_ng: Tensor) -> Tensor:
    return _words(megamoe.pack(rows(sf_ng)), sf_ng)


def l1_scale(gate_ig: Tensor, up_ig: Tensor) -> Tensor:
    return _words(megamoe.l1_scale(rows(gate_ig), rows(up_ig)), gate_ig)


def l2_scale(down_hg: Tensor) -> Tensor:
    return _words(megamoe.l2_scale(rows(down_hg)), down_hg)


def pad(x_nb: Tensor, new_rows: int, new_row_bytes: int, fill: bytes) -> Tensor:
    grown = b"".join(padding.padded(rows(x_nb), new_rows, new_row_bytes, fill))
    return torch.frombuffer(bytearray(grown), dtype=torch.uint8).view(new_rows, new_row_bytes).to(x_nb.device)


def _words(raw: bytes, like: Tensor) -> Tensor:
    """int32 ``[g / 4, n]`` from the scales of ``g`` groups."""
    return torch.frombuffer(bytearray(raw), dtype=torch.int32).view(like.shape[1] // 4, -1).to(like.device)
