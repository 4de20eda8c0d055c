"""Hints are true: what a hint says is done to the letter, and then its error is gone, no other one has come, and no tensor is lost.

A hint that asks for a download is followed by putting the original file back; one that asks for patience, by ending what was in the
way. Hints of the loaders inside servers: `tests/serving/test_hints.py`. Not followed: what only a person, a package index, a Ray
cluster or a GPU can do.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import (
    ShardPatch,
    drop,
    edit_config,
    edit_index,
    edit_manifest,
    flip,
    poke,
    read_shard,
    rename,
    write_shard,
)
from tests.cli.hints import EXPERTS, FIRST, INDEX, KNOBS, SHARED, Change, Digest, Make, Run, said, tensors


def put_back(*names: str) -> Callable[[Path, Path], None]:
    """Download files again, or all without names."""

    def follow(root: Path, original: Path) -> None:
        if not names:
            shutil.rmtree(root)
            shutil.copytree(original, root)
        for name in names:
            shutil.copy(original / name, root / name)

    return follow


def rewrite(change: Callable[[dict[str, Any]], object] = lambda _: None, trailing: bytes = b"", hole: int = 0) -> Change:
    """Write a shard in a way that safetensors refuses: a changed header, bytes after the last tensor, a hole before the first."""

    def damage(root: Path) -> None:
        header, payload = read_shard(root / FIRST)
        for entry in header.values():
            if "data_offsets" in entry:
                entry["data_offsets"] = [at + hole for at in entry["data_offsets"]]
        change(header)
        write_shard(root / FIRST, header, bytes(hole) + payload + trailing)

    return damage


def write_again(root: Path, _original: Path) -> None:
    """Rewrite the shard, every tensor once."""
    with ShardPatch(root / FIRST) as shard:
        shard.metadata = {"format": "pt"}


def list_twice(root: Path) -> None:
    raw = (root / FIRST).read_bytes()
    size, text = int.from_bytes(raw[:8], "little"), raw[8:].decode("latin1")
    header = text[:size].rstrip()
    name, entry = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    header = header[:-1] + f',"{name}":{json.dumps(entry)}' + "}"
    (root / FIRST).write_bytes(len(header).to_bytes(8, "little") + header.encode() + text[size:].encode("latin1"))


def index_anew(root: Path, _original: Path) -> None:
    """Rewrite the index from the headers."""
    shards = {path.name: read_shard(path)[0] for path in sorted(root.glob("*.safetensors"))}
    names = {tensor: name for name, header in shards.items() for tensor in header if tensor != "__metadata__"}
    edit_index(root, lambda index: index.update(weight_map=names))


def add_shard(root: Path, *, listed: bool) -> None:
    """Put a copy of a shard beside it: a leftover, or one that a careless index lists."""
    shutil.copy(root / FIRST, root / "model-extra.safetensors")
    if listed:
        tensor = next(iter(ShardPatch(root / FIRST).tensors))
        edit_index(root, lambda index: index["weight_map"].update({tensor: "model-extra.safetensors"}))


def unlist(root: Path) -> None:
    """Forget the shard of a layer, its experts included."""
    lost = json.loads((root / INDEX).read_text())["weight_map"][f"{SHARED}.w1.weight"]
    edit_index(root, lambda i: i.update(weight_map={t: n for t, n in i["weight_map"].items() if n != lost}))


def remove_copy(root: Path, original: Path) -> None:
    (root / "model-extra.safetensors").unlink()
    index_anew(root, original)


def move_ignored(root: Path, old: str, new: str) -> None:
    def change(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        quantization[new] = quantization.pop(old, None) or ["lm_head"]

    edit_config(root, change)


CHECKPOINTS: dict[str, tuple[str, str, Change, Callable[[Path, Path], object]]] = {
    "config gone": (
        "file-missing",
        "a checkpoint needs its config.json",
        lambda r: (r / "config.json").unlink(),
        put_back("config.json"),
    ),
    "index gone": ("file-missing", "download the index", lambda r: (r / INDEX).unlink(), put_back(INDEX)),
    "pointer": (
        "lfs-pointer",
        "git lfs pull",
        lambda r: (r / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        put_back(FIRST),
    ),
    "half a config": ("json-invalid", "download it again", lambda r: (r / "config.json").write_text("{"), put_back("config.json")),
    "no weight_map": ("index-invalid", "download it again", lambda r: edit_index(r, lambda i: i.clear()), put_back(INDEX)),
    "shard gone": ("shard-missing", "finish the download", lambda r: (r / FIRST).unlink(), put_back(FIRST)),
    "shard cut": (
        "shard-truncated",
        "download it again",
        lambda r: os.truncate(r / FIRST, (r / FIRST).stat().st_size - 1),
        put_back(FIRST),
    ),
    "header cut": ("header-length", "download it again", lambda r: os.truncate(r / FIRST, 20), put_back(FIRST)),
    "nearly empty": ("header-short", "download it again", lambda r: os.truncate(r / FIRST, 7), put_back(FIRST)),
    "no JSON": ("header-json", "download it again", lambda r: flip(r / FIRST, 8), put_back(FIRST)),
    "other offsets": (
        "tensor-size",
        "download it again",
        rewrite(lambda h: h["aligner.w1.bias"]["shape"].append(2)),
        put_back(FIRST),
    ),
    "index of another": (
        "tensor-missing",
        "download",
        lambda r: edit_index(r, lambda i: i["weight_map"].update(x=FIRST)),
        put_back(INDEX),
    ),
    "bytes at the end": ("shard-trailing", "", rewrite(trailing=b"12345678"), write_again),
    "a hole": ("tensor-offset", "", rewrite(hole=8), write_again),
    "metadata of numbers": ("header-metadata", "", rewrite(lambda h: h.update(__metadata__={"a": 1})), write_again),
    "a key twice": ("header-duplicate", "", list_twice, write_again),
    "folder fse": (
        "sidecar-foreign",
        "move the folder away",
        lambda r: [(r / "fse").mkdir(), (r / "fse/x").write_text("")],
        lambda r, _: (r / "fse").rename(r.parent / "away"),
    ),
    "leftover": ("shard-unlisted|left-out", "", lambda r: add_shard(r, listed=False), remove_copy),
    "shard not listed": ("shard-unlisted", "", unlist, index_anew),
    "tensors twice": ("tensor-duplicate", "", lambda r: add_shard(r, listed=True), remove_copy),
    "tensor not listed": ("tensor-unlisted", "", lambda r: edit_index(r, lambda i: i["weight_map"].popitem()), index_anew),
    "expert gone": (
        "expert-missing",
        "is the checkpoint complete?",
        lambda r: drop(r, *(f"{EXPERTS}.0.{w}.{s}" for w in ("w1", "w2", "w3") for s in ("weight", "scale"))),
        put_back(),
    ),
    "projection gone": (
        "projection-missing",
        "is the checkpoint complete?",
        lambda r: drop(r, f"{SHARED}.w1.weight", f"{SHARED}.w1.scale"),
        put_back(),
    ),
    "weight gone": ("weight-missing", "is the checkpoint complete?", lambda r: drop(r, f"{SHARED}.w1.weight"), put_back()),
    "scale gone": ("scale-missing", "is the checkpoint complete?", lambda r: drop(r, f"{SHARED}.w1.scale"), put_back()),
    "two scales": (
        "part-ambiguous|matrix-odd",
        "",
        lambda r: rename(r, f"{SHARED}.w1.scale", f"{SHARED}.w1.weight_scale", keep=True),
        put_back(),
    ),
    "list that is not read": (
        "ignore-key-unread",
        "for fp8 they read",
        lambda r: move_ignored(r, "modules_to_not_convert", "exclude"),
        lambda r, _: move_ignored(r, "exclude", "modules_to_not_convert"),
    ),
}
"""By what is done: the code, words of its hint, the damage, and what the hint says."""


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_hint_about_a_checkpoint(what: str, source: Make, made: Make, run: Run, tmp_path: Path) -> None:
    code, words, damage, follow = CHECKPOINTS[what]
    root, original, out = source(**KNOBS), made(**KNOBS), tmp_path / "out"

    def told(folder: Path) -> dict[str, str]:
        found = said(run(folder, out, "--dry-run", "--json")[1])
        return found | {c["code"]: c["hint"] for c in json.loads(run("inspect", folder, "--json")[1])["conflicts"]}

    right = told(original)
    damage(root)
    assert any(words in hint for name, hint in told(root).items() if name in code.split("|"))
    follow(root, original)
    assert told(root).keys() == right.keys()
    assert tensors(root) == tensors(original)
    assert run(root, out, "-q", "--verify", "storage")[0] == 0


def test_a_shard_that_fits_its_checksum_has_no_nan(source: Make, run: Run, tmp_path: Path) -> None:
    root, out = source(**KNOBS), tmp_path / "out"
    before = poke(root, f"{SHARED}.w1.weight", 0, b"\x7f")
    assert "compare its checksum" in said(run(root, out, "--json")[1])["nan"]
    poke(root, f"{SHARED}.w1.weight", 0, before)
    assert run(root, out, "-q", "--verify", "storage")[0] == 0


def test_scales_that_are_requantised(source: Make, run: Run, tmp_path: Path) -> None:
    root, out = source("v4-flash-base", **KNOBS), tmp_path / "out"
    before = poke(root, f"{SHARED}.w1.scale", 0, b"\0\0\xc0\x3f")
    assert "loses precision" in said(run(root, out, "--dry-run", "--json")[1])["scale-inexact"]
    poke(root, f"{SHARED}.w1.scale", 0, before)  # a power of two
    assert "scale-inexact" not in said(run(root, out, "--dry-run", "--json")[1])


def test_the_original_of_an_output_by_restore(
    output: Make, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = said(run(output(**KNOBS), tmp_path / "again", "--json")[1])["already-converted"]
    _, *words = shlex.split(hint.partition("get it back first: ")[2])
    assert run(*words, "-q")[0] == 0
    assert tensors(tmp_path / "ORIGINAL") == tensors(made(**KNOBS))
    assert run("ORIGINAL", tmp_path / "again", "-q", "--verify", "storage")[0] == 0


def test_the_output_states_the_right_total(source: Make, run: Run, tmp_path: Path) -> None:
    root, out = source(**KNOBS), tmp_path / "out"
    edit_index(root, lambda index: index["metadata"].update(total_size=1))
    code, text, _ = run(root, out, "--json", "--verify", "storage")
    assert (code, "total-size" in said(text)) == (0, True)
    assert "the output states the right one" in run("inspect", root, "--json")[1]
    assert "total-size" not in said(run("inspect", out, "--json")[1])
    assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == sum(
        len(read_shard(p)[1]) for p in out.glob("*.safetensors")
    )


def edit(change: Callable[[dict[str, Any]], object], *, signed: bool = True) -> Change:
    return lambda out: edit_manifest(out, change, signed=signed)


def spaces(out: Path) -> None:
    header, payload = read_shard(out / FIRST)
    write_shard(out / FIRST, header, payload, spaces=800)


OUTPUTS: dict[str, tuple[str, Change]] = {
    "padded shard": ("tensor-damaged", lambda o: flip(o, -1, f"{SHARED}.w1.weight")),
    "shard carried over": ("tensor-damaged", lambda o: flip(o / FIRST, -1)),
    "other file": ("file-damaged", lambda o: flip(o / "tokenizer_config.json", 3)),
    "file gone": ("file-missing", lambda o: (o / "tokenizer_config.json").unlink()),
    "index": ("original-unknown", lambda o: edit_index(o, lambda i: i["metadata"].update(x=1))),
    "manifest": ("manifest-damaged", edit(lambda m: m["model"].update(family="x"), signed=False)),
    "header": ("header-unlike", spaces),
    "shard more": ("shard-unknown", lambda o: (
        (o / FIRST).rename(o / "model-00000-of-00005.safetensors"),
        edit_index(o, lambda i: i.update(weight_map={t: n.replace("00001-of", "00000-of") for t, n in i["weight_map"].items()})),
        edit(lambda m: m["source"]["shards"].pop(FIRST))(o),
        edit(lambda m: m["files"].pop(FIRST))(o),
    )),
    "size stated": ("shard-size", edit(lambda m: m["source"]["shards"][FIRST].update(size=1))),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTPUTS)
def test_a_hint_about_an_output(
    what: str, output: Make, converted: Make, made: Make, digest: Digest, run: Run, tmp_path: Path
) -> None:
    code, damage = OUTPUTS[what]
    kind = ("megamoe-512", "v4.1-flash", "--verify", "storage")
    out = output(*kind, **KNOBS)
    damage(out)
    found = said(run("restore", out, tmp_path / "original", "--json")[1])
    assert found.keys() == {code}
    assert "fetch the output again, or convert again" in found[code]
    assert json.loads(run("verify", out, "--json")[1])["storage"]["status"] == ("passed" if code == "shard-size" else "failed")
    shutil.rmtree(out)
    shutil.copytree(converted(*kind, **KNOBS), out)
    assert run("restore", out, tmp_path / "original", "-q")[0] == 0
    assert digest(tmp_path / "original") == digest(made(**KNOBS))
