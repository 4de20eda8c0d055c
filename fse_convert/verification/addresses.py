"""Where the kernel finds a byte, as arithmetic on indices: the inverse of MegaMoE's layout for 8-bit weights.

A *physical* row is a row as stored, a *logical* one a row of gate, up or down. ``/`` floors, ``half`` is 0 for gate, 1 for up:

* L1 weight: physical row ``d`` is row ``8 (d / 16) + d % 8`` of half ``(d % 16) / 8``. L2 weight: rows as they are.
* L1 scale: physical row ``d = 128 b + 64 q + 32 half + 4 m + j`` is row ``64 b + 16 j + 8 q + m`` of that half.
* L2 scale: physical row ``d = 128 b + 4 i + j`` is row ``128 b + 32 j + i`` (the UTCCP copy's order).
* Byte ``o`` of a scale tensor over ``N`` rows: word ``w = o / 4``, physical row ``w % N``, K group ``4 (w / N) + o % 4``.
* The scale of logical row ``r`` and group ``g`` (columns ``32 g`` to ``32 g + 31``) is the block ``(r / bm, 32 g / bk)``.

Rules: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py and include/deep_gemm/impls/smxx_layout.cuh:181-189; vLLM 0.33,
model_executor/layers/fused_moe/deep_gemm_mega_moe.py:572-606. Written without `fse_convert.layout`, which the writer uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Columns under one scale."""
ONE = 0x7F
"""UE8M0 code of 1.0."""


def l1_weight_rows(d: Tensor) -> tuple[Tensor, Tensor]:
    """Half and logical row of physical rows ``d`` (int64) of the L1 weight."""
    return (d % 16) // 8, 8 * (d // 16) + d % 8


def l1_scale_rows(d: Tensor) -> tuple[Tensor, Tensor]:
    """Half and logical row of physical rows ``d`` (int64) of the L1 scale."""
    b, q, half, m, j = d // 128, d % 128 // 64, d % 64 // 32, d % 32 // 4, d % 4
    return half, 64 * b + 16 * j + 8 * q + m


def l2_scale_rows(d: Tensor) -> Tensor:
    """Logical row of physical rows ``d`` (int64) of the L2 scale."""
    return 128 * (d // 128) + 32 * (d % 4) + d % 128 // 4


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales of one projection as UE8M0 codes, uint8 ``[ceil(n / bm), ceil(k / bk)]``, for ``shape`` = (n, k)."""

    codes: Tensor
    block: tuple[int, int]
    shape: tuple[int, int]

    def at(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Codes of logical rows ``[r]`` and K groups ``[p, s]``, both within the shape: uint8 ``[p, r, s]``."""
        bm, bk = self.block
        return self.codes[(rows // bm)[None, :, None], (GROUP * groups // bk)[:, None, :]]


def l1_scale_bytes(gate: BlockScales, up: BlockScales, width: int, words: range) -> Tensor:
    """What the L1 scale must hold in word columns ``words`` (of ``hidden / 128``) at padded ``width``: uint8 ``[p, 2w, 4]``."""
    half, row = l1_scale_rows(torch.arange(2 * width))
    groups = _groups(words)
    out = torch.full((len(words), 2 * width, 4), ONE, dtype=torch.uint8)
    for number, scales in enumerate((gate, up)):
        real = ((half == number) & (row < scales.shape[0])).nonzero().flatten()
        out[:, real] = scales.at(row[real], groups)
    return out


def l2_scale_bytes(down: BlockScales, words: range) -> Tensor:
    """What the L2 scale must hold in word columns ``words`` (of ``padded width / 128``): uint8 ``[p, hidden, 4]``."""
    hidden, width = down.shape
    groups = _groups(words)
    row = l2_scale_rows(torch.arange(hidden))
    found = down.at(row, groups.clamp(max=(width - 1) // GROUP))
    return torch.where((GROUP * groups < width)[:, None, :], found, torch.full((), ONE, dtype=torch.uint8))


def _groups(words: range) -> Tensor:
    return 4 * torch.arange(words.start, words.stop)[:, None] + torch.arange(4)


def exponents(raw: Tensor) -> Tensor | None:
    """UE8M0 codes of FP32 scales, from their bits: uint8 ``[n, 4 k] -> [n, k]``; None if one is no power of two.

    The sign and the mantissa must be zero and the exponent neither 0 nor 255: DeepGEMM traps on anything else
    (deep_gemm/include/deep_gemm/impls/smxx_layout.cuh:178).
    """
    parts = raw.view(len(raw), -1, 4).to(torch.int32)
    bits = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    code = (bits >> 23) & 0xFF
    if bool((bits & ~0x7F800000).any()) or bool(((code == 0) | (code == 0xFF)).any()):
        return None
    return code.to(torch.uint8)
