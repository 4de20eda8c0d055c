"""Outputs whose format changed: what their proof covers, records, prints and finds, level by level."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.exit_codes import ExitCode
from fse_convert.plan.changes.apply import changed_tensors
from fse_convert.plan.plan import Plan
from fse_convert.plan.source import open_source
from fse_convert.progress import Event, ignore
from fse_convert.testing.patch import ShardPatch, edit_manifest, find, poke, read_header
from fse_convert.verification.expected import ExpectedOutput
from fse_convert.verification.findings import Level
from fse_convert.verification.manifest import OutputManifest, plan_again
from fse_convert.verification.proof import Check, verify
from fse_convert.verification.sample import Sample
from fse_convert.verification.stand_ins import kept_originals, stand_ins
from tests.verification.editing import load, seal
from tests.verification.recipes import KNOBS, MXFP4, RECIPES, Recipe

Changed = Callable[[Recipe], tuple[Path, Path]]
Run = Callable[..., tuple[int, str, str]]
ROUTED, _, SHARED, SHARED_BF16, SCALES, LABELS, _ = RECIPES
NAMED = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def planned(root: Path, out: Path) -> Plan:
    plan = plan_again(OutputManifest.read(LocalFolder(out)).content, open_source(LocalFolder(root)))
    assert isinstance(plan, Plan)
    return plan


def tensors_of(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    headers = (read_header(path)[0] for path in folder.glob("*.safetensors"))
    return [(name, entry) for header in headers for name, entry in header.items() if name != "__metadata__"]


@pytest.fixture
def copied(changed: Changed, tmp_path: Path) -> Changed:
    """A source and an output of a recipe, to be damaged."""

    def copy(recipe: Recipe) -> tuple[Path, Path]:
        root, out = changed(recipe)
        return Path(shutil.copytree(root, tmp_path / "source")), Path(shutil.copytree(out, tmp_path / "out"))

    return copy


@NAMED
def test_the_proof_and_the_planner_agree_on_every_tensor(recipe: Recipe, changed: Changed) -> None:
    plan = planned(*changed(recipe))
    changes = plan.decision.changes
    assert recipe.change in [change.name for change in changes]
    found = stand_ins(plan.source, [change.name for change in changes])
    assert found == changed_tensors(changes)
    assert kept_originals(found) == frozenset().union(*(change.originals for change in changes))


@NAMED
def test_what_was_proved_is_recorded(recipe: Recipe, changed: Changed) -> None:
    root, out = changed(recipe)
    manifest = load(out)
    before, after = ({(n, e["dtype"], tuple(e["shape"])) for n, e in tensors_of(folder)} for folder in (root, out))
    tensors, (recoded, labelled, kept) = manifest["proof"]["storage"]["tensors"], recipe.counts
    assert len(after - before) == recoded + labelled
    assert len(manifest.get("renamed", {})) <= labelled
    assert (tensors.get("recoded", 0), tensors.get("original", 0)) == (recoded, kept)
    assert sum(tensors.values()) == len(after) + kept == len(manifest["tensors"])
    assert manifest["proof"]["kernel"] == {"status": "not-run", "reason": "not asked for"}


@NAMED
def test_it_passes_again_at_every_level(recipe: Recipe, changed: Changed) -> None:
    root, out = changed(recipe)
    proof = verify(Check(out, root, Level.KERNEL), ignore)
    assert proof.storage.passed, proof.storage.findings.listed
    assert proof.numerics
    assert proof.kernel
    assert proof.kernel.reason == "no layer has the kernel layout"
    assert proof.exit_code is ExitCode.NO  # the level that was asked for had nothing to run on
    status = {ROUTED.change: "passed", SCALES.change: "passed", SHARED.change: "measured"}.get(recipe.change, "not-run")
    assert proof.numerics.status == status == load(out)["proof"]["numerics"]["status"]
    assert verify(Check(out, root), ignore).exit_code is ExitCode.OK
    assert verify(Check(out, root, sample=Sample(7)), ignore).exit_code is ExitCode.OK
    alone = verify(Check(out, None), ignore)
    assert (alone.exit_code, alone.storage.of_tensors) == (ExitCode.OK, len(load(out)["tensors"]))


@NAMED
def test_the_workload_adds_up(recipe: Recipe, changed: Changed) -> None:
    root, out = changed(recipe)
    check = Check(out, root)
    events: list[Event] = []
    verify(check, events.append)
    for work in check.workload():
        found = [e for e in events if e.phase is work.phase]
        assert (work.bytes, work.count) == (sum(e.bytes for e in found if not e.done), sum(e.done for e in found))


def test_how_many_experts_is_not_known_before_they_were_computed(changed: Changed, tmp_path: Path, run: Run) -> None:
    root, _ = changed(ROUTED)
    assert run(root, tmp_path / "out", *ROUTED.options, "--verify", "storage", "-q")[0] == 0
    assert [work.count for work in Check(tmp_path / "out", root).workload()] == [len(load(tmp_path / "out")["files"]), 0]


def test_experts_that_are_computed(changed: Changed) -> None:
    """One routed expert of every layer and the shared ones: the same whatever is sampled elsewhere."""
    names = [e.prefix for e in ExpectedOutput.of(planned(*changed(ROUTED))).recoded]
    assert names == ["layers.0.ffn.experts.1", "layers.0.ffn.shared_experts", "mtp.0.ffn.experts.0", "mtp.0.ffn.shared_experts"]
    assert [e.prefix for e in ExpectedOutput.of(planned(*changed(SHARED))).recoded] == ["layers.0.ffn.shared_experts"]


@pytest.mark.parametrize("expert", ["experts.1", "shared_experts"])
@pytest.mark.parametrize("part", ["weight", "scale"])
def test_numerics_show_what_storage_does(expert: str, part: str, copied: Changed) -> None:
    root, out = copied(ROUTED)
    name = f"layers.0.ffn.{expert}.w2.{part}"
    value = b"\x77" if part == "weight" else (1 << 23).to_bytes(4, "little")
    poke(out, name, 0, value)
    proof = verify(Check(out, root, Level.NUMERICS), ignore)
    assert [m.tensor for m in proof.storage.findings.listed if m.code == "bytes"] == [name]
    assert proof.numerics
    assert [layer.name for layer in proof.numerics.layers if not layer.passed] == [f"layers.0.ffn.{expert}"]
    assert proof.numerics.status == "failed"


def test_an_expert_that_cannot_be_read_fails(copied: Changed) -> None:
    root, out = copied(ROUTED)
    poke(out, "mtp.0.ffn.shared_experts.w1.scale", 0, b"\x01\0\0\0")
    with ShardPatch(find(out, "layers.0.ffn.experts.1.w1.weight").path) as shard:
        shard.tensors.pop("layers.0.ffn.experts.1.w1.weight")
    proof = verify(Check(out, root), ignore)
    assert proof.numerics
    reasons = {layer.name: layer.reason for layer in proof.numerics.layers if not layer.passed}
    assert reasons["mtp.0.ffn.shared_experts"] == "mtp.0.ffn.shared_experts.w1.scale: a scale is not a power of two"
    assert reasons["layers.0.ffn.experts.1"] == "the output's headers do not have it in a format that is understood"


@pytest.mark.parametrize("recipe", [SHARED, SHARED_BF16], ids=lambda recipe: recipe.name)
def test_a_loss_is_measured_and_never_called_passed(recipe: Recipe, changed: Changed, run: Run) -> None:
    root, out = changed(recipe)
    record = load(out)["proof"]["numerics"]
    assert list(record) == ["status", "layers", "experts", "tokens", "seed", "swiglu_limit", "matrices", "outputs"]
    assert (record["layers"], record["experts"], len(record["matrices"]), len(record["outputs"])) == (1, 1, 3, 1)
    usual = {"relative_l2": 0.119, "norm_ratio": 0.986, "projection": 0.979, "saturated": 0.005, "flushed": 0.101}
    if recipe is SHARED_BF16:
        usual = {"relative_l2": 0.112, "norm_ratio": 0.996, "projection": 0.989, "saturated": 0.0104, "flushed": 0.092}
    for figures in record["matrices"].values():
        assert figures == {name: pytest.approx(value, rel=0.2 if value < 0.2 else 0.01) for name, value in usual.items()}
        assert all(value == float(f"{value:.4g}") for value in figures.values())
    code, text, _ = run("verify", out, "--source", root, "-q")
    assert code == 0
    line = next(line for line in text.splitlines() if line.startswith("numerics"))
    assert line.startswith("numerics: measured, not bit-equal: 1 expert rounded: relative L2 of a matrix at most 0.1")
    assert "passed" not in line
    assert "note:" not in text
    found = json.loads(run("verify", out, "--source", root, "--json")[1])["numerics"]
    assert (found["status"], found["layers"]) == ("measured", [])
    assert {name: m for loss in found["losses"] for name, m in loss["matrices"].items()} == record["matrices"]
    assert [loss["output_relative_l2"] for loss in found["losses"]] == list(record["outputs"].values())


@pytest.mark.parametrize(
    ("place", "name", "key", "value"),
    [
        ("matrices", "layers.0.ffn.shared_experts.w1", "relative_l2", 0.1),
        ("matrices", "layers.0.ffn.shared_experts.w2", "flushed", 0.0),
        ("outputs", "layers.0.ffn.shared_experts", None, 0.05),
    ],
)
def test_figures_are_measured_again(place: str, name: str, key: str | None, value: float, copied: Changed) -> None:
    """An editor who makes a loss look smaller is found by the level that measures it."""
    root, out = copied(SHARED)

    def edit(manifest: dict[str, Any]) -> None:
        figures = manifest["proof"]["numerics"][place]
        (figures[name] if key else figures)[key or name] = value

    edit_manifest(out, edit)
    assert verify(Check(out, root, Level.STORAGE), ignore).exit_code is ExitCode.OK
    proof = verify(Check(out, root), ignore)
    assert proof.exit_code is ExitCode.NO
    assert [(m.code, m.file) for m in proof.storage.findings.listed] == [("manifest", "fse/manifest.json")]
    assert proof.storage.findings.listed[0].expected.startswith(f"proof.numerics.{place}.{name}")


@pytest.mark.parametrize("value", [0.11923456, "0.1192", None, math.inf, -0.0, 1])
def test_what_is_no_figure_is_found_without_measuring(value: object, copied: Changed) -> None:
    root, out = copied(SHARED)
    manifest = load(out)
    manifest["proof"]["numerics"]["matrices"]["layers.0.ffn.shared_experts.w1"]["relative_l2"] = value
    seal(out, manifest)
    storage = verify(Check(out, root, Level.STORAGE), ignore).storage
    assert storage.passed == (value == 0)


def test_weights_that_lose_more_than_ordinary_ones_are_named(made: Callable[..., Path], tmp_path: Path, run: Run) -> None:
    """One large value in every group: all others are flushed."""
    root = Path(shutil.copytree(made("kimi-k2-quark", **KNOBS), tmp_path / "source"))
    name = "model.layers.1.mlp.shared_experts.up_proj"
    with ShardPatch(find(root, f"{name}.weight").path) as shard:
        held = shard.tensors[f"{name}.weight"]
        values = torch.full((160, 8, 32), 0.06).bfloat16()
        values[:, :, 0] = 1.0
        shard.tensors[f"{name}.weight"] = held._replace(data=bytes(values.view(torch.uint8).flatten().tolist()))
    code, text, _ = run(root, tmp_path / "out", *MXFP4, "-q")
    assert code == 0
    (note,) = (line for line in text.splitlines() if "lost more" in line)
    assert note.startswith(f"  note: {name} lost more than ordinary weights do: relative l2 0.")
    assert "(usual: up to 0.14)" in note
    found = json.loads(run("verify", tmp_path / "out", "--source", root, "--json")[1])["numerics"]["losses"][0]["unusual"]
    assert list(found) == [name]
    assert load(tmp_path / "out")["proof"]["numerics"]["matrices"][name]["relative_l2"] > 0.14


def test_a_source_that_does_not_fit_has_no_right_bytes(copied: Changed) -> None:
    """A group's scale that became NaN after the conversion: whatever the output holds, it is not that."""
    root, out = copied(ROUTED)
    poke(root, "layers.0.ffn.experts.1.w1.scale", 5, b"\xff")
    poke(out, "original.layers.0.ffn.experts.1.w1.scale", 5, b"\xff")
    seal(out)
    found = {(m.code, m.tensor) for m in verify(Check(out, root, Level.STORAGE), ignore).storage.findings.listed}
    assert found == {("source-unfit", f"layers.0.ffn.experts.1.w1.{part}") for part in ("weight", "scale")}


def test_originals_stay_out_of_the_index_of_the_kernel_layout(changed: Changed) -> None:
    _, out = changed(ROUTED)
    assert sorted(p.name for p in (out / "fse").iterdir()) == [
        "manifest.json", "original-model-00002-of-00004.safetensors", "original-model-00004-of-00004.safetensors",
    ]  # fmt: skip


def test_without_originals(changed: Changed, tmp_path: Path, run: Run) -> None:
    root, _ = changed(ROUTED)
    out = tmp_path / "out"
    assert run(root, out, *ROUTED.options, "--drop-originals", "-q")[0] == 0
    assert "original" not in load(out)["proof"]["storage"]["tensors"]
    assert verify(Check(out, root), ignore).exit_code is ExitCode.OK
    stray = out / "fse" / "original-model-00002-of-00004.safetensors"
    shutil.copy(out / "model-00002-of-00004.safetensors", stray)
    seal(out)
    codes = {m.code for m in verify(Check(out, root, Level.STORAGE), ignore).storage.findings.listed}
    assert codes >= {"file-unexpected", "tensor-unexpected"}


def test_the_same_bytes_whatever_the_workers(changed: Changed, tmp_path: Path, run: Run) -> None:
    root, out = changed(SHARED)
    for workers in ("1", "3"):
        again = tmp_path / workers
        assert run(root, again, *SHARED.options, "-q", "--workers", workers)[0] == 0
        assert (again / "fse/manifest.json").read_bytes() == (out / "fse/manifest.json").read_bytes()
