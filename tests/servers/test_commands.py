"""The command that starts a server has the flags and variables of the server's row, and only those."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from fse_convert.servers.aiter.families import find_aiter_family
from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.commands import serve_command
from fse_convert.servers.judge import ALL_TARGETS, AnyTarget
from fse_convert.servers.release_names import find_named

AITER = "VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_MOE=1 VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1 vllm serve out"
NATIVE = "--moe-backend deep_gemm_mega_moe --enable-expert-parallel"
LABELS = """--quantization-config.targets '{"*shared_experts*": "mxfp4"}'"""
COMMANDS = {
    "megamoe-512": "",
    "tensorrt-llm": "",
    "atom": "",
    "vllm-0.30": f"vllm serve out --tensor-parallel-size 8 --load-format fse {NATIVE}",
    "sglang-0.5.21": "python -m sglang.launch_server --model-path out --tp 8 --moe-a2a-backend megamoe",
    "sglang-0.5.23-slots": "python -m sglang.launch_server --model-path out --tp 8 --enforce-shared-experts-fusion",
    "vllm-0.33-aiter": AITER,
    "vllm-0.33-aiter-fhmoe": f"{AITER} --tensor-parallel-size 8 --moe-backend aiter",
    "vllm-0.33-aiter-mega": f"{AITER} --moe-backend aiter_mega_moe {LABELS}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    assert serve_command(find_named(name, ALL_TARGETS), "out", "deepseek_v4", fse=True) == COMMANDS[name]


def test_without_a_kernel_layout_vllm_loads_as_ever() -> None:
    command = serve_command(find_named("vllm-0.30", ALL_TARGETS), "out", "deepseek_v4", fse=False)
    assert command == "vllm serve out --tensor-parallel-size 8 --moe-backend deep_gemm_mega_moe --enable-expert-parallel"


def test_one_release_takes_v41_as_text_only() -> None:
    command = serve_command(find_named("sglang-0.5.21", ALL_TARGETS), "out", "deepseek_v41", fse=True)
    assert command == COMMANDS["sglang-0.5.21"] + """ --json-model-override-args '{"vision_n_layers": 0}'"""


@pytest.mark.parametrize("target", ALL_TARGETS, ids=lambda t: t.name)
def test_every_command_can_be_pasted(target: AnyTarget) -> None:
    words = shlex.split(serve_command(target, "out", "deepseek_v41", fse=True))
    assert all(word.isascii() and "..." not in word for word in words)
    assert ("out" in words) == (target.engine in ("vLLM", "vLLM ROCm", "SGLang"))


@pytest.mark.parametrize("target", ALL_TARGETS, ids=lambda t: t.name)
def test_a_tensor_parallel_size_that_was_asked_for_is_in_the_command(target: AnyTarget) -> None:
    usual, four = (serve_command(target, "out", "deepseek_v4", fse=True, tp=tp) for tp in (1, 4))
    only_eight = target.name.endswith("-fhmoe")
    asked = usual.replace("--tensor-parallel-size 8", "--tensor-parallel-size 4").replace("--tp 8", "--tp 4")
    assert four == (usual if only_eight else asked)


@pytest.mark.parametrize(("tp", "size"), [(1, 8), (2, 8), (4, 4), (8, 8)])
def test_a_size_that_the_model_needs_is_in_the_command(tp: int, size: int) -> None:
    """0.32 models/glm5next/common/model.py:1308."""
    family = find_aiter_family({"model_type": "glm5_next"})
    assert family
    row = next(t for t in AITER_TARGETS if t.name == "vllm-0.33-aiter")
    needing = replace(row, conditions=family.needs)
    assert serve_command(needing, "out", "glm5_next", fse=False, tp=tp) == f"{AITER} --tensor-parallel-size {size}"
