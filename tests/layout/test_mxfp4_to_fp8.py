"""MXFP4 as E4M3: every value equal in float64, the scale that the rule names, and a refusal of what cannot be exact."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fse_convert.layout.mxfp4 import Unencodable
from fse_convert.layout.mxfp4_to_fp8 import Group, TileSpan, block_scales, certainly_fits, to_fp8, to_mxfp4
from tests.layout.values import CODES, E4M3, MAGNITUDES, fp8_values, mxfp4_values, packed, same

GOLDEN = {
    6: "00 60 68 6c 70 74 78 7c",
    0: "00 30 38 3c 40 44 48 4c",
    -8: "00 01 02 03 04 06 08 0c",
    -9: "00 -- 01 -- 02 03 04 06",
    -10: "00 -- -- -- 01 -- 02 03",
    -11: "00 -- -- -- -- -- 01 --",
    -12: "00 -- -- -- -- -- -- --",
}
"""E4M3 bytes of codes 0 to 7 by how far the group's exponent is above the tile's; -- where no byte is exact."""
REPRESENTABLE = {Fraction(float(v)) for v in E4M3[:0x7F]}
TILE = (4, 64)


def groups(*codes_and_bytes: tuple[list[int], int], block: tuple[int, int] = TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile of groups, row by row; a group is the codes at its start and its scale byte, those not given are zero."""
    count = block[0] * block[1] // 32
    filled = [*codes_and_bytes, *[([], 1)] * (count - len(codes_and_bytes))]
    codes = torch.tensor([codes + [0] * (32 - len(codes)) for codes, _ in filled])
    return packed(codes.view(block[0], -1)), torch.tensor([byte for _, byte in filled]).to(torch.uint8).view(block[0], -1)


def judged(groups: list[tuple[list[int], int]]) -> int | None:
    """Return the tile's scale byte by the rule, with fractions and by trial; None where no scale is exact."""
    values = [Fraction(float(MAGNITUDES[c % 8])) * Fraction(2) ** (byte - 127) for codes, byte in groups for c in codes]

    def exact(t: int) -> bool:
        return all(v / Fraction(2) ** (t - 127) in REPRESENTABLE for v in values)

    counted = [byte for codes, byte in groups if any(c % 8 for c in codes)] or [byte for _, byte in groups]
    first = max(max(counted) - 6, 1)
    return first if exact(first) else next((t for t in range(1, 255) if exact(t)), None)


@pytest.mark.parametrize(("s", "row"), GOLDEN.items())
def test_golden_bytes(s: int, row: str) -> None:
    for code, byte in enumerate(row.split()):
        tile = groups(([code, code + 8], 100), ([7], 100 + 6 - s))
        if byte == "--":
            with pytest.raises(TileSpan):
                to_fp8(*tile, TILE)
        else:
            codes, t = to_fp8(*tile, TILE)
            assert int(t) == 100 - s
            assert codes[0, :2].tolist() == [int(byte, 16), int(byte, 16) | 0x80]


@pytest.mark.parametrize("distance", range(21))
def test_every_code_at_every_distance_and_position(distance: int) -> None:
    """Below a group of sixes nothing but the code's own lowest bit decides: 14 for .5, 15 for 1, 16 for 2, 17 for 4."""
    furthest = {0: 99, 1: 14, 2: 15, 3: 14, 4: 16, 5: 15, 6: 17, 7: 16}
    for code, position in itertools.product(range(16), range(1, 8)):
        tile: list[tuple[list[int], int]] = [([7, 15], 140)] + [([], 140)] * 7
        tile[position] = ([0, code], 140 - distance)
        w, sf = groups(*tile)
        if distance <= furthest[code % 8]:
            codes, t = to_fp8(w, sf, TILE)
            assert int(t) == 140 - 6
            assert same(fp8_values(codes, t, TILE), mxfp4_values(w, sf))
            assert torch.equal(to_mxfp4(codes, t, sf, TILE), w)
        else:
            with pytest.raises(TileSpan) as refused:
                to_fp8(w, sf, TILE)
            assert (refused.value.tile, refused.value.span) == ((0, 0), distance)
            assert refused.value.large == Group(row=0, column=0, exponent=13)
            assert refused.value.small == Group(row=position // 2, column=position % 2 * 32, exponent=13 - distance)


@pytest.mark.parametrize("column", range(32))
def test_a_code_counts_wherever_it_is_in_its_group(column: int) -> None:
    code = [0] * column + [1]
    assert int(block_scales(*groups(([7], 100), (code, 86)), TILE)) == 94
    with pytest.raises(TileSpan):
        block_scales(*groups(([7], 100), (code, 85)), TILE)


@pytest.mark.parametrize("top", range(1, 8))
def test_a_tile_is_exact_if_any_scale_is(top: int) -> None:
    """Two groups of one code each, every pair at every distance, against a trial of all scales."""
    fallback = 0
    for low, distance in itertools.product(range(1, 8), range(24)):
        tile = [([top], 60), ([low], 60 - distance)]
        expected = judged(tile)
        if expected is None:
            with pytest.raises(TileSpan):
                block_scales(*groups(*tile), TILE)
        else:
            assert int(block_scales(*groups(*tile), TILE)) == expected
            fallback += expected != 60 - 6
    assert bool(fallback) is (top < 6)  # 4 and 6 leave no room


def test_the_fallback_reaches_every_shift_there_is() -> None:
    codes, t = to_fp8(*groups(([1, 9], 100), ([6], 80)), TILE)
    assert (int(t), codes[0, :2].tolist(), int(codes[0, 32])) == (91, [0x78, 0xF8], 0x01)  # shifts of 9 and -11


@pytest.mark.parametrize("distance", [-16, 16])
def test_zero_groups_do_not_count(distance: int) -> None:
    w, sf = groups(([1, 7, 9], 100), ([0, 8], 100 + distance))
    codes, t = to_fp8(w, sf, TILE)
    assert int(t) == 94
    assert same(fp8_values(codes, t, TILE), mxfp4_values(w, sf))
    assert codes[0, 32:34].tolist() == [0, 0x80]
    assert torch.equal(to_mxfp4(codes, t, sf, TILE), w)
    assert not certainly_fits(sf, TILE)


def test_a_tile_of_zeros_takes_its_greatest_exponent() -> None:
    w, sf = groups(([0, 8], 100), ([], 120), ([], 90))
    codes, t = to_fp8(w, sf, TILE)
    assert int(t) == 114
    assert codes[0, :2].tolist() == [0, 0x80]


@pytest.mark.parametrize("byte", range(255))
def test_every_scale_byte(byte: int) -> None:
    """Below byte 7 the tile's would be 0 or less, which is subnormal in F32: it is 1, and every value is still exact."""
    w, sf = groups((list(range(16)), byte), ([7], max(0, byte - 14)))
    codes, t = to_fp8(w, sf, TILE)
    assert int(t) == max(1, byte - 6)
    assert same(fp8_values(codes, t, TILE), mxfp4_values(w, sf))
    assert torch.equal(to_mxfp4(codes, t, sf, TILE), w)


@pytest.mark.parametrize("codes", [[7], [0]], ids=["values", "zeros"])
def test_a_scale_that_is_nan_is_refused(codes: list[int]) -> None:
    w, sf = groups(([7], 127), ([], 127), ([], 127), (codes, 255))
    with pytest.raises(Unencodable, match=r"the group scale is a NaN \(0xFF\) at row 1, columns 32 to 63") as refused:
        block_scales(w, sf, TILE)
    assert refused.value.code == "nan"
    assert not certainly_fits(torch.full_like(sf, 255), TILE)


def test_no_byte_is_nan() -> None:
    """Of all that a tile can hold: sixteen codes in groups at every exact distance."""
    for distance in range(15):
        codes, _ = to_fp8(*groups((list(range(16)), 100), (list(range(16)), 100 - distance)), TILE)
        assert not (codes % 128 == 127).any()


SIZES = st.tuples(st.integers(1, 11), st.integers(1, 5).map(lambda g: 32 * g))
BLOCKS = st.sampled_from([(4, 64), (1, 32), (3, 96), (128, 128)])


@given(SIZES, BLOCKS, st.integers(0, 2**32), st.integers(0, 14), st.integers(0, 240))
@settings(max_examples=200, deadline=None)
def test_random_tiles_come_back(size: tuple[int, int], block: tuple[int, int], seed: int, span: int, least: int) -> None:
    """Partial tiles at both ends included: each has the scale of its own groups."""
    (n, k), draw = size, torch.Generator().manual_seed(seed)
    w = torch.randint(256, (n, k // 2), generator=draw).to(torch.uint8)
    w *= torch.rand(n, k // 32, generator=draw).gt(0.3).to(torch.uint8).repeat_interleave(16, 1)
    sf = torch.randint(least, least + span + 1, (n, k // 32), generator=draw).to(torch.uint8)
    assert certainly_fits(sf, block)
    codes, t = to_fp8(w, sf, block)
    assert torch.equal(t, block_scales(w, sf, block))
    assert same(fp8_values(codes, t, block), mxfp4_values(w, sf))
    assert torch.equal(to_mxfp4(codes, t, sf, block), w)
    for row, column in itertools.product(range(t.shape[0]), range(t.shape[1])):
        rows, cols = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1] // 32, (column + 1) * block[1] // 32)
        used = [b for r, s in zip(w[rows], sf[rows], strict=True) for g, b in list(enumerate(s.tolist()))[cols] if nonzero(r, g)]
        assert t[row, column] == max(1, max(used or sf[rows, cols].flatten().tolist()) - 6)


def nonzero(row: torch.Tensor, group: int) -> bool:
    return any(byte & 0x77 for byte in row[16 * group : 16 * group + 16].tolist())


@pytest.mark.parametrize(("span", "fits"), [(0, True), (14, True), (15, False), (40, False)])
@pytest.mark.parametrize("at", [(0, 0), (6, 4)], ids=["first", "in a partial tile"])
def test_scales_alone_tell_what_certainly_fits(span: int, fits: bool, at: tuple[int, int]) -> None:
    sf = torch.full((7, 5), 50, dtype=torch.uint8)
    sf[4:, 4] = 50 + span  # in one tile with row 6
    sf[at] = 50 if at == (6, 4) else 50 + span
    assert certainly_fits(sf, TILE) is fits


def test_a_refusal_names_tile_groups_and_span() -> None:
    w, sf = groups(block=(12, 192))
    w[9, 5 * 16 + 3], sf[9, 5] = 0x70, 130
    w[10, 4 * 16], sf[10, 4] = 0x01, 110
    w[11, 4 * 16], sf[11, 4] = 0x01, 120
    with pytest.raises(TileSpan) as refused:
        to_fp8(w, sf, TILE)
    where = "from 2**-17 at row 10, column 128 to 2**3 at row 9, column 160"
    assert str(refused.value) == f"tile (2, 2) spans 20 powers of two, {where}: no scale makes both exact in E4M3"
    assert refused.value.sentence(400).startswith("tile (102, 2) spans 20 powers of two, from 2**-17 at row 410, column 128 to ")


@pytest.mark.parametrize("s", range(-16, 17))
def test_the_way_back_takes_what_a_code_becomes_and_nothing_else(s: int) -> None:
    """Every E4M3 byte, the NaNs too, in either half of a pair."""
    sf, t = torch.full((1, 1), 100 + s, dtype=torch.uint8), torch.full((1, 1), 100, dtype=torch.uint8)
    known = {(v, float(v) == 0 and bool(v.signbit())): code for code, v in enumerate(CODES * 2.0**s)}
    known = {(float(v), minus): code for (v, minus), code in known.items()}
    for byte in range(256):
        value = (float(E4M3[byte]), float(E4M3[byte]) == 0 and byte == 0x80)
        for place in (4, 5):
            codes = torch.zeros(1, 32, dtype=torch.uint8)
            codes[0, place] = byte
            if value in known:
                w = to_mxfp4(codes, t, sf, (1, 32))
                assert w[0].tolist() == [known[value] << 4 * (place % 2) if at == 2 else 0 for at in range(16)]
            else:
                with pytest.raises(Unencodable, match="at row 0, columns 4 to 5") as refused:
                    to_mxfp4(codes, t, sf, (1, 32))
                assert refused.value.code == "tensor-damaged"


@pytest.mark.parametrize(
    ("shape", "scales", "block", "match"),
    [
        ((2, 24), (2, 1), (4, 64), "K = 48 is not a multiple of 32"),
        ((2, 32), (2, 1), (4, 64), "do not fit"),
        ((2, 32), (1, 2), (4, 64), "do not fit"),
        ((2, 32), (2, 2), (4, 48), "do not fit"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, int], scales: tuple[int, int], block: tuple[int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        block_scales(torch.zeros(shape, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8), block)
