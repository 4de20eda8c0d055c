"""Level 1: whole outputs of every kind, and what a mismatch says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import fse_convert
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.conversion.run import Conversion, Request
from fse_convert.output.copying import Link
from fse_convert.plan.plan import Experts, Options
from fse_convert.plan.source import open_source
from fse_convert.progress import ignore
from fse_convert.servers.targets import find_target
from fse_convert.testing.patch import edit_index, find, poke, read_header, write_shard
from fse_convert.verification import compare, expected_bytes, storage
from fse_convert.verification.findings import LIMIT, Level, StorageResult
from fse_convert.verification.manifest import OutputManifest
from fse_convert.verification.sample import Sample
from fse_convert.verification.storage import Output, prove_alone, prove_storage

Make = Callable[..., Path]
KINDS = ["v4-flash", "v4.1-flash", "v4-flash-base", "v3", "quark-mxfp4", "nvfp4", "bf16"]


def output(
    root: Path, out: Path, target: str = "megamoe-512", level: Level = Level.STORAGE, link: Link = Link.COPY, **more: Any
) -> Path:
    row = find_target(target)
    assert row
    Conversion(Request(root, out, Options(row, allow_unfused=True, **more), link, verify=level)).run(ignore)
    return out


def read(out: Path, sample: int | None = None) -> Output:
    folder = LocalFolder(out)
    return Output(folder, OutputManifest.read(folder), None if sample is None else Sample(sample, 0))


def prove(root: Path, out: Path, sample: int | None = None) -> StorageResult:
    return prove_storage(read(out, sample), open_source(LocalFolder(root)))[0]


def prove_with(root: Path, out: Path, **changes: Any) -> StorageResult:
    """Prove an output with a manifest in which some keys are changed."""
    folder = LocalFolder(out)
    manifest = OutputManifest.of({**OutputManifest.read(folder).value, **changes})
    return prove_storage(Output(folder, manifest), open_source(LocalFolder(root)))[0]


def test_imports_nothing_of_the_writer() -> None:
    code = "import sys, fse_convert.verification.storage; print(*sorted(m for m in sys.modules if m.startswith('fse_convert')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    writer = {
        "fse_convert." + m for m in ("layout.megamoe", "layout.padding", "layout.ue8m0", "conversion.writer", "conversion.run")
    }
    assert not writer & set(loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_proves_an_output_of_every_kind(kind: str, made: Make, tmp_path: Path) -> None:
    root = made(kind)
    out = output(root, tmp_path / "out", level=Level.NONE)
    result = prove(root, out)
    assert result.passed, [str(m) for m in result.findings.listed]
    names = {n for p in root.glob("*.safetensors") for n in read_header(p)[0]} - {"__metadata__"}
    kernel = sum(n.endswith(("_weight", "_weight_scale")) for n in result.tensors if ".shared_l" in n)
    assert result.coverage.tensors["unchanged"] + result.coverage.tensors["padded"] == len(names)
    assert result.coverage.tensors["kernel"] == kernel
    assert result.coverage.tensors["padded"] > 0
    assert set(result.files) == {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {"fse/manifest.json"}
    alone = prove_alone(read(out))
    assert alone.passed
    assert alone.tensors == result.tensors
    assert not alone.digests


@pytest.mark.parametrize(
    ("knobs", "how"),
    [
        ({"shared": 2}, {}),
        ({}, {"target": "megamoe-128"}),
        ({}, {"experts": Experts.SHARED}),
        ({}, {"tp": 3}),
        ({"single_file": True}, {}),
        ({"header_metadata": False}, {"link": Link.HARD}),
        ({"width": 512}, {}),
    ],
    ids=["two shared", "nothing padded", "shared only", "tp", "single file", "hard links", "wide enough"],
)
def test_proves_every_way_to_convert(knobs: dict[str, Any], how: dict[str, Any], made: Make, tmp_path: Path) -> None:
    root = made("v4.1-flash", **knobs)
    out = output(root, tmp_path / "out", **how)
    result = prove(root, out)
    assert result.passed, [str(m) for m in result.findings.listed]
    assert result.digests
    assert result.coverage.tensors["kernel"] == 12
    assert prove_alone(read(out)).passed


def test_pieces_may_end_anywhere(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made("nvfp4", experts=1, layers=1)
    out = output(root, tmp_path / "out")
    whole = prove(root, out)
    for module in (compare, expected_bytes):
        monkeypatch.setattr(module, "CHUNK", 10_007)
    monkeypatch.setattr(storage, "WORKERS", 3)
    small = prove(root, out)
    assert small.passed
    assert small.tensors == whole.tensors == read(out).manifest.content.tensors
    assert small.files == whole.files
    assert small.coverage == whole.coverage
    name = "mtp.0.ffn.experts.shared_l1_weight"
    path, offset, entry = find(out, name)
    start, end = entry["data_offsets"]
    data = path.read_bytes()[offset : offset + end - start]
    assert small.tensors[name] == xxhash.xxh3_128_hexdigest(data)
    for at in (0, 10_006, 10_007, 2 * 512 * 512 - 1):
        before = poke(out, name, at, bytes([data[at] ^ 1]))
        found = prove(root, out).findings.listed[0]
        assert (found.tensor, found.offset, found.count) == (name, offset + at, 1)
        poke(out, name, at, before)


def test_empty_and_scalar_tensors_have_digests(source: Make, tmp_path: Path) -> None:
    root = source("v4-flash", layers=1, experts=1)
    entries = {
        "a.empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
        "b.scalar": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]},
        "c.empty": {"dtype": "I64", "shape": [2, 0], "data_offsets": [2, 2]},
    }
    write_shard(root / "model-00099.safetensors", entries, b"\x01\x02")
    edit_index(root, lambda index: index["weight_map"].update(dict.fromkeys(entries, "model-00099.safetensors")))
    out = output(root, tmp_path / "out")
    result = prove(root, out)
    assert result.passed
    assert {n: result.tensors[n] for n in entries} == {
        "a.empty": xxhash.xxh3_128_hexdigest(b""),
        "b.scalar": xxhash.xxh3_128_hexdigest(b"\x01\x02"),
        "c.empty": xxhash.xxh3_128_hexdigest(b""),
    }


@pytest.fixture
def pair(made: Make, tmp_path: Path) -> tuple[Path, Path]:
    root = made("v4.1-flash", layers=1, experts=1)
    return root, output(root, tmp_path / "out")


def test_names_tensor_file_offset_expected_and_found(pair: tuple[Path, Path]) -> None:
    root, out = pair
    path, offset, _ = find(out, "layers.0.ffn.shared_experts.w1.weight")
    source, source_offset, _ = find(root, "layers.0.ffn.shared_experts.w1.weight")
    at = 5 * 512 + 7
    expected = source.read_bytes()[source_offset + at]
    poke(out, "layers.0.ffn.shared_experts.w1.weight", at, bytes([expected ^ 0x81]))
    result = prove(root, out)
    first = result.findings.listed[0]
    assert first.code == "bytes"
    assert first.file == path.name
    assert first.tensor == "layers.0.ffn.shared_experts.w1.weight"
    assert first.offset == offset + at
    assert (first.expected, first.found) == (f"0x{expected:02X}", f"0x{expected ^ 0x81:02X}")
    assert str(first) == f"{first.tensor} ({path.name}, byte {offset + at:,}): expected {first.expected}, found {first.found}"
    assert [m.code for m in result.findings.listed[1:]] == ["tensor-digest", "file-digest"]


@pytest.mark.parametrize(
    ("tensor", "at", "fill"),
    [
        ("layers.0.ffn.shared_experts.w1.weight", 384 * 512, 0x00),
        ("layers.0.ffn.shared_experts.w2.weight", 384, 0x00),
        ("layers.0.ffn.experts.0.w3.scale", 384 * 16, 0x7F),
        ("layers.0.ffn.experts.shared_l1_weight", 2 * 384 * 512, 0x00),
        ("layers.0.ffn.experts.shared_l2_weight_scale", 4 * 512 * 3, 0x7F),
    ],
)
def test_tells_padding_apart(tensor: str, at: int, fill: int, pair: tuple[Path, Path]) -> None:
    root, out = pair
    offset = find(out, tensor).offset
    assert poke(out, tensor, at, b"\x33") == bytes([fill])
    found = prove(root, out).findings.listed[0]
    assert (found.code, found.tensor, found.offset, found.expected, found.found) == (
        "padding",
        tensor,
        offset + at,
        f"0x{fill:02X}",
        "0x33",
    )


def test_lists_some_mismatches_and_counts_all(pair: tuple[Path, Path]) -> None:
    root, out = pair
    for path in out.glob("*.safetensors"):
        _, start = read_header(path)
        raw = bytearray(path.read_bytes())
        raw[start:] = bytes(b ^ 0xFF for b in raw[start:])
        path.write_bytes(raw)
    result = prove(root, out)
    assert len(result.findings.listed) == LIMIT
    assert result.findings.count > LIMIT
    big = max(result.findings.listed, key=lambda m: m.count)
    assert f"({big.count:,} bytes differ)" in str(big)


def test_a_wrong_config_or_index_is_named_by_its_key(pair: tuple[Path, Path]) -> None:
    root, out = pair
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 7.0
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] += 1
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    found = {m.file: m for m in prove(root, out).findings.listed if m.code == "text"}
    assert (found["config.json"].expected, found["config.json"].found) == ("text_config.swiglu_limit 10.0", "7.0")
    assert found["model.safetensors.index.json"].expected.startswith("metadata.total_size ")


def test_another_source_is_told_and_not_compared(pair: tuple[Path, Path], made: Make) -> None:
    _, out = pair
    result = prove(made("v4-flash"), out)
    assert {m.code for m in result.findings.listed} == {"source-differs"}
    assert not result.reached


def test_a_manifest_that_says_otherwise_is_told(pair: tuple[Path, Path]) -> None:
    root, out = pair
    raw = read(out).manifest.value
    model, layers = raw["model"], raw["layers"]
    for change in (
        {"model": {**model, "width": {"source": 384, "main": 384, "kernel": 512}}},
        {"model": {**model, "width": {"source": 384, "main": 1024, "kernel": 1024}}},
        {"model": {**model, "width": {"source": 512, "main": 512, "kernel": 512}}},
        {"model": {**model, "n_shared_experts": 2}},
        {"model": {**model, "family": "x"}},
        {"contract": {**raw["contract"], "name": "megamoe-128"}},
        {"arguments": {**raw["arguments"], "target": "megamoe-128"}},
        {"arguments": {**raw["arguments"], "target": "vllm-0.30"}},
        {"arguments": {**raw["arguments"], "target": "zz"}},
        {"arguments": {**raw["arguments"], "experts": "shared"}},
        {"layers": [{**layers[0], "verdict": "unfused"}, *layers[1:]]},
        {"layers": [{**layers[0], "reasons": [{"code": "x", "message": "y"}]}, *layers[1:]]},
        {"layers": [{**layers[0], "shared": {**layers[0]["shared"], "format": "BF16"}}, *layers[1:]]},
        {"layers": layers[:1]},
        {"config_edits": []},
        {"padded": {}},
        {"server": {"target": "vllm-0.33", "verdict": "fused"}},
        {"layout": {**raw["layout"], "version": 2}},
        {"source": {**raw["source"], "url": "https://x"}},
        {"tool": {**raw["tool"], "name": "another"}},
        {"signed_by": "DeepSeek"},
        {"proof": {**raw["proof"], "storage": {**raw["proof"]["storage"], "files": 1}}},
        {"proof": {**raw["proof"], "numerics": {"status": "passed", "layers": 999}}},
        {"proof": {**raw["proof"], "kernel": {"status": "passed", "layers": 2, "relative_l2": 1e-4}}},
        {"proof": {}},
    ):
        result = prove_with(root, out, **change)
        assert {m.code for m in result.findings.listed} == {"manifest"}, change
    assert prove(root, out).passed


def test_every_mismatched_layer_is_named(pair: tuple[Path, Path]) -> None:
    root, out = pair
    layers = [{**layer, "verdict": "unfused"} for layer in read(out).manifest.value["layers"]]
    found = prove_with(root, out, layers=layers).findings.listed
    assert [(m.expected, m.found) for m in found] == [
        ('layers[0].verdict "fused"', '"unfused"'),
        ('layers[1].verdict "fused"', '"unfused"'),
    ]


def test_another_tool_version_is_a_note(pair: tuple[Path, Path]) -> None:
    root, out = pair
    result = prove_with(root, out, tool={"name": "fse-convert", "version": "99"})
    assert result.passed
    assert result.notes == (f'written by fse-convert "99", compared with what {fse_convert.__version__} would write',)


def test_a_sample_is_repeatable_and_says_so(pair: tuple[Path, Path]) -> None:
    root, out = pair
    first, again = prove(root, out, sample=7), prove(root, out, sample=7)
    assert first.tensors.keys() == again.tensors.keys()
    assert first.sample == Sample(7, 0)
    assert first.coverage.compared == len(first.tensors) == 7
    assert all(first.coverage.tensors.values())
    assert first.of_tensors > 7
    assert not any(n.endswith(".safetensors") for n in first.files)
    poke(out, next(iter(first.tensors)), 0, b"\xee")
    assert not prove(root, out, sample=7).passed
    everything = prove(root, out, sample=10_000)
    assert everything.coverage.compared == everything.of_tensors


@pytest.mark.slow
def test_proves_the_published_width(made: Make, tmp_path: Path) -> None:
    root = made("v4.1-flash", hidden=5120, width=2304, layers=1, experts=1, mtp=0)
    out = output(root, tmp_path / "out", level=Level.NUMERICS)
    entry = find(out, "layers.0.ffn.experts.shared_l1_weight").entry
    assert entry["shape"] == [5120, 5120]
    result = prove(root, out)
    assert result.passed
    poke(out, "layers.0.ffn.experts.shared_l1_weight_scale", 4 * 5120 * 39 + 5, b"\x80")
    assert prove(root, out).findings.listed[0].tensor == "layers.0.ffn.experts.shared_l1_weight_scale"


@pytest.mark.slow
def test_memory_does_not_grow_with_a_tensor(made: Make, tmp_path: Path) -> None:
    root = made("v4.1-flash", layers=2, experts=1, engram_rows=4_000_000, sparse=True)
    out = output(root, tmp_path / "out", link=Link.HARD, level=Level.NONE)
    assert max(p.stat().st_size for p in root.glob("*.safetensors")) > 10**9
    code = (
        "import sys, resource; from pathlib import Path; from fse_convert.verification.proof import Check, verify; import torch;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "from fse_convert.verification.findings import Level;"
        "assert not verify(Check(Path(sys.argv[1]), Path(sys.argv[2]), Level.STORAGE), lambda e: None).failed;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code, out, root], capture_output=True, text=True, check=True).stdout
    assert int(grown) * 1024 < 200 << 20
