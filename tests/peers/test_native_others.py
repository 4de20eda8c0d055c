"""Native fusion on other releases: vLLM 0.30's own class after loading, and SGLang 0.5.23's own check of shapes."""

from __future__ import annotations

import pytest
import torch

from fse_convert.servers.native import native_verdict
from fse_convert.servers.targets import find_target
from fse_convert.servers.verdict import Outcome, Verdict
from fse_convert.testing.memory import Model
from tests.peers import published, wheels
from tests.peers.published import SharedMlp

pytestmark = pytest.mark.peers


def ours(name: str, model: Model) -> Verdict:
    target = find_target(name)
    assert target is not None
    about = model.subject()
    return native_verdict(about.description.layers[0], target, about.config)


def empty_mlp(hidden: int, width: int, experts: int, block: int) -> SharedMlp:
    def scale(n: int, k: int) -> torch.Tensor:
        return torch.full((n // block, k // block), 127, dtype=torch.uint8)

    up, down = torch.zeros(width, hidden, dtype=torch.uint8), torch.zeros(hidden, width, dtype=torch.uint8)
    scales = (scale(width, hidden), scale(width, hidden), scale(hidden, width))
    return SharedMlp(up, up.clone(), down, *scales, (block, block), experts)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    ("routed", "shared", "experts"),
    [(384, 384, 1), (512, 512, 1), (384, 512, 1), (512, 384, 1), (1024, 1024, 1), (512, 1024, 2), (384, 768, 2), (384, 1024, 2)],
)
def test_vllm_0_30(routed: int, shared: int, experts: int, block: int) -> None:
    """It pads routed experts to 512 while loading, and then asks the shared MLP for that width."""
    try:
        theirs = published.vllm_0_30_experts(empty_mlp(512, shared, experts, block), routed)
    except wheels.PeerUnavailable as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    model = Model(512, routed, 1, experts, shared, shared=f"fp8-{block}", layers=1, mtp=0)
    assert ours("vllm-0.30", model).fused == theirs.has_fused_shared_experts


@pytest.mark.parametrize(("routed", "mma_type"), [("mxfp4", "fp8xfp4"), ("nvfp4", "nvfp4xnvfp4")])
@pytest.mark.parametrize("hidden", [512, 768, 1024, 4096, 4352, 5120, 7168])
@pytest.mark.parametrize("width", [128, 256, 384, 512, 2048, 2176, 2304, 2240, 3072])
def test_sglang_0_5_23_refuses_the_same_shapes(routed: str, mma_type: str, hidden: int, width: int) -> None:
    try:
        check = published.sglang().check_mega_moe_shapes
    except wheels.PeerUnavailable as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    try:
        check(hidden, width, mma_type)
        refused = False
    except ValueError:
        refused = True
    model = Model(hidden, width, 1, routed=routed, layers=1, mtp=0)
    assert (ours("sglang-0.5.23", model).outcome is Outcome.REFUSED) == refused
