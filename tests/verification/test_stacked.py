"""Damage of padded stacks of experts: whatever byte changes, the proof names the tensor and says whether it was padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.conversion.run import Conversion, Request
from fse_convert.model.formats import Format, Tile
from fse_convert.model.stacked import Stacked, StackTensor
from fse_convert.output.copying import Link
from fse_convert.plan.plan import Options
from fse_convert.plan.source import open_source
from fse_convert.progress import ignore
from fse_convert.testing.patch import read_header
from fse_convert.verification import expected_bytes
from fse_convert.verification.manifest import OutputManifest
from fse_convert.verification.storage import Output, prove_storage
from tests.stacked import CASES, Case
from tests.verification.editing import load, seal
from tests.verification.mutating import Converted, level_1

SEEDS = 6
EACH = 4
"""Bytes per tensor of each kind: numbers, padding, and either side of a border between them."""


def converted(case: Case, root: Path) -> Converted:
    case.save(root / "source")
    Conversion(Request(root / "source", root / "out", Options(None, tp=case.tp), Link.COPY)).run(ignore)
    return Converted(
        open_source(LocalFolder(root / "source")), root / "out", OutputManifest.read(LocalFolder(root / "out")).content
    )


def padding_of(case: Case) -> dict[str, Tensor]:
    """Which elements of every tensor are padding: those that are the same whatever the numbers of the experts."""
    drawn = [case.tensors(case.padded, seed) for seed in range(SEEDS)]
    bits = [{n: t.contiguous().view(torch.uint8).view(-1, t.dtype.itemsize) for n, t in tensors.items()} for tensors in drawn]
    same = {n: torch.stack([(b[n] == bits[0][n]).all(1) for b in bits]).all(0) for n in bits[0]}
    return {n: s.repeat_interleave(drawn[0][n].dtype.itemsize) for n, s in same.items() if not s.all()}


def places(padding: Tensor, rng: random.Random) -> Iterator[int]:
    """Bytes of numbers and of padding, and both sides of borders, the first and the last among them."""
    border = (padding[1:] != padding[:-1]).nonzero().flatten().tolist()
    for found in (padding.nonzero().flatten().tolist(), (~padding).nonzero().flatten().tolist()):
        yield from rng.sample(found, min(EACH, len(found)))
    for at in {border[0], border[-1], *rng.sample(border, min(EACH, len(border)))} if border else ():
        yield from (at, at + 1)
    yield from (0, len(padding) - 1)


def found(c: Converted) -> list[tuple[str, str]]:
    folder = LocalFolder(c.out)
    manifest = OutputManifest.read(folder)
    bare = OutputManifest(msgspec.structs.replace(manifest.content, files=None, tensors=None), manifest.value)
    mismatches = prove_storage(Output(folder, bare, workers=1), c.source)[0].findings
    return [(m.code, m.tensor) for m in mismatches.listed if m.code in ("bytes", "padding")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_changed_byte_of_a_stack_is_found(case: Case, tmp_path: Path) -> None:
    c, rng, tried = converted(case, tmp_path), random.Random(case.name), 0
    (shard,) = c.out.glob("*.safetensors")
    entries, start = read_header(shard)
    padding = padding_of(case)
    assert found(c) == []
    with shard.open("r+b", buffering=0) as f:
        for name in sorted(padding.keys() & c.manifest.padded.keys()):
            assert padding[name].any()
            for at in sorted(set(places(padding[name], rng))):
                offset = start + entries[name]["data_offsets"][0] + at
                f.seek(offset)
                (old,) = f.read(1)
                f.seek(offset)
                f.write(bytes([old ^ (1 << rng.randrange(8))]))
                assert found(c) == [("padding" if padding[name][at] else "bytes", name)], (name, at)
                f.seek(offset)
                f.write(bytes([old]))
                tried += 1
    assert tried >= 24
    assert found(c) == []


@pytest.mark.parametrize("chunk", [64, 1000])
def test_pieces_of_any_size_expect_the_same(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = converted(next(case for case in CASES if case.name == "L3 MXFP4"), tmp_path)
    monkeypatch.setattr(expected_bytes, "CHUNK", chunk)
    assert found(c) == []


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("L1 Qwen3.5", {"parts": 1}),  # taken for interleaved
        ("L1 Granite FP8", {"parts": 1}),
        ("L3 BF16", {"parts": 2}),  # taken for one after the other
        ("L2 square", {"axis": 1}),  # taken for rows before columns
        ("L1 FP8", {"tile": Tile(64, 32, b"\0\0\x80?", None)}),  # taken for another block
    ],
)
def test_a_wrong_layout_in_the_planner_is_found(
    name: str, mistake: dict[str, Any], tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof knows orientation, interleaving and blocks by itself."""
    right = StackTensor.stacked

    def wrong(member: StackTensor, f: Format) -> Stacked:
        stacked = right(member, f)
        is_meant = member.part == f.scale if "tile" in mistake else member.part == f.weight
        return replace(stacked, **mistake) if len(member.stack.roles) == 2 and is_meant else stacked

    monkeypatch.setattr(StackTensor, "stacked", wrong)
    next(c for c in CASES if c.name == name).save(tmp_path / "source")
    code, _, err = run(tmp_path / "source", tmp_path / "out", "--tp", "2", "--workers", "1")
    assert (code, "error[storage-mismatch]" in err) == (1, True)


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
EDITS: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: m.pop("stretches"),
    lambda m: m["stretches"].pop(GATE_UP),
    lambda m: m["stretches"].update({GATE_UP: 3}),
    lambda m: m["stretches"].update({"model.embed_tokens.weight": 2}),
    lambda m: m["padded"].update({GATE_UP: [3, 64, 64]}),
]


@pytest.mark.parametrize("edit", EDITS)
def test_what_the_manifest_says_of_stretches_is_compared(edit: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    c = converted(CASES[0], tmp_path)
    assert level_1(c)
    manifest = load(c.out)
    edit(manifest)
    seal(c.out, manifest, digests=False)
    assert not level_1(c)
