"""What stored expert matrices mean, in float64: plain tables, by torch alone, for judges and for reference outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

E2M1 = torch.tensor([sign * m for sign in (1, -1) for m in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)], dtype=torch.float64)
"""Value of every MXFP4 code; bit 3 is the sign."""
SCALES = ("scale", "weight_scale", "weight_scale_inv")


def power_of_two(e8m0: Tensor) -> Tensor:
    """Value of E8M0 bytes (uint8); 255 is NaN."""
    bits = (e8m0.to(torch.int64) - 127 + 1023) << 52  # of a double
    return torch.where(e8m0 == 255, torch.nan, bits.view(torch.float64))


def of_scale(scale: Tensor) -> Tensor:
    """Value of scales: E8M0 (uint8, too), or floats."""
    e8m0 = scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    return power_of_two(scale.view(torch.uint8)) if e8m0 else scale.to(torch.float64)


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Codes [N, K/2], uint8, two to a byte, the even column in the low nibble; scales [N, K/32], as E8M0 or by their values.

    The last group may be partial.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return E2M1[codes.to(torch.int64)] * of_scale(scale).repeat_interleave(32, dim=-1)[..., : codes.shape[-1]]


def nvfp4(packed: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """Codes as those of MXFP4; E4M3 scales [N, K/16], and one of the whole matrix."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return E2M1[codes.to(torch.int64)] * scale.to(torch.float64).repeat_interleave(16, dim=-1) * whole.to(torch.float64)


def block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """E4M3 [N, K], a scale per block, as E8M0 (uint8, too) or by its value; the last blocks may be partial."""
    rows = of_scale(scale).repeat_interleave(block[0], dim=0)[: weight.shape[0]]
    return weight.to(torch.float64) * rows.repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]


def matrix(weight: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    """A matrix by its dtypes: without scale as it is, I8 or U8 as MXFP4, E4M3 in blocks."""
    if scale is None:
        return weight.to(torch.float64)
    if weight.dtype in (torch.int8, torch.uint8):
        return mxfp4(weight.view(torch.uint8), scale)
    return block_fp8(weight, scale, block)


def stored(tensors: Mapping[str, Tensor], name: str, block: tuple[int, int]) -> Tensor:
    """The matrix ``name`` of a checkpoint, whatever its scale is called."""
    scale = next((tensors[key] for key in (f"{name}.{suffix}" for suffix in SCALES) if key in tensors), None)
    return matrix(tensors[f"{name}.weight"], scale, block)
