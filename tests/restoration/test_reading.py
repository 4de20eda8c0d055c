"""Tensors of an output, read in pieces: digests, padding cut off, and what else a header may say."""

from __future__ import annotations

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fse_convert.checkpoint.encoding import encode_header, header_entries
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import BITS, Header
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import FseConvertError, VerificationFailure
from fse_convert.progress import Event, ignore
from fse_convert.restoration import reading
from fse_convert.restoration.reading import TensorFile, without_padding
from fse_convert.restoration.recipes import recipes, restored
from fse_convert.sidecar.manifest import stretches
from fse_convert.sidecar.reader import read_shards

Entry = tuple[str, str, tuple[int, ...]]
NAME = "x.safetensors"


def shard(folder: Path, name: str, entries: list[Entry], word: bytes = bytes(range(251))) -> Shard:
    """Write a shard of one word again and again, and read its header."""
    size = sum(prod(shape) * BITS[dtype] // 8 for _, dtype, shape in entries)
    (folder / name).write_bytes(encode_header(header_entries(entries), None) + (word * (size // len(word) + 1))[:size])
    (found,), problems = read_shards(LocalFolder(folder), [name])
    assert problems == []
    return found


def opened(folder: Path, s: Shard, digests: dict[str, str] | None = None, seen: list[Event] | None = None) -> TensorFile:
    return TensorFile(s, folder / s.name, digests, ignore if seen is None else seen.append)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("shape", [(5, 7), (35,), (1, 35)])
def test_pieces_are_the_tensor_and_are_reported(
    chunk: int, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    s = shard(tmp_path, NAME, [("before", "U8", (3,)), ("t", "U8", shape)])
    seen: list[Event] = []
    with opened(tmp_path, s, seen=seen) as file:
        pieces = [bytes(piece) for piece in file.pieces(s.header.tensors[1])]
        assert bytes(file.whole(s.header.tensors[1])) == b"".join(pieces) == bytes(range(3, 38))
    assert max(map(len, pieces)) <= chunk
    assert sum(event.bytes for event in seen) == 2 * 35


@pytest.mark.parametrize("listed", [{}, {"t": "0" * 32}])
def test_a_tensor_without_its_digest_is_damaged_at_its_end(listed: dict[str, str], tmp_path: Path) -> None:
    s = shard(tmp_path, NAME, [("t", "U8", (9,))])
    (t,) = s.header.tensors
    with opened(tmp_path, s, listed) as file, pytest.raises(VerificationFailure) as error:
        assert len([*file.pieces(t)]) == 1
    (problem,) = error.value.problems
    assert (problem.code, problem.where) == ("tensor-damaged", f"{NAME}: t")
    with opened(tmp_path, s, {"t": xxhash.xxh3_128_hexdigest(bytes(range(9)))}) as file:
        assert bytes(file.whole(t)) == bytes(range(9))


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    s = shard(tmp_path, NAME, [("t", "U8", (9,))])
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    with opened(tmp_path, s) as file, pytest.raises(EOFError):
        file.whole(s.header.tensors[0])


@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])
@pytest.mark.parametrize(
    ("dtype", "shape", "kept", "count"),
    [
        ("U8", (6, 12), (6, 12), 1),
        ("U8", (6, 12), (4, 12), 1),
        ("U8", (6, 12), (6, 7), 6),
        ("F32", (3, 3), (3, 1), 3),
        ("U8", (40,), (33,), 1),
        ("U8", (6, 1, 2, 1), (6, 1, 1, 1), 6),
        ("U8", (2, 8, 3), (2, 6, 3), 2),
        ("U8", (2, 8, 3), (2, 6, 3), 4),
        ("U8", (), (), 1),
        ("U8", (0, 4), (0, 4), 1),
        ("U8", (6, 12), (6, 0), 6),
    ],
)
def test_the_head_of_every_stretch_is_kept(
    chunk: int,
    dtype: str,
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    s = shard(tmp_path, NAME, [("t", dtype, shape)])
    with opened(tmp_path, s) as file:
        out = b"".join(map(bytes, without_padding(file, s.header.tensors[0], kept, count)))
    size, keep = (prod(x) * BITS[dtype] // 8 // count for x in (shape, kept))
    assert out == b"".join(bytes(range(i * size, i * size + keep)) for i in range(count))


@pytest.mark.parametrize(("kept", "count"), [((7, 12), 1), ((6, 13), 6), ((6, 12), 5), ((5, 12), 72)])
def test_a_tensor_that_cannot_hold_the_original_is_refused(kept: tuple[int, ...], count: int, tmp_path: Path) -> None:
    s = shard(tmp_path, NAME, [("t", "U8", (6, 12))])
    with opened(tmp_path, s) as file, pytest.raises(VerificationFailure) as error:
        list(without_padding(file, s.header.tensors[0], kept, count))
    assert error.value.problems[0].code == "tensor-shape"


@pytest.mark.parametrize(
    ("source", "shape", "count"), [((6, 12), (8, 12), 1), ((6, 12), (6, 14), 6), ((6,), (9,), 1), ((6, 1, 2, 1), (6, 1, 3, 1), 6)]
)
def test_one_matrix_grows_by_rows_or_by_columns(source: tuple[int, ...], shape: tuple[int, ...], count: int) -> None:
    assert stretches(source, shape) == count


@pytest.mark.parametrize("shape", [(8, 14), (5, 12), (6, 11), (6, 12, 1), (6,)])
def test_no_padding_leads_to_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot hold the original"):
        stretches((6, 12), shape)


SIZES = st.sampled_from([0, 1, 2, 3, 32, 48, 64])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
DTYPES = st.sampled_from(["F8_E4M3", "F32", "U8", "I8", "F8_E8M0", "BF16"])


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[Entry], list[Entry], list[Entry], dict[str, str]]:
    """Tensors of a source, an output, its originals, and other names: sometimes those of a change, with or without damage."""
    n, k = draw(st.sampled_from([(3, 64), (32, 32), (64, 96)]))
    tiles = -(-n // 32), -(-k // 32)
    source: list[Entry] = [("m.weight", "I8", (n, k // 2)), ("m.scale", "F8_E8M0", (n, k // 32)), ("s.scale", "U8", tiles)]
    output: list[Entry] = [("m.weight", "F8_E4M3", (n, k)), ("m.scale", "F32", tiles), ("s.scale_inv", "F32", tiles)]
    kept: list[Entry] = [("original.m.scale", "F8_E8M0", (n, k // 32))]
    renamed = {"s.scale_inv": "s.scale"}
    for entries in (source, output, kept):
        for i, (name, dtype, shape) in enumerate(entries):
            what = draw(st.sampled_from(["as it is"] * 6 + ["name", "dtype", "shape"]))
            entries[i] = (
                draw(st.sampled_from(["m.weight", "original.m.weight", f"{name}.x"])) if what == "name" else name,
                draw(DTYPES) if what == "dtype" else dtype,
                draw(SHAPES) if what == "shape" else shape,
            )
    unique = [list({name: (name, dtype, shape) for name, dtype, shape in entries}.values()) for entries in (source, output, kept)]
    return unique[0], unique[1], unique[2], draw(st.sampled_from([renamed, {}, {"m.scale": "m.weight"}]))


def code(error: FseConvertError) -> str:
    return error.problems[0].code


def outcomes(header: Header, out: Shard, kept: Shard, folder: Path, renamed: dict[str, str], *, dropped: bool) -> set[object]:
    """Bring every tensor back: True where it has as many bytes as its header says, False where not, else the code."""
    try:
        found = recipes(header, out, None if dropped else kept, renamed, dropped=dropped)
    except FseConvertError as e:
        return {code(e)}
    seen: set[object] = set()
    with opened(folder, out) as file, opened(folder, kept) as beside:
        for recipe in found:
            try:
                seen.add(sum(map(len, restored(recipe, file, beside))) == recipe.source.nbytes)
            except VerificationFailure as e:
                seen.add(code(e))
    return seen


@settings(deadline=None)
@given(shards(), st.booleans(), st.sampled_from([bytes(4), b"\0\0\x80\x3f", b"\1\x7f\xff\0"]))
def test_whatever_the_headers_say_a_tensor_comes_back_whole_or_is_refused(
    of: tuple[list[Entry], list[Entry], list[Entry], dict[str, str]], dropped: bool, word: bytes
) -> None:
    source, output, kept, renamed = of
    with TemporaryDirectory() as name:
        folder = Path(name)
        header, out, originals = (
            shard(folder, f"{i}.safetensors", entries, word) for i, entries in enumerate((source, output, kept))
        )
        seen = outcomes(header.header, out, originals, folder, renamed, dropped=dropped)
    assert seen <= {True, "tensor-damaged", "tensor-order", "originals-dropped" if dropped else "tensor-missing"}
