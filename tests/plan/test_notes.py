"""Notes of a conversion: said where they are true of this checkpoint, and nowhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.patch import edit_config, poke

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def codes(run: Run, source: Path, out: Path, *options: object) -> dict[str, str]:
    """Messages by code, of a plan."""
    code, text, err = run(source, out, "--dry-run", "--json", *options)
    assert code == 0, err
    return {n["code"]: f"{n['where']} {n['message']}" for n in json.loads(text)["notes"]}


def test_padding_is_needless_where_servers_fuse_the_source(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made(layers=1), tmp_path / "out")
    assert "vLLM >= 0.31 and SGLang >= 0.5.23 fuse the source as is" in found["padding-not-needed"]
    assert "SGLang >= 0.5.22" in codes(run, made("v4-flash", layers=1), tmp_path / "out")["padding-not-needed"]


@pytest.mark.parametrize(("kind", "options"), [("v4-flash-base", []), ("v3", ["--allow-unfused"]), ("bf16", ["--allow-unfused"])])
def test_no_server_fuses_these_as_they_are(kind: str, options: list[str], made: Made, tmp_path: Path, run: Run) -> None:
    assert "padding-not-needed" not in codes(run, made(kind, layers=2), tmp_path / "out", *options)


@pytest.mark.parametrize("options", [["--tp", 16], ["--target", "vllm-0.30"], ["--target", "sglang-0.5.21"]])
def test_padding_that_was_asked_for_is_not_needless(options: list[object], made: Made, tmp_path: Path, run: Run) -> None:
    assert "padding-not-needed" not in codes(run, made(layers=1), tmp_path / "out", *options)


def test_padding_without_a_fitting_layer_fuses_nothing(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made("bf16", layers=1), tmp_path / "out", "--allow-unfused")
    assert "padding fuses nothing here" in found["padding-fuses-nothing"]
    assert "padding-fuses-nothing" not in codes(run, made(layers=1), tmp_path / "out")


def test_where_nothing_is_padded_only_the_sidecar_is_new(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made(layers=1), tmp_path / "out", "--target", "megamoe-128")
    assert "2 of 2 layers fit megamoe-128 as is: only fse/ is new; --link hard copies none of the other" in found["nothing-to-pad"]
    assert "fit vLLM 0.33 as is" in codes(run, made(layers=1), tmp_path / "out", "--target", "vllm-0.33")["nothing-to-pad"]
    assert "nothing-to-pad" not in codes(run, made(layers=1), tmp_path / "out")


def test_files_that_still_state_the_old_width_are_named(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made(layers=1), tmp_path / "out")
    assert found["width-beside"].startswith("inference/config.json still says moe_inter_dim 384")
    assert "width-beside" not in codes(run, made(layers=1), tmp_path / "out", "--target", "megamoe-128")
    assert "width-beside" not in codes(run, made(layers=1), tmp_path / "out", "--experts", "shared")


@pytest.mark.parametrize(("options", "code"), [([], "drafter-unsafe"), (["--shared", "mxfp4", "--lossy"], "drafter-unfused")])
def test_a_drafter_that_does_not_fuse_is_told(options: list[str], code: str, made: Made, tmp_path: Path, run: Run) -> None:
    root = made("v4-flash", layers=2, width=256)
    found = codes(run, root, tmp_path / "out", "--target", "vllm-0.33-aiter", *options)
    assert "fuses the decoder layers" in found[code]
    assert "output-served" not in found


def test_a_change_by_name_is_judged_by_all_servers(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made("v4.1-flash", layers=1), tmp_path / "out", "--routed", "fp8")
    assert re.search("SGLang >= 0.5.23 fuses? this checkpoint as is", found["output-served"])
    assert "with DeepEP, Mooncake or NIXL: wrong values." in found["output-served"]
    code, text, _ = run(made("v4.1-flash", layers=1), tmp_path / "out", "--routed", "fp8", "--dry-run", "--json")
    assert code == 0
    assert {reason["code"] for layer in json.loads(text)["layers"] for reason in layer["reasons"]} == {"not-judged"}


def test_notes_are_the_same_in_every_form(made: Made, tmp_path: Path, run: Run) -> None:
    command = (made("v4-flash", layers=1, width=256), tmp_path / "out", "--routed", "fp8")
    code, text, err = run(*command, "--dry-run")
    assert code == 0
    told = [line[5 : line.index("]")] for line in err.splitlines() if line.startswith("note[")]
    for options in (["--dry-run"], []):
        code, text, err = run(*command, "--json", *options)
        assert (code, "note[" in err) == (0, False)
        assert [note["code"] for note in json.loads(text)["notes"]] == told
    assert {"fp8-fits", "output-served"} <= set(told)


def test_a_scale_that_another_format_cannot_hold_is_an_error_in_json_too(source: Made, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", layers=1, width=256)
    poke(root, "layers.0.ffn.shared_experts.w1.scale", 1, b"\0")
    code, text, _ = run(root, tmp_path / "out", "--routed", "fp8", "--dry-run", "--json")
    assert (code, [e["code"] for e in json.loads(text)["problems"]]) == (3, ["scale-range"])


def test_a_conflict_that_the_plan_mends_is_not_told_of_it(source: Made, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash-base", layers=1)
    edit_config(root, lambda config: config.update(expert_dtype="fp4"))
    conflicts = {c["code"] for c in json.loads(run("inspect", root, "--json")[1])["conflicts"]}
    assert conflicts
    assert not conflicts & codes(run, root, tmp_path / "out", "--heal").keys()
    assert not codes(run, root, tmp_path / "out", "--target", "megamoe-128").keys() & {*conflicts, "nothing-to-pad"}
    text = run(root, tmp_path / "out", "--target", "megamoe-128", "--dry-run")[1]
    assert "nothing to pad; writes expert_dtype fp8 in the place where servers read it (lossless); 2 of 2 layers fit" in text


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        (["--routed", "fp8", "--lossy"], ["--lossy"]),
        (["--routed", "fp8", "--drop-originals"], []),
        (["--shared", "mxfp4", "--lossy", "--drop-originals"], []),
        (["--target", "megamoe-128", "--lossy", "--drop-originals"], ["--lossy", "--drop-originals"]),
    ],
)
def test_permissions_that_nothing_uses_are_noted(
    options: list[str], unused: list[str], made: Made, tmp_path: Path, run: Run
) -> None:
    code, text, _ = run(made("v4-flash", layers=1, width=256), tmp_path / "out", "--dry-run", "--json", *options)
    assert code == 0
    assert [note["where"] for note in json.loads(text)["notes"] if note["code"] == "option-unused"] == unused


def test_requantisation_at_load_is_told_by_a_conversion_too(made: Made, tmp_path: Path, run: Run) -> None:
    found = codes(run, made("v4-flash", layers=1), tmp_path / "out", "--target", "sglang-0.5.23-slots")
    assert "requantises the FP8 shared experts" in found["slot-requantised"]
