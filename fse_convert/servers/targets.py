"""Kernel contracts and server releases as data, each row with the release and file that it was read from.

To add a release, add a row to `TARGETS`. A *contract* is what DeepGEMM's MegaMoE kernel asks of shapes; a *target* is
a server release that calls it, with what the server's own code adds to it. This is the native MegaMoE fusion of NVIDIA
GPUs; shared experts that become extra routed experts are another question (`fusion.slots`, `fusion.aiter`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm

from fse_convert.model.formats import E8M0_DTYPES, Kind


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

Pairings = Mapping[Kind, tuple[Kind, ...]]
"""Which shared formats join a launch, by the routed format. FP8 means E4M3 with UE8M0 block scales."""

FP8_SHARED: Pairings = {Kind.MXFP4: (Kind.FP8_BLOCK,), Kind.FP8_BLOCK: (Kind.FP8_BLOCK,)}
"""The kernel's mma types fp8xfp4 and fp8xfp8."""
FP4_ONLY: Pairings = {Kind.MXFP4: (Kind.FP8_BLOCK,)}
"""vLLM's DeepSeek-V4 models: they always ask for MEGA_MOE_MXFP4 (0.33 models/deepseek_v4/nvidia/model.py:389)."""
FP4_OR_NVFP4_ALONE: Pairings = {**FP4_ONLY, Kind.NVFP4: ()}
"""SGLang: nvfp4xnvfp4 launches run without a shared expert (0.5.23 layers/moe/mega_moe.py:203)."""
VLLM_0_33_CLASS: Pairings = {**FP8_SHARED, Kind.NVFP4: (Kind.FP8_BLOCK, Kind.PLAIN), Kind.PLAIN: (Kind.PLAIN,)}
"""All that vLLM 0.33's class could do (deep_gemm_mega_moe.py:142-185); no model of that release asks for the last two."""


CONTRACT = "contract"
"""The engine of rows that are bare contracts."""


@dataclass(frozen=True)
class ConfigRule:
    """A key of config.json that must have one of some values, if it is there at all."""

    key: str
    allowed: tuple[object, ...]


@dataclass(frozen=True)
class Target:
    """One server release, or a bare contract.

    ``fuses``: whether it has native shared-expert fusion at all. ``routed_pad``: the multiple to which the server itself
    pads routed experts at load (0: none). ``hidden_multiple``: the server's own rule where it is stricter than the kernel's.
    ``pairings``: see `Pairings`. ``multiples``: of width and hidden size, for routed formats with rules of their own.
    ``shared_blocks``: scale blocks its fusion accepts (None: any with a multiple of 32 columns). ``scale_dtypes``: of the
    shared expert's scales in the checkpoint. ``model_types``: whose model code has the path (empty: any), ``beside``: whose
    model code runs MegaMoE and always keeps the shared expert out of it. ``rules``: what the model code asks of config.json.
    """

    name: str
    engine: str
    release: str
    contract: Contract
    source: str
    fuses: bool = True
    routed_pad: int = 0
    hidden_multiple: int = 0
    pairings: Pairings = field(default_factory=lambda: FP4_ONLY)
    multiples: Mapping[Kind, tuple[int, int]] = field(default_factory=dict)
    shared_blocks: tuple[tuple[int, int], ...] | None = None
    scale_dtypes: tuple[str, ...] = E8M0_DTYPES
    model_types: frozenset[str] = frozenset({"deepseek_v4", "deepseek_v41"})
    beside: frozenset[str] = frozenset()
    rules: tuple[ConfigRule, ...] = ()
    needs: str = ""

    @property
    def is_contract(self) -> bool:
        """Whether this is no server but a bare kernel contract."""
        return self.engine == CONTRACT

    @property
    def title(self) -> str:
        """The server and its release for people: ``SGLang 0.5.21``; the name of a contract."""
        return self.name if self.is_contract else f"{self.engine} {self.release}"


V4_ONLY = frozenset({"deepseek_v4"})
KIMI_K3 = frozenset({"kimi_k3"})
VLLM_NEEDS = "SM100, --moe-backend deep_gemm_mega_moe, --enable-expert-parallel, TP 1 or sequence parallel"
SGLANG_NEEDS = "SM100, --moe-a2a-backend megamoe"
SGLANG_SCALES = (*E8M0_DTYPES, "F32")
"""SGLang loads scales as FP32 and rounds them to UE8M0 (0.5.23 layers/quantization/fp8.py:1694-1719)."""
NVFP4_256 = {Kind.NVFP4: (256, 256)}
VLLM_RULES = (ConfigRule("scoring_func", ("sqrtsoftplus",)), ConfigRule("expert_dtype", ("fp4",)))
"""DeepseekV4MoE.__init__ raises otherwise: 0.29 models/deepseek_v4/nvidia/model.py:780-790."""
VLLM_RULES_0_31 = (*VLLM_RULES, ConfigRule("norm_topk_prob", (True,)))
"""Since 0.31 (model.py:839) also without normalised top-k probabilities."""


def _contract_row(contract: Contract) -> Target:
    return Target(
        contract.name, CONTRACT, contract.kernels, contract, contract.source,
        pairings=FP8_SHARED, model_types=frozenset(), needs="SM100",
    )  # fmt: skip


TARGETS: tuple[Target, ...] = (
    _contract_row(MEGAMOE_512),
    _contract_row(MEGAMOE_128),
    Target(
        "vllm-0.29", "vLLM", "0.29", MEGAMOE_512, "models/deepseek_v4/nvidia/model.py:336, 394-455 (DeepGEMM 2.6.1)",
        model_types=V4_ONLY, beside=KIMI_K3, rules=VLLM_RULES, needs=VLLM_NEEDS,
    ),
    Target(
        "vllm-0.30", "vLLM", "0.30", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:412-441, 516-534",
        routed_pad=512, beside=KIMI_K3, rules=VLLM_RULES, needs=VLLM_NEEDS,
    ),
    Target(
        "vllm-0.31", "vLLM", "0.31", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:370, 443-475, 835-849",
        beside=KIMI_K3, rules=VLLM_RULES_0_31, needs=VLLM_NEEDS,
    ),
    Target(
        "vllm-0.32", "vLLM", "0.32", MEGAMOE_128, "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:195-298, 461",
        beside=KIMI_K3, rules=VLLM_RULES_0_31, needs=VLLM_NEEDS,
    ),
    Target(
        "vllm-0.33", "vLLM", "0.33", MEGAMOE_128, "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:202, 214-245, 338-384",
        beside=KIMI_K3 | {"step5"}, rules=VLLM_RULES_0_31, needs=VLLM_NEEDS,
    ),
    Target(
        "sglang-0.5.20", "SGLang", "0.5.20", MEGAMOE_128, "layers/moe/mega_moe.py (no shape check; sgl-deep-gemm 0.2.0)",
        fuses=False, pairings=FP4_OR_NVFP4_ALONE, model_types=V4_ONLY, needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.21", "SGLang", "0.5.21", MEGAMOE_512, "layers/moe/mega_moe.py:99-111",
        fuses=False, pairings=FP4_OR_NVFP4_ALONE, multiples=NVFP4_256, needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.22", "SGLang", "0.5.22", MEGAMOE_128, "layers/moe/mega_moe.py:100-116, 194-204",
        hidden_multiple=512, pairings=FP4_OR_NVFP4_ALONE, multiples=NVFP4_256, shared_blocks=((128, 128),),
        scale_dtypes=SGLANG_SCALES, needs=SGLANG_NEEDS,
    ),
    Target(
        "sglang-0.5.23", "SGLang", "0.5.23", MEGAMOE_128, "layers/moe/mega_moe.py:100-116, 196-207",
        hidden_multiple=512, pairings=FP4_OR_NVFP4_ALONE, multiples=NVFP4_256, scale_dtypes=SGLANG_SCALES, needs=SGLANG_NEEDS,
    ),
    Target(
        "tensorrt-llm", "TensorRT-LLM", "main (2026-08)", MEGAMOE_512,
        "_torch/modules/fused_moe/mega_moe/mega_moe_deepgemm.py (MegaMoEDeepGemm)",
        fuses=False, needs="SM100, moe_backend MEGAMOE_DEEPGEMM, attention DP; V4.1's architecture is not confirmed",
    ),
)  # fmt: skip


def needed_contract(target: Target) -> Contract:
    """The contract that a converted checkpoint must meet for this target.

    A server that pads routed experts itself (vLLM 0.30, to 512) demands that width of the shared expert too.
    """
    return MEGAMOE_512 if target.routed_pad == MEGAMOE_512.width_multiple else target.contract


def width_multiple(target: Target, routed: Kind) -> int:
    """What one expert's width must be a multiple of in a checkpoint converted for a target, with such routed experts.

    It must meet the kernel's contract, and the server's own rule for the format: SGLang takes NVFP4 at multiples of 256.
    """
    own, _ = target.multiples.get(routed, (1, 1))
    return lcm(needed_contract(target).width_multiple, own)


def find_target(name: str) -> Target | None:
    """Find a target or contract by name; None when there is no such row."""
    return next((t for t in TARGETS if t.name == name), None)


def for_version(engine: str, version: str) -> Target:
    """Find the row for an installed server: that of its release (``0.5.22rc1`` is of 0.5.22), else the engine's newest one."""
    rows = [t for t in TARGETS if t.engine == engine]
    return next((t for t in rows if re.match(rf"{re.escape(t.release)}(?!\d)", version)), rows[-1])
