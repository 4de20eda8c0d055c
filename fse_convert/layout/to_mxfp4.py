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
from fse_convert.layout.nan_and_one import BF16_INFINITY, E4M3_NAN, E8M0_NAN
from fse_convert.layout.sizes import GROUP

if TYPE_CHECKING:
    from torch import Tensor

MANTISSA = 7
"""Bits of BF16's mantissa."""
ROUNDING = 0x20
"""Carries a mantissa of 1.75 or more into the exponent: 0x200000 in F32's bits."""
QUARTER = 2
"""A quarter of a scale: so much less is its exponent, and all below it becomes zero."""
NORMAL = QUARTER + 4 << MANTISSA
"""BF16 bits of a number so large that a quarter of its group's scale is no subnormal number."""
LEAST = 133
"""The least number of BF16 is 2**-133."""
THRESHOLDS = (0, 11, 18, 21, 26, 29, 34)
"""The last place (see `_places`) before each code: the middles between magnitudes; a tie goes to the even code."""
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
    refuse_where(scale_ng == E8M0_NAN, "nan", "the scale is a NaN (0xFF)")
    top_ng = (codes_nk & 0x7F).view(n, -1, GROUP).to(torch.int32).amax(2)
    refuse_where(top_ng == E4M3_NAN, "nan", "there is a NaN")
    byte_ng = _bytes_of_e4m3().index_select(0, top_ng.flatten()).view_as(top_ng)
    w_np = _looked_up(_pairs_of_e4m3(), codes_nk, byte_ng - FP8_BYTES[0] << 16).view(n, k // 2)
    return w_np, _scaled(byte_ng, scale_ng.to(torch.int32) - E8M0_BIAS, top_ng == 0)


def _scaled(byte_ng: Tensor, exponent_ng: Tensor, zero_ng: Tensor) -> Tensor:
    byte_ng = (byte_ng + exponent_ng).masked_fill(zero_ng, 0)
    refuse_where((byte_ng < 0) | (byte_ng >= E8M0_NAN), "scale-range", "the MXFP4 scale would not be in 2**-127 to 2**127")
    return byte_ng.to(torch.uint8)


def _encoded(bits_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Encode BF16 bits ``int16 [n, k]``; the scale bytes are int32."""
    n, k = bits_nk.shape
    check_groups(k)
    magnitude = (bits_nk & 0x7FFF).view(-1, GROUP)
    top = magnitude.to(torch.int32).amax(1)
    least, most = map(int, torch.aminmax(top))
    if most >= BF16_INFINITY:
        refuse_where(top.view(n, -1) >= BF16_INFINITY, "nan", "there is a NaN or an infinity")
    byte = _bytes(top)
    quarter = byte - QUARTER << MANTISSA
    if least < NORMAL:
        tiny = byte <= QUARTER
        magnitude[tiny] = _in_least_numbers(magnitude[tiny])
        quarter[tiny] += LEAST << MANTISSA
    place = _places(magnitude, quarter).bitwise_xor_((bits_nk >> 15).view_as(magnitude))
    return _looked_up(_pairs_by_place(), place.to(torch.uint8)).view(n, k // 2), byte.view(n, -1)


def _bytes(top: Tensor) -> Tensor:
    """Return scale bytes by the greatest magnitude of each group, given as BF16 bits in int32."""
    return ((top + ROUNDING >> MANTISSA) - 2).clamp(min=0)


def _in_least_numbers(magnitude: Tensor) -> Tensor:
    """Return the BF16 bits of small magnitudes, some of them subnormal, as multiples of the least of them, 2**-133."""
    shift = ((magnitude >> MANTISSA) - 1).clamp(min=0)
    return (magnitude - (shift << MANTISSA) << shift).bfloat16().view(torch.int16)


def _places(magnitude: Tensor, quarter: Tensor) -> Tensor:
    """Return where BF16 magnitudes lie among the thresholds of their groups; overwrites them.

    All thresholds are multiples of 32 above a quarter of the scale: a place is twice the multiple, and one more between two.
    """
    place = magnitude.sub_(quarter.to(torch.int16).view(-1, 1)).clamp_(min=0)
    return (place & 15).add_(15).bitwise_or_(place).bitwise_right_shift_(4)


def _looked_up(table: Tensor, elements: Tensor, first: Tensor | None = None) -> Tensor:
    """Return entries of a table by two neighbouring bytes each; ``first``: of the table's part, int32 by group."""
    index = elements.view(torch.uint16).view(-1, GROUP // 2).to(torch.int32)
    return table.index_select(0, (index if first is None else index.add_(first.view(-1, 1))).view(-1))


@lru_cache(maxsize=1)
def _pairs_by_place() -> Tensor:
    """Return the byte of two MXFP4 codes by two places, complements for negative numbers: uint8 ``[65536]``."""
    code = _by_place(torch.arange(128))
    return _pairs(torch.cat((code, code.flip(0) | SIGN)))


def _by_place(place: Tensor) -> Tensor:
    return (place[..., None] > torch.tensor(THRESHOLDS)).sum(-1).to(torch.uint8)


def _pairs(code: Tensor) -> Tensor:
    """Return what two codes make together, the first in the low nibble, by pairs of bytes: ``[..., 256] -> [..., 65536]``."""
    return (code[..., None, :] | code[..., :, None] << 4).flatten(-2)


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
    quarter = torch.arange(FP8_BYTES[0], FP8_BYTES[1] + 1) - QUARTER << MANTISSA
    bits = _e4m3_bits()
    code = _by_place(_places((bits & 0x7FFF).repeat(len(quarter), 1), quarter))
    return _pairs(code | (bits >> 12 & SIGN).to(torch.uint8)).flatten()


def _bf16_bits(x_nk: Tensor) -> Tensor:
    """Return the first 16 bits of floats, the last one set where what follows is not zero: int16 ``[n, k]``."""
    if x_nk.dtype == torch.bfloat16:
        return x_nk.view(torch.int16)
    return (_odd(x_nk.float().view(torch.int32), 16) >> 16).to(torch.int16)


def _odd(bits: Tensor, dropped: int) -> Tensor:
    """Clear the last bits, and set the one before them where they were not zero."""
    low = (1 << dropped) - 1
    return (bits | (bits & low) + low) & ~low
