"""vLLM's own check, before and after every change of format: no, then yes, by the published code of 0.29 to 0.33.

It reads configs alone. That it says yes where its loader then fails is told by our own rules (`tests/plan/changes`), which are held
against it here wherever it decides.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.source import Source
from fse_convert.servers.aiter.vllm_config import RELEASES
from tests.peers.aiter import answer, ask_vllm, cases, sources_of
from tests.plan.changes.models import changes_of, made, opened
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
