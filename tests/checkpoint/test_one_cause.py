"""One cause, one error: what cannot be read must not also be told as missing, unknown or not listed, by no command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.checkpoint.names import INDEX
from fse_convert.testing.patch import edit_index

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
BOM = "save it as UTF-8 without that mark"


def put(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).write_bytes(change((root / name).read_bytes()))

    return damage


def marked(raw: bytes) -> bytes:
    return b"\xef\xbb\xbf" + raw


def utf16(raw: bytes) -> bytes:
    return raw.decode().encode("utf-16")


def lead_outside(root: Path) -> None:
    def change(index: dict[str, dict[str, str]]) -> None:
        index["weight_map"] = {t: f"../{n}" if n.startswith("model-00001") else n for t, n in index["weight_map"].items()}

    edit_index(root, change)


def rename_index(root: Path) -> None:
    (root / INDEX).rename(root / "model.fp8.safetensors.index.json")


def slices(root: Path) -> None:
    (root / INDEX).unlink()
    for i, path in enumerate(sorted(root.glob("*.safetensors"))):
        path.rename(root / f"model{i}-mp8.safetensors")


CASES = {
    "config with a BOM": (put("config.json", marked), "json-invalid", "config.json", BOM),
    "index with a BOM": (put(INDEX, marked), "json-invalid", INDEX, BOM),
    "config in UTF-16": (put("config.json", utf16), "json-invalid", "config.json", BOM),
    "config cut": (put("config.json", lambda raw: raw[:-9]), "json-invalid", "config.json", "download it again"),
    "index cut": (put(INDEX, lambda raw: raw[:-9]), "json-invalid", INDEX, "download it again"),
    "config a pointer": (put("config.json", lambda _: POINTER), "lfs-pointer", "config.json", "git lfs pull"),
    "index a pointer": (put(INDEX, lambda _: POINTER), "lfs-pointer", INDEX, "git lfs pull"),
    "config gone": (lambda root: (root / "config.json").unlink(), "file-missing", "config.json", "config.json"),
    "index without a map": (put(INDEX, lambda _: b"{}"), "index-invalid", INDEX, "download it again"),
    "index with an empty map": (put(INDEX, lambda _: b'{"weight_map": {}}'), "index-invalid", INDEX, "download it again"),
    "index that leads outside": (lead_outside, "index-path", INDEX, "do not trust"),
    "index under another name": (rename_index, "file-missing", INDEX, f"copy model.fp8.safetensors.index.json to {INDEX}"),
    "slices of ranks": (slices, "rank-slices", "model0-mp8.safetensors", "join them"),
}


@pytest.mark.parametrize(("damage", "code", "where", "hint"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("command", ["inspect", "convert", "dry run"])
def test_one_error(
    command: str, damage: Callable[[Path], None], code: str, where: str, hint: str, source: Make, tmp_path: Path, run: Run
) -> None:
    root = source("v4-flash", layers=1)
    damage(root)
    line = {"inspect": ("inspect", root), "convert": (root, tmp_path / "out"), "dry run": (root, tmp_path / "out", "--dry-run")}
    status, text, _ = run(*line[command], "--json")
    answer = json.loads(text)
    assert status == 3
    assert [(p["code"], p["where"]) for p in answer["problems"]] == [(code, where)]
    assert hint in answer["problems"][0]["hint"]
    assert answer.get("conflicts", []) == answer.get("unsupported", []) == []


def test_the_folder_above_names_the_one_below(source: Make, run: Run, tmp_path: Path) -> None:
    source("v4-flash", layers=1)
    status, _, err = run("inspect", tmp_path)
    assert status == 3
    assert err.count("error[") == 1
    assert "hint:  give source/ of this folder" in err


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("source/config.json", "give its folder: source"),
        ("deepseek-ai/DeepSeek-V4.1-Flash", "hf://deepseek-ai/DeepSeek-V4.1-Flash"),
        ("nowhere", "give the folder that holds config.json"),
    ],
)
def test_no_folder(place: str, hint: str, source: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source("v4-flash", layers=1)
    monkeypatch.chdir(tmp_path)
    status, _, err = run("inspect", place)
    assert (status, "error[no-such-folder]" in err) == (3, True)
    assert hint in err


def test_an_output_is_not_read_from_the_hub(tmp_path: Path, run: Run) -> None:
    for line in (("restore", "hf://org/name", tmp_path / "out"), ("verify", "hf://org/name")):
        status, _, err = run(*line)
        assert status == 3
        assert "hf download org/name --local-dir" in err


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "pytorch_model.bin"])
def test_without_weights_it_says_what_there_is(name: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    status, text, _ = run("inspect", tmp_path, "--json")
    first = json.loads(text)["problems"][0]
    assert (status, first["code"]) == (3, "no-weights")
    assert "only" in first["message"]


def test_a_locale_that_cannot_spell_a_name_says_so(source: Make, tmp_path: Path) -> None:
    root = source("v4-flash", layers=1)
    first = sorted(root.glob("*.safetensors"))[0].name
    (root / first).rename(root / "modèle.safetensors")
    edit_index(
        root, lambda i: i.update(weight_map={t: "modèle.safetensors" if n == first else n for t, n in i["weight_map"].items()})
    )
    for settings, code in ((("C", "0"), 4), (("C", "1"), 0), (("C.UTF-8", "0"), 0)):
        env = {**os.environ, "LC_ALL": settings[0], "PYTHONUTF8": settings[1]}
        line = [sys.executable, "-m", "fse_convert", "inspect", str(root)]
        result = subprocess.run(line, capture_output=True, text=True, env=env, encoding="utf-8", errors="replace", check=False)
        assert result.returncode == code
        assert ("error[locale-encoding]" in result.stderr) is (code == 4)
        assert "remove" not in result.stderr
