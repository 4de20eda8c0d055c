"""vLLM as on a machine with one GPU, on a CPU: its own platform classes, told by stand-ins of NVML or amdsmi which GPU it is.

To be started before anything imports vLLM. Real: platform, engine config, the choice of classes, backends and kernels,
construction and loading. Stand-ins: the drivers' libraries, compiled modules (empty; of their functions those that are asked at
construction), the device (the CPU), the packages `aiter` and, for V4.1's engrams, the tokenizer. No kernel is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

MEMORY = 180 << 30
GPUS = {"sm100": (10, 0), "sm90": (9, 0), "gfx950": (9, 5)}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
QUERIES = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
ACTIVATIONS = (
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit) -> ()",
)


class _Nothing:
    """Takes any call and gives nothing back: streams, events, kernels."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __call__(self, *_args: object, **_kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that this machine lacks, by name, with what is in them."""

    def __init__(self, given: dict[str, dict[str, Any]]) -> None:
        self._given = given

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if fullname in self._given else None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._given[module.__name__])


class OnCpu(TorchFunctionMode):
    """Places on the CPU what is asked for on a GPU, and pins nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _of_nvidia(capability: tuple[int, int]) -> dict[str, dict[str, Any]]:
    nvml = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda _: capability,
        "nvmlDeviceGetName": lambda _: "stand-in",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=MEMORY),
    }
    kernels = {"__getattr__": lambda _: _Nothing()}  # warmed up by 0.29-0.31 at construction
    return {
        "vllm.third_party.pynvml": nvml,
        "vllm.model_executor.kernels.mhc.tilelang_kernels": kernels,
        "deep_gemm": {},
        **{name: {} for name in COMPILED},
    }


def _of_amd(gpu: str) -> dict[str, dict[str, Any]]:
    amdsmi = {
        "AmdSmiException": type("AmdSmiException", (Exception,), {}),
        "AmdSmiMemoryType": SimpleNamespace(VRAM=0),
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: [0],
        "amdsmi_get_gpu_asic_info": lambda _: {"target_graphics_version": gpu, "device_id": "", "market_name": "stand-in"},
        "amdsmi_get_gpu_device_uuid": lambda _: "0",
        "amdsmi_get_gpu_memory_total": lambda *_: MEMORY,
        "amdsmi_topo_get_link_type": lambda *_: {"hops": 1, "type": 2},
        "amdsmi_topo_get_numa_node_number": lambda _: 0,
    }
    untuned = {  # asked by 0.30: no shape is tuned
        "AITER_CONFIGS": SimpleNamespace(AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE=""),
        "get_gfx": lambda: gpu,
        "get_cu_num": lambda: 256,
    }
    return {"amdsmi": amdsmi, "aiter": {"flash_attn_varlen_func": None}, "aiter.ops": {}, "aiter.ops.gemm_op_a8w8": untuned}


def start(gpu: str) -> types.ModuleType:
    """Import vLLM on a machine with this GPU and return it; the stand-ins stay for as long as the process lives."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ROCM_USE_AITER"] = str(int(gpu.startswith("gfx")))
    os.environ.pop("VLLM_TARGET_DEVICE", None)
    capability = GPUS[gpu]
    sys.meta_path.insert(0, _Modules(_of_amd(gpu) if gpu.startswith("gfx") else _of_nvidia(capability)))
    library = torch.library.Library("_C", "FRAGMENT")
    for name in QUERIES:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda _: True, "CompositeImplicitAutograd")
    for schema in ACTIVATIONS:
        library.define(schema)
    properties = SimpleNamespace(
        name="stand-in",
        major=capability[0],
        minor=capability[1],
        gcnArchName=gpu,
        multi_processor_count=148,
        total_memory=MEMORY,
        L2_cache_size=4 << 20,
    )
    for target, name, value in (
        (torch.cuda, "Stream", _Nothing),
        (torch.cuda, "Event", _Nothing),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_name", lambda *_: properties.name),
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (torch.accelerator, "current_device_index", lambda: 0),
    ):
        mock.patch.object(target, name, value).start()
    vllm = importlib.import_module("vllm")
    platform = importlib.import_module("vllm.platforms").current_platform
    type(platform).device_type = "cpu"
    vllm._stand_in_library = library  # which ends with its last reference
    language = importlib.import_module("vllm.triton_utils").tl  # vLLM's own stand-in, which lacks a name that a backend reads
    language.bfloat16 = None
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # a process per model class, to look at it
    return vllm


def no_tokenizer(config: Any) -> contextlib.ExitStack:
    """Give V4.1's engrams a table in place of what they would read out of a tokenizer; other models have none."""
    import transformers

    stack, text = contextlib.ExitStack(), config.model_config.hf_text_config
    if getattr(text, "engram_layer_ids", None):
        engram = importlib.import_module("vllm.models.deepseek_v41.common.engram")
        stack.enter_context(mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=None))
        if hasattr(engram, "build_compressed_token_map"):
            table = [0] * text.vocab_size, text.engram_compressed_vocab_size
            stack.enter_context(mock.patch.object(engram, "build_compressed_token_map", return_value=table))
    return stack
