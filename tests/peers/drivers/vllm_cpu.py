"""vLLM's real configs, models and loaders on a CPU: what stands in for the GPU, and nothing else.

Runs in the environment that `tests/peers/make_env.py` builds; with the Python files of an earlier release first on the path it
runs that release. No kernel is called. Stand-ins: the device and its streams, the kernels that linear layers choose at
construction, DeepGEMM's compiled functions (see `tests/peers/published.py`), and the tokenizer that V4.1's engrams hash with.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(ENVIRONMENT)

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.model_executor.layers.quantization as quantization  # noqa: E402
import vllm.utils.deep_gemm as vllm_deep_gemm  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader import utils as loader_utils  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from tests.peers import published  # noqa: E402

MODELS = {
    "v4": ("deepseek_v4.nvidia.model", "DeepseekV4ForCausalLM"),
    "v4-mtp": ("deepseek_v4.nvidia.mtp", "DeepSeekV4MTP"),
    "v4.1": ("deepseek_v41.nvidia.model", "DeepseekV41LLMForCausalLM"),
    "v4.1-vl": ("deepseek_v41.nvidia.vl_model", "DeepseekV41ForCausalLM"),
    "v4.1-dspark": ("deepseek_v41.nvidia.dspark", "DSparkDeepseekV4ForCausalLM"),
}


_OPS = torch.library.Library("_C", "FRAGMENT")


class _Nothing:
    """Takes any call and gives nothing back: streams, events, chosen kernels, warm-up tables."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class _Cuda:
    """The platform as the choice between V4's and V4.1's quantisation config sees it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def is_cuda(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def deep_gemm() -> SimpleNamespace:
    """The release's own vendored Python of DeepGEMM; compiled functions raise, but for the packer that published Python gives."""
    name = "published_vendored_deep_gemm"
    package, compiled = types.ModuleType(name), types.ModuleType(f"{name}._C")
    package.__path__ = [str(Path(vllm.__file__).parent / "third_party" / "deep_gemm")]
    package._C = compiled

    def absent(function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)
        return published._compiled(function)

    compiled.__getattr__ = absent
    compiled.get_tma_aligned_size = lambda mn, size: -(-mn // (16 // size)) * (16 // size)
    sys.modules[name], sys.modules[compiled.__name__] = package, compiled
    mega = importlib.import_module(f"{name}.mega")

    def transform_sf(sf: torch.Tensor, mn: int, k: int, recipe: tuple[int, int], groups: int) -> torch.Tensor:
        assert (recipe, tuple(sf.shape)) == ((1, 32), (groups, mn, k // 32))
        return published.pack_ue8m0(sf, published.wheels.SGL_DEEP_GEMM_0_1_7)

    return SimpleNamespace(
        **vars(mega),
        get_block_m_for_mega_moe=absent("get_block_m_for_mega_moe"),
        transform_sf_into_required_layout=transform_sf,
    )


def _replace_everywhere(stack: contextlib.ExitStack, pattern: str, value: Any) -> None:
    """Replace a function in every module of vLLM that has imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm"):
            for name in [n for n in vars(module) if re.fullmatch(pattern, n)]:
                stack.enter_context(mock.patch.object(module, name, value))


def _patches() -> list[tuple[Any, str, Any]]:
    kernels = deep_gemm()
    return [
        (torch.cuda, "Stream", _Nothing),
        (torch.cuda, "Event", _Nothing),
        (torch.cuda, "get_device_capability", lambda *_: (10, 0)),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=148, major=10, minor=0)),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "empty_cache", lambda: None),
        (type(current_platform), "is_device_capability_family", classmethod(lambda *_args, **_kwargs: True)),
        (vllm_deep_gemm, "_import_deep_gemm", lambda: kernels),
        (registry, "_run_in_subprocess", lambda function: function()),  # a process per model class, to look at it
    ]


def start() -> contextlib.ExitStack:
    """Put the stand-ins in place for as long as the process lives, and start vLLM's distributed state with one rank."""
    _OPS.define("silu_and_mul(Tensor! result, Tensor input) -> ()")  # looked up when 0.30's vision tower is built
    quantization.current_platform = _Cuda(quantization.current_platform)
    tables = types.ModuleType("vllm.model_executor.kernels.mhc.tilelang_kernels")  # warmed up by 0.29-0.31 at construction
    tables.__getattr__ = lambda name: getattr(_Nothing(), name)
    stack = contextlib.ExitStack()
    for target, name, value in _patches():
        stack.enter_context(mock.patch.object(target, name, value))
    with contextlib.suppress(ImportError, AssertionError):
        importlib.import_module(tables.__name__)
    sys.modules.setdefault(tables.__name__, tables)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{os.environ['FSE_RENDEZVOUS']}", backend="gloo"
        )
        initialize_model_parallel(1, 1)
    return stack


def engine_config(checkpoint: str, load_format: str, arguments: dict[str, Any]) -> VllmConfig:
    """The engine's config as ``vllm serve`` would make it; loads the plugins on the way."""
    config = EngineArgs(
        model=checkpoint,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=1,
        **{"enable_expert_parallel": True, "moe_backend": "deep_gemm_mega_moe", "dtype": "bfloat16", **arguments},
    ).create_engine_config()
    if getattr(config.model_config.hf_config, "engram_layer_ids", None):
        from vllm.config.engram import EngramConfig

        config.engram_config = EngramConfig(cpu_offload=False)  # the default pins memory, which needs a GPU
    with contextlib.suppress(AttributeError):
        config.kernel_config.enable_jit_warmup = False
    return config


@contextlib.contextmanager
def standing_in(config: VllmConfig, model: str) -> Iterator[type]:
    """Give the NVIDIA class of a model, with what its construction and post-load hooks would ask the GPU for."""
    module, name = MODELS[model]
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        model_class = getattr(importlib.import_module(f"vllm.models.{module}"), name)
        with contextlib.suppress(ImportError):
            _no_tokenizer(stack, config)
        _replace_everywhere(stack, r"init_\w+_linear_kernel", _Nothing)
        _replace_everywhere(stack, "compute_fp8_einsum_recipe", lambda *_args, **_kwargs: ((1, 128, 128), True))
        _replace_everywhere(stack, "dispatch_cpu_unquantized_gemm", lambda *_args, **_kwargs: None)
        stack.enter_context(mock.patch.object(loader_utils, "get_model_architecture", return_value=(model_class, name)))
        yield model_class


def _no_tokenizer(stack: contextlib.ExitStack, config: VllmConfig) -> None:
    import transformers

    engram = importlib.import_module("vllm.models.deepseek_v41.common.engram")
    text = config.model_config.hf_config
    stack.enter_context(mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=None))
    if hasattr(engram, "build_compressed_token_map") and hasattr(text, "engram_compressed_vocab_size"):
        table = [0] * text.vocab_size, text.engram_compressed_vocab_size
        stack.enter_context(mock.patch.object(engram, "build_compressed_token_map", return_value=table))


def load(config: VllmConfig, model: str, built: Callable[[], None]) -> torch.nn.Module:
    """The whole of vLLM's `load_model`: construction, loading and the post-load hooks; ``built`` is called after the first."""
    draft = config.speculative_config.draft_model_config if config.speculative_config else None
    with standing_in(config, model):
        loader = get_model_loader(config.load_config)
        load_weights = loader.load_weights

        def load_after_building(*args: Any, **kwargs: Any) -> None:
            built()
            load_weights(*args, **kwargs)

        loader.load_weights = load_after_building
        loaded: torch.nn.Module = loader.load_model(vllm_config=config, model_config=draft or config.model_config)
    return loaded
