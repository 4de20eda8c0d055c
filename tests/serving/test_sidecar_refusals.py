"""An output whose files, manifest or bytes are not those that the conversion wrote is not served: by either loader's reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.errors import NotServable
from fse_convert.serving.sidecar import open_sidecar
from fse_convert.sidecar.manifest import DIGEST
from fse_convert.sidecar.tensors import KernelTensorName
from fse_convert.testing.patch import edit_manifest, flip

LAYERS = ("layers.0.ffn.experts", "layers.1.ffn.experts", "mtp.0.ffn.experts")
INDEX = "model.safetensors.index.json"


def convert(source: Path, out: Path, *options: str) -> Path:
    from fse_convert.cli import main

    with pytest.raises(SystemExit) as stopped:
        main([str(source), str(out), *options])
    assert not stopped.value.code
    return out


STORAGE = ("megamoe-512", "v4-flash", "--verify", "storage")


@pytest.fixture
def out(output: Callable[..., Path]) -> Path:
    return output(*STORAGE)


def problems(folder: Path, *, whole: bool = True) -> dict[str, str]:
    """The refusal: code by file name."""
    with pytest.raises(NotServable) as e:
        open_sidecar(folder, whole=whole)
    assert all(p.hint for p in e.value.problems)
    return {Path(p.where).name: p.code for p in e.value.problems}


@pytest.mark.parametrize(
    "change",
    [lambda m: m["model"].update(family="other"), lambda m: m.pop(DIGEST), lambda m: m["tensors"].clear()],
    ids=["another family", "no digest", "no tensors"],
)
def test_a_manifest_that_was_edited(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(out, change, signed=False)
    assert problems(out) == {"manifest.json": "manifest-damaged"}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.update(files={"x.safetensors": 1}), id="file a number"),
        pytest.param(lambda m: m.update(files={"x.safetensors": {"size": "1", "sha256": ""}}), id="size a text"),
        pytest.param(lambda m: m.update(files={"x.safetensors": {"size": 1}}), id="file without a digest"),
        pytest.param(lambda m: m.update(files=[1]), id="files a list"),
        pytest.param(lambda m: m.pop("files"), id="no files"),
        pytest.param(lambda m: m.update(tensors={"a": 1}), id="digest a number"),
        pytest.param(lambda m: m.update(tensors="a"), id="tensors a text"),
        pytest.param(lambda m: m.update(layers=[1]), id="layer a number"),
        pytest.param(lambda m: m.update(layers=[{"verdict": "fused", "name": 1}]), id="layer's name a number"),
        pytest.param(lambda m: m.update(layers=None), id="layers null"),
        pytest.param(lambda m: m["contract"].update(name=None), id="contract's name null"),
        pytest.param(lambda m: m["model"]["width"].pop("main"), id="no main width"),
        *(
            pytest.param(lambda m, v=v: m["model"].update(n_shared_experts=v), id=f"n_shared_experts {v!r}")
            for v in (float("inf"), float("nan"), 1.0, True, -1, "1", None, [])
        ),
        *(
            pytest.param(lambda m, v=v: m["model"]["width"].update(kernel=v), id=f"kernel's width {v!r}")
            for v in (float("inf"), 512.5, -512, None)
        ),
    ],
)
def test_a_manifest_of_another_make(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(out, change)
    assert problems(out) == {"manifest.json": "manifest-invalid"}


def test_a_manifest_that_cannot_be_encoded_again(out: Path) -> None:
    path = out / "fse" / "manifest.json"
    path.write_text('{"format": "fse-convert", "format_version": 1, "x": ' + '{"a":' * 900 + "1" + "}" * 900 + "}")
    assert problems(out) == {"manifest.json": "manifest-damaged"}


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_decides_and_is_another_one(out: Path, name: str, whole: bool) -> None:
    """Of the same size, so that only its content tells."""
    raw = (out / name).read_bytes()
    (out / name).write_bytes(raw.replace(b"1", b"2", 1))
    assert (out / name).stat().st_size == len(raw)
    assert problems(out, whole=whole) == {name: "sidecar-stale"}


def test_the_sidecar_of_another_checkpoint(out: Path, made: Callable[..., Path], tmp_path: Path) -> None:
    """Two checkpoints of the same shapes: every size is the same, and fse/ of one lies in the folder of the other."""
    other = convert(made("v4-flash", seed=7), tmp_path / "other", "--verify", "storage")
    sizes = [{p.name: p.stat().st_size for p in folder.glob("fse/shared*")} for folder in (out, other)]
    assert sizes[0] == sizes[1]
    assert [(out / n).read_bytes() for n in ("config.json", INDEX)] == [(other / n).read_bytes() for n in ("config.json", INDEX)]
    open_sidecar(out).check_original(LAYERS[1])
    shutil.rmtree(out / "fse")
    shutil.copytree(other / "fse", out / "fse")
    for layer in LAYERS:
        with pytest.raises(NotServable, match=r"shared_experts\.w2.*of another checkpoint.*sidecar-stale"):
            open_sidecar(out).check_original(layer)


def test_a_shard_that_has_other_tensors_or_is_none(out: Path) -> None:
    shard = out / json.loads((out / INDEX).read_text())["weight_map"]["layers.1.ffn.shared_experts.w2.weight"]
    raw = shard.read_bytes()
    for changed in (raw.replace(b"shared_experts.w2", b"shared_experts.w9"), b"\xff" * len(raw)):
        shard.write_bytes(changed)
        with pytest.raises(NotServable, match="sidecar-stale"):
            open_sidecar(out).check_original(LAYERS[1])


def test_the_shard_of_another_checkpoint_without_an_index(made: Callable[..., Path], tmp_path: Path) -> None:
    outs = [convert(made("v4-flash", single_file=True, seed=s), tmp_path / f"{s}", "--verify", "storage") for s in (0, 1)]
    open_sidecar(outs[0]).check_original(LAYERS[0])
    shutil.copy(outs[1] / "model.safetensors", outs[0] / "model.safetensors")
    with pytest.raises(NotServable, match="sidecar-stale"):
        open_sidecar(outs[0]).check_original(LAYERS[0])


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_decides_and_is_gone(out: Path, name: str) -> None:
    (out / name).unlink()
    assert problems(out) == {name: "sidecar-incomplete"}
    open_sidecar(out, whole=False)  # a server fetches from the hub what it wants


def test_an_index_where_there_was_none(made: Callable[..., Path], tmp_path: Path) -> None:
    out = convert(made("v4-flash", single_file=True), tmp_path / "out", "--verify", "storage")
    (out / INDEX).write_text('{"weight_map": {}}')
    assert problems(out, whole=False) == {INDEX: "sidecar-stale"}


def test_shards_that_are_gone_and_shards_that_are_new(out: Path) -> None:
    first, second, *_ = sorted(out.glob("*.safetensors"))
    first.unlink()
    shutil.copy(second, out / "model-extra.safetensors")
    assert problems(out) == {first.name: "shard-missing", "model-extra.safetensors": "shard-unlisted"}
    assert open_sidecar(out, whole=False).layers == LAYERS


def test_other_files_of_the_folder_are_the_users_own(out: Path) -> None:
    (out / "README.md").write_text("mine")
    (out / "notes.txt").write_text("mine")
    (out / "._model-00001-of-00002.safetensors").write_bytes(b"x")
    assert open_sidecar(out).layers == LAYERS


@pytest.mark.parametrize("whole", [True, False])
def test_a_sidecar_without_its_index_is_not_an_empty_one(out: Path, whole: bool) -> None:
    (out / "fse" / INDEX).unlink()
    assert problems(out, whole=whole) == {INDEX: "sidecar-incomplete"}
    edit_manifest(out, lambda m: m.update(files=None))
    assert problems(out, whole=whole) == {"fse": "sidecar-incomplete"}, "the manifest names its layers"


def test_an_empty_sidecar_is_right_where_the_manifest_says_so(made: Callable[..., Path], tmp_path: Path) -> None:
    out = convert(made("bf16"), tmp_path / "out", "--allow-unfused", "--verify", "storage")
    assert open_sidecar(out).layers == ()
    edit_manifest(out, lambda m: m["layers"][0].update(verdict="fused"))
    assert problems(out) == {"fse": "sidecar-incomplete"}


def test_a_layer_that_the_manifest_does_not_call_fused(out: Path) -> None:
    edit_manifest(out, lambda m: m["layers"][1].update(verdict="unfused"))
    assert problems(out) == {"fse": "sidecar-incomplete"}


@pytest.mark.parametrize("part", list(KernelTensorName))
@pytest.mark.parametrize("byte", [0, -1])
def test_one_damaged_bit_is_found_when_the_tensor_is_read(out: Path, part: KernelTensorName, byte: int) -> None:
    flip(out, byte, f"{LAYERS[1]}.{part.value}")
    sidecar = open_sidecar(out)
    sidecar.tensors(LAYERS[0])
    with pytest.raises(NotServable) as e:
        sidecar.tensor(LAYERS[1], part)
    (problem,) = e.value.problems
    assert problem.code == "sidecar-damaged"
    assert f"{LAYERS[1]}.{part.value}" in problem.message
    assert "fse-convert verify" in problem.hint


def test_a_tensor_without_a_digest_is_refused(out: Path) -> None:
    edit_manifest(out, lambda m: m["tensors"].pop(f"{LAYERS[0]}.{KernelTensorName.L2_WEIGHT.value}"))
    with pytest.raises(NotServable, match="sidecar-damaged"):
        open_sidecar(out).tensors(LAYERS[0])


def test_an_output_without_proof_is_served_and_says_so(
    made: Callable[..., Path], tmp_path: Path, converted: Callable[..., Path]
) -> None:
    out = convert(made("v4-flash"), tmp_path / "out", "--verify", "none")
    (out / "config.json").write_text((out / "config.json").read_text() + "\n")
    sidecar = open_sidecar(out)
    assert not sidecar.proved
    assert open_sidecar(converted(*STORAGE)).proved
    assert sidecar.tensors(LAYERS[0]).l1_weight.shape == (1024, 512)
