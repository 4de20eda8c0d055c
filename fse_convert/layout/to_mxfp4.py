"""FP8 and floats as MXFP4 by the rule that servers call "even": lossy, and computed on the bits of the values.

Per group of 32: ``e = floor(log2(greatest magnitude)) - 2``, one more from a mantissa of 1.75 on, at least -127; codes are
``magnitude / 2**e`` rounded to the nearest, ties to the even code, 6 above that. A group of zeros has byte 0; signs stay.
Rule: vLLM 0.33 model_executor/layers/quantization/utils/mxfp4_utils.py (``downcast_to_mxfp``), torchao 0.18 (``EVEN``).

Every source becomes BF16 bits first, with all that BF16 cuts off kept as "not zero" in the last bit: the rule compares with
numbers of three significant bits, so this decides as the exact value would.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from fse_convert.layout.mxfp4 import SIGN, check_groups, refuse_where
from fse_convert.layout.sizes import GROUP
from fse_convert.layout.ue8m0 import NAN

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = 0x7F80
"""Of BF16; everything above is NaN."""
MANTISSA = 7
"""Bits of BF16's mantissa."""
ROUNDING = 0x20
"""Carries a mantissa of 1.75 or more into the exponent: 0x200000 in F32's bits."""
THRESHOLDS = (1, 3, 5, 7, 10, 14, 20)
"""Four times the middle between each code's magnitude and the next; a tie goes to the even one."""
ROW = 6 << MANTISSA
"""Bits of what a group with byte 3 can hold are below this."""
E8M0_BIAS = 127
FP8_BYTES = (E8M0_BIAS - 11, E8M0_BIAS + 7)
"""The scale bytes that groups of E4M3 codes have under scale 1, from 2**-9 alone to 448."""


def from_floats(x_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of bfloat16, float16 or float32 values: ``[n, k] -> uint8 [n, k / 2], uint8 [n, k / 32]``.

    Raises Unencodable for a NaN or an infinity, and ValueError unless ``k % 32 == 0``.
    """
    w_np, byte_ng = _encoded(_bf16_bits(x_nk))
    return w_np, byte_ng.to(torch.uint8)


def from_fp8(codes_nk: Tensor, scale_ng: Tensor) -> tuple[Tensor, Tensor]:
    """Return MXFP4 codes and scales of E4M3 codes ``uint8 [n, k]`` with a scale for each 32 columns, ``[n, k / 32]``.

    ``scale_ng``: E8M0 bytes, float32 or bfloat16. Raises Unencodable for a NaN code, for a scale that is not a positive number,
    and for a group whose MXFP4 scale would not be in 2**-127 to 2**127; ValueError unless ``k % 32 == 0``.
    """
    check_groups(codes_nk.shape[1])
    if scale_ng.dtype == torch.uint8:
        return _from_powers_of_two(codes_nk, scale_ng)
    refuse_where(~((scale_ng > 0) & scale_ng.isfinite()), "scale-range", "the scale is not a positive number")
    fraction, exponent = torch.frexp(scale_ng)
    values = _e4m3_bits().view(torch.bfloat16).double().index_select(0, codes_nk.flatten().to(torch.int32))
    products = values.view(-1, GROUP) * fraction.double().view(-1, 1)
    w_np, byte_ng = _encoded(_bf16_bits(_odd(products.view(torch.int64), 29).view(torch.float64)).view_as(codes_nk))
    return w_np, _scaled(byte_ng, exponent, (products == 0).all(1).view_as(exponent))


def _from_powers_of_two(codes_nk: Tensor, scale_ng: Tensor) -> tuple[Tensor, Tensor]:
    """Encode by table: what becomes of E4M3 codes depends on the largest of their group, not on its scale."""
    n, k = codes_nk.shape
    refuse_where(scale_ng == NAN, "nan", "the scale is a NaN (0xFF)")
    top_ng = (codes_nk & 0x7F).view(n, -1, GROUP).to(torch.int32).amax(2)
    refuse_where(top_ng == 0x7F, "nan", "there is a NaN")
    byte_ng = _bytes_of_e4m3().index_select(0, top_ng.flatten()).view_as(top_ng)
    index = codes_nk.view(torch.int16).view(-1, GROUP // 2).to(torch.int32) & 0xFFFF
    index += (byte_ng.view(-1, 1) - FP8_BYTES[0]) << 16
    w_np = _pairs_of_e4m3().index_select(0, index.view(-1)).view(n, k // 2)
    return w_np, _scaled(byte_ng, scale_ng.to(torch.int32) - E8M0_BIAS, top_ng == 0)


def _scaled(byte_ng: Tensor, exponent_ng: Tensor, zero_ng: Tensor) -> Tensor:
    byte_ng = (byte_ng + exponent_ng).masked_fill(zero_ng, 0)
    refuse_where((byte_ng < 0) | (byte_ng >= NAN), "scale-range", "the MXFP4 scale would not be in 2**-127 to 2**127")
    return byte_ng.to(torch.uint8)


def _encoded(bits_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Encode BF16 bits ``int16 [n, k]``; the scale bytes are int32."""
    n, k = bits_nk.shape
    check_groups(k)
    magnitude = (bits_nk & 0x7FFF).view(-1, GROUP)
    top = magnitude.to(torch.int32).amax(1)
    refuse_where(top.view(n, -1) >= INFINITY, "nan", "there is a NaN or an infinity")
    byte = _bytes(top)
    pairs = (_codes(magnitude, byte) | bits_nk.view(-1, GROUP) >> 12 & SIGN).view(torch.int32)
    return (pairs | pairs >> 12).to(torch.uint8).view(n, k // 2), byte.view(n, -1)


def _bytes(top: Tensor) -> Tensor:
    """Return scale bytes by the greatest magnitude of each group, given as BF16 bits in int32."""
    return ((top + ROUNDING >> MANTISSA) - 2).clamp(min=0)


def _codes(magnitude: Tensor, byte: Tensor) -> Tensor:
    """Return the codes of BF16 magnitudes ``[groups, 32]`` by their groups' bytes, as int16.

    From byte 3 on all thresholds are normal numbers, and bits move with the exponent: one row of the table is for all of them.
    """
    few = byte.clamp(max=3)
    start = (3 - few) * ROW - (byte - few << MANTISSA)
    index = (magnitude + start.to(torch.int16).view(-1, 1)).clamp_(0, 4 * ROW - 1)
    return _table().index_select(0, index.view(-1).to(torch.int32)).view_as(magnitude)


@lru_cache(maxsize=1)
def _table() -> Tensor:
    """Return codes by BF16 magnitude, for bytes 3, 2, 1 and 0: int16 ``[4 * ROW]``; all counts in BF16's least number, 2**-133."""
    values = [m if m >> MANTISSA == 0 else (128 + m % 128) << (m >> MANTISSA) - 1 for m in range(ROW)]
    rows = [[sum(v + i % 2 > t << byte + 4 for i, t in enumerate(THRESHOLDS)) for v in values] for byte in (3, 2, 1, 0)]
    return torch.tensor(rows, dtype=torch.int16).flatten()


@lru_cache(maxsize=1)
def _e4m3_bits() -> Tensor:
    """Return the values of the E4M3 codes as BF16 bits, which hold them exactly: int16 ``[256]``."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).bfloat16().view(torch.int16)


@lru_cache(maxsize=1)
def _bytes_of_e4m3() -> Tensor:
    """Return scale bytes by the largest E4M3 code of a group under scale 1: int32 ``[127]``."""
    return _bytes(_e4m3_bits()[:0x7F].to(torch.int32)).clamp(*FP8_BYTES)


@lru_cache(maxsize=1)
def _pairs_of_e4m3() -> Tensor:
    """Return the byte of two MXFP4 codes by scale byte and two E4M3 codes; what no group of that scale holds is arbitrary."""
    byte = torch.arange(FP8_BYTES[0], FP8_BYTES[1] + 1)
    bits = _e4m3_bits().expand(len(byte), 256)
    code = _codes(bits & 0x7FFF, byte) | bits >> 12 & SIGN
    return (code[:, None, :] | code[:, :, None] << 4).to(torch.uint8).flatten()


def _bf16_bits(x_nk: Tensor) -> Tensor:
    """Return the first 16 bits of floats, the last one set where what follows is not zero: int16 ``[n, k]``."""
    if x_nk.dtype == torch.bfloat16:
        return x_nk.view(torch.int16)
    return (_odd(x_nk.float().view(torch.int32), 16) >> 16).to(torch.int16)


def _odd(bits: Tensor, dropped: int) -> Tensor:
    """Clear the last bits, and set the one before them where they were not zero."""
    low = (1 << dropped) - 1
    return (bits | (bits & low) + low) & ~low
