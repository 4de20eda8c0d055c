"""The way back: every file of the source, byte for byte, from the output alone; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.restoration import reading
from fse_convert.sidecar.manifest import read_manifest
from fse_convert.testing.patch import edit_index, edit_manifest, flip, read_shard, write_shard

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KINDS = ["v4-flash", "v4-flash-0731", "v4-pro", "v4-flash-base", "v4.1-flash", "v3", "quark-mxfp4", "nvfp4", "bf16"]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_gives_every_file_back(kind: str, made: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out, original = made(kind), tmp_path / "out", tmp_path / "original"
    assert run(root, out, "--allow-unfused", "--verify", "storage")[0] == 0
    assert digest(out) != digest(root)
    code, text, _ = run("restore", out, original)
    assert code == 0
    assert digest(original) == digest(root)
    assert "byte for byte" in text
    assert "padding removed from" in text


@pytest.mark.parametrize(
    ("knobs", "how"),
    [
        ({"shared": 2}, []),
        ({}, ["--target", "megamoe-128"]),
        ({}, ["--experts", "shared"]),
        ({"single_file": True}, []),
        ({"header_metadata": False}, ["--verify", "none"]),
        ({"shard_size": 300_000}, ["--tp", "2", "--link", "hard"]),
    ],
    ids=["two shared", "nothing padded", "shared only", "single file", "no metadata, no proof", "small shards"],
)
def test_round_trip_however_converted(
    knobs: dict[str, Any], how: list[str], made: Make, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, out, original = made("v4.1-flash", **knobs), tmp_path / "out", tmp_path / "original"
    assert run(root, out, *how)[0] == 0
    code, text, _ = run("restore", out, original, "--json")
    assert code == 0
    report = json.loads(text)
    assert digest(original) == digest(root)
    assert set(report["files"]) == set(digest(root))
    assert report["digests"] is ("none" not in how)
    assert report["unpadded"] == len(read_manifest(LocalFolder(out)).padded)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], spaces: int = 0, **style: Any) -> None:
    header, payload = read_shard(path)
    write_shard(path, change(header), payload, spaces=spaces, **style)


def odd_config(root: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    config["note"] = "naïve ☃"
    (root / "config.json").write_text(json.dumps(config, indent="\t", ensure_ascii=False).replace("1e-06", "0.0000010"))


def odd_index(root: Path) -> None:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    index["metadata"] = {"total_size": 1, "other": {"a": 1}}
    path.write_text(json.dumps({**index, "extra": True}))


def transformers_index(root: Path) -> None:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] = {"total_parameters": 12345, **index["metadata"]}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def no_total(root: Path) -> None:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"metadata": {}, "weight_map": index["weight_map"]}, indent=4, ensure_ascii=True))


def odd_headers(root: Path) -> None:
    for i, path in enumerate(sorted(root.glob("*.safetensors"))):
        if i % 3 == 0:
            rewrite_header(path, lambda h: {"__metadata__": {"author": "x☃", "format": "pt"}, **dict(reversed(h.items()))}, 3)
        elif i % 3 == 1:
            rewrite_header(path, lambda h: {k: v for k, v in h.items() if k != "__metadata__"}, indent=1)
        else:
            rewrite_header(path, lambda h: {**h, "__metadata__": {"z": "1", "a": "2"}}, separators=(",", ":"))


@pytest.mark.parametrize("change", [odd_config, odd_index, transformers_index, no_total, odd_headers])
@pytest.mark.parametrize("target", ["megamoe-512", "megamoe-128"])
def test_unusual_files_come_back_byte_for_byte(
    change: Callable[[Path], None], target: str, source: Make, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, out, original = source("v4-flash", layers=1, experts=1), tmp_path / "out", tmp_path / "original"
    change(root)
    assert run(root, out, "--target", target, "--verify", "storage")[0] == 0
    assert run("restore", out, original)[0] == 0
    assert digest(original) == digest(root)
    assert run("verify", out, "--source", root, "--level", "storage")[0] == 0


def test_usual_files_need_no_text_in_the_manifest(made: Make, tmp_path: Path, run: Run) -> None:
    for kind, knobs in (("v4.1-flash", {}), ("v3", {"header_metadata": False})):
        out = tmp_path / kind
        assert run(made(kind, **knobs), out, "--allow-unfused", "--verify", "none")[0] == 0
        assert read_manifest(LocalFolder(out)).source.originals == {}


@pytest.fixture
def out(output: Make) -> Path:
    return output("megamoe-512", "v4.1-flash", "--verify", "storage", layers=1, experts=1)


def damage_manifest(out: Path) -> None:
    path = out / "fse/manifest.json"
    path.write_text(path.read_text().replace('"from": 384', '"from": 448'))


def damage_index(out: Path) -> None:
    edit_index(out, lambda index: index["metadata"].update(x=1))


def damage_config(out: Path) -> None:
    path = out / "config.json"
    path.write_text(path.read_text().replace("silu", "gelu"))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda out: flip(next(out.glob("model-00003*")), -1), "tensor-damaged"),
        (lambda out: flip(next(out.glob("model-00001*")), -1), "tensor-damaged"),
        (lambda out: flip(out / "tokenizer_config.json", 3), "file-damaged"),
        (lambda out: (out / "generation.json").write_text("{}"), "file-unexpected"),
        (damage_manifest, "manifest-damaged"),
        (damage_index, "original-unknown"),
        (damage_config, "original-unknown"),
    ],
    ids=["a rewritten shard", "a carried shard", "another file", "a file more", "the manifest", "the index", "config"],
)
def test_a_damaged_output_is_not_restored(damage: Callable[[Path], object], code: str, out: Path, tmp_path: Path, run: Run) -> None:
    damage(out)
    status, _, err = run("restore", out, tmp_path / "original")
    assert status == 1
    assert f"error[{code}]" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_refuses_what_it_did_not_write(made: Make, out: Path, tmp_path: Path, run: Run) -> None:
    status, _, err = run("restore", made("v4.1-flash", layers=1, experts=1), tmp_path / "original")
    assert (status, "error[not-an-output]" in err) == (3, True)
    assert run("restore", tmp_path / "nowhere", tmp_path / "original")[0] == 3
    (tmp_path / "there").mkdir()
    status, _, err = run("restore", out, tmp_path / "there")
    assert (status, "error[output-exists]" in err) == (2, True)
    status, _, err = run("restore", out, out / "inside")
    assert (status, "error[output-overlaps]" in err) == (2, True)
    next(out.glob("model-00002*")).unlink()
    status, _, err = run("restore", out, tmp_path / "original")
    assert (status, "error[shard-missing]" in err) == (3, True)


def test_a_newer_format_is_told(out: Path, tmp_path: Path, run: Run) -> None:
    edit_manifest(out, lambda manifest: manifest.update(format_version=3))
    status, _, err = run("restore", out, tmp_path / "original")
    assert (status, "error[format-newer]" in err) == (3, True)
    assert run("verify", out)[0] == 3


def test_works_without_the_source(source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = source("v4-flash", layers=1), tmp_path / "out"
    before = digest(root)
    assert run(root, out, "--verify", "none")[0] == 0
    shutil.rmtree(root)
    code, text, _ = run("restore", out, tmp_path / "again")
    assert code == 0
    assert text.startswith("restored, NOT proved: to ")
    assert "were not checked" in text
    assert digest(tmp_path / "again") == before
    assert not (tmp_path / "again/fse").exists()


def test_links_out_of_an_output_without_digests_are_refused(made: Make, tmp_path: Path, run: Run) -> None:
    out, secret = tmp_path / "out", tmp_path / "secret"
    assert run(made("v4.1-flash", layers=1, experts=1), out, "--verify", "none")[0] == 0
    (out / "inside").symlink_to("README.md")
    assert run("restore", out, tmp_path / "first")[0] == 0
    secret.write_text("x")
    (out / "notes.txt").symlink_to(secret)
    code, _, err = run("restore", out, tmp_path / "second")
    assert code == 1
    assert "error[link-outside]" in err
    assert "notes.txt" in err
    assert not (tmp_path / "second").exists()


def test_rows_longer_than_a_buffer_are_cut_in_parts(
    made: Make, tmp_path: Path, run: Run, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = made("v4.1-flash", layers=1, experts=1), tmp_path / "out"
    assert run(root, out, "--verify", "storage")[0] == 0
    asked: list[int] = []
    right = reading.read_into
    monkeypatch.setattr(reading, "CHUNK", 100)  # an expert's row has 384 bytes and is padded to 512
    monkeypatch.setattr(reading, "read_into", lambda fd, into, at: asked.append(len(into)) or right(fd, into, at))
    assert run("restore", out, tmp_path / "original")[0] == 0
    assert digest(tmp_path / "original") == digest(root)
    assert max(asked) <= 100
