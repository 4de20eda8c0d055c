"""Kernel contracts and server releases as data, each row with the release and file that it was read from.

To add a release, add a row to `TARGETS` (of vLLM on ROCm, to `RELEASES` of `fse_convert.servers.aiter.vllm_config`). A
*contract* is what DeepGEMM's MegaMoE kernel asks of shapes; a *target* is a server release that calls it, with what the
server's own code adds to it. This is the native MegaMoE fusion of NVIDIA GPUs; shared experts that become extra routed
experts are another question (`fse_convert.servers.slots`, `fse_convert.servers.aiter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from fse_convert.checkpoint.header import E8M0_DTYPES
from fse_convert.model.formats import StorageKind


@dataclass(frozen=True)
class Contract:
    """The multiples that a generation of the MegaMoE kernel asks hidden size and width to be of."""

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

Pairings = Mapping[StorageKind, tuple[StorageKind, ...]]
"""The shared formats that join a launch, by the routed format. FP8 means E4M3 with UE8M0 block scales."""

FP8_SHARED: Pairings = {
    StorageKind.MXFP4: (StorageKind.FP8_BLOCK,),
    StorageKind.FP8_BLOCK: (StorageKind.FP8_BLOCK,),
}
"""The kernel's mma types fp8xfp4 and fp8xfp8."""
FP4_ONLY: Pairings = {StorageKind.MXFP4: (StorageKind.FP8_BLOCK,)}
"""vLLM's DeepSeek-V4 models: they always ask for MEGA_MOE_MXFP4 (0.33 models/deepseek_v4/nvidia/model.py:389)."""
FP4_OR_NVFP4_ALONE: Pairings = {**FP4_ONLY, StorageKind.NVFP4: ()}
"""SGLang: nvfp4xnvfp4 launches run without a shared expert (0.5.23 layers/moe/mega_moe.py:203)."""

CONTRACT = "contract"
"""The engine of rows that are bare contracts."""


class HeldTwice(str, Enum):
    """Weights that a server keeps in two layouts after loading."""

    ROUTED_SCALES = "routed scales"
    SHARED_GATE_UP = "shared gate, up"


@dataclass(frozen=True)
class Target:
    """One server release, or a bare contract.

    * ``contract``: what its kernel asks of shapes.
    * ``source``: the files of the release that the row was read from.
    * ``started_with``: flags and hardware.
    * ``fuses``: it has native shared-expert fusion at all.
    * ``hidden_multiple``: of the hidden size, where the server is stricter than the kernel.
    * ``pairings``: the formats of shared experts that it fuses, by the format of the routed ones.
    * ``multiples``: of width and hidden size, for routed formats with rules of their own.
    * ``shared_blocks``: the scale blocks of shared experts that it fuses; None: any with a multiple of 32 columns.
    * ``scale_dtypes``: of the shared expert's scales in the checkpoint.
    * ``model_types``: whose model code has the path; empty: any.
    * ``beside``: model types whose code runs MegaMoE and always keeps the shared expert out of it.
    * ``passed_over``: routed formats that it loads, and then runs without MegaMoE.
    * ``classes``: the model classes that have the path, for a config that names its class; empty: any.
    * ``held_twice``: weights that it keeps two copies of.
    * ``slots``: where its gate of slot fusion was read, for the same model types; empty: it has none.
    * ``slots_fp8_32``: slots of FP8 experts in blocks of 32x32 were run.
    """

    name: str
    engine: str
    release: str
    contract: Contract
    source: str
    started_with: str
    fuses: bool = True
    hidden_multiple: int = 0
    pairings: Pairings = field(default_factory=lambda: FP4_ONLY)
    multiples: Mapping[StorageKind, tuple[int, int]] = field(default_factory=dict)
    shared_blocks: tuple[tuple[int, int], ...] | None = None
    scale_dtypes: tuple[str, ...] = E8M0_DTYPES
    model_types: frozenset[str] = frozenset({"deepseek_v4", "deepseek_v41"})
    beside: frozenset[str] = frozenset()
    passed_over: frozenset[StorageKind] = frozenset()
    classes: frozenset[str] = frozenset()
    held_twice: frozenset[HeldTwice] = frozenset()
    slots: str = ""
    slots_fp8_32: bool = False

    @property
    def is_contract(self) -> bool:
        """True for a bare kernel contract, which is not a server."""
        return self.engine == CONTRACT

    @property
    def title(self) -> str:
        """The server and its release for people: ``SGLang 0.5.21``; the name of a contract."""
        return self.name if self.is_contract else f"{self.engine} {self.release}"


V4_ONLY = frozenset({"deepseek_v4"})
KIMI_K3 = frozenset({"kimi_k3"})
VLLM = "SM100, --moe-backend deep_gemm_mega_moe, --enable-expert-parallel, no pipeline parallelism beside TP"
"""Then sequence parallelism, which fusion needs at TP > 1, is on (0.30 models/deepseek_v4/nvidia/model.py:1120, 0.33 :571)."""
SGLANG = "SM100, --moe-a2a-backend megamoe"
SGLANG_SCALES = (*E8M0_DTYPES, "F32")
"""SGLang loads scales as FP32 and rounds them to UE8M0 (0.5.23 layers/quantization/fp8.py:1694-1719)."""
SGLANG_PASSES_OVER = frozenset({StorageKind.FP8_BLOCK})
"""Nothing is built of FP8 experts on SM100 and every layer falls back, unlogged; SM90's MegaMoE takes them, no shared ones.

0.5.21 layers/quantization/fp8.py:2040-2076, 0.5.22:2116-2152, 0.5.23:2230-2275 (run); 0.5.23 layers/moe/mega_moe.py:163-184.
"""
NVFP4_256 = {StorageKind.NVFP4: (256, 256)}
V4_CLASS = frozenset({"DeepseekV4ForCausalLM"})
VLLM_CLASSES = V4_CLASS | {"DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"}
"""Since 0.30 also with a vision tower, and V4.1 (model_executor/models/registry.py:375-381)."""
SGLANG_CLASSES = V4_CLASS | {"DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"}
"""0.5.23 models/deepseek_v4.py, deepseek_v4_nextn.py, deepseek_v4_dspark.py; V4.1 is read as V4 (configs/deepseek_v41.py:38)."""
SGLANG_CLASSES_0_5_21 = SGLANG_CLASSES | {"DeepseekV41ForCausalLM"}
SGLANG_SCALES_TWICE = frozenset({HeldTwice.ROUTED_SCALES})
"""Interleaved, and as UTCCP takes them: 0.5.20 layers/moe/mega_moe.py:398-408, 0.5.23 :670-701."""
SGLANG_TWICE = SGLANG_SCALES_TWICE | {HeldTwice.SHARED_GATE_UP}
"""Since fusion also the shared L1 weights, for the path above the token cap: 0.5.23 layers/moe/mega_moe.py:706-717."""


def _contract_row(contract: Contract) -> Target:
    return Target(
        contract.name, CONTRACT, contract.kernels, contract, contract.source, "SM100",
        pairings=FP8_SHARED, model_types=frozenset(),
    )  # fmt: skip


TARGETS: tuple[Target, ...] = (
    _contract_row(MEGAMOE_512),
    _contract_row(MEGAMOE_128),
    Target(
        "vllm-0.29", "vLLM", "0.29", MEGAMOE_512, "models/deepseek_v4/nvidia/model.py:336, 394-455 (DeepGEMM 2.6.1)", VLLM,
        model_types=V4_ONLY, beside=KIMI_K3, classes=V4_CLASS,
    ),
    Target(
        "vllm-0.30", "vLLM", "0.30", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:412-441, 516-534", VLLM,
        beside=KIMI_K3, classes=VLLM_CLASSES,
    ),
    Target(
        "vllm-0.31", "vLLM", "0.31", MEGAMOE_128, "models/deepseek_v4/nvidia/model.py:370, 443-475, 835-849", VLLM,
        beside=KIMI_K3, classes=VLLM_CLASSES,
    ),
    Target(
        "vllm-0.32", "vLLM", "0.32", MEGAMOE_128, "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:195-298, 461", VLLM,
        beside=KIMI_K3, classes=VLLM_CLASSES,
    ),
    Target(
        "vllm-0.33", "vLLM", "0.33", MEGAMOE_128,
        "model_executor/layers/fused_moe/deep_gemm_mega_moe.py:202, 214-245, 338-384", VLLM,
        beside=KIMI_K3 | {"step5"}, classes=VLLM_CLASSES,
    ),
    Target(
        "sglang-0.5.20", "SGLang", "0.5.20", MEGAMOE_128, "layers/moe/mega_moe.py (no shape check; sgl-deep-gemm 0.2.0)", SGLANG,
        fuses=False, pairings=FP4_OR_NVFP4_ALONE, passed_over=SGLANG_PASSES_OVER, model_types=V4_ONLY, classes=SGLANG_CLASSES,
        held_twice=SGLANG_SCALES_TWICE, slots="models/deepseek_v4.py:3418-3444",
    ),
    Target(
        "sglang-0.5.21", "SGLang", "0.5.21", MEGAMOE_512, "layers/moe/mega_moe.py:99-111; V4.1: models/deepseek_v4.py:4865",
        f"{SGLANG}; V4.1 as text: --json-model-override-args '{{\"vision_n_layers\": 0}}'",
        fuses=False, pairings=FP4_OR_NVFP4_ALONE, passed_over=SGLANG_PASSES_OVER, multiples=NVFP4_256,
        classes=SGLANG_CLASSES_0_5_21, held_twice=SGLANG_SCALES_TWICE, slots="models/deepseek_v4.py:5045-5071",
    ),
    Target(
        "sglang-0.5.22", "SGLang", "0.5.22", MEGAMOE_128, "layers/moe/mega_moe.py:100-116, 194-204", SGLANG,
        hidden_multiple=512, pairings=FP4_OR_NVFP4_ALONE, passed_over=SGLANG_PASSES_OVER,
        multiples=NVFP4_256, shared_blocks=((128, 128),), scale_dtypes=SGLANG_SCALES, classes=SGLANG_CLASSES_0_5_21,
        held_twice=SGLANG_TWICE, slots="models/deepseek_v4.py:4791-4817",
    ),
    Target(
        "sglang-0.5.23", "SGLang", "0.5.23", MEGAMOE_128, "layers/moe/mega_moe.py:100-116, 196-207", SGLANG,
        hidden_multiple=512, pairings=FP4_OR_NVFP4_ALONE, passed_over=SGLANG_PASSES_OVER,
        multiples=NVFP4_256, scale_dtypes=SGLANG_SCALES, classes=SGLANG_CLASSES_0_5_21, held_twice=SGLANG_TWICE,
        slots="models/deepseek_v4.py:4864-4890, layers/moe/fused_moe_triton/layer.py:1043-1110", slots_fp8_32=True,
    ),
    Target(
        "tensorrt-llm", "TensorRT-LLM", "main (2026-08)", MEGAMOE_512,
        "_torch/modules/fused_moe/mega_moe/mega_moe_deepgemm.py (MegaMoEDeepGemm)",
        "SM100, moe_backend MEGAMOE_DEEPGEMM, attention DP; V4.1's architecture is not confirmed",
        fuses=False,
    ),
)  # fmt: skip


def find_target(name: str) -> Target | None:
    """Find a target or contract by name; None when there is no such row."""
    return next((t for t in TARGETS if t.name == name), None)
