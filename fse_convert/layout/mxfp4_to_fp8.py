"""MXFP4 as E4M3 with one power of two a tile, every value exact, and back.

Names carry shapes: ``n`` rows, ``k`` columns, ``p`` bytes of two MXFP4 codes, ``g`` groups of 32 columns; a tile is a block of
the output, the last ones may be partial. A code under group exponent e becomes E4M3 under tile exponent t; the byte
depends on the code and on ``s = e - t`` alone, so that one table is the whole encoder.

The tile's exponent: ``E - 6``, E the greatest e of a group that is not all zero, as in SGLang 0.5.23
(layers/quantization/fp8.py:216-258, where zero groups count); where that is not exact, the least t under which nothing
overflows: it is exact if any is. A tile of zeros takes the greatest e of all its groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from fse_convert.layout.mxfp4 import DOUBLED, SIGN, Unencodable, check_groups, refuse_where
from fse_convert.layout.nan_and_one import E4M3_NAN, E8M0_NAN
from fse_convert.layout.sizes import GROUP, ceil_div
from fse_convert.layout.ue8m0 import expand

if TYPE_CHECKING:
    from torch import Tensor

HEADROOM = 6
"""6 * 2**6 = 384 is the greatest MXFP4 value that E4M3, which ends at 448, has with a power of two."""
SPAN = 14
"""Exponents that a tile's groups may lie apart whatever their codes: 0.5 * 2**(6 - 14) is E4M3's least number, 2**-9."""
LEAST_S, MOST_S = -12, 10
"""Beyond -11 to 9 no code but zero is exact: one more row of the table at each end stands for all of them."""
UNBOUNDED = 1000
"""More than any exponent byte."""
MOST = (UNBOUNDED, 8, 9, 8, 10, 8, 9, 8, 11, 8, 9, 8, 10, 8, 9, 8)
LEAST = (-UNBOUNDED, -9, -8, -8, -7, -7, -7, -7, -6, -6, -6, -6, -6, -6, -6, -6)
"""By the bits that a group's doubled magnitudes have set: the greatest t - e under which the finest is exact, the least
under which the largest is not above 448."""


class Group(NamedTuple):
    """A group of a tile: its row and first column from the start of what was given, and its exponent (byte - 127)."""

    row: int
    column: int
    exponent: int


class TileSpan(Unencodable):
    """A tile that no power of two makes exact: ``tile`` counts tiles; of the two groups, one is too large beside the other."""

    def __init__(self, tile: tuple[int, int], block: tuple[int, int], large: Group, small: Group) -> None:
        super().__init__("tile-span", "no scale holds this tile exactly", tile[0] * block[0], tile[1] * block[1], block[1])
        self.tile, self.block, self.large, self.small = tile, block, large, small

    @property
    def span(self) -> int:
        """How far the exponents of the two groups are apart."""
        return self.large.exponent - self.small.exponent

    def sentence(self, first_row: int = 0) -> str:
        """Name the tile, the two groups and the span; ``first_row``: of what was given, in the whole tensor."""
        large, small = (f"2**{g.exponent} at row {first_row + g.row}, column {g.column}" for g in (self.large, self.small))
        tile = f"tile ({first_row // self.block[0] + self.tile[0]}, {self.tile[1]}) spans {self.span} powers of two"
        return f"{tile}, from {small} to {large}: no scale makes both exact in E4M3"


def certainly_fits(sf_ng: Tensor, block: tuple[int, int]) -> bool:
    """Tell from group scales alone, ``uint8 [n, g]``, whether every tile is exact; False where it depends on the codes."""
    e_ng = sf_ng.to(torch.int16)
    spans = _tile_max(e_ng, block) + _tile_max(-e_ng, block)
    return bool((spans <= SPAN).all()) and not bool((sf_ng == E8M0_NAN).any())


def block_scales(w_np: Tensor, sf_ng: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the E8M0 bytes of the tiles: ``uint8 [n, k / 2], uint8 [n, k / 32] -> uint8 [ceil(n / b), ceil(k / b')]``.

    They are in [1, 248]: byte 0 is subnormal in F32. Raises TileSpan for a tile that cannot be exact, Unencodable for a
    group scale that is NaN, and ValueError for shapes that do not fit.
    """
    _check_shapes(w_np, sf_ng, block)
    refuse_where(sf_ng == E8M0_NAN, "nan", "the group scale is a NaN (0xFF)")
    e_ng, bits_ng = sf_ng.to(torch.int16), _magnitude_bits(w_np)
    most_ng, least_ng = e_ng + _looked_up(MOST, bits_ng), e_ng + _looked_up(LEAST, bits_ng)
    most, least = -_tile_max(-most_ng, block), _tile_max(least_ng, block)
    greatest = _tile_max(e_ng.where(bits_ng > 0, -1), block)
    greatest = torch.where(greatest < 0, _tile_max(e_ng, block), greatest)
    t = (greatest - HEADROOM).clamp(min=1)
    t = torch.where(t > most, least, t)
    if (t > most).any():
        raise _span(t > most, most_ng, least_ng, e_ng, block)
    return t.to(torch.uint8)


def to_fp8(w_np: Tensor, sf_ng: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes ``uint8 [n, k]`` and the tiles' E8M0 bytes, from arguments and with errors as of `block_scales`."""
    n, p = w_np.shape
    t = block_scales(w_np, sf_ng, block)
    index = w_np.view(-1, GROUP // 2).to(torch.int32)
    index += _shifts(sf_ng, t, block).view(-1, 1) << 8
    return _encoder().index_select(0, index.view(-1)).view(torch.uint8).view(n, 2 * p), t


def to_mxfp4(codes_nk: Tensor, t: Tensor, sf_ng: Tensor, block: tuple[int, int]) -> Tensor:
    """Undo `to_fp8`: E4M3 codes, tile scales and the group scales there were before give the bytes ``uint8 [n, k / 2]``.

    Raises Unencodable for a code that no MXFP4 code becomes under these scales: something is damaged.
    """
    n, k = codes_nk.shape
    index = codes_nk.view(torch.int16).view(-1, GROUP // 2).to(torch.int32) & 0xFFFF
    index += _shifts(sf_ng, t, block).view(-1, 1) << 16
    pairs = _decoder().index_select(0, index.view(-1)).view(n, k // 2)
    refuse_where(pairs < 0, "tensor-damaged", "no MXFP4 code has this value under its group's scale", 2)
    return pairs.to(torch.uint8)


def _check_shapes(w_np: Tensor, sf_ng: Tensor, block: tuple[int, int]) -> None:
    n, p = w_np.shape
    check_groups(2 * p)
    if sf_ng.shape != (n, 2 * p // GROUP) or block[1] % GROUP:
        raise ValueError(f"group scales {tuple(sf_ng.shape)} and blocks {block} do not fit MXFP4 codes [{n}, {2 * p}]")


def _tile_max(x_ng: Tensor, block: tuple[int, int]) -> Tensor:
    n, g = x_ng.shape
    rows, groups = block[0], block[1] // GROUP
    whole = pad(x_ng, (0, -g % groups, 0, -n % rows), value=-2 * UNBOUNDED)
    by_rows = whole.view(ceil_div(n, rows), rows, -1).amax(1)
    return by_rows.view(len(by_rows), -1, groups).amax(2)


def _looked_up(table: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int16).index_select(0, index.flatten()).view_as(index)


def _magnitude_bits(w_np: Tensor) -> Tensor:
    """Return by group the bits that its doubled magnitudes have set, 0 to 15: int32 ``[n, g]``."""
    n, p = w_np.shape
    halves = _bits_of_pairs().index_select(0, w_np.flatten().to(torch.int32)).view(torch.int64).view(-1, 2)
    words = halves[:, 0] | halves[:, 1]
    for bits in (32, 16, 8):
        words |= words >> bits
    return words.to(torch.int32).view(n, 2 * p // GROUP) & 15


def _shifts(sf_ng: Tensor, t: Tensor, block: tuple[int, int]) -> Tensor:
    """Return by group the row of the table: ``s`` from `LEAST_S` on, int32 ``[n, g]``."""
    n, g = sf_ng.shape
    s_ng = sf_ng.to(torch.int32) - expand(t, n, g * GROUP, *block)
    return s_ng.clamp(LEAST_S, MOST_S) - LEAST_S


def _span(bad: Tensor, most_ng: Tensor, least_ng: Tensor, e_ng: Tensor, block: tuple[int, int]) -> TileSpan:
    row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[1])
    rows, groups = block[0], block[1] // GROUP
    tile = slice(row * rows, (row + 1) * rows), slice(column * groups, (column + 1) * groups)

    def group(at: Tensor) -> Group:
        r, g = divmod(int(at), most_ng[tile].shape[1])
        return Group(row * rows + r, (column * groups + g) * GROUP, int(e_ng[tile][r, g]) - 127)

    return TileSpan((row, column), block, group(least_ng[tile].argmax()), group(most_ng[tile].argmin()))


def _e4m3() -> dict[int, int]:
    """Return the codes of E4M3 by their values in units of 2**-13: 2**-9 is its least number, 4 bits are for what is finer."""
    codes = {}
    for code in range(E4M3_NAN):
        exponent, mantissa = divmod(code, 8)
        codes[(mantissa if exponent == 0 else (8 + mantissa) << exponent - 1) << 4] = code
    return codes


@lru_cache(maxsize=1)
def _bits_of_pairs() -> Tensor:
    """Return the bits that two doubled magnitudes have set, by the byte of their codes: uint8 ``[256]``."""
    return torch.tensor([DOUBLED[byte % SIGN] | DOUBLED[(byte >> 4) % SIGN] for byte in range(256)], dtype=torch.uint8)


@lru_cache(maxsize=1)
def _codes() -> Tensor:
    """Return E4M3 by ``s`` and MXFP4 code, int16 ``[23, 16]``; -1 where there is none."""
    codes = _e4m3()
    rows = [[codes.get(m << s + 12, -1) for m in DOUBLED] for s in range(LEAST_S, MOST_S + 1)]
    return torch.tensor([row + [a | 0x80 if a >= 0 else -1 for a in row] for row in rows], dtype=torch.int16)


@lru_cache(maxsize=1)
def _encoder() -> Tensor:
    """Return two E4M3 codes as one int16 by ``s`` and byte of two MXFP4 codes; `block_scales` leads to none that do not exist."""
    code = _codes()
    return (code[:, None, :] | code[:, :, None] << 8).flatten()


@lru_cache(maxsize=1)
def _decoder() -> Tensor:
    """Return a byte of two MXFP4 codes as int16 by ``s`` and two E4M3 codes; -1 where there is none."""
    code = _codes()
    back = torch.full((len(code), 256), -1, dtype=torch.int16)
    for nibble in range(16):
        exact = (code[:, nibble] >= 0).nonzero().flatten()
        back[exact, code[exact, nibble].int()] = nibble
    return (back[:, None, :] | back[:, :, None] << 4).flatten()
