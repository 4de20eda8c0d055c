"""Shards that the index does not list: what is said follows from their headers, and what the hint says, done, mends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import INDEX
from fse_convert.checkpoint.reader import PartialCheckpoint, read_checkpoint
from fse_convert.checkpoint.unlisted import Judged, judge_unlisted
from fse_convert.testing.patch import ShardPatch, Stored, edit_index, read_header, write_shard

Make = Callable[..., Path]
LEFT = "left out: 1 (extra.safetensors)"


def read(root: Path) -> PartialCheckpoint:
    return read_checkpoint(LocalFolder(root))


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def save(path: Path, **tensors: Stored) -> None:
    write_shard(path, {}, b"")
    with ShardPatch(path) as shard:
        shard.tensors = dict(tensors)


def unlist(root: Path, shard: Path) -> None:
    edit_index(root, lambda i: i.update(weight_map={t: n for t, n in i["weight_map"].items() if n != shard.name}))


def rewrite_index(root: Path) -> None:
    """Do what the hint says: list every tensor in the shard that has it."""
    found = {name: p.name for p in shards(root) for name in read_header(p)[0] if name != "__metadata__"}
    edit_index(root, lambda i: i.update(weight_map=found))


def test_a_copy_of_a_listed_shard_is_a_leftover(source: Make) -> None:
    root = source()
    (root / "extra.safetensors").write_bytes(shards(root)[1].read_bytes())
    found = read(root)
    assert found.problems == ()
    (note,) = found.checkpoint.notes
    assert note.code == "left-out"
    assert note.message.endswith(LEFT)
    assert note.hint == "a leftover: servers that read the index ignore it; compare the bytes before you remove it"
    assert "extra.safetensors" not in found.checkpoint.others


def test_another_form_of_the_same_tensors_is_not_said_to_be_removable(source: Make) -> None:
    root = source()
    with ShardPatch(shards(root)[0]) as shard:
        name, stored = next((n, t) for n, t in shard.tensors.items() if t.dtype == "BF16")
    save(root / "extra.safetensors", **{name: Stored("F16", stored.shape, stored.data)})
    (note,) = read(root).checkpoint.notes
    assert LEFT in note.message
    assert "remove" not in note.message + note.hint


@pytest.mark.parametrize(
    ("names", "foreign"),
    [
        (["base_model.model.layers.0.q_proj.lora_A.weight"], True),
        (["transformer.h.0.attn.c_attn.weight", "output.weight"], True),
        (["lm_head.weight"], False),
        (["layers.1.eh_proj.weight"], False),
        (["model.layers.1.ffn.gate.weight"], False),
        (["mtp.1.hnorm.weight"], False),
        (["mtp.fc.weight"], False),
        (["x.0.y", "layers.7.ffn.gate.weight"], False),
    ],
)
def test_only_what_cannot_be_this_models_is_left_out(names: list[str], foreign: bool, source: Make) -> None:
    root = source()
    save(root / "extra.safetensors", **dict.fromkeys(names, Stored("BF16", [4], bytes(8))))
    found = read(root)
    assert [p.code for p in found.problems] == ([] if foreign else ["shard-unlisted"])
    assert [n.code for n in found.checkpoint.notes] == (["left-out"] if foreign else [])


def test_a_drafter_that_the_index_forgot_whole_is_not_foreign(source: Make) -> None:
    root = source()
    for shard in shards(root):
        with ShardPatch(shard) as patch:
            patch.tensors = {name: t for name, t in patch.tensors.items() if not name.startswith("mtp.")}
    edit_index(root, lambda i: i.update(weight_map={t: n for t, n in i["weight_map"].items() if not t.startswith("mtp.")}))
    assert read(root).problems == ()
    save(root / "extra.safetensors", **{"mtp.0.hnorm.weight": Stored("BF16", [4], bytes(8))})
    assert [(p.code, p.where) for p in read(root).problems] == [("shard-unlisted", "extra.safetensors")]


def test_a_shard_that_the_index_forgot_is_never_to_be_removed(source: Make) -> None:
    root = source()
    forgotten = next(p for p in shards(root) if any(n.startswith("mtp.") for n in read_header(p)[0]))
    unlist(root, forgotten)
    (problem,) = read(root).problems
    assert (problem.code, problem.where) == ("shard-unlisted", forgotten.name)
    assert "stand nowhere else" in problem.message
    assert "remove" not in problem.message + problem.hint
    move, write = problem.hint.split("; ")
    assert move == "if it is of another model, such as a drafter, move it to a folder of its own"
    assert write == f"if its tensors are this model's, rewrite {INDEX} to list them"
    rewrite_index(root)
    assert read(root).problems == ()


@pytest.mark.parametrize(
    "names",
    [
        ["d2t", "fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"],
        ["fc.weight", "layers.0.ffn.gate.weight2", "layers.0.self_attn.q_proj.weight"],
        ["medusa_head.0.0.linear.weight", "lm_head.weight"],
    ],
)
def test_a_drafters_head_is_left_out_with_a_note(names: list[str], source: Make) -> None:
    root = source()
    save(root / "eagle_head.safetensors", **dict.fromkeys(names, Stored("BF16", [4], bytes(8))))
    found = read(root)
    assert found.problems == ()
    assert [n.hint for n in found.checkpoint.notes] == ["servers take a drafter from a folder of its own, and ignore it here"]
    assert "eagle_head.safetensors" not in found.checkpoint.files


@pytest.mark.parametrize(("name", "foreign"), [("model-00009-of-00009.safetensors", False), ("other.safetensors", True)])
def test_a_shard_with_a_name_like_the_listed_ones_is_never_anothers(name: str, foreign: bool, source: Make) -> None:
    root = source()
    save(root / name, **{"transformer.h.0.attn.c_attn.weight": Stored("BF16", [4], bytes(8))})
    found = read(root)
    assert [p.code for p in found.problems] == ([] if foreign else ["shard-unlisted"])
    assert [n.code for n in found.checkpoint.notes] == (["left-out"] if foreign else [])


def test_without_an_unlisted_shard_no_tensor_is_looked_at() -> None:
    class Untouched(dict[str, str]):
        def items(self) -> NoReturn:
            raise AssertionError

        __iter__ = items

    judged = judge_unlisted({}, Untouched({"layers.0.w": "a.safetensors"}), {}, ["a.safetensors"])
    assert judged == Judged(left={}, problems=(), explained=frozenset())


def test_an_index_of_an_earlier_sharded_save_beside_one_whole_file(made: Make, source: Make) -> None:
    root, index = source(single_file=True), made() / INDEX
    (root / INDEX).write_bytes(index.read_bytes())
    (problem,) = read(root).problems
    assert (problem.code, problem.where) == ("index-stale", INDEX)
    assert problem.hint == "keep model.safetensors, and move the index out of the folder: one file needs none"
    (root / INDEX).unlink()
    assert read(root).problems == ()


def test_a_renamed_shard(source: Make) -> None:
    root = source()
    first = shards(root)[0]
    first.rename(root / "renamed.safetensors")
    (problem,) = read(root).problems
    assert problem.code == "index-stale"
    assert problem.hint == f"rename renamed.safetensors to {first.name}"
    (root / "renamed.safetensors").rename(first)
    assert read(root).problems == ()


def test_a_shard_with_more_than_the_absent_one_is_not_to_be_renamed(source: Make) -> None:
    """Under the listed name its other tensors would stay unlisted."""
    root = source()
    first = shards(root)[0]
    first.rename(root / "renamed.safetensors")
    with ShardPatch(root / "renamed.safetensors") as shard:
        shard.tensors["layers.0.new.weight"] = Stored("BF16", [4], bytes(8))
    (problem,) = read(root).problems
    assert (problem.code, problem.hint) == ("index-stale", "keep the shards, and rewrite the index to list them")
    rewrite_index(root)
    assert read(root).problems == ()


def test_all_shards_renamed(source: Make) -> None:
    root = source()
    for i, path in enumerate(shards(root)):
        path.rename(root / f"other-{i}.safetensors")
    (problem,) = read(root).problems
    assert problem.code == "index-stale"
    assert "rewrite the index" in problem.hint
    rewrite_index(root)
    assert read(root).problems == ()


def test_a_part_of_what_is_absent_is_kept(source: Make) -> None:
    root = source()
    first, second, *_ = shards(root)
    second.unlink()
    first.rename(root / "renamed.safetensors")
    problems = {p.code: p for p in read(root).problems if p.where != first.name}
    assert set(problems) == {"shard-unlisted", "shard-missing"}
    assert problems["shard-unlisted"].hint.startswith("keep it")
    assert problems["shard-missing"].where == second.name


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"])
def test_an_unlisted_shard_that_cannot_be_read_is_one_problem(content: bytes, source: Make) -> None:
    root = source()
    (root / "extra.safetensors").write_bytes(content)
    (problem,) = read(root).problems
    assert (problem.code, problem.where) == ("shard-unlisted", "extra.safetensors")
    assert "cannot be read" in problem.message


def test_a_tensor_that_the_index_looks_for_in_another_shard(source: Make) -> None:
    root = source()
    first, second, *_ = (p.name for p in shards(root))
    moved = json.loads((root / INDEX).read_text())["weight_map"]
    tensor = next(t for t, n in moved.items() if n == first)

    def change(index: dict[str, Any]) -> None:
        index["weight_map"] |= {tensor: second}

    edit_index(root, change)
    (problem,) = read(root).problems
    assert (problem.code, problem.where) == ("tensor-missing", second)
    assert problem.hint == f"in the index's weight_map, set {tensor} to {first}"
    rewrite_index(root)
    assert read(root).problems == ()
