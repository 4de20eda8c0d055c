"""Crafted outputs end in an answer, never in a bug, and take no more memory than others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.plan.plan import Plan
from fse_convert.plan.source import open_source
from fse_convert.testing.patch import read_shard, write_shard
from fse_convert.verification.compare import InputFiles
from fse_convert.verification.expected import ExpectedOutput
from fse_convert.verification.layers import check_layers
from fse_convert.verification.manifest import OutputManifest, plan_again
from tests.verification.editing import INDEX, L1, SIDECAR, Manifest, into, load, seal

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def retype(name: str, **entry: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        header, payload = read_shard(out / SIDECAR)
        header[name].update(entry)
        write_shard(out / SIDECAR, header, payload)

    return change


def halve(out: Path) -> None:
    header, _ = read_shard(out / SIDECAR)
    rows, columns = header[L1]["shape"]
    retype(L1, dtype="BF16", shape=[rows // 2, columns])(out)


def test_other_dtypes_in_the_sidecar_are_no_bug(out: Path, verify: Run) -> None:
    for change in (retype(f"{L1}_scale", dtype="F32"), halve):
        change(out)
        seal(out)
        code, text, _ = verify("--level", "numerics")
        assert code == 1
        assert "mismatch[tensor-shape]" in text
        assert "numerics: FAILED: 2 of 3 layers" in text


@pytest.mark.parametrize("width", [72, 128, 256])
def test_a_consistent_output_of_an_odd_width_is_no_bug(width: int, out: Path, verify: Run, run: Run) -> None:
    manifest, data = load(out), b""
    manifest["model"]["width"]["kernel"] = width
    header, _ = read_shard(out / SIDECAR)
    for name, entry in header.items():
        if ".shared_l" in name:
            part = name.rpartition(".")[2]
            shapes = {
                "shared_l1_weight": [2 * width, 512],
                "shared_l1_weight_scale": [4, 2 * width],
                "shared_l2_weight": [512, width],
            }
            rows, columns = entry["shape"] = shapes.get(part, [width // 128, 512])
            size = rows * columns * (4 if entry["dtype"] == "I32" else 1)
            entry["data_offsets"] = [len(data), len(data) + size]
            data += bytes(size)
    write_shard(out / SIDECAR, header, data)
    index = out / f"fse/{INDEX}"
    index.write_bytes(encode_json({**json.loads(index.read_text()), "metadata": {"total_size": len(data)}}))
    seal(out, manifest)
    code, text, _ = run("verify", out)
    assert code == 1
    assert f"expected shapes that the kernel takes, found width 512 -> {width}, hidden size 512" in text
    assert verify()[0] == 1


@pytest.mark.parametrize(
    "edit",
    [
        into("model", "width", kernel=float("inf")),
        into("model", "width", kernel=512.0),
        into("model", "width", kernel=True),
        into("model", "width", kernel="512"),
        into("model", "width", source=-1),
        into("files", "config.json", size=float("inf")),
        into("contract", name=[]),
        into("arguments", experts=[]),
        into("arguments", target={}),
        into("arguments", tp=0),
        into("arguments", tp=2.0),
        into("arguments", allow_unfused=1),
        into("source", originals={"config.json": "\ud800"}),
        into("source", files={}),
        into("config_edits", 0, section=[]),
        into("layers", 0, name=[]),
        into("layers", 0, verdict=[]),
        into(format_version=True),
        into(format_version=1.0),
        into(files=None),
        into(tensors=None),
    ],
)
def test_a_manifest_of_other_types_is_damaged(
    edit: Callable[[Manifest], None], out: Path, tmp_path: Path, verify: Run, run: Run
) -> None:
    manifest = load(out)
    edit(manifest)
    seal(out, manifest, digests=False)
    code, text, _ = verify("--level", "storage")
    assert code == 1
    assert "mismatch[manifest-damaged]" in text
    code, _, err = run("restore", out, tmp_path / "original")
    assert (code, "error[manifest-damaged]" in err) == (1, True)


@pytest.mark.parametrize(
    "edit",
    [
        into(**{"\ud800": 1}),
        into("tensors", **{"\ud800": "x"}),
        into("tensors", **{f"{L1}_scale": "\ud800"}),
        into("files", **{"\ud800": {"size": 1, "sha256": "\ud800"}}),
        into("contract", name="\ud800"),
        into("model", family="\ud800"),
        into("layers", 0, name="\ud800"),
    ],
)
def test_half_characters_in_a_manifest_are_printed_as_escapes(
    edit: Callable[[Manifest], None], out: Path, verify: Run, run: Run
) -> None:
    manifest = load(out)
    edit(manifest)
    seal(out, manifest, digests=False)
    code, text, _ = verify("--level", "storage")
    assert code == 1
    assert "\\ud800" in text
    assert run("verify", out)[0] in (0, 1)


def without(out: Path, name: str, key: str, value: Any) -> None:
    content = json.loads((out / name).read_text())
    content.pop(key)
    (out / name).write_bytes(encode_json(content if value is None else {**content, key: value}))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda out: seal(out, {**load(out), "config_edits": [{**load(out)["config_edits"][0], "section": "nope"}]}), 1),
        (lambda out: without(out, "config.json", "text_config", None), 1),
        (lambda out: without(out, "config.json", "text_config", []), 1),
        (lambda out: without(out, "model.safetensors.index.json", "metadata", None), 1),
        (lambda out: without(out, "model.safetensors.index.json", "metadata", []), 3),
    ],
    ids=["section unknown", "config without section", "section a list", "index without metadata", "metadata a list"],
)
def test_a_crafted_output_is_not_restored(change: Callable[[Path], None], code: int, out: Path, tmp_path: Path, run: Run) -> None:
    change(out)
    seal(out)
    status, _, err = run("restore", out, tmp_path / "original")
    assert status == code
    assert "error[original-unknown]: " in err or code == 3
    assert not (tmp_path / "original").exists()


@pytest.mark.parametrize("target", ["megamoe-512", "megamoe-128"])
def test_half_characters_in_a_config_are_kept(target: str, source: Make, tmp_path: Path, run: Run) -> None:
    root, out, original = source("v4.1-flash", layers=1, experts=1), tmp_path / "out", tmp_path / "original"
    path = root / "config.json"
    path.write_text(path.read_text().replace("{\n", '{\n "n": "\\ud800",\n', 1))
    assert run(root, out, "--target", target)[0] == 0
    assert run("verify", out, "--source", root)[0] == 0
    assert run("restore", out, original)[0] == 0
    assert (original / "config.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["fse/manifest.json", "config.json", INDEX, f"fse/{INDEX}"])
def test_json_of_absurd_size_is_not_read(name: str, out: Path, verify: Run) -> None:
    os.truncate(out / name, 40 << 30)
    code, _, err = verify()
    assert (code, "error[json-too-large]" in err) == (3, True)


def test_a_tensor_of_another_shape_is_not_read(root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, payload = read_shard(out / SIDECAR)
    last = "mtp.0.ffn.experts.shared_l2_weight_scale"
    start = header[last]["data_offsets"][0]
    header[last] |= {"shape": [1 << 31], "data_offsets": [start, start + (8 << 30)]}
    write_shard(out / SIDECAR, header, payload[:start])
    os.truncate(out / SIDECAR, (out / SIDECAR).stat().st_size + (8 << 30))
    asked: list[int] = []
    right = InputFiles.read

    def watched(self: InputFiles, name: str, offset: int, into: memoryview) -> memoryview:
        asked.append(len(into))
        return right(self, name, offset, into)

    monkeypatch.setattr(InputFiles, "read", watched)
    folder = LocalFolder(out)
    plan = plan_again(OutputManifest.read(folder).content, open_source(LocalFolder(root)))
    assert isinstance(plan, Plan)
    numerics = check_layers(ExpectedOutput.of(plan), folder)
    assert [layer.passed for layer in numerics.layers] == [True, True, False]
    assert "shared_l2_weight_scale is I32 [2147483648], expected I32 [4, 512]" in numerics.layers[2].reason
    assert max(asked) < 1 << 20
