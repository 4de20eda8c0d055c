"""The published code of DeepGEMM, vLLM and SGLang as judges of the kernel layout: on a CPU, with torch alone.

Every judge runs the peer's own files, unmodified, out of its wheel. What stands in for the rest of the peer is limited
to imports, the device and DeepGEMM's compiled functions. Whatever is not given here is an `_Absent`: it can be derived
from and constructed, but neither called, read nor used as a condition, so that it decides nothing unnoticed.

The one compiled function on the way is ``transform_sf_into_required_layout`` (repeats rows, then packs). Published
Python takes its place: sgl-deep-gemm's fallback packer for vLLM 0.30, SGLang's own repetition and packer for SGLang.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from tests.peers import wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

LAYER = "model.layers.3.ffn"
ROUTED_EXPERTS = 1  # of the layer; the fewest that the classes accept, as routed weights are not judged


@dataclass(frozen=True)
class SharedMlp:
    """The shared experts of a layer as in a checkpoint: uint8 views of FP8 weights, UE8M0 scales of ``block``."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor
    block: tuple[int, int]
    experts: int

    @property
    def hidden(self) -> int:
        return self.gate.shape[1]

    @property
    def width(self) -> int:
        """Of all shared experts together."""
        return self.gate.shape[0]

    @property
    def gate_up(self) -> Tensor:
        return torch.cat((self.gate, self.up)).view(torch.float8_e4m3fn)

    @property
    def gate_up_scale(self) -> Tensor:
        return torch.cat((self.gate_scale, self.up_scale))


class KernelWeights(NamedTuple):
    """What the kernel is called with, in the peer's own dtypes, shapes and strides."""

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor


# --- Running a peer's file -----------------------------------------------------------------------------------------


class _Absent:
    """What a peer gets for a name that it imports and the layout code never needs."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __class_getitem__(cls, _item: object) -> type:
        return cls

    def __bool__(self) -> bool:
        raise TypeError(f"the peer decides by {type(self).__name__}, which is absent")


class _StandIn(ModuleType):
    """A module of which some names are given, and every other one is absent."""

    def __init__(self, name: str, given: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(name)
        self.__dict__.update({key: value for key, value in given.get(name, {}).items() if not key.startswith("__")})
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        is_module = any(given == full_name or given.startswith(f"{full_name}.") for given in self._given)
        value = _StandIn(full_name, self._given) if is_module else type(name, (_Absent,), {})
        setattr(self, name, value)
        return value


def _run(path: Path, given: Mapping[str, Mapping[str, Any]]) -> SimpleNamespace:
    """Execute a peer's file and return its names.

    ``given``: for a module, the names that imports of it find. All modules of the same top-level packages are
    stand-ins, also for imports inside functions and for relative ones; other imports are real.
    """
    packages = {name.partition(".")[0] for name in given}

    def import_(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        top = name.partition(".")[0]
        if level == 0 and top not in packages:
            return builtins.__import__(name, globals_, locals_, fromlist, level)
        return _StandIn(name if fromlist else top, given)

    names = {"__name__": f"published.{path.stem}", "__builtins__": {**vars(builtins), "__import__": import_}}
    # Without dont_inherit this module's own __future__ imports would change the peer's.
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


class _Log:
    """Takes the place of the peer's logger and keeps what it warns of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str, *args: object) -> None:
        self.warnings.append(text % args)

    warning_once = warning


# --- DeepGEMM ------------------------------------------------------------------------------------------------------


def _compiled(name: str) -> Callable[..., Any]:
    def absent(*_args: object, **_kwargs: object) -> Any:
        raise RuntimeError(f"{name} is compiled for CUDA and cannot run here")

    return absent


# vLLM's copy imports these by name. sgl-deep-gemm must not find them: it probes for them and has Python fallbacks.
_VLLM_COMPILED = (
    "get_mn_major_tma_aligned_tensor",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "set_mk_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_theoretical_mk_alignment_for_contiguous_layout",
)


@lru_cache
def deep_gemm(peer: wheels.Peer) -> SimpleNamespace:
    """DeepGEMM's ``mega``, ``utils`` and ``utils.layout`` of a wheel, imported under a name of their own."""
    in_vllm = peer.name == "vllm"
    folder = wheels.fetch(peer) / ("vllm/third_party/deep_gemm" if in_vllm else "deep_gemm")
    name = re.sub(r"\W", "_", f"published_deep_gemm_{peer}")
    package, compiled = ModuleType(name), ModuleType(f"{name}._C")
    package.__path__ = [str(folder)]
    vars(package)["_C"] = compiled
    # 16 bytes: the TMA rule. The compiled function was seen to return the same.
    vars(compiled)["get_tma_aligned_size"] = lambda mn, element_size: -(-mn // (16 // element_size)) * (16 // element_size)
    vars(compiled).update({function: _compiled(function) for function in _VLLM_COMPILED if in_vllm})
    sys.modules[name], sys.modules[compiled.__name__] = package, compiled
    mega = importlib.import_module(f"{name}.mega")
    return SimpleNamespace(
        mega=mega,
        utils=importlib.import_module(f"{name}.utils"),
        layout=importlib.import_module(f"{name}.utils.layout"),
    )


def pack_ue8m0(scale_fp32: Tensor, peer: wheels.Peer = wheels.SGL_DEEP_GEMM_0_2_5) -> Tensor:
    """Pack FP32 scales by sgl-deep-gemm's Python: ``[n, g] -> int32 [n, g / 4]``, MN-major."""
    return deep_gemm(peer).layout._pack_fp32_into_ue8m0_fallback(scale_fp32)


def fp32(ue8m0: Tensor) -> Tensor:
    """Value of UE8M0 bytes, by torch."""
    return ue8m0.view(torch.float8_e8m0fnu).to(torch.float32)


def per_row(scale: Tensor, n: int, k: int, block: tuple[int, int]) -> Tensor:
    """Scale of every row and 32 columns, looked up in the block scales; DeepGEMM leaves that to its callers."""
    return scale[torch.arange(n)[:, None] // block[0], torch.arange(0, k, 32)[None] // block[1]]


def _by_deep_gemm(peer: wheels.Peer, mlp: SharedMlp) -> KernelWeights:
    packer = wheels.SGL_DEEP_GEMM_0_2_5 if peer.name == "vllm" else peer  # vLLM's copy packs only on the device
    l1_scale = per_row(mlp.gate_up_scale, 2 * mlp.width, mlp.hidden, mlp.block)
    l2_scale = per_row(mlp.down_scale, mlp.hidden, mlp.width, mlp.block)
    l1, l2 = deep_gemm(peer).mega.transform_weights_for_mega_moe(
        (mlp.gate_up, pack_ue8m0(fp32(l1_scale), packer)),
        (mlp.down.view(torch.float8_e4m3fn), pack_ue8m0(fp32(l2_scale), packer)),
    )
    return KernelWeights(*l1, *l2)


# --- vLLM ----------------------------------------------------------------------------------------------------------


@lru_cache
def vllm(peer: wheels.Peer) -> SimpleNamespace:
    """The names of vLLM's file that holds the experts' class, and ``log``."""
    folder = wheels.fetch(peer) / "vllm"
    kernels = deep_gemm(peer)
    platform = SimpleNamespace(
        device_type="cpu",
        is_device_capability_family=lambda *_args, **_kwargs: True,  # the SM100 check
        use_sync_weight_loader=lambda: False,  # a TPU's
    )
    log = _Log()
    given = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.logger": {"init_logger": lambda _name: log},
        "vllm.utils.deep_gemm": {
            "_import_deep_gemm": lambda: SimpleNamespace(
                **vars(kernels.mega),
                get_block_m_for_mega_moe=_compiled("get_block_m_for_mega_moe"),
                transform_sf_into_required_layout=_transform_sf_of_one_row,
            )
        },
        "regex": vars(re),  # for names of tensors; a package of its own
    }
    given["vllm.model_executor.utils"] = vars(_run(folder / "model_executor/utils.py", given))
    file = (
        "model_executor/layers/fused_moe/deep_gemm_mega_moe.py"
        if peer == wheels.VLLM_0_33
        else "models/deepseek_v4/nvidia/model.py"
    )
    return SimpleNamespace(**vars(_run(folder / file, given)), log=log)


def _transform_sf_of_one_row(sf: Tensor, mn: int, k: int, recipe: tuple[int, int], num_groups: int) -> Tensor:
    assert recipe == (1, 32)
    assert sf.shape == (num_groups, mn, k // 32)
    return pack_ue8m0(sf, wheels.SGL_DEEP_GEMM_0_1_7)  # the DeepGEMM of vLLM 0.30's time


def _vllm_config() -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def _linear(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> SimpleNamespace:
    """The attributes of a block-FP8 linear that the peers' experts read."""
    parameter = {"weight_scale_inv": scale} if block[0] == 128 else {"weight_scale": scale}
    return SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False),
        weight_block_size=list(block),
        **{name: torch.nn.Parameter(value, requires_grad=False) for name, value in parameter.items()},
    )


def vllm_mlp(mlp: SharedMlp) -> SimpleNamespace:
    """The shared MLP as vLLM's loaders leave it: gate above up in one linear."""
    e8m0 = torch.float8_e8m0fnu
    return SimpleNamespace(
        gate_up_proj=_linear(mlp.gate_up, mlp.gate_up_scale.view(e8m0), mlp.block),
        down_proj=_linear(mlp.down.view(torch.float8_e4m3fn), mlp.down_scale.view(e8m0), mlp.block),
    )


def vllm_0_33_experts(hidden: int, routed_width: int, shared_width: int, block: tuple[int, int]) -> Any:
    """vLLM 0.33's experts of a layer, built beside an empty shared MLP of ``shared_width``, as a model builds them."""
    code = vllm(wheels.VLLM_0_33)

    def empty(n: int, k: int) -> SimpleNamespace:
        scale = torch.empty(n // block[0], k // block[1], dtype=torch.float8_e8m0fnu)
        return _linear(torch.empty(n, k, dtype=torch.float8_e4m3fn), scale, block)

    return code.DeepGemmMegaMoEExperts(
        _vllm_config(),
        num_experts=ROUTED_EXPERTS,
        num_local_experts=ROUTED_EXPERTS,
        experts_start_idx=0,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=routed_width,
        activation=code.MegaMoEActivation(clamp=10.0),
        weight_format=code.MEGA_MOE_MXFP4,
        shared_experts=SimpleNamespace(gate_up_proj=empty(2 * shared_width, hidden), down_proj=empty(hidden, shared_width)),
        prefix=f"{LAYER}.experts",
    )


def _by_vllm_0_33(mlp: SharedMlp) -> KernelWeights:
    experts = vllm_0_33_experts(mlp.hidden, mlp.width // mlp.experts, mlp.width, mlp.block)
    # Names as its mapper leaves them: w2 renamed, scales by the block.
    scale_name = "weight_scale_inv" if mlp.block[0] == 128 else "weight_scale"
    loaded = set()
    for projection, weight, scale in (
        ("w1", mlp.gate, mlp.gate_scale),
        ("w3", mlp.up, mlp.up_scale),
        ("down_proj", mlp.down, mlp.down_scale),
    ):
        prefix = f"{LAYER}.shared_experts.{projection}"
        loaded.add(experts.load_shared_expert_weight(f"{prefix}.weight", weight.view(torch.float8_e4m3fn)))
        loaded.add(experts.load_shared_expert_weight(f"{prefix}.{scale_name}", scale.view(torch.float8_e8m0fnu)))
    held = {f"{LAYER}.experts.{name}": value for name, value in experts.named_parameters() if name.startswith("shared_")}
    assert loaded == set(held)
    kinds = ("l1_weight", "l1_weight_scale", "l2_weight", "l2_weight_scale")
    return KernelWeights(*(held[f"{LAYER}.experts.shared_{kind}"] for kind in kinds))


def vllm_0_30_experts(mlp: SharedMlp, routed_width: int) -> Any:
    """vLLM 0.30's experts of a layer after loading: routed ones of ``routed_width``, and ``mlp`` offered for fusion."""
    experts = vllm(wheels.VLLM_0_30).DeepseekV4MegaMoEExperts(
        _vllm_config(),
        num_experts=ROUTED_EXPERTS,
        num_local_experts=ROUTED_EXPERTS,
        experts_start_idx=0,
        top_k=1,
        hidden_size=mlp.hidden,
        intermediate_size=routed_width,
        num_shared_experts=mlp.experts,
        prefix=f"{LAYER}.experts",
    )
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(10, 0)):
        experts.finalize_weights(vllm_mlp(mlp))
    return experts


def _by_vllm_0_30(mlp: SharedMlp) -> KernelWeights:
    experts = vllm_0_30_experts(mlp, mlp.width // mlp.experts)
    assert experts.has_fused_shared_experts
    return KernelWeights(*experts._transformed_shared_l1_weights, *experts._transformed_shared_l2_weights)


# --- SGLang --------------------------------------------------------------------------------------------------------

_NOT_HERE = (
    "is_cuda",
    "is_flashinfer_available",
    "is_gfx95_supported",
    "is_gfx1250_supported",
    "is_hip",
    "is_musa",
    "is_xpu",
)


@lru_cache
def sglang() -> SimpleNamespace:
    """The names of SGLang's ``mega_moe.py``, and ``fp8_utils``; with the DeepGEMM that SGLang pins."""
    folder = wheels.fetch(wheels.SGLANG_0_5_23) / "sglang/srt/layers"
    kernels = deep_gemm(wheels.SGL_DEEP_GEMM_0_2_3)
    no_gpu = SimpleNamespace(is_blackwell=False, is_sm90=False, is_sm100=False, is_sm120=False)
    given: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": {name: lambda: False for name in _NOT_HERE}
        | {
            "get_bool_env_var": lambda _name: False,
            "ceil_align": kernels.utils.align,
            "ceil_div": kernels.utils.ceil_div,
        },
        "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": lambda: False},
        "sglang.srt.runtime_context": {"get_platform": lambda: no_gpu},
        "deep_gemm": {"transform_weights_for_mega_moe": kernels.mega.transform_weights_for_mega_moe},
        "deep_gemm.utils": {name: getattr(kernels.utils, name) for name in ("align", "get_tma_aligned_size")},
        "deep_gemm.utils.layout": {},
    }
    fp8_utils = _run(folder / "quantization/fp8_utils.py", given)
    pack = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl

    def transform_sf(
        sf: Tensor, *, mn: int, k: int, recipe: tuple[int, int], num_groups: int = 1, disable_ue8m0_cast: bool
    ) -> Tensor:
        assert num_groups == 1
        assert not disable_ue8m0_cast
        assert sf.shape[-1] == k // 32
        if recipe == (128, 32):
            return fp8_utils.transform_scale_ue8m0(sf, mn=mn, use_torch_impl=True)
        assert recipe == (1, 32)
        return pack(sf)

    given["deep_gemm"]["transform_sf_into_required_layout"] = transform_sf
    given["deep_gemm.utils.layout"]["get_mn_major_tma_aligned_packed_ue8m0_tensor"] = pack
    given["sglang.srt.layers.quantization.fp8_utils"] = vars(fp8_utils)
    return SimpleNamespace(**vars(_run(folder / "moe/mega_moe.py", given)), fp8_utils=fp8_utils)


def sglang_fp8(path: Path) -> SimpleNamespace:
    """The names of SGLang's ``fp8.py``, as it is on a machine without accelerators: its loader makes FP8 of MXFP4 experts."""
    asked = (*_NOT_HERE, "get_bool_env_var", "mxfp8_block_convert_required")
    unset = SimpleNamespace(SGLANG_USE_AITER=SimpleNamespace(get=lambda: False))
    return _run(
        path,
        {
            "sglang.srt.utils": {name: lambda *_: False for name in asked},
            "sglang.srt.environ": {"envs": unset},
            "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": lambda: False},
        },
    )


def sglang_shared_weights(mlp: SharedMlp, *, requantized: str = "") -> KernelWeights:
    """SGLang's kernel weights from the FP32 block scales that its loader makes of UE8M0 ones.

    ``requantized``: what SGLang does before to blocks of 128x128 on SM100. ``weights``: quantised anew, and the new
    scales packed for its dense GEMM. ``scales``: only the latter.
    """
    code = sglang()

    def linear(weight: Tensor, ue8m0: Tensor) -> SimpleNamespace:
        scale = fp32(ue8m0)
        if requantized == "scales":
            scale = code.fp8_utils.transform_scale_ue8m0(scale, mn=weight.shape[0], use_torch_impl=True)
        elif requantized == "weights":
            weight, scale = code.fp8_utils.requant_weight_ue8m0(weight, scale, list(mlp.block))
        config = SimpleNamespace(weight_block_size=list(mlp.block))
        return SimpleNamespace(weight=weight, weight_scale_inv=scale, quant_method=SimpleNamespace(quant_config=config))

    shared_experts = SimpleNamespace(
        gate_up_proj=linear(mlp.gate_up, mlp.gate_up_scale),
        down_proj=linear(mlp.down.view(torch.float8_e4m3fn), mlp.down_scale),
    )
    l1, l2 = code.build_mega_moe_shared_weights(shared_experts)
    return KernelWeights(*l1, *l2)


# --- All of them ---------------------------------------------------------------------------------------------------

JUDGES: dict[str, Callable[[SharedMlp], KernelWeights]] = {
    "sgl-deep-gemm 0.1.7": lambda mlp: _by_deep_gemm(wheels.SGL_DEEP_GEMM_0_1_7, mlp),
    "sgl-deep-gemm 0.2.3.post2": lambda mlp: _by_deep_gemm(wheels.SGL_DEEP_GEMM_0_2_3, mlp),
    "sgl-deep-gemm 0.2.5": lambda mlp: _by_deep_gemm(wheels.SGL_DEEP_GEMM_0_2_5, mlp),
    "DeepGEMM in vLLM 0.30": lambda mlp: _by_deep_gemm(wheels.VLLM_0_30, mlp),
    "DeepGEMM in vLLM 0.33": lambda mlp: _by_deep_gemm(wheels.VLLM_0_33, mlp),
    "vLLM 0.30": _by_vllm_0_30,
    "vLLM 0.33": _by_vllm_0_33,
    "SGLang 0.5.23": sglang_shared_weights,
    "SGLang 0.5.23, scales packed": lambda mlp: sglang_shared_weights(mlp, requantized="scales"),
}
