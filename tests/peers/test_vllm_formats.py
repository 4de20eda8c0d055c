"""Checkpoints in another format inside vLLM's own classes and loaders: every expert, in slots too, has the source's values.

vLLM runs on a CPU, told that it has an SM100, an SM90 or a gfx950 with AITER (drivers/vllm_gpu.py); earlier releases run from the
Python files of their wheels, in the environment of 0.33. Loaded parameters are compared in float64; there is no forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.peers import vllm_formats
from tests.peers.vllm_formats import AMD, EXPERTS, FSE, LAYERS, NVIDIA, Case

pytestmark = pytest.mark.peers

ALL = ("0.30", "0.31", "0.32", "0.33")
WITH_0_29 = ("0.29", *ALL)  # which has no V4.1
SLOW = {"0.29", "0.31", "0.32"}
SM90 = partial(Case, gpu="sm90")
MISSES = r"KeyError: '.*{}'"
SHARED = MISSES.format(r"\.ffn\.shared_experts\.(gate_up|down)_proj\.weight(_scale_inv)?")

EXACT: list[tuple[Case, Sequence[str]]] = [
    (NVIDIA("v4"), WITH_0_29),
    (NVIDIA("v4", "fp8"), WITH_0_29),
    (NVIDIA("v4", "fp8", draft="mtp"), WITH_0_29),
    (NVIDIA("v4", "fp8", "e8m0-shared"), WITH_0_29),  # beside the experts, scales are read by value
    (NVIDIA("v4.1"), ALL),
    (NVIDIA("v4.1", "fp8"), ALL),
    (NVIDIA("v4.1", "fp8", draft="dspark"), ["0.33"]),  # earlier ones want Triton for this drafter
    (SM90("v4", "fp8"), ["0.33"]),
    (SM90("v4.1", "fp8"), ["0.33"]),
    (AMD("v4", "fp8"), WITH_0_29),
    (AMD("v4", "fp8", draft="mtp"), WITH_0_29),
    (AMD("v4", "mxfp4"), ["0.31", "0.32", "0.33"]),
    (AMD("v4", "mxfp4", draft="mtp"), ALL),
    (AMD("v4", "fp8", "e8m0-shared"), ALL),
    (FSE("v4"), ["0.29", "0.33"]),  # not fused; what the others do is below
    (FSE("v4.1"), ["0.33"]),
    (FSE("v4", "fp8"), ["0.29"]),  # not fused: its routed experts are not MXFP4
    (FSE("v4", "fp8", draft="mtp"), ["0.29"]),
    (FSE("v4", "mxfp4", draft="mtp"), ["0.29", "0.31", "0.32", "0.33"]),  # not fused: its shared experts keep FP8
    (FSE("kimi-k2"), WITH_0_29),
    (FSE("glm-4.5"), WITH_0_29),
    (FSE("glm-4.5", "mxfp4"), ["0.29"]),  # the exclusion of its MTP layer counts for every layer
]
FUSED: list[tuple[Case, Sequence[str]]] = [
    (FSE("v4", "fp8"), ALL),
    (FSE("v4", "target"), ALL),
    (FSE("v4", "mxfp4"), WITH_0_29),
    (FSE("v4", "mxfp4", "mxfp4-mtp"), ALL),
    (FSE("v4", "mxfp4", "no-twins"), ALL),
    (FSE("kimi-k2", "mxfp4"), WITH_0_29),
    (FSE("glm-4.5", "mxfp4"), ALL),
]
GARBLED: list[tuple[Case, str]] = [  # what of it is wrong; nothing is said
    (NVIDIA("v4", "fp8", "e8m0-routed"), "routed"),
    (NVIDIA("v4", "fp8", "e8m0-routed", draft="mtp"), "routed"),
    (NVIDIA("v4.1", "fp8", "e8m0-routed"), "routed"),
    (AMD("v4", "fp8", "e8m0-routed"), "routed"),
    (FSE("v4", "fp8", "e8m0-routed"), "routed"),
    (FSE("v4", "fp8", "e8m0-shared"), "slot"),
]
DAMAGED = {
    NVIDIA("v4", "fp8", "byte-routed"): ("routed", "layers.1.ffn.experts.2.w3"),
    NVIDIA("v4", "fp8", "byte-scale"): ("routed", "layers.0.ffn.experts.1.w2"),
    NVIDIA("v4", "fp8", "byte-shared"): ("shared", "layers.1.ffn.shared_experts.w2"),
    FSE("v4", "fp8", "byte-shared"): ("slot", "layers.1.ffn.shared_experts.w2"),
    FSE("v4", "mxfp4", "byte-shared"): ("slot", "layers.1.ffn.shared_experts.w2"),
}
REFUSED: list[tuple[Case, Sequence[str], str]] = [
    (FSE("v4"), ["0.30", "0.31", "0.32"], MISSES.format(r"\.routed_experts\.w13_weight_scale_inv")),
    (FSE("v4.1"), ["0.30", "0.31", "0.32"], SHARED),
    (FSE("v4", "fp8", draft="mtp"), ALL, SHARED),
    (FSE("v4", "mxfp4", draft="mtp"), ["0.30"], SHARED),
    (FSE("v4", "mxfp4", "mxfp4-mtp", draft="mtp"), ALL, SHARED),
    (AMD("v4", "mxfp4"), ["0.29", "0.30"], "AssertionError"),  # it builds every linear layer for FP8
    (AMD("v4", "mxfp4", "no-twins", draft="mtp"), ["0.31", "0.32"], "AssertionError"),
    (FSE("v4.1", "fp8"), ALL, "ValueError: FP8 MoE backend AITER does not support"),
    (NVIDIA("v4", "fp8", "expert-dtype"), ALL, "RuntimeError: The size of tensor a"),  # packed MXFP4 is half as wide
]
ASKED = [
    *EXACT,
    *FUSED,
    *((case, ALL) for case, _ in GARBLED),
    *((case, ALL) for case in DAMAGED),
    *((case, releases) for case, releases, _ in REFUSED),
]
CLASSES = {"v4": "DeepseekV4", "v4.1": "DeepseekV41", "kimi-k2": "DeepseekV3", "glm-4.5": "Glm4Moe"}
DRAFTERS = {"mtp": "DeepSeekV4MTP", "dspark": "DSparkDeepseekV4ForCausalLM"}


def in_releases(rows: Sequence[tuple[Any, ...]]) -> Any:
    """Parametrise by the cases of rows, each in its releases."""
    return pytest.mark.parametrize(
        ("release", "case", "expected"),
        [
            pytest.param(release, row[0], row[-1], id=f"{release} {row[0]}", marks=pytest.mark.slow if release in SLOW else ())
            for row in rows
            for release in row[1]
        ],
    )


@pytest.fixture
def load(work: Path, python: Path) -> Callable[[str, Case], dict[str, Any]]:
    """What a release makes of a case."""
    folder = work / "vllm"
    folder.mkdir(exist_ok=True)

    def answer(release: str, case: Case) -> dict[str, Any]:
        cases = list(dict.fromkeys(asked for asked, releases in ASKED if asked.gpu == case.gpu and release in releases))
        found = vllm_formats.answers(folder, python, release, cases)[str(case)]
        assert found["version"] == f"{release}.0"
        assert "failed" not in found, found
        return found

    return answer


def counts(case: Case, *, fused: bool = False) -> dict[str, int]:
    """How many matrices there are to compare: three of an expert, and those of attention that are FP8."""
    layers = 1 if case.draft else {"v4": LAYERS, "v4.1": 3, "kimi-k2": 1, "glm-4.5": 1}[case.source]  # those with experts
    experts = 1 if case.draft == "dspark" else EXPERTS
    dense = 5 * layers if case.source.startswith("v4") else 0
    dense += case.source == "v4.1" and not case.draft  # its indexer
    return {"routed": 3 * experts * layers, "slot": 3 * layers * fused, "shared": 3 * layers * (not fused), "dense": dense}


@in_releases(EXACT)
def test_beside_the_routed_ones(load: Callable[..., dict[str, Any]], release: str, case: Case, expected: object) -> None:
    answer = load(release, case)
    assert answer["refused"] is None
    assert (answer["fused"], answer["unequal"], answer["equal"]) == (False, {}, counts(case))
    assert answer["class"] == DRAFTERS.get(case.draft, f"{CLASSES[case.source]}ForCausalLM")


@in_releases(FUSED)
def test_in_a_slot(load: Callable[..., dict[str, Any]], release: str, case: Case, expected: object) -> None:
    answer = load(release, case)
    assert answer["refused"] is None
    assert answer["fused"]
    assert set(answer["slots"]) == {1}
    assert (answer["unequal"], answer["equal"]) == ({}, counts(case, fused=True))


@in_releases([(case, ALL, wrong) for case, wrong in GARBLED])
def test_e8m0_scales_are_garbled_and_nothing_is_said(
    load: Callable[..., dict[str, Any]], release: str, case: Case, expected: str
) -> None:
    answer, all_ = load(release, case), counts(case, fused=case.fse)
    assert answer["refused"] is None
    assert {kind: len(names) for kind, names in answer["unequal"].items()} == {expected: all_[expected]}
    assert answer["equal"] == {**all_, expected: 0}


@in_releases([(case, ALL, wrong) for case, wrong in DAMAGED.items()])
def test_one_damaged_bit_is_seen(load: Callable[..., dict[str, Any]], release: str, case: Case, expected: tuple[str, str]) -> None:
    answer, all_ = load(release, case), counts(case, fused=case.fse)
    kind, name = expected
    assert answer["unequal"] == {kind: [name]}
    assert answer["equal"] == {**all_, kind: all_[kind] - 1}


@in_releases(REFUSED)
def test_what_the_server_refuses(load: Callable[..., dict[str, Any]], release: str, case: Case, expected: str) -> None:
    answer = load(release, case)
    assert answer["refused"], answer
    assert re.match(expected, answer["refused"])
