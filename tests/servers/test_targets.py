"""The table of targets: consistent, addressable, and with a source for every row."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fse_convert.model.formats import StorageKind
from fse_convert.servers.judge import ALL_TARGETS
from fse_convert.servers.targets import (
    CONTRACTS,
    MEGAMOE_128,
    MEGAMOE_512,
    TARGETS,
    Target,
    find_target,
)
from tests.releases import MEGA, SGLANG, VLLM


def test_names_are_unique_over_all_questions() -> None:
    names = [t.name for t in ALL_TARGETS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_row_says_where_it_was_read_and_what_it_needs(target: Target) -> None:
    assert ".py" in target.source or ".cuh" in target.source
    assert target.started_with
    assert target.release in target.name or target.engine in ("contract", "TensorRT-LLM")
    assert find_target(target.name) is target


def test_the_releases_of_the_issue_are_there() -> None:
    names = {t.name for t in ALL_TARGETS}
    for vllm in VLLM:
        assert f"{vllm}-aiter" in names
    for sglang in SGLANG:
        assert f"{sglang}-slots" in names
    assert {"tensorrt-llm", "atom", "megamoe-128", "megamoe-512"} <= names
    assert MEGA[0] == "vllm-0.33-aiter-mega"


def test_contracts_are_what_the_kernels_assert() -> None:
    assert CONTRACTS == {"megamoe-512": MEGAMOE_512, "megamoe-128": MEGAMOE_128}
    assert (MEGAMOE_512.width_multiple, MEGAMOE_512.hidden_multiple) == (512, 512)
    assert (MEGAMOE_128.width_multiple, MEGAMOE_128.hidden_multiple) == (128, 256)


def test_no_vllm_release_fuses_nvfp4_routed_experts() -> None:
    """0.33's class could (deep_gemm_mega_moe.py:163-171), but its DeepSeek-V4 model always asks for MXFP4."""
    assert all(StorageKind.NVFP4 not in t.pairings for t in TARGETS if t.engine == "vLLM")


def test_the_command_lists_all_targets(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("targets", "--json")
    assert code == 0
    listed = json.loads(out)["targets"]
    assert [t["name"] for t in listed] == [t.name for t in ALL_TARGETS]
    assert all(t["source"] and t["question"] for t in listed)
    code, out, _ = run("targets")
    assert code == 0
    assert all(t.name in out for t in ALL_TARGETS)
