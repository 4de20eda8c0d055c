"""The kernel's addresses: where each byte of a shared expert is, as arithmetic on indices.

A *physical* row is a row as stored, a *logical* one a row of gate, up or down. ``/`` floors, ``half`` is 0 for gate, 1 for up.
Level 1 asks for any stored byte which byte of the source it must be, from physical rows to logical ones:

* L1 weight: physical row ``d`` is row ``8 (d / 16) + d % 8`` of half ``(d % 16) / 8``. L2 weight: rows as they are.
* L1 scale: physical row ``d = 128 b + 64 q + 32 half + 4 m + j`` is row ``64 b + 16 j + 8 q + m`` of that half.
* L2 scale: physical row ``d = 128 b + 4 i + j`` is row ``128 b + 32 j + i`` (the UTCCP copy's order).
* Byte ``o`` of a scale tensor over ``N`` rows: word ``w = o / 4``, physical row ``w % N``, K group ``4 (w / N) + o % 4``.

Level 2 reads them the other way, from logical rows to physical ones: `KernelLayout`. The two share no arithmetic with each other,
and neither they nor `fse_convert.verification.experts.StoredExpert`, which finds scales by the checkpoint's blocks, use
`fse_convert.layout`, the writer's own: a mistake on one side shows.

Rules: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py and include/deep_gemm/impls/smxx_layout.cuh:181-189; vLLM 0.33,
model_executor/layers/fused_moe/deep_gemm_mega_moe.py:572-606.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fse_convert.model.moe import Role
from fse_convert.verification.code_of_one import E8M0_ONE

GROUP = 32
"""Elements along K under one scale (recipe (1, 1, 32))."""
Rows = tuple[Tensor, Tensor]
"""Weight codes uint8 ``[n, k]`` and their scales uint8 ``[n, k / 32]``, rows in logical order."""


def l1_weight_rows(d: Tensor) -> tuple[Tensor, Tensor]:
    """Return half and logical row of physical rows ``d`` (int64) of the L1 weight."""
    return (d % 16) // 8, 8 * (d // 16) + d % 8


def l1_scale_rows(d: Tensor) -> tuple[Tensor, Tensor]:
    """Return half and logical row of physical rows ``d`` (int64) of the L1 scale."""
    b, q, half, m, j = d // 128, d % 128 // 64, d % 64 // 32, d % 32 // 4, d % 4
    return half, 64 * b + 16 * j + 8 * q + m


def l2_scale_rows(d: Tensor) -> Tensor:
    """Return the logical row of physical rows ``d`` (int64) of the L2 scale."""
    return 128 * (d // 128) + 32 * (d % 4) + d % 128 // 4


def l1_scale_bytes(gate_ng: Tensor, up_ng: Tensor, width: int) -> Tensor:
    """Return the L1 scale at padded ``width`` from a scale for every row and group: uint8 ``[hidden / 128, 2w, 4]``."""
    half, row = l1_scale_rows(torch.arange(2 * width))
    gate, up = (pad(sf, (0, 0, 0, width - len(sf)), value=E8M0_ONE) for sf in (gate_ng, up_ng))
    return _words(torch.stack((gate, up))[half, row])


def l2_scale_bytes(down_ng: Tensor, width: int) -> Tensor:
    """Return the L2 scale at padded ``width``, likewise: uint8 ``[width / 128, hidden, 4]``."""
    whole = pad(down_ng, (0, width // GROUP - down_ng.shape[1]), value=E8M0_ONE)
    return _words(whole[l2_scale_rows(torch.arange(len(down_ng)))])


def _words(sf_ng: Tensor) -> Tensor:
    return sf_ng.view(len(sf_ng), -1, 4).transpose(0, 1)


def exponents(raw: Tensor) -> Tensor | None:
    """Return the UE8M0 codes of FP32 scales, from their bits: uint8 ``[n, 4 k] -> [n, k]``; None if one is not a power of two.

    The sign and the mantissa must be zero and the exponent neither 0 nor 255: DeepGEMM traps on anything else
    (deep_gemm/include/deep_gemm/impls/smxx_layout.cuh:178).
    """
    parts = raw.view(len(raw), -1, 4).to(torch.int32)
    bits = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    code = (bits >> 23) & 0xFF
    if bool((bits & ~0x7F800000).any()) or bool(((code == 0) | (code == 0xFF)).any()):
        return None
    return code.to(torch.uint8)


@dataclass(frozen=True)
class KernelLayout:
    """The shared expert as MegaMoE reads it, every byte found by the kernel's own address.

    ``l1_weight`` uint8 ``[2S, H]``, ``l1_scale`` int32 as stored ``[H / 128, 2S]``, ``l2_weight`` uint8 ``[H, S]``,
    ``l2_scale`` int32 as stored ``[S / 128, H]``; contiguous, on one device.

    Addresses (``/`` floors): row ``r`` of gate is physical row ``16 (r / 8) + r % 8`` of L1, of up 8 further; its
    scale row is ``p = 128 (r / 64) + 64 ((r / 8) % 2) + 32 half + 4 (r % 8) + (r % 64) / 16``; row ``n`` of down keeps
    its place, its scale row is ``p = 128 (n / 128) + 4 (n % 32) + (n % 128) / 32``. The scale of row ``p`` of ``N``
    and K group ``g`` is byte ``4 ((g / 4) N + p) + g % 4``. Source: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py
    and deep_gemm/include/deep_gemm/impls/smxx_layout.cuh, composed into offsets.
    """

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor

    @property
    def hidden(self) -> int:
        """Return H."""
        return self.l2_weight.shape[0]

    @property
    def width(self) -> int:
        """Return S: the shared width, padding included."""
        return self.l2_weight.shape[1]

    def to(self, device: torch.device) -> KernelLayout:
        """Move all four tensors."""
        return KernelLayout(*(t.to(device) for t in (self.l1_weight, self.l1_scale, self.l2_weight, self.l2_scale)))

    def rows(self, role: Role, start: int, stop: int) -> Rows:
        """Return rows of gate, up or down."""
        r = torch.arange(start, stop, device=self.l1_weight.device)
        if role is Role.DOWN:
            p = 128 * (r // 128) + 4 * (r % 32) + (r % 128) // 32
            return self.l2_weight[r], _scales_at(self.l2_scale, p, self.width // GROUP)
        half = 0 if role is Role.GATE else 1
        p = 128 * (r // 64) + 64 * ((r // 8) % 2) + 32 * half + 4 * (r % 8) + (r % 64) // 16
        return self.l1_weight[16 * (r // 8) + 8 * half + r % 8], _scales_at(self.l1_scale, p, self.hidden // GROUP)


def _scales_at(stored: Tensor, row: Tensor, groups: int) -> Tensor:
    g = torch.arange(groups, device=row.device)
    offset = 4 * ((g // 4) * stored.shape[1] + row[:, None]) + g % 4
    return stored.view(-1).view(torch.uint8)[offset]
