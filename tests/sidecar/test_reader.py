"""The reader of ``fse/``: index and headers, compared in both directions, and every problem returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.sidecar.reader import SidecarContents, read_shards, read_sidecar, shard_names
from fse_convert.sidecar.tensors import KernelTensorName, kernel_shapes

SHARD = "fse/shared-00001-of-00001.safetensors"
INDEX = "fse/model.safetensors.index.json"
LAYERS = ("layers.0.ffn.experts", "mtp.0.ffn.experts")


def read(out: Path) -> SidecarContents:
    return read_sidecar(LocalFolder(out))


def test_kernel_tensors_by_layer_without_the_tripwire(converted: Path) -> None:
    contents = read(converted)
    assert contents.problems == ()
    assert [shard.name for shard in contents.shards] == shard_names(LocalFolder(converted)) == [SHARD]
    assert contents.layers == LAYERS
    assert list(contents.tensors) == [f"{layer}.{part.value}" for layer in LAYERS for part in KernelTensorName]
    assert len(contents.shards[0].header.tensors) == len(contents.tensors) + 1
    shapes = kernel_shapes(512, 512)
    for name, info in contents.tensors.items():
        assert (info.dtype, info.shape) == shapes[KernelTensorName(name.rpartition(".")[2])]


def test_without_an_index_there_is_nothing(out: Path) -> None:
    (out / INDEX).unlink()
    assert read(out) == SidecarContents((), ())


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(out: Path) -> None:
        index = json.loads((out / INDEX).read_text())
        change(index["weight_map"])
        (out / INDEX).write_text(json.dumps(index))

    return edit


NAME = f"{LAYERS[0]}.shared_l1_weight"


@pytest.mark.parametrize(
    ("damage", "code", "where"),
    [
        pytest.param(lambda out: (out / INDEX).write_text("{"), "manifest-invalid", INDEX, id="an index that is no JSON"),
        pytest.param(lambda out: (out / INDEX).write_text("{}"), "sidecar-incomplete", INDEX, id="no weight map"),
        pytest.param(edit_index(lambda m: m.update(x="../model.safetensors")), "sidecar-incomplete", INDEX, id="a path"),
        pytest.param(edit_index(lambda m: m.update(x=1)), "sidecar-incomplete", INDEX, id="a number for a file"),
        pytest.param(edit_index(lambda m: m.pop(NAME)), "sidecar-incomplete", INDEX, id="a tensor that is not listed"),
        pytest.param(edit_index(lambda m: m.update(x=SHARD[4:])), "sidecar-incomplete", INDEX, id="a tensor that is not there"),
        pytest.param(lambda out: (out / SHARD).unlink(), "sidecar-incomplete", SHARD, id="a shard that is not there"),
        pytest.param(lambda out: (out / SHARD).write_bytes(b"1234567"), "header-short", SHARD, id="a shard of seven bytes"),
        pytest.param(lambda out: (out / SHARD).write_bytes(b"\xff" * 64), "header-too-large", SHARD, id="a shard of noise"),
    ],
)
def test_problems_are_returned(out: Path, damage: Callable[[Path], object], code: str, where: str) -> None:
    damage(out)
    (problem,) = read(out).problems
    assert (problem.code, problem.where) == (code, where)
    assert problem.hint


def test_a_shard_that_cannot_be_read_does_not_hide_the_others(out: Path) -> None:
    (out / "fse/extra.safetensors").write_bytes(b"")
    folder = LocalFolder(out)
    shards, problems = read_shards(folder, shard_names(folder))
    assert [shard.name for shard in shards] == [SHARD]
    assert [(p.code, p.where) for p in problems] == [("header-short", "fse/extra.safetensors")]
    assert read(out).problems == (), "the index does not list it"
