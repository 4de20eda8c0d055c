"""Tensors in another format as the writer streams them: what `fse_convert.layout` makes of the whole, whatever the band."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo, parse_header
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion import recoding
from fse_convert.conversion.source_rows import SourceReader, open_reader
from fse_convert.conversion.writer import write_shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import mxfp4_to_fp8, to_mxfp4, ue8m0
from fse_convert.plan.tensors import Copied, OutputShard, Recoded, Rule, TensorSpec, placed
from fse_convert.testing import patch

N, K = 200, 224
"""Neither is a multiple of 128: the last tiles are partial."""
BLOCK = (128, 128)
Stored = dict[str, tuple[str, Tensor]]


def random(*shape: int, least: int = 0, most: int = 255) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape) + least)
    return torch.randint(least, most + 1, shape, generator=draw).to(torch.uint8)


def fp8(n: int = N, k: int = K) -> Tensor:
    codes = random(n, k)
    return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)


@contextmanager
def source(root: Path, *shards: Stored) -> Iterator[tuple[SourceReader, dict[str, TensorInfo]]]:
    """Write tensors into shards 0, 1, ... and open them: a reader, and each tensor's place by its name."""
    for i, tensors in enumerate(shards):
        header, payload = {}, b""
        for name, (dtype, tensor) in tensors.items():
            data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
            offsets = [len(payload), len(payload) + len(data)]
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            payload += data
        patch.write_shard(root / f"{i}.safetensors", header, payload)
    opened = []
    for path in sorted(root.glob("*.safetensors")):
        raw, size = path.read_bytes(), path.stat().st_size
        opened.append(Shard(path.name, size, parse_header(raw[8 : 8 + int.from_bytes(raw[:8], "little")], size, path.name)))
    with open_reader(LocalFolder(root), tuple(opened)) as reader:
        yield reader, {t.name: t for shard in opened for t in shard.header.tensors}


def change(rule: Rule, places: dict[str, TensorInfo], *, scale: bool, block: tuple[int, int] | None = BLOCK) -> Recoded:
    return Recoded(rule=rule, weight=places.get("w"), scale=places.get("s"), shape=(N, K), block=block, is_scale=scale)


def streamed(recoded: Recoded, reader: SourceReader) -> Tensor:
    return torch.cat([band[recoded.is_scale].flatten() for band in recoding.recoded_bands(recoded, reader)])


W_MXFP4, SF_MXFP4 = random(N, K // 2), random(N, K // 32, least=100, most=114)
CODES, GRID = fp8(), random(2, 2, least=120, most=130)
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ODD_SCALES = GRID.float() / 97
PLAIN = torch.linspace(-3, 5, N * K).view(N, K)


def by_e8m0(grid: Tensor) -> tuple[Tensor, Tensor]:
    return to_mxfp4.from_fp8(CODES, ue8m0.expand(grid, N, K, *BLOCK))


def exact() -> tuple[Tensor, Tensor]:
    codes, t = mxfp4_to_fp8.to_fp8(W_MXFP4, SF_MXFP4, BLOCK)
    return codes, ue8m0.to_fp32(t)


CASES = {
    "MXFP4 to FP8": (Rule.FP8, {"w": ("I8", W_MXFP4), "s": ("F8_E8M0", SF_MXFP4)}, BLOCK, exact()),
    "U8 labels": (Rule.FP8, {"w": ("U8", W_MXFP4), "s": ("U8", SF_MXFP4)}, BLOCK, exact()),
    "FP8 with E8M0 to MXFP4": (Rule.MXFP4, {"w": ("F8_E4M3", CODES), "s": ("F8_E8M0", GRID)}, BLOCK, by_e8m0(GRID)),
    "FP8 with F32 to MXFP4": (Rule.MXFP4, {"w": ("F8_E4M3", CODES), "s": ("F32", ODD_SCALES)}, BLOCK, by_e8m0(ODD_SCALES)),
    "FP8 with BF16 to MXFP4": (
        Rule.MXFP4,
        {"w": ("F8_E4M3", CODES), "s": ("BF16", ODD_SCALES.bfloat16())},
        BLOCK,
        by_e8m0(ODD_SCALES.bfloat16().float()),
    ),
    **{
        f"{dtype} to MXFP4": (Rule.MXFP4, {"w": (dtype, PLAIN.to(kind))}, None, to_mxfp4.from_floats(PLAIN.to(kind)))
        for dtype, kind in FLOATS.items()
    },
}


@pytest.mark.parametrize("chunk", [1, 30_000, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_any_band_gives_the_same_bytes(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoding, "CHUNK", chunk)
    rule, tensors, block, expected = CASES[case]
    with source(tmp_path, tensors) as (reader, places):
        for scale, whole in enumerate(expected):
            got = streamed(change(rule, places, scale=bool(scale), block=block), reader)
            assert torch.equal(got, whole.contiguous().view(torch.uint8).flatten())


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_e8m0_scales_become_the_same_powers_of_two(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoding, "CHUNK", chunk)
    scales = torch.arange(1, 255).to(torch.uint8).view(2, 127)
    with source(tmp_path, {"s": ("F8_E8M0", scales)}) as (reader, places):
        got = streamed(change(Rule.F32, places, scale=True), reader).view(torch.float32)
    assert torch.equal(got.double(), torch.exp2(torch.arange(1, 255).double() - 127))


def test_a_band_is_no_larger_than_a_chunk_or_a_row_of_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoding, "CHUNK", 3 * 32 * K)
    with source(tmp_path, {"w": ("I8", W_MXFP4), "s": ("F8_E8M0", SF_MXFP4)}) as (reader, places):
        for block, rows in ((32, 96), (128, 128)):
            recoded = change(Rule.FP8, places, scale=False, block=(block, block))
            bands = recoding.recoded_bands(recoded, reader)
            assert [len(band[False]) for band in bands] == [rows] * (N // rows) + [N % rows]


@pytest.fixture
def bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one row of blocks at a time."""
    monkeypatch.setattr(recoding, "CHUNK", 1)


def problem(recoded: Recoded, reader: SourceReader) -> Problem:
    with pytest.raises(InvalidCheckpoint) as refused:
        streamed(recoded, reader)
    return refused.value.problems[0]


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("scale", [False, True])
def test_a_tile_that_cannot_be_exact_is_named(scale: bool, tmp_path: Path) -> None:
    w, sf = W_MXFP4.clone(), SF_MXFP4.clone()
    w[150, 64], sf[150, 4] = 0x01, 90
    w[131, 80], sf[131, 5] = 0x07, 140
    with source(tmp_path, {"w": ("I8", w), "s": ("F8_E8M0", sf)}) as (reader, places):
        found = problem(change(Rule.FP8, places, scale=scale), reader)
    assert (found.code, found.where) == ("tile-span", "0.safetensors: w")
    assert found.message.startswith(
        "tile (1, 1) spans 50 powers of two, from 2**-37 at row 150, column 128 to 2**13 at row 131, column 160"
    )
    assert "keep the experts in MXFP4" in found.hint


@pytest.mark.parametrize(
    ("case", "tensor", "at", "value", "code", "message"),
    [
        ("MXFP4 to FP8", "s", (150, 3), 255, "nan", "the group scale is a NaN (0xFF) at row 150, columns 96 to 127"),
        ("FP8 with E8M0 to MXFP4", "w", (150, 3), 0x7F, "nan", "there is a NaN at row 150, columns 0 to 31"),
        ("FP8 with E8M0 to MXFP4", "s", (1, 1), 255, "nan", "the scale is a NaN (0xFF) at row 128, columns 128 to 159"),
        (
            "FP8 with F32 to MXFP4", "s", (1, 1), -1.0, "scale-range",
            "the scale is not a positive number at row 128, columns 128 to 159",
        ),
        ("BF16 to MXFP4", "w", (150, 40), float("inf"), "nan", "there is a NaN or an infinity at row 150, columns 32 to 63"),
    ],
)  # fmt: skip
def test_what_has_no_code_is_refused_with_its_place(
    case: str,
    tensor: str,
    at: tuple[int, int],
    value: float,
    code: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recoding, "CHUNK", 30_000)
    rule, tensors, block, _ = CASES[case]
    dtype, damaged = tensors[tensor][0], tensors[tensor][1].clone()
    damaged[at] = value
    with source(tmp_path, {**tensors, tensor: (dtype, damaged)}) as (reader, places):
        found = problem(change(rule, places, scale=False, block=block), reader)
    assert (found.code, found.message, found.where) == (code, message, "0.safetensors: w")
    assert found.hint


@pytest.mark.parametrize(
    ("byte", "code", "message"),
    [
        (255, "nan", "the scale is a NaN (0xFF) at row 1, column 1"),
        (0, "scale-range", "the scale is 2**-127, which is subnormal in F32, so that servers take it for 0, at row 1, column 1"),
    ],
)
def test_e8m0_scales_that_f32_cannot_carry_are_refused(byte: int, code: str, message: str, tmp_path: Path) -> None:
    scales = GRID.clone()
    scales[1, 1] = byte
    with source(tmp_path, {"s": ("F8_E8M0", scales)}) as (reader, places):
        found = problem(change(Rule.F32, places, scale=True), reader)
    assert (found.code, found.message, found.where) == (code, message, "0.safetensors: s")


def test_a_shard_of_copied_relabelled_dropped_and_recoded_tensors(tmp_path: Path) -> None:
    """Copied neighbours of the output are one range only where they are neighbours in one shard of the source."""
    plain = {name: torch.arange(i, i + 5).to(torch.uint8) for i, name in enumerate("abcdefg")}
    first: Stored = {name: ("U8", plain[name]) for name in "abc"}
    first |= {"w": ("I8", W_MXFP4), "s": ("F8_E8M0", SF_MXFP4)}
    first |= {name: ("U8", plain[name]) for name in "de"}
    root = tmp_path / "source"
    root.mkdir()
    with source(root, first, {name: ("U8", plain[name]) for name in "fg"}) as (reader, places):

        def copied(name: str, to: str = "", dtype: str = "U8") -> TensorSpec:
            return TensorSpec(to or name, dtype, places[name].shape, Copied(places[name]))

        recoded = [
            TensorSpec("w", "F8_E4M3", (N, K), change(Rule.FP8, places, scale=False)),
            TensorSpec("s", "F32", (2, 2), change(Rule.FP8, places, scale=True)),
        ]
        # b is dropped; c is relabelled; d and f follow each other, as do e and a, but not in the source
        order = [
            copied("a"),
            copied("c", "C", "I8"),
            recoded[1],
            copied("d"),
            copied("f"),
            recoded[0],
            copied("g"),
            copied("e"),
            copied("a", "A"),
        ]
        shard = OutputShard(name="0.safetensors", tensors=placed(order), metadata={})
        told: list[int] = []
        write_shard(shard, reader, tmp_path / "out.safetensors", told.append)
    got = load_file(tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").stat().st_size == shard.size == sum(told)
    codes, t = exact()
    assert torch.equal(got.pop("w").view(torch.uint8), codes)
    assert torch.equal(got.pop("s"), t)
    assert torch.equal(got.pop("C").view(torch.uint8), plain["c"])
    assert torch.equal(got.pop("A"), plain["a"])
    assert got.keys() == set("adefg")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in got.items())


def test_a_matrix_is_read_once_for_weight_and_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    with source(tmp_path, {"w": ("I8", W_MXFP4), "s": ("F8_E8M0", SF_MXFP4)}) as (reader, places):
        rows = reader.rows
        monkeypatch.setattr(reader, "rows", lambda info, *rest: (read.append(info.name), rows(info, *rest))[1])
        scale = TensorSpec("s", "F32", (2, 2), change(Rule.FP8, places, scale=True))
        weight = TensorSpec("w", "F8_E4M3", (N, K), change(Rule.FP8, places, scale=False))
        for i, specs in enumerate(((scale, weight), (weight,), (scale,))):
            read.clear()
            path = tmp_path / f"out {i}"
            write_shard(OutputShard(name=path.name, tensors=placed(specs), metadata={}), reader, path, lambda n: None)
            assert sorted(read) == ["s", "w"]
            got = load_file(path)
            assert got.keys() == {spec.name for spec in specs}
            assert all(
                torch.equal(got[n].view(torch.uint8), e.view(torch.uint8)) for n, e in zip("ws", exact(), strict=True) if n in got
            )


def test_copied_neighbours_are_one_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across a gap, another shard or another order a range begins anew: thousands of tensors are few calls."""
    ranges: list[int] = []
    root = tmp_path / "source"
    root.mkdir()
    shards: list[Stored] = [{name: ("U8", torch.zeros(5, dtype=torch.uint8)) for name in names} for names in ("abcd", "ef")]
    with source(root, *shards) as (reader, places):
        specs = [TensorSpec(name, "U8", (5,), Copied(places[name])) for name in "abdefc"]
        monkeypatch.setattr("fse_convert.conversion.writer.copy_range", lambda src, dst, at, length, tell: ranges.append(length))
        shard = OutputShard(name="out", tensors=placed(specs), metadata={})
        write_shard(shard, reader, tmp_path / "out.safetensors", lambda n: None)
    assert ranges == [10, 5, 10, 5]
