"""Hints are true: what a hint says is done to the letter, and then its error is gone, no other one has come, and no tensor is lost.

A hint that asks for a download is followed by putting the original file back; one that asks for patience, by ending what was in the
way. Hints of the loaders inside servers: `tests/serving/test_hints.py`. Not followed: what only a person, a package index, a Ray
cluster or a GPU can do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.hub import HubFolder
from fse_convert.errors import FseConvertError
from fse_convert.output.lock import locked
from fse_convert.output.staging import Staging
from fse_convert.testing.faults import Injector
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
from tests.hub_server import serve

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
Change = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
STEP = 30
"""The file operation at which a fault comes: the conversion has begun by then."""
FIRST = "model-00001-of-00005.safetensors"
"""A shard that padding leaves alone."""
EXPERTS = "layers.0.ffn.experts"
SHARED = "layers.0.ffn.shared_experts"
KNOBS = {"layers": 1, "experts": 2}


def tensors(root: Path) -> dict[str, str]:
    """Digest by name of every tensor that the shards of a folder hold."""
    return {
        name: hashlib.sha256(repr((stored.dtype, stored.shape)).encode() + stored.data).hexdigest()
        for path in sorted(root.glob("*.safetensors"))
        for name, stored in ShardPatch(path).tensors.items()
    }


def said(text: str) -> dict[str, str]:
    """Hint by code of every problem and note of a JSON answer; of a note it is the message."""
    answer = json.loads(text)
    return {p["code"]: f"{p['message']} {p.get('hint', '')}" for key in ("problems", "notes") for p in answer.get(key, [])}


# Hints about a checkpoint: damage it, follow the hint, and it converts as the original does.


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
        "fp8 is read with",
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
    assert "requantise to E8M0 scales first" in said(run(root, out, "--dry-run", "--json")[1])["scale-inexact"]
    poke(root, f"{SHARED}.w1.scale", 0, before)  # a power of two
    assert "scale-inexact" not in said(run(root, out, "--dry-run", "--json")[1])


def test_the_original_of_an_output_by_restore(output: Make, made: Make, run: Run, tmp_path: Path) -> None:
    out = output(**KNOBS)
    hint = said(run(out, tmp_path / "again", "--json")[1])["already-converted"]
    assert "fse-convert restore" in hint
    assert run("restore", out, tmp_path / "original", "-q")[0] == 0
    assert tensors(tmp_path / "original") == tensors(made(**KNOBS))
    assert run(tmp_path / "original", tmp_path / "again", "-q", "--verify", "storage")[0] == 0


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


# Hints about the command line: give the wrong words, then those of the hint.


@pytest.mark.parametrize(
    ("wrong", "code", "words", "right"),
    [
        (["{source}"], "usage", "see: fse-convert convert --help", ["convert", "--help"]),
        (
            ["{source}", "{out}", "--target", "vlm-0.33"],
            "target-unknown",
            "did you mean vllm-0.33?",
            ["{source}", "{out}", "--target", "vllm-0.33"],
        ),
        (["{source}", "{out}", "--target", "x"], "target-unknown", "see: fse-convert targets", ["targets"]),
        (["explain", "nam"], "code-unknown", "did you mean nan?", ["explain", "nan"]),
        (["explain", "?"], "code-unknown", "see: fse-convert explain", ["explain"]),
        (
            ["verify", "{old}", "--level", "numerics"],
            "source-needed",
            "give --source CHECKPOINT",
            ["verify", "{old}", "--level", "numerics", "--source", "{source}"],
        ),
        (
            ["{source}", "{out}", "--part", "1/2", "--restart"],
            "parts-alone",
            "start anew without --part",
            ["{source}", "{out}", "--restart"],
        ),
        (
            ["{source}", "{out}", "--part", "1/2", "--ray", "auto"],
            "parts-alone",
            "leave one of them out",
            ["{source}", "{out}", "--part", "1/2"],
        ),
        (["{source}", "{out}/.."], "output-unnamed", "give the name of a new folder", ["{source}", "{out}"]),
        (["{source}", "{source}/out"], "output-overlaps", "choose a folder beside it", ["{source}", "{out}"]),
        (["{source}", "{old}"], "output-exists", "choose another folder", ["{source}", "{out}"]),
        (
            ["{source}", "{old}"],
            "output-exists",
            "or --overwrite to replace an earlier output",
            ["{source}", "{old}", "--overwrite"],
        ),
        (["restore", "{old}", "{source}"], "output-exists", "choose another folder", ["restore", "{old}", "{out}"]),
        (
            ["inspect", "{source}", "--html", "{source}/config.json"],
            "report-exists",
            "give another name",
            ["inspect", "{source}", "--html", "{out}"],
        ),
        (
            ["inspect", "{source}", "--html", "{source}/new.html"],
            "report-in-source",
            "write the report elsewhere",
            ["inspect", "{source}", "--html", "{out}"],
        ),
        (["{out}", "{out}2"], "no-such-folder", "give the folder that holds config.json", ["{source}", "{out}2"]),
        (["{empty}", "{out}"], "no-weights", "give the folder that holds the weights", ["{source}", "{out}"]),
        (["verify", "{source}"], "not-an-output", "give the folder that fse-convert wrote", ["verify", "{old}"]),
        (
            ["restore", "{source}", "{out}"],
            "not-an-output",
            "give the folder that fse-convert wrote",
            ["restore", "{old}", "{out}"],
        ),
        (["{source}", "{long}"], "name-too-long", "choose a shorter output path", ["{source}", "{out}"]),
    ],
)
def test_a_hint_about_the_command_line(
    wrong: list[str], code: str, words: str, right: list[str], source: Make, output: Make, digest: Digest, run: Run, tmp_path: Path
) -> None:
    places = {
        "source": source(**KNOBS),
        "old": output("megamoe-512", "v4.1-flash", "--verify", "storage", **KNOBS).rename(tmp_path / "old"),
        "out": tmp_path / "out",
        "long": tmp_path / ("x" * 300),
    }
    places["empty"] = tmp_path / "empty"
    places["empty"].mkdir()
    shutil.copy(places["source"] / "config.json", places["empty"])
    before = digest(places["source"])
    _, text, err = run(*(word.format(**places) for word in wrong))
    assert (f"error[{code}]" in err, text) == (True, "")
    assert words in err
    assert run(*(word.format(**places) for word in right))[0] == 0
    assert digest(places["source"]) == before


def test_a_folder_of_something_else_is_removed_by_its_owner(made: Make, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    _, _, err = run(made(**KNOBS), out, "--overwrite")
    assert "error[output-foreign]" in err
    assert "remove it yourself" in err
    shutil.rmtree(out)
    assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0


def test_layers_that_would_not_fuse_are_written_when_allowed(made: Make, run: Run, tmp_path: Path) -> None:
    hint = said(run(made("bf16", **KNOBS), tmp_path / "out", "--json")[1])["not-fusable"]
    assert "--allow-unfused writes such layers in the standard layout only" in hint
    code, text, _ = run(made("bf16", **KNOBS), tmp_path / "out", "--json", "--verify", "storage", "--allow-unfused")
    assert (code, {layer["verdict"] for layer in json.loads((tmp_path / "out/fse/manifest.json").read_text())["layers"]}) == (
        0,
        {"unfused"},
    )
    assert "not-fusable" not in said(text)
    assert tensors(tmp_path / "out").keys() == tensors(made("bf16", **KNOBS)).keys()


def test_a_target_that_pads_nothing(made: Make, run: Run, tmp_path: Path) -> None:
    note = said(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json")[1])["padding-not-needed"]
    assert "--target megamoe-128 pads nothing" in note
    found = said(run(made(**KNOBS), tmp_path / "out", "--target", "megamoe-128", "--json", "--verify", "storage")[1])
    assert "padding-not-needed" not in found
    assert tensors(tmp_path / "out") == tensors(made(**KNOBS))
    assert "--link hard copies none" in found["nothing-to-pad"]
    code, text, _ = run(
        made(**KNOBS), tmp_path / "linked", "--target", "megamoe-128", "--json", "--link", "hard", "--verify", "storage"
    )
    assert (code, {how for name, how in json.loads(text)["files"].items() if name.startswith("model-")}) == (0, {"hard link"})


@pytest.mark.parametrize(
    ("target", "code", "words", "how"),
    [
        ("megamoe-512", "width-alignment", "convert with --target megamoe-512", ["--target", "megamoe-512"]),
        ("sglang-0.5.21", "width-alignment", "convert with --target sglang-0.5.21", ["--target", "sglang-0.5.21"]),
        ("tensorrt-llm", "width-alignment", "convert with --target tensorrt-llm", ["--target", "tensorrt-llm"]),
        ("vllm-0.30", "width-ratio", "to one width: --experts all", ["--target", "vllm-0.30", "--experts", "all"]),
    ],
)
def test_a_width_that_a_conversion_gives(
    target: str, code: str, words: str, how: list[str], made: Make, run: Run, tmp_path: Path
) -> None:
    def reasons(folder: Path) -> dict[str, str]:
        (answer,) = json.loads(run("inspect", folder, "--target", target, "--json")[1])["targets"]
        return {r["code"]: r["hint"] for r in answer["reasons"]}

    assert words in reasons(made(**KNOBS))[code]
    assert run(made(**KNOBS), tmp_path / "out", "-q", "--verify", "storage", *how)[0] == 0
    assert reasons(tmp_path / "out").keys() <= {"server-no-fusion"}


def test_scales_that_a_dry_run_reads(made: Make, source: Make, run: Run, tmp_path: Path) -> None:
    """Only its exit code and error tell: of powers of two there is nothing to say."""
    assert "fse-convert CHECKPOINT OUT --dry-run reads them" in run("inspect", made("v4-flash-base", **KNOBS), "--json")[1]
    assert run(made("v4-flash-base", **KNOBS), tmp_path / "out", "--dry-run", "-q")[0] == 0
    root = source("v4-flash-base", **KNOBS)
    poke(root, f"{SHARED}.w1.scale", 0, b"\0\0\xc0\x3f")
    assert "error[scale-inexact]" in run(root, tmp_path / "out", "--dry-run")[2]


# Hints about the machine: take away what was in the way, give the same command again.


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no-space"), (errno.EDQUOT, "no-space"), (errno.EACCES, "permission"), (errno.EROFS, "permission"),
        (errno.EFBIG, "file-too-large"), (errno.ENOMEM, "out-of-memory"), (errno.EMFILE, "too-many-files"),
        (errno.ENFILE, "too-many-files"), (errno.EIO, "io-error"), (errno.EBUSY, "io-error"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else None,
)  # fmt: skip
def test_what_the_machine_refused_once_resumes(
    number: int, code: str, made: Make, converted: Make, run: Run, digest: Digest, tmp_path: Path
) -> None:
    out, command = tmp_path / "out", (made(**KNOBS), tmp_path / "out", "--workers", "1", "--verify", "storage", "--json")
    fault = Injector(str(tmp_path), STEP, "error", number)
    fault.install()
    try:
        found = said(run(*command)[1])
    finally:
        fault.remove()
    assert found.keys() == {code, "resumable"}
    assert "the same command resumes from there" in found["resumable"]
    assert len(found[code]) > len("x ")
    assert run(*command)[0] == 0
    assert digest(out) == digest(converted("megamoe-512", "v4.1-flash", "--verify", "storage", **KNOBS))


def interrupted(tmp_path: Path, run: Run, *command: object) -> None:
    fault = Injector(str(tmp_path), STEP, "error", errno.ENOSPC)
    fault.install()
    try:
        assert run(*command)[0] == 4
    finally:
        fault.remove()


@pytest.mark.parametrize("how", ["start anew with --restart and without --part", "give another output folder"])
@pytest.mark.parametrize("part", [(), ("--part", "1/1")], ids=["whole", "a part"])
def test_an_unfinished_conversion_of_something_else(how: str, part: tuple[str, ...], made: Make, run: Run, tmp_path: Path) -> None:
    root, out = made(**KNOBS), tmp_path / "out"
    interrupted(tmp_path, run, root, out, "--workers", "1")
    _, _, err = run(root, out, "--target", "megamoe-128", *part)
    assert "error[resume-differs]" in err
    assert how in err
    elsewhere = (tmp_path / "elsewhere",) if "another" in how else (out, "--restart")
    assert run(root, *elsewhere, "-q", "--target", "megamoe-128", "--verify", "storage")[0] == 0


@pytest.mark.parametrize("how", ["wait for the other run", "give another output folder"])
def test_a_folder_that_another_run_writes(how: str, made: Make, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(Staging(out).root, out):
        code, _, err = run(made(**KNOBS), out)
        assert (code, "error[locked]" in err, how in err) == (6, True, True)
        if "another" in how:
            out = tmp_path / "elsewhere"
            assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    if "wait" in how:
        assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    assert out.exists()


@pytest.mark.parametrize("how", ["move it away", "give another output folder"])
def test_a_place_for_unfinished_work_that_is_taken(how: str, made: Make, run: Run, tmp_path: Path) -> None:
    out, root = tmp_path / "out", Staging(tmp_path / "out").root
    root.mkdir()
    (root / "thesis.txt").write_text("years of work")
    code, _, err = run(made(**KNOBS), out)
    assert (code, "error[staging-foreign]" in err, how in err) == (2, True, True)
    if "move" in how:
        root = root.rename(tmp_path / "away")
    else:
        out = tmp_path / "elsewhere"
    assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    assert (root / "thesis.txt").read_text() == "years of work"


def test_room_that_was_made(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
        _, _, err = run(made(**KNOBS), tmp_path / "out")
    assert "error[no-space]" in err
    assert "free some space" in err
    assert run(made(**KNOBS), tmp_path / "out", "-q", "--verify", "storage")[0] == 0


def test_a_source_that_is_left_alone(source: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = source(**KNOBS), shutil.disk_usage
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "disk_usage", lambda path: (os.utime(root / FIRST), real(path))[1])
        found = said(run(root, tmp_path / "out", "--json")[1])
    assert "wait until nothing writes to the source" in found["source-changed"]
    assert found["resumable"].endswith("start anew with --restart and without --part")
    assert run(root, tmp_path / "out", "--restart", "-q", "--verify", "storage")[0] == 0


def test_unfinished_work_that_nobody_touches_any_more(
    made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", os.fsync

    def clean(fd: int) -> None:
        real(fd)
        if Staging(out).folder.exists():
            Staging(out).root.rename(tmp_path / "cleaned")

    with monkeypatch.context() as cleaner:
        cleaner.setattr(os, "fsync", clean)
        found = said(run(made(**KNOBS), out, "--json", "--workers", "1", "--verify", "storage")[1])
    assert "then give the same command again" in found["staging-lost"]
    assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0


def test_a_run_that_was_stopped(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt  # a signal itself would end this process

    command = (made(**KNOBS), tmp_path / "out", "--json", "--workers", "1", "--verify", "storage")
    with monkeypatch.context() as signals:
        signals.setattr(os, "fsync", stop)
        code, text, _ = run(*command)
    assert (code, "the same command begins again" in said(text)["interrupted"]) == (130, True)
    assert run(*command)[0] == 0


def test_a_proof_that_failed_once(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (made(**KNOBS), tmp_path / "out", "--json")
    with monkeypatch.context() as broken:
        broken.setattr("fse_convert.verification.numerics.ONE", 0x7E)
        found = said(run(*command)[1])
    assert "nothing was published: run again" in found["proof-failed"]
    assert not (tmp_path / "out").exists()
    assert run(*command)[0] == 0


def test_a_folder_inside_of_a_mounted_one(made: Make, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Path("/dev/shm")
    if not (place.is_mount() and os.access(place, os.W_OK)):
        pytest.skip("nothing is mounted where this may write")
    monkeypatch.setattr("fse_convert.output.staging.any", lambda _: False, raising=False)  # as if nothing were in it
    code, _, err = run(made(**KNOBS), place, "--overwrite")
    assert (code, "error[output-mounted]" in err, "give a folder inside of it" in err) == (2, True, True)
    monkeypatch.undo()
    with tempfile.TemporaryDirectory(dir=place) as inside:
        assert run(made(**KNOBS), Path(inside) / "out", "-q", "--verify", "storage")[0] == 0


@pytest.mark.parametrize(
    ("wrong", "code", "words", "right"),
    [
        ("hf://one", "hub-address", "hf://org/name or hf://org/name@revision", "hf://org/name"),
        ("hf://org/nome", "no-such-model", "check the spelling", "hf://org/name"),
        ("hf://org/name@nope", "no-such-revision", "give a branch, a tag or a commit", "hf://org/name@v1"),
    ],
)
def test_an_address_of_the_hub(wrong: str, code: str, words: str, right: str, made: Make) -> None:
    pytest.importorskip("huggingface_hub")
    with serve("org/name", made(**KNOBS)) as hub:
        with pytest.raises(FseConvertError) as e:
            HubFolder(wrong, endpoint=hub.endpoint)
        assert {p.code: words in p.hint for p in e.value.problems} == {code: True}
        assert HubFolder(right, endpoint=hub.endpoint).files


def test_numerics_run_on_the_cpu_too(made: Make, converted: Make, run: Run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = ("verify", converted(**KNOBS), "--source", made(**KNOBS))
    code, _, err = run(*command, "--device", "cuda")
    assert (code, "error[no-cuda]" in err, "leave --device away" in err) == (4, True, True)
    assert run(*command)[0] == 0


# Hints about an output: `verify OUT` says what is damaged, and the output as it was is restored.


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
