"""What tensors in another format must hold, against an oracle that counts in fractions, and against the writer's own tables."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.layout import mxfp4_to_fp8, to_mxfp4, ue8m0
from fse_convert.layout.mxfp4 import Unencodable
from fse_convert.plan.tensors import Recoded, Rule
from fse_convert.verification.compare import Memory, SourceTensors, Undefined
from fse_convert.verification.decode import decode_mxfp4, decode_scales
from fse_convert.verification.recoded import TileScales, mxfp4_codes, mxfp4_scales, recoded_rows

MAGNITUDES = [Fraction(m) for m in (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)]


def e4m3(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    return Fraction(mantissa, 512) if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


CODES = {e4m3(code): code for code in range(0x7F)}
Row = list[tuple[int, int]]
"""(MXFP4 code, group exponent) of every element."""


def tile_oracle(rows: list[Row]) -> tuple[int, list[list[int]]] | None:
    """The scale byte and the E4M3 codes of one tile, None where there are none: the rule, one number at a time."""
    live = [e for row in rows for code, e in row if code % 8]
    preferred = max(1, (max(live) if live else max(e for row in rows for _, e in row)) - 6)
    largest = max(MAGNITUDES[code % 8] * Fraction(2) ** e for row in rows for code, e in row)
    least = next(t for t in itertools.count(1) if largest <= 448 * Fraction(2) ** t)
    for t in (preferred, least):
        scaled = [[MAGNITUDES[code % 8] * Fraction(2) ** (e - t) for code, e in row] for row in rows]
        if all(v in CODES for row in scaled for v in row):
            return t, [
                [CODES[v] + 16 * (code & 8) for v, (code, _) in zip(*both, strict=True)] for both in zip(scaled, rows, strict=True)
            ]
    return None


class Held:
    """Stands for open files: every tensor is one, from offset 0."""

    def __init__(self, **tensors: Tensor) -> None:
        self.raw = {name: bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for name, t in tensors.items()}

    def read(self, name: str, offset: int, into: memoryview) -> memoryview:
        into[:] = self.raw[name][offset : offset + len(into)]
        return into


def recoded(
    rule: Rule, block: tuple[int, int] | None, shape: tuple[int, int], **stored: tuple[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Weight and scale of the output as bytes. ``stored``: ``weight`` and ``scale`` of the source with their dtypes."""
    infos = {}
    for name, (dtype, t) in stored.items():
        size = t.numel() * t.element_size()
        infos[name] = TensorInfo(name, name, dtype, (t.shape[0], size * 8 // BITS[dtype] // t.shape[0]), 0, size)
    files: Any = Held(**{name: t for name, (_, t) in stored.items()})
    source, memory = SourceTensors(files, infos, dict.fromkeys(infos, 0)), Memory()
    tiles, found = TileScales(source), []
    for is_scale in (False, True):
        weight = infos.get("weight") if rule is not Rule.F32 else None
        change = Recoded(rule=rule, weight=weight, scale=infos.get("scale"), shape=shape, block=block, is_scale=is_scale)
        rows, parts = recoded_rows(change, source, tiles), []
        for first in range(0, rows.count, rows.multiple):
            raw = rows.expected(first, min(rows.multiple, rows.count - first), memory)
            parts.append(torch.tensor(list(raw), dtype=torch.uint8))
        found.append(torch.cat(parts).view(rows.count, rows.size))
    return found[0], found[1]


def fp8(rows: list[Row], block: tuple[int, int]) -> tuple[list[list[int]], list[list[int]]]:
    """E4M3 codes and scale bytes of MXFP4 elements."""
    codes = torch.tensor([[code for code, _ in row] for row in rows], dtype=torch.uint8)
    packed, scale = (
        codes[:, ::2] | codes[:, 1::2] << 4,
        torch.tensor([[e for _, e in row[::32]] for row in rows], dtype=torch.uint8),
    )
    weight, scales = recoded(Rule.FP8, block, tuple(codes.shape), weight=("I8", packed), scale=("F8_E8M0", scale))  # type: ignore[arg-type]
    values = scales.view(torch.float32)
    return weight.tolist(), (values.log2() + 127).int().tolist()


def group(codes: Iterable[int], e: int) -> Row:
    """A group of 32 that begins with these codes and has zeros then."""
    held = list(codes)
    return [(code, e) for code in [*held, *[0] * (32 - len(held))]]


def test_every_code_at_every_distance_from_the_greatest() -> None:
    """Beside 6: the finest codes are exact up to 14 powers of two below, coarser ones up to 17."""
    refused = set()
    for code, distance, first in itertools.product(range(16), range(21), (False, True)):
        row = [*group([7], 127), *group([code], 127 - distance)]
        rows = [row if first else [*row[32:], *row[:32]]]
        expected = tile_oracle(rows)
        if expected is None:
            refused.add((code % 8, distance))
            with pytest.raises(Undefined, match="no power of two"):
                fp8(rows, (1, 64))
        else:
            assert fp8(rows, (1, 64)) == (expected[1], [[expected[0]]])
    assert {code: min(d for c, d in refused if c == code) for code in range(1, 8)} == {
        1: 15,
        3: 15,
        2: 16,
        5: 16,
        4: 17,
        7: 17,
        6: 18,
    }


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([[*group([4, 12], 120), *group([], 136)]], id="a group of zeros 16 above"),
        pytest.param([[*group([], 9), *group([8], 200)]], id="nothing but zeros of either sign"),
        pytest.param([[*group([1], 127), *group([1], 110)]], id="exact under the least scale only"),
        pytest.param([[*group([2, 9], 130), *group([3], 114)]], id="the least scale, and signs"),
        pytest.param([[*group([7], 0), *group([1], 3)]], id="scales that are clamped"),
        pytest.param([[*group([7], 254), *group([15, 8], 250)]], id="the greatest scale"),
    ],
)
def test_tiles_by_their_rule(rows: list[Row]) -> None:
    expected = tile_oracle(rows)
    assert expected is not None
    assert fp8(rows, (1, 64)) == (expected[1], [[expected[0]]])


def test_negative_zero_stays_negative() -> None:
    assert fp8([group([8, 0, 8], 127)], (1, 32))[0][0][:4] == [0x80, 0, 0x80, 0]


@pytest.mark.parametrize("codes", [[7], []])
def test_a_scale_that_is_no_number_is_refused(codes: list[int]) -> None:
    with pytest.raises(Undefined, match="NaN"):
        fp8([[*group([1], 127), *group(codes, 255)]], (1, 64))


@pytest.mark.parametrize("spread", [3, 14, 16, 17])
@pytest.mark.parametrize(("n", "k", "block"), [(48, 96, (32, 32)), (40, 160, (32, 64)), (20, 64, (128, 128))])
def test_random_tiles_with_partial_blocks(n: int, k: int, block: tuple[int, int], spread: int) -> None:
    """Two sorts of tile: full ones, and ones where a few groups hold a few codes."""
    rng = random.Random(spread * n)
    refused = 0
    for _ in range(6):
        dense = rng.random() < 0.5
        rows = []
        for _ in range(n):
            e = [rng.randrange(100, 101 + spread) for _ in range(k // 32)]
            rows.append([(rng.randrange(16) if dense or rng.random() < 0.02 else rng.choice((0, 8)), e[x // 32]) for x in range(k)])
        b, w = block
        tiles = {(i, j): tile_oracle([row[j : j + w] for row in rows[i : i + b]]) for i in range(0, n, b) for j in range(0, k, w)}
        if None in tiles.values():
            refused += 1
            with pytest.raises(Undefined):
                fp8(rows, block)
            continue
        codes, scales = fp8(rows, block)
        for (i, j), found in tiles.items():
            assert found is not None
            assert scales[i // b][j // w] == found[0]
            assert [row[j : j + w] for row in codes[i : i + b]] == found[1]
    assert refused == 0 or spread > 14


@pytest.mark.parametrize("block", [(32, 32), (128, 128)])
@pytest.mark.parametrize("spread", [5, 15, 18])
def test_the_writer_makes_the_same_of_random_tiles(block: tuple[int, int], spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    refused = 0
    for _ in range(20):
        sparse = torch.rand(160, 128, generator=generator) < 0.01
        w_np = torch.randint(0, 256, (160, 128), generator=generator).where(sparse, 0).to(torch.uint8)
        sf_ng = torch.randint(100, 101 + spread, (160, 8), generator=generator).to(torch.uint8)
        try:
            codes, t = mxfp4_to_fp8.to_fp8(w_np, sf_ng, block)
        except Unencodable:
            refused += 1
            with pytest.raises(Undefined):
                recoded(Rule.FP8, block, (160, 256), weight=("I8", w_np), scale=("F8_E8M0", sf_ng))
            continue
        weight, scale = recoded(Rule.FP8, block, (160, 256), weight=("I8", w_np), scale=("F8_E8M0", sf_ng))
        assert torch.equal(weight, codes)
        assert torch.equal(scale, ue8m0.to_fp32(t).view(torch.uint8))
    assert (refused > 0) == (spread > 14)


def test_e8m0_scales_as_f32() -> None:
    byte = torch.arange(1, 255).to(torch.uint8).view(2, 127)
    found = recoded(Rule.F32, (128, 128), (256, 16256), scale=("F8_E8M0", byte))[1].view(torch.float32)
    assert found.double().tolist() == [[2.0 ** (int(b) - 127) for b in row] for row in byte]
    for bad in (0, 255):
        with pytest.raises(Undefined):
            recoded(Rule.F32, (128, 128), (128, 128), scale=("U8", torch.tensor([[bad]], dtype=torch.uint8)))


def mxfp4_oracle(values: list[Fraction]) -> tuple[int, list[int]]:
    """Scale byte and magnitude codes of one group of 32 by the definition, in fractions."""
    amax = max(map(abs, values))
    if not amax:
        return 0, [0] * len(values)
    e = next(e for e in itertools.count(-160) if amax < Fraction(2) ** (e + 1)) - 2
    e += amax >= Fraction(7, 4) * Fraction(2) ** (e + 2)
    e = min(127, max(-127, e))
    scaled = [abs(v) / Fraction(2) ** e for v in values]
    return e + 127, [min(range(8), key=lambda c: (abs(MAGNITUDES[c] - min(v, Fraction(6))), c & 1)) for v in scaled]


def encode_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = mxfp4_scales(values)
    return mxfp4_codes(values, scales), scales


def check_mxfp4(values: Tensor) -> None:
    """Compare groups ``[n, 32]`` of float64 with the oracle."""
    packed, byte = encode_mxfp4(values)
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
    for row, found, scale in zip(values.tolist(), codes.tolist(), byte.flatten().tolist(), strict=True):
        expected, magnitudes = mxfp4_oracle([Fraction(v) for v in row])
        assert scale == expected
        assert [c % 8 for c in found] == magnitudes
    assert torch.equal(codes >= 8, values.signbit())


@pytest.mark.parametrize(
    ("start", "byte", "first"),
    [
        ((6, 3), 127, 0x57), ((7, 3), 128, 0x36), ((6.5, 2.5), 127, 0x47), ((3.5, -3.5), 127, 0xE6), ((1.75, -0.25), 126, 0x96),
        ((-5, 0.75), 127, 0x2E), ((5, 1.25), 127, 0x26), ((0.0, -0.0), 0, 0x80),
    ],
)  # fmt: skip
def test_golden_groups(start: tuple[float, float], byte: int, first: int) -> None:
    """vLLM 0.33 ``downcast_to_mxfp`` and torchao 0.18 EVEN make these."""
    values = torch.zeros(1, 32, dtype=torch.float64)
    values[0, :2] = torch.tensor(start)
    packed, scale = encode_mxfp4(values)
    assert (int(scale), int(packed[0, 0])) == (byte, first)


@pytest.mark.parametrize("exponent", [-140, -133, -127, -30, 0, 100, 126])
def test_ties_and_extremes_as_mxfp4(exponent: int) -> None:
    """Every middle between two codes, and one step of BF16 beside it, under every mantissa of the greatest magnitude."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.5], dtype=torch.float64)
    some = torch.cat((middles, middles * (1 + 2**-7), middles * (1 - 2**-8), torch.zeros(4)))
    rows = [torch.cat((some, torch.tensor([sign * m], dtype=torch.float64))) for m in (4, 5, 6, 6.97, 7, 7.9) for sign in (1, -1)]
    check_mxfp4(torch.stack(rows).mul(2.0**exponent))


def test_random_groups_as_mxfp4() -> None:
    generator = torch.Generator().manual_seed(0)
    check_mxfp4(torch.randn(64, 32, generator=generator).bfloat16().double())
    check_mxfp4(torch.randn(64, 32, generator=generator).double().pow(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(Undefined, match="NaN or infinite"):
        encode_mxfp4(torch.full((1, 32), value, dtype=torch.float64))


SOURCES = {
    "BF16": lambda g: (torch.randn(64, 96, generator=g).bfloat16(), None),
    "F16": lambda g: (torch.randn(64, 96, generator=g).half(), None),
    "F32": lambda g: (torch.randn(64, 96, generator=g), None),
    "E8M0": lambda g: (torch.randint(0, 127, (64, 96), generator=g), torch.randint(100, 130, (2, 3), generator=g).to(torch.uint8)),
    "F32 scales": lambda g: (torch.randint(0, 127, (64, 96), generator=g), torch.rand(2, 3, generator=g) + 0.1),
}


@pytest.mark.parametrize("sort", SOURCES)
def test_the_writer_codes_every_source_alike(sort: str) -> None:
    weight, scale = SOURCES[sort](torch.Generator().manual_seed(1))
    if scale is None:
        codes, byte = to_mxfp4.from_floats(weight)
        found = recoded(Rule.MXFP4, None, (64, 96), weight=(sort, weight))
    else:
        weight = weight.to(torch.uint8) | (torch.arange(96) % 2 * 0x80).to(torch.uint8)
        codes, byte = to_mxfp4.from_fp8(weight, ue8m0.expand(scale, 64, 96, 32, 32))
        stored = ("F8_E8M0" if sort == "E8M0" else "F32", scale)
        found = recoded(Rule.MXFP4, (32, 32), (64, 96), weight=("F8_E4M3", weight), scale=stored)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], byte)


def test_decoding_keeps_zeros_and_their_signs() -> None:
    values = decode_mxfp4(torch.tensor([[0x80, 0x79]], dtype=torch.uint8))
    assert values.tolist() == [[0.0, -0.0, -0.5, 6.0]]
    assert values.signbit().tolist() == [[False, True, True, False]]
    assert decode_scales(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]


def test_tile_scales_are_worked_out_once_per_matrix() -> None:
    reads: list[str] = []
    w_np, sf_ng = torch.zeros(32, 16, dtype=torch.uint8), torch.full((32, 1), 127, dtype=torch.uint8)
    held = Held(weight=w_np, scale=sf_ng)
    files: Any = SimpleNamespace(read=lambda name, offset, into: (reads.append(name), held.read(name, offset, into))[1])
    infos = {
        "weight": TensorInfo("weight", "weight", "I8", (32, 16), 0, 512),
        "scale": TensorInfo("scale", "scale", "U8", (32, 1), 0, 32),
    }
    tiles = TileScales(SourceTensors(files, infos, {"weight": 0, "scale": 0}))
    for is_scale in (False, True):
        change = Recoded(
            rule=Rule.FP8, weight=infos["weight"], scale=infos["scale"], shape=(32, 32), block=(32, 32), is_scale=is_scale
        )
        assert tiles.of(change).tolist() == [[121]]
    assert reads == ["weight", "scale"]
