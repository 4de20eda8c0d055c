"""Native fusion: the real ``DeepGemmMegaMoEExperts`` of vLLM 0.33 agrees with our verdicts on shapes, dtypes and scale blocks.

The class's own method decides, out of the published wheel; only what the server would hold beside it stands in. It sees
what a loader would have allocated from the same headers: one linear for gate and up, one for down, on torch's meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from fse_convert.servers.native import native_verdict
from fse_convert.servers.targets import FP8_SHARED, find_target
from fse_convert.servers.verdict import Outcome, Verdict
from fse_convert.testing.memory import Model, matrix
from tests.peers import published, wheels

pytestmark = pytest.mark.peers

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
SHARED = (
    *("fp8-128", "fp8-32", "fp8-32-u8", "mxfp8", "mxfp8-u8", "fp8-16", "fp8-1x16", "fp8-128-f32", "fp8-128-bf16"),
    *("fp8-tensor", "fp8-channel", "mxfp4", "mxfp4-u8", "nvfp4", "bf16", "f16"),
)
ROUTED = {"mxfp4": "MEGA_MOE_MXFP4", "mxfp8": "MEGA_MOE_MXFP8"}
SIZES = ((5120, 2304), (5120, 2560), (4096, 2048), (7168, 3072), (512, 384), (256, 128))


@dataclass(frozen=True)
class Case:
    """A layer: sizes, how its experts are stored, and the shared MLP's width in routed widths."""

    hidden: int
    width: int
    routed: str
    shared: str
    times: float = 1.0

    def __str__(self) -> str:
        return f"{self.hidden}x{self.width}-{self.routed}-{self.shared}-{self.times:g}"

    @property
    def shared_width(self) -> int:
        return int(self.width * self.times)


MXFP4 = [
    *(Case(h, w, "mxfp4", shared) for h, w in SIZES for shared in SHARED),
    *(
        Case(h, w, "mxfp4", shared, times)
        for h, w in SIZES
        for shared in ("fp8-32", "mxfp8", "fp8-128")
        for times in (2, 4, 0.5, 1.5)
    ),
]
MATRIX = [Case(5120, 2304, routed, shared, times) for routed in ROUTED for shared in SHARED for times in (1, 2, 1.5)]


@pytest.fixture(scope="module")
def code() -> SimpleNamespace:
    try:
        return published.vllm(wheels.VLLM_0_33)
    except wheels.PeerUnavailable as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def ours(case: Case, *, fp8_routed: bool = False) -> Verdict:
    """Our verdict for vLLM 0.33. ``fp8_routed``: as if a model asked for FP8 routed experts too, which kernel and class have."""
    target = find_target("vllm-0.33")
    assert target is not None
    if fp8_routed:
        target = replace(target, pairings=FP8_SHARED)
    about = Model(case.hidden, case.width, 1, 1, case.shared_width, case.routed, case.shared, layers=1, mtp=0).subject()
    return native_verdict(about.description.layers[0], target, about.config)


def linear(store: str, n: int, k: int, shards: int) -> SimpleNamespace:
    """A linear as the loader allocates it: the shards' rows one after another, per-tensor scales one per shard."""
    parts = {s: (dtype, shape) for s, (dtype, shape) in matrix(store, n, k).items() if not s.endswith(("_2", "input_scale"))}
    held: dict[str, torch.Tensor] = {}
    for suffix, (dtype, shape) in parts.items():
        rows = (shards * shape[0], *shape[1:]) if shape else (shards,)
        name = suffix if suffix == "weight" else "weight_scale_inv" if suffix == "scale" else suffix
        held[name] = torch.empty(rows, dtype=DTYPES[dtype], device="meta")
    return SimpleNamespace(**held)


def theirs(code: SimpleNamespace, case: Case) -> int:
    """How many shared experts the published method fuses; 0 for none. DeepGEMM's Python counts as new enough."""
    layer = SimpleNamespace(
        hidden_size=case.hidden,
        intermediate_size=case.width,
        weight_format=getattr(code, ROUTED[case.routed]),
        _kernel_fuses_shared_experts=lambda _spec: True,
    )
    mlp = SimpleNamespace(
        gate_up_proj=linear(case.shared, case.shared_width, case.hidden, shards=2),
        down_proj=linear(case.shared, case.hidden, case.shared_width, shards=1),
    )
    count: int = code.DeepGemmMegaMoEExperts._fusable_shared_experts(layer, mlp)[0]
    return count


@pytest.mark.parametrize("case", MXFP4, ids=str)
def test_mxfp4_layers(code: SimpleNamespace, case: Case) -> None:
    count = theirs(code, case)
    assert ours(case).fused == (count > 0), ours(case).reasons
    assert count in (0, case.times)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_pair_of_formats_with_fp8(code: SimpleNamespace, case: Case) -> None:
    verdict = ours(case, fp8_routed=True)
    assert verdict.fused == (theirs(code, case) > 0), verdict.reasons


def test_the_grid_is_large_and_has_both_answers(code: SimpleNamespace) -> None:
    answers = [theirs(code, case) > 0 for case in MXFP4 + MATRIX]
    assert len(answers) >= 150
    assert 0.15 < sum(answers) / len(answers) < 0.85


@pytest.mark.parametrize(("hidden", "width"), [(4096, 2240), (4096, 1344), (320, 128), (192, 128)])
def test_what_the_published_constructor_refuses_we_refuse(code: SimpleNamespace, hidden: int, width: int) -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        code.check_deep_gemm_mega_moe_supported(torch.device("cpu"), hidden, width)
    target = find_target("vllm-0.33")
    assert target is not None
    about = Model(hidden, width, 1, layers=1, mtp=0).subject()
    assert native_verdict(about.description.layers[0], target, about.config).outcome is Outcome.REFUSED


@pytest.mark.parametrize("hidden", [128, 384, 640, 4224])
def test_the_one_difference_is_the_compiled_kernels(code: SimpleNamespace, hidden: int) -> None:
    """vLLM's Python asks for a hidden size of 128s, the kernel it then calls asserts 256s (scheduler/mega_moe.cuh:56).

    So vLLM decides to fuse and fails at the first launch; we say no. No published model has such a hidden size.
    """
    case = Case(hidden, 256, "mxfp4", "mxfp8")
    code.check_deep_gemm_mega_moe_supported(torch.device("cpu"), hidden, 256)
    assert theirs(code, case) == 1
    assert [r.code for r in ours(case).reasons] == ["hidden-alignment"]


@pytest.mark.parametrize(
    ("shared_width", "block"),
    [(256, (32, 32)), (512, (32, 32)), (384, (32, 32)), (256, (1, 32)), (256, (1, 16)), (256, (128, 128))],
)
def test_the_whole_constructor_with_the_published_deep_gemm(shared_width: int, block: tuple[int, int]) -> None:
    store = {(32, 32): "fp8-32", (1, 32): "mxfp8", (1, 16): "fp8-1x16", (128, 128): "fp8-128"}[block]
    case = Case(512, 256, "mxfp4", store, shared_width / 256)
    experts = published.vllm_0_33_experts(512, 256, shared_width, block)
    assert experts.has_fused_shared_experts == ours(case).fused
    assert experts.num_shared_experts == (shared_width // 256 if ours(case).fused else 0)
