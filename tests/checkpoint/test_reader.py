"""Opening a checkpoint: index and headers agree in both directions, every problem is found, nothing is read twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import INDEX, natural_key
from fse_convert.checkpoint.reader import Checkpoint, open_checkpoint
from fse_convert.errors import InvalidCheckpoint, some
from fse_convert.testing.patch import edit_index

Make = Callable[..., Path]


def opened(root: Path) -> Checkpoint:
    return open_checkpoint(LocalFolder(root))


def codes(root: Path) -> dict[str, str]:
    with pytest.raises(InvalidCheckpoint) as e:
        opened(root)
    return {p.code: p.where for p in e.value.problems}


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["v4-flash", "v4.1-flash", "v4-flash-base", "v3", "quark-mxfp4", "nvfp4", "bf16"])
def test_opens_every_kind(kind: str, made: Make) -> None:
    root = made(kind)
    checkpoint = opened(root)
    weight_map = json.loads((root / INDEX).read_text())["weight_map"]
    assert {n: t.shard for n, t in checkpoint.tensors.items()} == weight_map
    assert checkpoint.total_size == json.loads((root / INDEX).read_text())["metadata"]["total_size"]
    assert not checkpoint.notes


def test_nested_files_come_along_and_are_not_read_as_the_model(made: Make) -> None:
    checkpoint = opened(made("v4.1-flash"))
    assert "inference/config.json" in checkpoint.others
    assert checkpoint.config["model_type"] == "deepseek_v41"


def test_single_file_needs_no_index(made: Make) -> None:
    checkpoint = opened(made("v4-flash", single_file=True))
    assert [s.name for s in checkpoint.shards] == ["model.safetensors"]
    assert checkpoint.index_metadata is None


def test_hub_snapshot_of_symlinks_is_read_through(source: Make, tmp_path: Path) -> None:
    root = source()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(shards(root)):
        path.rename(blobs / str(i))
        path.symlink_to(Path("..") / "blobs" / str(i))
    assert opened(root).total_size > 0
    (blobs / "0").unlink()
    with pytest.raises(InvalidCheckpoint, match="no such file") as e:
        opened(root)
    assert "symlink to nowhere" in e.value.problems[0].hint


def test_all_problems_are_found_at_once(source: Make) -> None:
    root = source()
    first, second, third, *_ = shards(root)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (root / "config.json").write_text("{")
    found = codes(root)
    assert found["shard-missing"] == first.name
    assert found["shard-truncated"] == second.name
    assert found["lfs-pointer"] == third.name
    assert found["json-invalid"] == "config.json"


def test_index_and_headers_are_compared_in_both_directions(source: Make) -> None:
    root = source()
    names = [p.name for p in shards(root)]

    def change(index: dict[str, Any]) -> None:
        del index["weight_map"]["layers.0.ffn.gate.weight"]
        index["weight_map"]["layers.9.nowhere"] = names[0]

    edit_index(root, change)
    assert codes(root) == {"tensor-missing": names[0], "tensor-unlisted": opened_shard(root, "layers.0.ffn.gate.weight")}


def opened_shard(root: Path, tensor: str) -> str:
    return next(p.name for p in shards(root) if f'"{tensor}"'.encode() in p.read_bytes()[:200_000])


def test_a_tensor_in_two_shards_is_refused(source: Make) -> None:
    root = source()
    *_, last = shards(root)
    copy = root / "model-00099-of-00099.safetensors"
    copy.write_bytes(last.read_bytes())
    edit_index(root, lambda index: index["weight_map"].update(extra=copy.name))
    found = codes(root)
    assert found["tensor-duplicate"] == copy.name


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", ""])
def test_paths_that_lead_outside_are_refused(name: str, source: Make) -> None:
    root = source()
    edit_index(root, lambda index: index["weight_map"].update(x=name))
    assert codes(root)["index-path"] == INDEX


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_weight_map(index: str, source: Make) -> None:
    root = source()
    (root / INDEX).write_text(index)
    assert codes(root)["index-invalid"] == INDEX


def test_several_shards_need_an_index(source: Make) -> None:
    root = source()
    (root / INDEX).unlink()
    assert codes(root)["file-missing"] == INDEX


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert set(codes(tmp_path)) == {"no-weights"}
    with pytest.raises(InvalidCheckpoint, match="no such folder"):
        LocalFolder(tmp_path / "absent")


def test_stale_total_size_is_noted(source: Make) -> None:
    root = source()
    edit_index(root, lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 1))
    assert [n.code for n in opened(root).notes] == ["total-size"]


def test_what_is_left_out_is_said(source: Make) -> None:
    root = source()
    (root / "gone.txt").symlink_to("nowhere")
    (note,) = opened(root).notes
    assert note.code == "not-copied"
    assert "gone.txt" in note.message


def test_a_folder_named_like_the_sidecar_is_refused(source: Make) -> None:
    root = source()
    (root / "fse").mkdir()
    (root / "fse" / "x").write_text("")
    assert codes(root)["sidecar-foreign"] == "fse/"


def test_natural_order_and_short_lists() -> None:
    assert sorted(["m-10", "m-2", "a"], key=natural_key) == ["a", "m-2", "m-10"]
    assert some(str(i) for i in range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_file_that_is_a_link_out_of_the_checkpoint_is_told(source: Make, tmp_path: Path) -> None:
    """Its content is copied into the output, which may be published; links inside of the folder are the checkpoint's own."""
    root, secret = source("v4-flash"), tmp_path / "token"
    secret.write_text("TOKEN=secret")
    (root / "inside.txt").symlink_to("README.md")
    assert [n for n in opened(root).notes if n.code == "link-copied"] == []
    (root / "vocab.txt").symlink_to(secret)
    assert [n.where for n in opened(root).notes if n.code == "link-copied"] == ["vocab.txt"]
