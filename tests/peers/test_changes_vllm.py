"""vLLM's own check, before and after every change of format: no, then yes, by the published code of 0.29 to 0.33.

It reads configs alone. That it says yes where its loader then fails is told by our own rules (`tests/plan/changes`), which are held
against it here wherever it decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fse_convert.model.description import LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.source import Source
from fse_convert.servers.aiter.question import AiterQuestion, AiterTarget, ask_aiter, judge_layer
from fse_convert.servers.aiter.vllm_config import RELEASES
from tests.peers.aiter import ask_vllm, sources_of
from tests.peers.aiter_cases import CLASSES
from tests.plan.changes.models import changes_of, letters, made, opened
from tests.plan.changes.recipes import RECIPES

pytestmark = pytest.mark.peers

NEWEST = "0.33"
Pair = tuple[Source, Source]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Every recipe's checkpoint, and what its changes make of it."""
    found = {}
    for recipe in RECIPES:
        root = made(tmp_path_factory.mktemp("recipe") / "source", recipe.kind, **recipe.knobs)
        recipe.damage(root)
        source = opened(root)
        found[recipe.name] = source, with_changes(source, changes_of(source, recipe.changes))
    return found


def cases(name: str, source: Source, release: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield a case for every layer, with our letter for the check itself, and for what comes of it."""
    config = source.checkpoint.config
    question = ask_aiter(config, None, source.quantization, AiterTarget("x", RELEASES[release]))
    assert isinstance(question, AiterQuestion)
    (outcome,) = letters(source, (f"vllm-{release}-aiter",))
    for layer, letter in zip(source.description.layers, outcome, strict=True):
        case = {"id": f"{name}: {layer.layer.name}", "config": config, "model_class": CLASSES[question.family.name]}
        case |= {"shared": question.family.shared, **place(question, layer, source)}
        yield case, judge_layer(question, layer).outcome.value[0], letter


def place(question: AiterQuestion, layer: LayerDescription, source: Source) -> dict[str, Any]:
    """Return the module of a layer's experts, and for DeepSeek-V4's drafter how many layers it has."""
    family, index, layers = question.family, layer.layer.index, question.decoder_layers or 0
    if layer.layer.kind is LayerKind.DECODER:
        return {"block": family.block.format(index=index)}
    drafter = sum(d.layer.kind is LayerKind.MTP for d in source.description.layers)
    return {"block": family.mtp_block.format(k=index, next=layers + index), "mtp": drafter if family.v4 else None}


def answer(found: dict[str, Any]) -> str:
    """Return vLLM's answer as a letter."""
    return "e" if "error" in found else "f" if found["fused"] else "u"


@pytest.mark.parametrize("release", [pytest.param(name, marks=[] if name == NEWEST else pytest.mark.slow) for name in RELEASES])
def test_vllm_says_no_before_and_yes_after(release: str, pairs: dict[str, Pair], python: Path) -> None:
    asked = [found for name, pair in pairs.items() for when, source in zip(("before", "after"), pair, strict=True)
             for found in cases(f"{name}, {when}", source, release)]  # fmt: skip
    sources = None if release == NEWEST else sources_of(release)
    answers = ask_vllm({"cases": [case for case, _, _ in asked]}, python, sources)
    assert answers["version"] == f"{release}.0"
    theirs = {found["id"]: answer(found) for found in answers["answers"]}
    assert theirs == {case["id"]: own for case, own, _ in asked}
    unsafe = {case["id"]: letter for case, _, letter in asked if letter != theirs[case["id"]]}
    assert set(unsafe.values()) <= {"x"}, "only where its loader fails do we say otherwise"
    column = list(RELEASES).index(release)
    for recipe in RECIPES:
        for when, expected in (("before", recipe.before[column]), ("after", recipe.after[column])):
            own = [letter for id_, letter in theirs.items() if id_.startswith(f"{recipe.name}, {when}: ")]
            assert len(own) == len(expected)
            assert [letter for letter, told in zip(own, expected, strict=True) if told != "x"] == [t for t in expected if t != "x"]
