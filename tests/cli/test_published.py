"""Outputs that were published: what hubs add and people edit is noted, everything else stays a mismatch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import flip

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KNOBS: dict[str, Any] = {"layers": 1, "experts": 1}


@pytest.fixture
def root(made: Make) -> Path:
    return made("v4.1-flash", **KNOBS)


@pytest.fixture
def out(output: Make) -> Path:
    return output("megamoe-512", "v4.1-flash", "--verify", "storage", **KNOBS)


def add(name: str) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("new\n")

    return change


def append(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).write_text((out / name).read_text() + "more\n") and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).unlink()


def same_size(name: str) -> Callable[[Path], None]:
    return lambda out: flip(out / name, 3)


EDITS = {
    "the hub's attributes": (add(".gitattributes"), ".gitattributes"),
    "model card, longer": (append("README.md"), "README.md"),
    "model card, as long": (same_size("README.md"), "README.md"),
    "model card removed": (remove("README.md"), "README.md"),
    "a licence": (add("LICENSE"), "LICENSE"),
    "a picture": (add("figures/benchmark.png"), "figures/benchmark.png"),
    "a page": (add("docs/deploy.md"), "docs/deploy.md"),
}


@pytest.mark.parametrize(("edit", "name"), EDITS.values(), ids=EDITS.keys())
def test_an_edit_that_no_server_reads_is_noted(
    edit: Callable[[Path], None], name: str, root: Path, out: Path, tmp_path: Path, run: Run, digest: Digest
) -> None:
    edit(out)
    note = f"note: added, removed or edited since the conversion, and read by no server: {name}"
    for line in (("verify", out), ("verify", out, "--source", root, "--level", "storage")):
        code, text, _ = run(*line)
        assert (code, note in text) == (0, True), text
        code, text, _ = run(*line, "--json")
        report = json.loads(text)
        assert (code, report["ok"], report["storage"]["mismatch_count"]) == (0, True, 0)
        assert [name in n for n in report["storage"]["notes"]] == [True]
        code, text, _ = run(*line, "--strict")
        assert (code, "mismatch[" in text, name in text) == (1, True, True)

    code, _, err = run("restore", out, tmp_path / "strict", "--strict")
    assert (code, name in err, (tmp_path / "strict").exists()) == (1, True, False)
    code, text, _ = run("restore", out, tmp_path / "original")
    assert (code, f"so not the original's: {name}" in text) == (0, True)
    original, now = digest(tmp_path / "original"), digest(out)
    assert original.get(name) == now.get(name)
    assert {n: d for n, d in original.items() if n != name} == {n: d for n, d in digest(root).items() if n != name}


def test_json_of_restore_names_what_was_edited(out: Path, tmp_path: Path, run: Run) -> None:
    _, text, _ = run("restore", out, tmp_path / "first", "--json")
    assert "edited" not in json.loads(text)
    append("README.md")(out)
    _, text, _ = run("restore", out, tmp_path / "second", "--json")
    report = json.loads(text)
    assert report["edited"] == ["README.md"]
    assert report["files"]["README.md"] == "edited since the conversion"


def test_both_sides_edited_alike_after_the_conversion(source: Make, out: Path, run: Run) -> None:
    root = source("v4.1-flash", **KNOBS)
    for folder in (root, out):
        append("README.md")(folder)
    assert run("verify", out, "--source", root, "--level", "storage")[0] == 0


def test_an_output_without_digests(root: Path, output: Make, tmp_path: Path, run: Run) -> None:
    out = output("megamoe-512", "v4.1-flash", "--verify", "none", **KNOBS)
    add(".gitattributes")(out)
    append("README.md")(out)
    code, text, _ = run("verify", out, "--source", root, "--level", "storage")
    assert (code, "read by no server: .gitattributes, README.md" in text) == (0, True)
    assert run("restore", out, tmp_path / "original")[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        append("tokenizer_config.json"), append("config.json"), append("inference/config.json"),
        append("encoding/encoding_dsv4.py"), add("notes.txt"), add("modeling.py"), add("fse/README.md"), add("extra.safetensors"),
        remove("tokenizer_config.json"),
    ],
    ids=["tokenizer", "config", "inference config", "code", "text", "code added", "in fse/", "a shard", "tokenizer removed"],
)  # fmt: skip
def test_everything_else_stays_a_mismatch(change: Callable[[Path], None], root: Path, out: Path, run: Run) -> None:
    change(out)
    assert run("verify", out)[0] == 1
    assert run("verify", out, "--source", root, "--level", "storage")[0] == 1


@pytest.mark.parametrize(
    "name", ["._config.json", ".DS_Store", "fse/._manifest.json", "fse/._shared-00001-of-00001.safetensors", "x~"]
)
def test_clutter_in_an_output(name: str, root: Path, out: Path, tmp_path: Path, run: Run, digest: Digest) -> None:
    (out / name).write_bytes(b"x")
    for line in (("verify", out), ("verify", out, "--source", root, "--level", "storage")):
        code, text, _ = run(*line)
        assert (code, f"left out: 1 ({name})" in text) == (0, True), text
        code, text, _ = run(*line, "--strict")
        assert (code, f"mismatch[file-unexpected]: {name}" in text) == (1, True)
    assert run("restore", out, tmp_path / "original")[0] == 0
    assert digest(tmp_path / "original") == digest(root)
