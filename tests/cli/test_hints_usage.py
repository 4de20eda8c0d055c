"""Hints about the command line are true: give the wrong words, then those of the hint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fse_convert.testing.patch import edit_config, poke
from tests.cli.hints import FIRST, KNOBS, SHARED, Change, Digest, Make, Run, said, tensors


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


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("quark-mxfp4", lambda _: None),  # padded it does not fuse either
        ("v4-flash", lambda root: edit_config(root, lambda c: c["quantization_config"].pop("activation_scheme"))),  # fails at load
        ("v4-flash", lambda root: edit_config(root, lambda c: c.update(hidden_size=1024))),
        ("v4-flash", lambda root: (root / FIRST).unlink()),
    ],
    ids=["format", "unsafe", "config", "broken"],
)
def test_a_conversion_that_would_be_refused_is_no_hint(kind: str, damage: Change, source: Make, run: Run, tmp_path: Path) -> None:
    root = source(kind)
    damage(root)
    answers = json.loads(run("inspect", root, "--target", "vllm-0.29", "--json")[1])["targets"]
    assert [(r["code"], r.get("hint", "")) for r in answers[0]["reasons"] if r["code"] == "width-alignment"] == [
        ("width-alignment", "")
    ]
    assert run(root, tmp_path / "out", "--target", "vllm-0.29", "--dry-run")[0] in (1, 3)


def test_to_overwrite_is_a_hint_only_where_that_may_be_done(made: Make, converted: Make, output: Make, run: Run) -> None:
    assert "--overwrite" in run(made(), converted())[2]
    out = output()
    (out / "notes.txt").write_text("years of work")
    code, _, err = run(made(), out)
    assert (code, "error[output-exists]" in err, "--overwrite" in err) == (2, True, False)


def test_scales_that_a_dry_run_reads(made: Make, source: Make, run: Run, tmp_path: Path) -> None:
    """Only its exit code and error tell: of powers of two there is nothing to say."""
    assert "a conversion with --dry-run reads them" in run("inspect", made("v4-flash-base", **KNOBS), "--json")[1]
    assert run(made("v4-flash-base", **KNOBS), tmp_path / "out", "--dry-run", "-q")[0] == 0
    root = source("v4-flash-base", **KNOBS)
    poke(root, f"{SHARED}.w1.scale", 0, b"\0\0\xc0\x3f")
    assert "error[scale-inexact]" in run(root, tmp_path / "out", "--dry-run")[2]
