"""Kernel contracts and server releases as data, each row with the release and file that it was read from.

To add a release, add a row to `TARGETS`. A *contract* is what DeepGEMM's MegaMoE kernel asks of shapes; a *target* is
a server release that calls it, with what the server's own code adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fse_convert.quantization.formats import Kind


@dataclass(frozen=True)
class Contract:
    """What a generation of the MegaMoE kernel asks of shapes: the multiples that hidden size and width must be of."""

    name: str
    width_multiple: int
    hidden_multiple: int
    kernels: str
    source: str


MEGAMOE_512 = Contract(
    "megamoe-512",
    width_multiple=512,
    hidden_multiple=512,
    kernels="DeepGEMM <= 2.6, sgl-deep-gemm <= 0.1.7",
    source="sgl-deep-gemm 0.1.7 include/deep_gemm/layout/mega_moe.cuh:518 (1x32 activation scales need 16-byte TMA rows)",
)
MEGAMOE_128 = Contract(
    "megamoe-128",
    width_multiple=128,
    hidden_multiple=256,
    kernels="DeepGEMM >= 2.8, sgl-deep-gemm >= 0.2.0",
    source="sgl-deep-gemm 0.2.5 include/deep_gemm/layout/mega_moe.cuh:431, scheduler/mega_moe.cuh:56 (DeepGEMM #432)",
)
CONTRACTS: Mapping[str, Contract] = {c.name: c for c in (MEGAMOE_512, MEGAMOE_128)}

FP8_SHARED: Mapping[Kind, tuple[Kind, ...]] = {Kind.MXFP4: (Kind.FP8_BLOCK,), Kind.FP8_BLOCK: (Kind.FP8_BLOCK,)}
"""mma types fp8xfp4 and fp8xfp8: which shared formats join a launch, by the routed format. FP8: E4M3 with UE8M0 blocks."""
FP4_ONLY: Mapping[Kind, tuple[Kind, ...]] = {Kind.MXFP4: (Kind.FP8_BLOCK,)}
"""DeepSeek-V4's model code: ``expert_dtype`` must be fp4."""
FP4_OR_NVFP4: Mapping[Kind, tuple[Kind, ...]] = {**FP4_ONLY, Kind.NVFP4: (Kind.FP8_BLOCK, Kind.PLAIN)}


@dataclass(frozen=True)
class Target:
    """One server release, or a bare contract.

    ``fuses``: whether it has native shared-expert fusion at all. ``routed_pad``: the multiple to which the server itself
    pads routed experts at load (0: none). ``hidden_multiple``: the server's own rule where it is stricter than the kernel's.
    ``pairings``: see `FP8_SHARED`. ``shared_blocks``: scale blocks its fusion accepts (None: any with a multiple of 32
    columns). ``families`` and ``model_types``: whose model code has the path (empty: any).
    """

    name: str
    engine: str
    release: str
    contract: Contract
    source: str
    fuses: bool = True
    routed_pad: int = 0
    hidden_multiple: int = 0
    pairings: Mapping[Kind, tuple[Kind, ...]] = field(default_factory=lambda: FP4_ONLY)
    shared_blocks: tuple[tuple[int, int], ...] | None = None
    families: frozenset[str] = frozenset({"DeepSeek-V4"})
    model_types: frozenset[str] = frozenset({"deepseek_v4", "deepseek_v41"})
    needs: str = ""


V4_ONLY = frozenset({"deepseek_v4"})
VLLM_NEEDS = "SM100, --moe-backend deep_gemm_mega_moe, --enable-expert-parallel, TP 1 or sequence parallel"
SGLANG_NEEDS = "SM100, --moe-a2a-backend megamoe"


def _contract_row(contract: Contract) -> Target:
    return Target(
        contract.name, "contract", contract.kernels, contract, contract.source,
        pairings=FP8_SHARED, families=frozenset(), model_types=frozenset(), needs="SM100",
    )  # fmt: skip


TARGETS: tuple[Target, ...] = (
    _contract_row(MEGAMOE_512),
    _contract_row(MEGAMOE_128),
    Target(
        "vllm-0.29", "vLLM", "0.29", MEGAMOE_512, "models/deepseek_v4/nvidia/model.py:336 (DeepGEMM 2.6.1)",
        model_types=V4_ONLY, needs=VLLM_NEEDS,
    ),
    Target(
        "vllm-0.30", "vLLM", "0.30", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:412-441, 516-534",
        routed_pad=512, needs=VLLM_NEEDS,
    ),
    Target("vllm-0.31", "vLLM", "0.31", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:370", needs=VLLM_NEEDS),
    Target("vllm-0.32", "vLLM", "0.32", MEGAMOE_128, "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:461", needs=VLLM_NEEDS),
    Target(
        "vllm-0.33", "vLLM", "0.33", MEGAMOE_128, "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:202, 338-384",
        pairings=FP4_OR_NVFP4, needs=VLLM_NEEDS,
    ),
    Target(
        "sglang-0.5.20", "SGLang", "0.5.20", MEGAMOE_128, "layers/moe/mega_moe.py (no shape check; sgl-deep-gemm 0.2.0)",
        fuses=False, model_types=V4_ONLY, needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.21", "SGLang", "0.5.21", MEGAMOE_512, "layers/moe/mega_moe.py:99-111",
        fuses=False, needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.22", "SGLang", "0.5.22", MEGAMOE_128, "layers/moe/mega_moe.py:101-113",
        hidden_multiple=512, shared_blocks=((128, 128),), needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.23", "SGLang", "0.5.23", MEGAMOE_128, "layers/moe/mega_moe.py:100-116, 196-207",
        hidden_multiple=512, needs=SGLANG_NEEDS,
    ),
    Target(
        "tensorrt-llm", "TensorRT-LLM", "main (2026-08)", MEGAMOE_512,
        "_torch/modules/fused_moe/mega_moe/mega_moe_deepgemm.py (MegaMoEDeepGemm)",
        fuses=False, needs="SM100, moe_backend MEGAMOE_DEEPGEMM",
    ),
)  # fmt: skip


def needed_contract(target: Target) -> Contract:
    """The contract that a converted checkpoint must meet for this target.

    A server that pads routed experts itself (vLLM 0.30, to 512) demands that width of the shared expert too.
    """
    return MEGAMOE_512 if target.routed_pad == MEGAMOE_512.width_multiple else target.contract


def find_target(name: str) -> Target | None:
    """Find a target or contract by name; None when there is no such row."""
    return next((t for t in TARGETS if t.name == name), None)
