"""What bytes of MXFP4 and of block FP8 stand for, in float64, by tables that are written out here and by torch's own E4M3."""

from __future__ import annotations

import torch

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
CODES = torch.cat((MAGNITUDES, -MAGNITUDES))
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()


def packed(codes_nk: torch.Tensor) -> torch.Tensor:
    """Put two codes into a byte, the even column into the low half."""
    return (codes_nk[:, ::2] + 16 * codes_nk[:, 1::2]).to(torch.uint8)


def unpacked(w_np: torch.Tensor) -> torch.Tensor:
    return torch.stack((w_np % 16, w_np // 16), -1).flatten(1)


def powers(byte: torch.Tensor) -> torch.Tensor:
    return torch.exp2(byte.double() - 127)


def mxfp4_values(w_np: torch.Tensor, sf_ng: torch.Tensor) -> torch.Tensor:
    return CODES[unpacked(w_np).long()] * powers(sf_ng).repeat_interleave(32, 1)


def fp8_values(codes_nk: torch.Tensor, t: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    n, k = codes_nk.shape
    return E4M3[codes_nk.long()] * powers(t).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:n, :k]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether values are equal, the sign of zero included."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
