"""Files that are left out change nothing: every kind by every command, against the same checkpoint without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import ShardPatch, Stored, write_shard

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KNOBS: dict[str, Any] = {"layers": 1, "experts": 1, "mtp": 0}
APPLE = bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(4072)


def shard(path: Path) -> None:
    """Write a whole safetensors file with one tensor of this model's names, of another width."""
    write_shard(path, {}, b"")
    with ShardPatch(path) as patch:
        patch.tensors = {"layers.0.ffn.shared_experts.w1.weight": Stored("BF16", [2, 2], bytes(8))}


def copy_of_a_shard(path: Path) -> None:
    shutil.copy(next(path.parent.glob("model-00001-of-*")), path)


KINDS: dict[str, tuple[str, list[str], Callable[[Path], object] | bytes]] = {
    "AppleDouble": ("macOS", ["._config.json", "._model-00001-of-00002.safetensors", "inference/._config.json"], APPLE),
    "DS_Store": ("macOS", [".DS_Store"], b"\0\0\0\1Bud1"),
    "Windows": ("Windows", ["Thumbs.db", "desktop.ini"], b"x"),
    "incomplete": ("unfinished", ["model-00001-of-00002.safetensors.incomplete"], b"x"),
    "ModelScope": ("unfinished download of ModelScope", ["._____temp/model-00001-of-00002.safetensors"], b"x"),
    "NFS": ("placeholders", [".nfs00000000a3c0f5e00000001"], b"x"),
    "FUSE": ("placeholders", [".fuse_hidden0000000a00000001"], b"x"),
    "editor": ("editors", ["config.json~", ".config.json.swp", "#config.json#", "config.json.orig", "config.json.bak"], b"{"),
    "notebook": ("notebooks", [".ipynb_checkpoints/config-checkpoint.json"], b"{}"),
    "adapter": ("adapter", ["adapter_model.safetensors", "adapter_config.json"], shard),
    "consolidated": ("Mistral", ["consolidated.safetensors"], shard),
    "rank slices": ("slices", ["model0-mp2.safetensors", "model1-mp2.safetensors"], shard),
    "another index": ("indexes", ["model.fp8.safetensors.index.json"], b'{"weight_map": {}}'),
    "old weights": (
        "other formats",
        ["pytorch_model.bin", "consolidated.00.pth", "x.gguf", "tf_model.h5", "flax_model.msgpack", "model.pt"],
        b"x",
    ),
    "training": ("training", ["checkpoint-500/config.json", "checkpoint-500/model.safetensors"], b"x"),
    "states of a training": ("training", ["training_args.bin", "optimizer.pt", "fsdp_0/__0_0.distcp", "fsdp_0/.metadata"], b"x"),
    "numbered": ("copies of files beside them", ["config.json.1", "config.json.2"], b"{}"),
    "leftover": ("stand in listed ones", ["model.safetensors"], copy_of_a_shard),
    "variant": ("other forms", ["model.fp16.safetensors"], shard),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def cluttered(request: pytest.FixtureRequest, source: Make) -> tuple[Path, str, list[str]]:
    """A checkpoint with files of one kind beside it; a word of the note, and the files."""
    word, names, make = request.param
    root = source("v4.1-flash", **KNOBS)
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        make(root / name) if callable(make) else (root / name).write_bytes(make)
    return root, word, names


def answers(run: Run, *line: object) -> dict[str, Any]:
    code, text, _ = run(*line, "--json")
    answer: dict[str, Any] = json.loads(text)
    assert (code, answer["ok"]) == (0, True)
    return answer


def without_notes(answer: dict[str, Any], root: Path) -> str:
    return json.dumps({k: v for k, v in answer.items() if k not in ("notes", "free")}).replace(str(root), "")


def test_every_command(
    cluttered: tuple[Path, str, list[str]], made: Make, converted: Make, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, word, names = cluttered
    clean, clean_out = made("v4.1-flash", **KNOBS), converted("megamoe-512", "v4.1-flash", "--verify", "storage", **KNOBS)
    found, expected = answers(run, "inspect", root), answers(run, "inspect", clean)
    (note,) = (n for n in found["notes"] if n["code"] == "left-out")
    assert word in note["message"]
    assert sum(name in note["message"] or f"{name.partition('/')[0]}/" in note["message"] for name in names) == len(names)
    assert "left out: 1 (" in note["message"] or f"left out: {len(names)} (" in note["message"]
    assert without_notes(found, root) == without_notes(expected, clean)

    planned = answers(run, root, tmp_path / "out", "--dry-run")
    assert [n["message"] for n in planned["notes"] if n["code"] == "left-out"] == [note["message"]]
    answers(run, root, tmp_path / "out", "--verify", "storage")
    assert digest(tmp_path / "out") == digest(clean_out)
    assert run("verify", tmp_path / "out", "--source", root, "--level", "storage")[0] == 0
    assert run("verify", tmp_path / "out", "--source", root, "--level", "storage", "--strict")[0] == 0
    answers(run, "restore", tmp_path / "out", tmp_path / "original")
    assert digest(tmp_path / "original") == digest(clean)


def test_what_comes_while_a_conversion_runs_does_not_disturb_it(made: Make, source: Make) -> None:
    from fse_convert.checkpoint.folder import LocalFolder

    root = source("v4.1-flash", **KNOBS)
    folder = LocalFolder(root)
    assert folder.stamps
    (root / ".DS_Store").write_bytes(b"x")
    (root / ".nfs0001").write_bytes(b"x")
    folder.check_all()
