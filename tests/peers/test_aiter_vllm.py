"""Our AITER rules against vLLM's own code, over a grid of configs and over random exclusions.

vLLM 0.33.0 runs in an environment of its own, built by `make_env.py` when it is missing; `FSE_PEERS_VLLM` names it, by
default `vllm` in the peers' folder. Earlier releases (marked slow) run in the same environment, from the Python files of
their wheels.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fse_convert.model.quantization import read_quantization
from fse_convert.servers.aiter.all_or_nothing import judge_model
from fse_convert.servers.aiter.question import AiterQuestion, AiterTarget, ask_aiter, judge, judge_mtp_layer
from fse_convert.servers.aiter.vllm_config import RELEASES
from fse_convert.servers.hazards import misread
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict
from tests.peers.aiter import ask_vllm, sources_of
from tests.peers.aiter_cases import FAMILIES, grid, quark_modules
from tests.peers.aiter_random import random_cases

pytestmark = pytest.mark.peers

RANDOM_CASES, SEED = 2000, 20261129

KNOWN = {
    r"/fbgemm$": "vLLM passes this message to ValueError unformatted, so its text is that of a tuple",
    r"/mega/quark-(mxfp8-2d|odd)$": "vLLM raises for these schemes, where we say that they do not fuse",
    r"/file/MIXED_PRECISION$": "no fusion rule for the class; vLLM fails earlier, as the file does not list the layers",
}
"""Cases of the grid that differ, by the end of their name, and why."""

KNOWN_ANYWHERE = {
    "is not understood": "Python's re does not compile the pattern: we say unknown, where vLLM's regex module raises or matches",
}
"""What our messages contain where we say unknown, and why."""


@dataclass(frozen=True)
class Answer:
    """What one side says about a case, in the form that is compared."""

    outcome: Outcome
    message: str
    kind: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    @property
    def _key(self) -> tuple[str, ...]:
        # Sets print in any order.
        text = re.sub(r"\{'[^{}]*'\}", lambda found: str(sorted(found.group()[1:-1].split(", "))), self.message)
        # A scheme that does not fit is named in another way.
        text = re.sub(r"(?<=routed expert weight key )(?!None).*", "...", text)
        return self.outcome.value, text, self.kind


@dataclass
class Comparison:
    """All differences between vLLM's answers and ours, less the known ones; which known ones occurred; how many of each outcome."""

    version: str
    unknown: dict[str, tuple[Answer, Answer]]
    known: Counter[str]
    outcomes: Counter[str]
    codes: set[str]

    def __str__(self) -> str:
        total, agreed = sum(self.outcomes.values()), sum(self.outcomes.values()) - self.known.total() - len(self.unknown)
        return f"vLLM {self.version}: {total} cases {dict(self.outcomes)}, {agreed} agree; known differences {dict(self.known)}"


def question_of(case: dict[str, Any], release: str) -> AiterQuestion:
    config, file = case["config"], case.get("quant_config")
    target = AiterTarget("x", RELEASES[release], mega_moe="online" in case)
    question = ask_aiter(config, file, read_quantization(config, file), target)
    assert isinstance(question, AiterQuestion)
    assert question.family is FAMILIES[case["family"]]
    return question


def ours(case: dict[str, Any], release: str) -> tuple[Answer, str]:
    """Our answer, and its reason's code."""
    question = question_of(case, release)
    if case.get("mtp_layer") is not None:
        verdict = judge_mtp_layer(question, case["mtp_layer"])
    else:
        verdict = judge(question, f"{case['block']}.experts", f"{case['block']}.{case['shared']}")
    reason = verdict.reasons[0] if verdict.reasons else Reason("", "")
    return Answer(verdict.outcome, reason.message, question.quant.class_name), reason.code


def theirs(answer: dict[str, Any], mine: Answer) -> Answer:
    """vLLM's answer in our form; what it does not say (an exception without text, the class after one) is taken from ours."""
    if "error" in answer:
        kind = answer.get("class") if answer["stage"] == "check" else mine.kind
        return Answer(Outcome.ERROR, answer["text"] or mine.message, kind or "")
    assert answer.get("resolved", answer["fused"]) == answer["fused"]
    return Answer(Outcome.FUSED if answer["fused"] else Outcome.UNFUSED, answer["reason"] or "", answer["class"])


def compare(cases: list[dict[str, Any]], release: str, python: Path, sources: Path | None = None) -> Comparison:
    names = [case["id"] for case in cases]
    assert len(set(names)) == len(names)
    request = [{key: value for key, value in case.items() if key != "family"} for case in cases]
    asked = ask_vllm({"cases": request}, python, sources)
    assert [answer["id"] for answer in asked["answers"]] == names
    result = Comparison(asked["version"], {}, Counter(), Counter(), set())
    for case, answer in zip(cases, asked["answers"], strict=True):
        mine, code = ours(case, release)
        his = theirs(answer, mine)
        result.outcomes[his.outcome.value] += 1
        result.codes.add(code)
        if mine != his:
            known = [pattern for pattern in KNOWN if re.search(pattern, case["id"])]
            known += [text for text in KNOWN_ANYWHERE if mine.outcome is Outcome.UNKNOWN and text in mine.message]
            if known:
                result.known[known[0]] += 1
            else:
                result.unknown[case["id"]] = mine, his
    print(result)
    return result


@pytest.fixture(scope="module")
def on_the_grid(python: Path) -> Comparison:
    return compare(grid(), "0.33", python)


def test_every_case_of_the_grid_agrees_but_the_known_ones(on_the_grid: Comparison) -> None:
    assert on_the_grid.version == "0.33.0"
    assert sum(on_the_grid.outcomes.values()) >= 3500
    assert min(on_the_grid.outcomes[outcome] for outcome in ("fused", "unfused", "error")) >= 150
    assert on_the_grid.unknown == {}


def test_no_known_difference_is_stale(on_the_grid: Comparison) -> None:
    assert set(on_the_grid.known) == set(KNOWN)


def test_the_grid_reaches_every_rule_of_the_release(on_the_grid: Comparison) -> None:
    assert on_the_grid.codes - {""} == {
        "aiter-config-refused",
        "aiter-deepseek-excluded",
        "aiter-deepseek-no-quantization",
        "aiter-deepseek-not-quark-mxfp4",
        "aiter-deepseek-shared-not-mxfp4",
        "aiter-fp8-ignored-differently",
        "aiter-fp8-not-block",
        "aiter-fp8-store-dtype",
        "aiter-mxfp8-excluded-differently",
        "aiter-online-class",
        "aiter-online-routed-key",
        "aiter-quantization-unsupported",
        "aiter-quark-configs-differ",
        "aiter-quark-excluded",
        "aiter-quark-incomplete",
        "aiter-server-error",
        "aiter-shards-differ",
    }


def compare_modules(release: str, python: Path, sources: Path | None = None) -> None:
    """Hold the schemes of single Quark modules against vLLM's: those that it builds as FP4, though they are stored in FP8."""
    cases = quark_modules()
    for case, answer in zip(cases, ask_vllm({"cases": cases}, python, sources)["answers"], strict=True):
        found = misread(question_of(case, release), tuple(case["stored"]), case["mtp_layer"])
        theirs = [name for name, server in zip(case["stored"], case["modules"], strict=True) if answer["schemes"][server] == "fp4"]
        assert list(found) == theirs, case["id"]


def test_the_schemes_of_single_modules_agree(python: Path) -> None:
    compare_modules("0.33", python)


def test_random_exclusions_agree(python: Path) -> None:
    result = compare(random_cases(RANDOM_CASES, SEED), "0.33", python)
    assert result.unknown == {}
    assert sum(result.known.values()) <= RANDOM_CASES // 100
    assert min(result.outcomes["fused"], result.outcomes["unfused"]) >= 400
    assert result.outcomes["error"] >= 10


def test_whole_models_agree(python: Path) -> None:
    """Every mix of up to five layers that are fused, not fused, or on another pipeline rank."""
    states = [list(mix) for length in range(6) for mix in product((True, False, None), repeat=length)]
    answers = ask_vllm({"cases": [], "mixed": states}, python)["mixed"]
    assert len(answers) == len(states) == 364
    for mix, answer in zip(states, answers, strict=True):
        no = Verdict(Outcome.UNFUSED, (Reason("aiter-quark-excluded", "Quark excludes shared experts"),))
        mine = judge_model(FUSED if state else no for state in mix if state is not None)
        if "error" in answer:
            assert (mine.outcome, mine.reasons[0].code, mine.reasons[0].message) == (
                Outcome.ERROR,
                "aiter-model-mixed",
                answer["text"],
            )
        else:
            assert mine.outcome is (Outcome.FUSED if answer["fused"] else Outcome.UNFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("release", [name for name in RELEASES if name != "0.33"])
def test_earlier_releases_agree(release: str, python: Path) -> None:
    sources = sources_of(release)
    cases = [case for case in grid() + random_cases(RANDOM_CASES, SEED + 1) if str(FAMILIES[case["family"]].since) <= release]
    if not RELEASES[release].mega_moe:
        cases = [case for case in cases if "online" not in case]
    result = compare(cases, release, python, sources)
    assert result.version == f"{release}.0"
    assert result.unknown == {}
    if release in ("0.31", "0.32"):  # before, DeepSeek-V4 by Quark is read as FP8
        compare_modules(release, python, sources)
