"""Faults that people met, each with what is right: small commands on small checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.names import INDEX
from fse_convert.servers.targets import CONTRACT
from fse_convert.testing.patch import edit_config
from tests.conftest import digests

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def edit(root: Path, change: dict[str, Any], section: str = "") -> None:
    path = root / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(change)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("depth", [1, 3, 10**12])
def test_a_depth_in_another_section_is_a_conflict(depth: int, source: Make, run: Run, tmp_path: Path) -> None:
    root = source()
    edit(root, {"num_hidden_layers": depth})  # the right one stands in text_config; loaders disagree on which they read
    code, out, err = run("inspect", root, "--require", "vllm-0.33")
    assert code == 3
    assert "config-layers" in out + err
    code, _, err = run(root, tmp_path / "out", "--dry-run")
    assert code == 3
    assert "hint:  set both to 2" in err


def test_a_depth_that_no_model_has_is_told_at_once(source: Make, run: Run) -> None:
    root = source()
    edit(root, {"num_hidden_layers": 10**12}, "text_config")
    code, _, err = run("inspect", root)
    assert code == 3
    assert "error[layers-missing]" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_intermediate_size", None), ("hidden_size", None), ("n_routed_experts", None), ("num_hidden_layers", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["vllm-0.33", "sglang-0.5.23", "sglang-0.5.23-slots"])
def test_a_size_that_the_config_does_not_state(key: str, value: object, target: str, source: Make, run: Run) -> None:
    root = source()
    assert run("inspect", root, "--require", target)[0] == 0
    edit(root, {key: value}, "text_config")
    code, out, err = run("inspect", root, "--require", target)
    assert code == 1
    assert "config-unstated" in out
    assert f"{target} is not known to fuse: config-unstated" in err


@pytest.mark.parametrize("key", ["hidden_size", "n_routed_experts", "n_shared_experts", "num_hidden_layers"])
def test_convert_tells_of_a_size_that_the_config_does_not_state(key: str, source: Make, run: Run, tmp_path: Path) -> None:
    root = source()
    edit_config(root, lambda config: config["text_config"].pop(key))
    assert "note[config-unstated]" in run(root, tmp_path / "out", "--tp", 4, "--dry-run")[2]
    status, out, _ = run(root, tmp_path / "out", "--tp", 4, "--json")
    told = [key in n["message"] for n in json.loads(out)["notes"] if n["code"] == "config-unstated"]
    assert (status, told) == (0, [True])


@pytest.mark.parametrize("limit", [float("nan"), -1, 0, 10**400], ids=lambda v: str(v)[:5])
def test_a_clamp_that_clamps_nothing_is_none(limit: object, source: Make, run: Run, tmp_path: Path) -> None:
    root = source()
    edit(root, {"swiglu_limit": limit}, "text_config")
    assert run(root, tmp_path / "out", "-q")[0] == 0


def test_a_model_type_of_another_type(source: Make, run: Run) -> None:
    root = source()
    edit(root, {"model_type": ["deepseek_v41"], "architectures": 7})
    code, _, err = run("inspect", root)
    assert code == 0
    assert "bug" not in err


@pytest.mark.parametrize("name", ["sub/model-00001-of-00007.safetensors", "./model-00001-of-00007.safetensors", "model.bin"])
def test_an_index_that_names_what_servers_do_not_read(name: str, source: Make, run: Run) -> None:
    root = source()
    index = json.loads((root / INDEX).read_text())
    first = "model-00001-of-00007.safetensors"
    (root / INDEX).write_text(
        json.dumps({**index, "weight_map": {t: name if n == first else n for t, n in index["weight_map"].items()}})
    )
    (root / name).parent.mkdir(exist_ok=True)
    (root / first).rename(root / name)
    code, _, err = run("inspect", root)
    assert code == 3
    assert "error[index-path]" in err


def test_hints_are_not_given_where_they_do_not_help(made: Make, run: Run) -> None:
    """BF16 experts are refused for their format too, so converting for the server would change nothing."""
    _, text, _ = run("inspect", made("bf16"), "--json", "--target", "sglang-0.5.21", "--target", "vllm-0.29")
    for target in json.loads(text)["targets"]:
        codes = {r["code"] for r in target["reasons"]}
        assert {"width-alignment", "routed-format"} <= codes
        assert not any("convert with" in r["hint"] for r in target["reasons"])
    _, text, _ = run("inspect", made(), "--json", "--target", "sglang-0.5.21")
    assert json.loads(text)["targets"][0]["reasons"][0]["hint"] == "convert with --target sglang-0.5.21"


@pytest.mark.parametrize("mine", ["notes.txt", "lora/adapter.bin", "fse/mine.json"])
def test_overwrite_deletes_nothing_that_it_did_not_write(mine: str, output: Make, made: Make, run: Run) -> None:
    out = output()
    (out / mine).parent.mkdir(exist_ok=True)
    (out / mine).write_text("mine")
    before = digests(out)
    code, _, err = run(made(), out, "--overwrite")
    assert code == 2
    assert "error[output-foreign]" in err
    assert mine in err
    assert digests(out) == before
    (out / mine).unlink()
    assert run(made(), out, "--overwrite", "-q")[0] == 0


def test_files_of_the_hubs_upload_are_bookkeeping(output: Make, made: Make, run: Run) -> None:
    out = output()
    for name in ("config.json.metadata", "config.json.lock"):
        path = out / ".cache/huggingface/upload" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert run("verify", out, "--source", made())[0] == 0


@pytest.mark.parametrize("place", ["secret", "blobs/secret"])
def test_restore_follows_no_link_out_of_the_output(place: str, output: Make, run: Run, tmp_path: Path) -> None:
    out, secret = output(), tmp_path / place
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("secret")
    (out / "README.md").unlink()
    (out / "README.md").symlink_to(secret)
    code, _, err = run("restore", out, tmp_path / "original")
    assert code == 1
    assert "error[link-outside]" in err
    assert not (tmp_path / "original").exists()


def test_restore_takes_an_edited_page_from_the_blobs_of_its_own_cache(output: Make, run: Run, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/0123"
    snapshot.parent.mkdir(parents=True)
    output().rename(snapshot)
    blob = snapshot.parents[1] / "blobs/4567"
    blob.parent.mkdir()
    blob.write_text("a model card, edited on the hub")
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(blob)
    assert run("restore", snapshot, tmp_path / "original")[0] == 0
    assert (tmp_path / "original/README.md").read_text() == blob.read_text()


def test_each_target_is_listed_with_what_it_is_started_with(run: Run) -> None:
    needs = dict(
        line.strip().partition(": ")[::2] for line in run("targets")[1].splitlines() if line.startswith("  ") and line.strip()
    )
    said = [(name, need) for names, need in needs.items() for name in names.split(", ")]
    rows = json.loads(run("targets", "--json")[1])["targets"]
    assert sorted(said) == sorted((row["name"], row["needs"]) for row in rows if row["engine"] != CONTRACT)


def test_on_a_narrow_terminal_a_file_takes_two_lines(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    lines = run(made(), tmp_path / "out", "--dry-run")[1].splitlines()
    at = lines.index("file")
    assert lines[at + 1].startswith("model-00001-of-")
    assert lines[at + 2].startswith("  what: copy  in: ")
    assert lines[at + 3].startswith("model-00002-of-")


def test_a_config_that_cannot_be_read_is_told_and_nothing_is_guessed(source: Make, run: Run) -> None:
    root = source()
    (root / "config.json").write_text("{")
    for form in ("text", "markdown"):
        code, out, err = run("inspect", root, "--format", form)
        assert (code, "layers.N" in out) == (3, False)
        assert "json-invalid" in out + err


def test_another_source_is_said_in_words_before_digests(converted: Make, made: Make, run: Run) -> None:
    out = run("verify", converted(), "--source", made("v4-flash"))[1].splitlines()
    assert out[1] == "  by its headers or config this is not the checkpoint that the output was made from"
