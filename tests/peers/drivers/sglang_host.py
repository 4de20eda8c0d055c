"""SGLang's own loader and model classes on a CPU, unmodified, as its scheduler process runs them; imported by the drivers.

What is missing without a GPU stands in: the platform says SM100, DeepGEMM is its published Python part (its compiled scale
transform is SGLang's own torch code, as in `published.py`), the kernel call records what it is given, rotary tables are empty.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ.setdefault("SGLANG_OPT_USE_TILELANG_MHC_PRE", "0")  # a kernel that is compiled at load
warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.peers import published, wheels  # noqa: E402

_library = torch.library.Library("torchvision", "DEF")  # its wheel's operators are compiled for CUDA
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

calls: list[SimpleNamespace] = []
"""Calls of the fused kernel: the routed and shared weights that it was given."""


def deep_gemm() -> ModuleType:
    """Put DeepGEMM's published Python part in place under its own name."""
    parts = published.deep_gemm(wheels.SGL_DEEP_GEMM_0_2_3)
    package = ModuleType("deep_gemm")
    package.__path__ = []
    package.mega, package.utils = parts.mega, parts.utils
    package.transform_weights_for_mega_moe = parts.mega.transform_weights_for_mega_moe
    package.transform_sf_into_required_layout = transform_sf
    package.get_num_sms = lambda: 148
    package.set_num_sms = lambda _n: None
    package.get_symm_buffer_for_mega_moe = symm_buffer
    package.get_block_m_for_mega_moe = lambda **_kwargs: 64
    package.fp8_fp4_mega_moe = record_call
    sys.modules |= {"deep_gemm": package, "deep_gemm.utils": parts.utils, "deep_gemm.utils.layout": parts.layout}
    parts.layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = lambda sf: packer()(sf)  # noqa: PLW0108 (SGLang is not imported yet)
    return package


def packer():
    from sglang.srt.layers.quantization import fp8_utils

    return fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl


def transform_sf(sf, *, mn, k, recipe, num_groups=None, disable_ue8m0_cast=False, is_sfa=None):
    """Stand in for the compiled function: repeat rows, pack four columns into a word, rows first in memory."""
    from sglang.srt.layers.quantization import fp8_utils

    if recipe == (1, 128, 128):  # attention's, not looked at here
        return sf.contiguous()
    assert not disable_ue8m0_cast
    assert sf.shape[-1] == k // 32
    if recipe == (128, 32):
        return fp8_utils.transform_scale_ue8m0(sf, mn=mn, use_torch_impl=True)
    assert recipe == (1, 32)
    return packer()(sf)


def symm_buffer(group, num_experts, num_max_tokens, num_topk, hidden, intermediate, **kwargs):
    sizes = {"x": hidden, "x_sf": hidden // 128, "topk_idx": num_topk, "topk_weights": num_topk}
    tensors = {name: torch.zeros(num_max_tokens, size) for name, size in sizes.items()}
    return SimpleNamespace(
        **tensors, shared_l1_acts_sf=None, group=SimpleNamespace(size=lambda: 1), num_experts=num_experts,
        num_max_tokens_per_rank=num_max_tokens, num_topk=num_topk, mma_type=kwargs["mma_type"],
        num_shared=kwargs["num_shared_experts"], intermediate=intermediate,
    )  # fmt: skip


def record_call(y, l1_weights, l2_weights, buffer, **kwargs):
    y.zero_()
    calls.append(SimpleNamespace(l1=l1_weights, l2=l2_weights, num_shared=buffer.num_shared, **kwargs))


def start(**arguments: object) -> None:
    """Publish a configuration and build process groups of one, as the scheduler process does."""
    package = deep_gemm()
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.utils import initialize_moe_config

    runtime_context.get_platform()._install(is_sm100=True, is_blackwell=True)
    given = {"moe_a2a_backend": "megamoe", "device": "cpu", **arguments}
    server_args = runtime_context.get_context().override_server_args(**given).install()
    runtime_context.publish(server_args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
    place = f"file://{tempfile.mkdtemp()}/store"
    parallel_state.init_distributed_environment(1, 0, place, 0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    pretend_sm100(package)
    logging.getLogger("sglang").setLevel(logging.ERROR)


def pretend_sm100(package: ModuleType) -> None:
    """Let the code that picks kernels see an SM100 with DeepGEMM; what it picks is never run."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.deep_gemm_wrapper import configurer
    from sglang.srt.layers.moe import mega_moe
    from sglang.srt.models import deepseek_v4

    for module in (deep_gemm_wrapper, configurer):
        module.ENABLE_JIT_DEEPGEMM = module.DEEPGEMM_SCALE_UE8M0 = module.DEEPGEMM_BLACKWELL = True
    mega_moe.is_sm100_supported = lambda: True
    mega_moe._device_sm = 100
    mega_moe._mega_moe_max_num_sms = lambda: 146
    mega_moe.mega_moe_pre_dispatch = lambda *_args, **_kwargs: None
    deepseek_v4._FP8_WO_A_UE8M0 = True
    deepseek_v4.get_rope_wrapper = lambda *_args, **_kwargs: Rope()


class Rope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cos_sin_cache = torch.zeros(16, 64)


def model_config(folder: Path, **more: object):
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(model_path=str(folder), language_model_only=True, **more)
    config.hf_config.engram_layer_ids = ()  # the synthetic tables have no published sizes
    return config


def load(folder: Path, *, load_format: str = "auto", **more: object) -> SimpleNamespace:
    """Load a model as `load_model_with_memory_saver` does, then what the runner calls next; count bytes after the reading."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.eplb import expert_location
    from sglang.srt.model_executor.model_runner_components import load_model_utils
    from sglang.srt.model_loader import loader as loaders

    counter = AllocationCounter()
    original = loaders.DefaultModelLoader.postprocess_weights

    def counted(model, device):
        counter.seed(model)
        with counter:
            original(model, device)

    loaders.DefaultModelLoader.postprocess_weights = staticmethod(counted)
    try:
        config = model_config(folder, **more)
        if not config.is_draft_model:
            location = expert_location.compute_initial_expert_location_metadata(config, 0)
            expert_location.set_global_expert_location_metadata(location, allow_overwrite=True)
        loader = load_model_utils.get_model_loader(load_config=LoadConfig(load_format=load_format), model_config=config)
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
        after_routed, counter.peak = counter.peak, 0
        with counter:
            load_model_utils.maybe_precompile_model_kernels_after_loading(model, "cpu")
    finally:
        loaders.DefaultModelLoader.postprocess_weights = staticmethod(original)
    sizes = {"read": counter.first, "peak routed": after_routed, "peak shared": counter.peak, "held": held(model)}
    return SimpleNamespace(model=model, config=config, loader=loader, sizes=sizes)


def moe_layers(model) -> dict:
    """The MoE layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "DeepseekV2MoE"}


def reachable(model) -> list[torch.Tensor]:
    """Every tensor that the MoE layers keep alive: parameters, buffers, and the kernel's tuples beside them."""
    tensors = []
    for moe in moe_layers(model).values():
        tensors += [*moe.parameters(), *moe.buffers()]
        for layer in ("l1", "l2"):
            tensors += getattr(moe, f"mega_shared_{layer}_weights", None) or ()
            tensors += getattr(moe.experts, f"mega_{layer}_weights", None) or ()
    return tensors


def held(model) -> int:
    """Bytes of all storages that the MoE layers keep alive, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(model)}.values())


def shared_tensors(model) -> dict[str, tuple[torch.Tensor, ...]]:
    """The kernel's four tensors of every fused layer."""
    found = {}
    for name, moe in moe_layers(model).items():
        if getattr(moe, "mega_shared_l1_weights", None) is not None:  # 0.5.21 has no such attribute
            found[name] = (*moe.mega_shared_l1_weights, *moe.mega_shared_l2_weights)
    return found


class AllocationCounter(TorchDispatchMode):
    """Counts bytes of live storages: those of a model to begin with, then every one that an operator makes.

    Storages that only pass by, such as a mapped file, are not counted: on a GPU they would be in host memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.first = self.peak = 0

    def seed(self, model) -> None:
        for tensor in reachable(model):
            self._add(tensor.untyped_storage())
        self.first = self._total()

    def _add(self, storage) -> None:
        self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())

    def _total(self) -> int:
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        total = sum(size for _, size in self.live.values())
        self.peak = max(self.peak, total)
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        passed = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in passed:
                self._add(tensor.untyped_storage())
        self._total()
        return out


class LogLines(logging.Handler):
    """Collects the lines of one logger."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger(name).addHandler(self)
        logging.getLogger(name).setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
