"""Names of targets as people write them: a release is a version, and another release is never proposed for it."""

from __future__ import annotations

import pytest

from fse_convert.errors import UsageError
from fse_convert.servers.judge import ALL_TARGETS
from fse_convert.servers.release_names import find_named, for_version
from fse_convert.servers.targets import TARGETS
from tests.releases import AITER, NEWEST, SGLANG, SLOTS, VLLM


@pytest.mark.parametrize("name", [t.name for t in ALL_TARGETS])
def test_every_name_finds_its_own_row(name: str) -> None:
    assert find_named(name, ALL_TARGETS).name == name
    assert find_named(name.upper(), ALL_TARGETS).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("vllm-0.30.1", "vllm-0.30"),
        ("vllm==0.30.0", "vllm-0.30"),
        ("VLLM-0.30", "vllm-0.30"),
        ("vLLM 0.31.2rc1", "vllm-0.31"),
        ("vllm-v0.30", "vllm-0.30"),
        ("vllm@0.29.4", "vllm-0.29"),
        ("vllm-0.30.1-aiter", "vllm-0.30-aiter"),
        ("vllm==0.33.1-aiter-mega", "vllm-0.33-aiter-mega"),
        ("sglang-0.5.22.post1", "sglang-0.5.22"),
        ("sglang-0.5.21-slots", "sglang-0.5.21-slots"),
        ("vllm", VLLM[-1]),
        ("vllm-aiter", AITER[-1]),
        ("SGLang", SGLANG[-1]),
        ("sglang-slots", SLOTS[-1]),
        ("MegaMoE-128", "megamoe-128"),
        ("TensorRT-LLM", "tensorrt-llm"),
    ],
)
def test_spellings_of_a_release(written: str, name: str) -> None:
    assert find_named(written, ALL_TARGETS).name == name


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        ("vllm-0.99", f"vLLM 0.99 is newer than the newest release known here, {NEWEST.release}", "update fse-convert"),
        (
            "vllm-1.0.0-aiter",
            f"vLLM ROCm 1.0.0 is newer than the newest release known here, {NEWEST.release}",
            "update fse-convert",
        ),
        ("vllm-0.3", "vLLM 0.3 is older than the oldest release known here, 0.29", "fse-convert targets"),
        ("sglang-0.5.3", "SGLang 0.5.3 is older than the oldest release known here, 0.5.20", "fse-convert targets"),
        ("sglang-0.5", "SGLang 0.5 is older than", "fse-convert targets"),
        ("vllm-0.30.x", "known releases of vLLM are 0.29, 0.30", "fse-convert targets"),
        ("vlm-0.30", "no target 'vlm-0.30'", "did you mean vllm-0.30?"),
        ("megamoe-513", "no target 'megamoe-513'", "fse-convert targets"),
        ("megamo-512", "no target 'megamo-512'", "did you mean megamoe-512?"),
        ("vllm-0.30-aitr", "no target 'vllm-0.30-aitr'", "did you mean vllm-0.30-aiter?"),
        ("", "no target ''", "fse-convert targets"),
    ],
)
def test_what_is_said_of_a_release_that_is_not_known(written: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_named(written, ALL_TARGETS, "--require")
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in problem.hint
    assert problem.where == "--require"


@pytest.mark.parametrize(
    ("engine", "version", "name"),
    [
        ("SGLang", "0.5.22", "sglang-0.5.22"),
        ("SGLang", "0.5.22rc1", "sglang-0.5.22"),
        ("SGLang", "0.5.22.post1", "sglang-0.5.22"),
        ("SGLang", "0.5.22.dev3+g1234567", "sglang-0.5.22"),
        ("SGLang", "0.5.21rc0", "sglang-0.5.21"),
        ("SGLang", "0.5.2", "newest"),
        ("SGLang", "0.99.0rc1", "newest"),
        ("SGLang", "main", "newest"),
        ("vLLM", "0.30.0", "vllm-0.30"),
        ("vLLM", "0.31.2rc1.dev5+gabc", "vllm-0.31"),
        ("vLLM", "0.3.1", "newest"),
        ("vLLM", "0.99.0", "newest"),
        ("vLLM", "dev", "newest"),
    ],
)
def test_the_row_of_an_installed_release_candidate_or_build(engine: str, version: str, name: str) -> None:
    newest = [t.name for t in TARGETS if t.engine == engine][-1]
    assert for_version(engine, version, TARGETS).name == (newest if name == "newest" else name)
