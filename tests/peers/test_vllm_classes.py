"""Converted checkpoints in vLLM's published experts' classes, with torch alone: the quick part of `test_vllm_serving.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fse_convert.serving.sidecar import open_sidecar
from tests.peers import published, wheels

pytestmark = pytest.mark.peers

LAYER, WIDTH, PADDED = "layers.1.ffn", 384, 512
BLOCKS = {"v4-flash": (128, 128), "v4.1-flash": (32, 32)}


def shared_mlp(folder: Path, block: tuple[int, int]) -> published.SharedMlp:
    """A layer's shared expert out of the standard layout, by safetensors alone."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def read(name: str) -> Tensor:
        full = f"{LAYER}.shared_experts.{name}"
        with safe_open(folder / index[full], framework="pt") as f:
            return f.get_tensor(full).view(torch.uint8)

    gate, up, down = (read(f"{w}.weight") for w in ("w1", "w3", "w2"))
    return published.SharedMlp(gate, up, down, *(read(f"{w}.scale") for w in ("w1", "w3", "w2")), block=block, experts=1)


@pytest.fixture(params=BLOCKS)
def before_and_after(
    request: pytest.FixtureRequest, made: Callable[..., Path], tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> tuple[published.SharedMlp, published.SharedMlp, Path]:
    """The shared expert before and after the conversion, and the output."""
    source, out = made(request.param), tmp_path / "out"
    assert run(source, out, "--verify", "storage")[0] == 0
    block = BLOCKS[request.param]
    return shared_mlp(source, block), shared_mlp(out, block), out


Converted = tuple[published.SharedMlp, published.SharedMlp, Path]


def assert_is_the_sidecar(theirs: published.KernelWeights, out: Path) -> None:
    ours = open_sidecar(out).tensors(f"{LAYER}.experts")
    for name, mine, his in zip(ours._fields, ours, theirs, strict=True):
        assert (his.dtype, his.shape, his.stride()) == (mine.dtype, mine.shape, mine.stride()), name
        assert torch.equal(his.contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8)), name


def test_0_30_fuses_after_the_conversion_and_not_before(before_and_after: Converted) -> None:
    before, after, out = before_and_after
    log = published.vllm(wheels.VLLM_0_30).log
    log.warnings.clear()
    experts = published.vllm_0_30_experts(before, WIDTH)
    assert not experts.has_fused_shared_experts
    assert experts.intermediate_size == PADDED, "0.30 pads the routed experts itself"
    assert len(log.warnings) == 1
    assert f"expected replicated block-FP8 weights with gate_up={(2 * PADDED, 512)}" in log.warnings[0]
    log.warnings.clear()
    experts = published.vllm_0_30_experts(after, PADDED)
    assert experts.has_fused_shared_experts
    assert log.warnings == []
    l1, l2 = experts._transformed_shared_l1_weights, experts._transformed_shared_l2_weights
    assert_is_the_sidecar(published.KernelWeights(*l1, *l2), out)


def test_0_33_loads_the_kernel_layout_of_the_sidecar(before_and_after: Converted) -> None:
    _, after, out = before_and_after
    assert_is_the_sidecar(published.JUDGES["vLLM 0.33"](after), out)
