"""Puts the sidecar's shared experts where vLLM's MegaMoE layers keep them, and checks that all of them arrive.

Two generations: 0.33 registers parameters in the kernel layout (``shared_l1_weight`` ...) and drops the shared MLP when the
model is built; 0.29-0.32 build the MLP, and transform it after loading into slots (``_transformed_shared_l1_weights`` ...).
Nothing here imports vLLM, so that its classes can be exercised one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fse_convert.servers.load_padding import padded_routed
from fse_convert.servers.release_names import for_version
from fse_convert.servers.targets import TARGETS
from fse_convert.serving.sidecar import RECONVERT, Sidecar, refuse
from fse_convert.sidecar.tensors import KernelTensorName

SLOTS = ("_transformed_shared_l1_weights", "_transformed_shared_l2_weights")
NOT_MEGAMOE = "serve it with --moe-backend deep_gemm_mega_moe --enable-expert-parallel, or without --load-format fse"
WITHOUT = "--load-format auto (for a draft: its draft_load_config) loads the checkpoint without this plugin"


@dataclass(frozen=True)
class Block:
    """One MoE layer of a model: the module that holds ``experts`` and, unless they are dropped, ``shared_experts``."""

    name: str
    module: Any

    @property
    def experts(self) -> Any:
        """The module that calls the kernel."""
        return self.module.experts

    @property
    def slots(self) -> bool:
        """Whether it is of 0.29-0.32, which keep the shared experts in slots; otherwise they are parameters."""
        return hasattr(self.experts, SLOTS[0])

    @property
    def fuses(self) -> bool:
        """Whether the server runs the shared experts of this layer inside the kernel, once they are loaded."""
        if not self.slots:
            return bool(self.experts.has_fused_shared_experts)
        return self.experts.num_shared_experts > 0 and self.module.shared_experts is not None


def find_blocks(model: nn.Module) -> list[Block]:
    """Find all MegaMoE layers that a model owns; layers of other pipeline ranks are not among them."""
    modules = model.named_modules()
    return [Block(name, m) for name, m in modules if hasattr(getattr(m, "experts", None), "has_fused_shared_experts")]


def marker(prefix: str) -> Tensor:
    """Make a stand-in for a shared expert's tensor, ``[0, 0]`` uint8, that carries the prefix of its layer in the sidecar."""
    tensor = torch.empty((0, 0), dtype=torch.uint8)
    tensor.fse_prefix = prefix  # type: ignore[attr-defined]
    return tensor


class Takeover:
    """One load: checks the sidecar against the model, then takes every shared expert's place; a context manager.

    Inside the context the model may be loaded with markers. ``taken``: sidecar prefix by block name. ``nbytes``: copied.
    """

    def __init__(self, sidecar: Sidecar, model: nn.Module, version: str) -> None:
        self.sidecar = sidecar
        self.target = for_version("vLLM", version, TARGETS)
        self.blocks = find_blocks(model)
        self.taken: dict[str, str] = {}
        self.nbytes = 0
        self._parts: dict[str, set[KernelTensorName]] = {block.name: set() for block in self.blocks}
        self._check_model(model)
        for block in self.blocks:
            self._check_width(block, padded_routed(block.experts.intermediate_size, self.target))
            if block.slots and not _kernel_takes_shared(block.experts):
                refuse("kernel-api", "the installed DeepGEMM takes no shared experts", block.name, WITHOUT)

    def _check_model(self, model: nn.Module) -> None:
        if not self.blocks:
            message = "no layer of this model runs DeepGEMM MegaMoE"
            refuse("not-megamoe", message, type(model).__name__, NOT_MEGAMOE)
        apart = [b.name for b in self.blocks if not b.fuses]
        if apart:
            message = (
                f"the server runs the shared experts of {len(apart)} of {len(self.blocks)} layers outside of the kernel: tensor "
                "parallel without sequence parallel, VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION, another backend, or what "
                "the log says"
            )
            refuse("not-fused", message, apart[0], WITHOUT)

    def _check_width(self, block: Block, routed_width: int) -> None:
        self.sidecar.check(
            hidden=block.experts.hidden_size,
            routed_width=routed_width,
            n_shared=block.experts.num_shared_experts,
            contract=self.target.contract,
            target=self.target.name,
        )

    def __enter__(self) -> Takeover:
        for block in self.blocks:
            if block.slots:
                self._take_slots(block)
            else:
                block.experts.load_shared_expert_weight = self._parameter_loader(block)
        gc.collect()  # 0.33 dropped its MLPs, but parameters and modules hold each other: the storage is still there
        return self

    def __exit__(self, *exception: object) -> None:
        for block in self.blocks:
            for replaced in ("load_shared_expert_weight", "finalize_weights"):
                vars(block.experts).pop(replaced, None)
            if block.slots:
                block.module.shared_experts = None

    def _take_slots(self, block: Block) -> None:
        """Free the shared MLP of 0.29-0.32 and put a sink in its place; only the routed experts are left to transform."""
        mlp, block.module.shared_experts = block.module.shared_experts, None
        block.module.shared_experts = _sink(mlp, partial(self._arrive, block))
        for parameter in mlp.parameters():
            parameter.data = parameter.data.new_empty(0)
        finalize = block.experts.finalize_weights
        block.experts.finalize_weights = lambda *_args, **_kwargs: finalize()

    def finish(self) -> None:
        """Fill the slots, and check that every layer has what it needs. Raises NotServable.

        The slots come last, so that they are not yet there when the server's transformation of the routed experts peaks.
        """
        for block in self.blocks:
            if block.slots and block.name in self.taken:
                self._fill(block, self.taken[block.name])
        missing = [name for name, parts in self._parts.items() if len(parts) != len(KernelTensorName)]
        if missing:
            message = f"{len(missing)} of {len(self.blocks)} layers did not get their shared experts from the sidecar"
            refuse("sidecar-layer", message, ", ".join(missing[:4]), RECONVERT)
        if len(set(self.taken.values())) != len(self.taken):
            message = "two layers of the model took the same shared experts"
            refuse("sidecar-layer", message, str(self.taken), WITHOUT)

    def _arrive(self, block: Block, tensor: Tensor) -> str:
        """Take what the model loads into a layer, which must be markers of one prefix; return that prefix."""
        prefix: str | None = getattr(tensor, "fse_prefix", None)
        if prefix is None:
            message = "the model owns this layer, the sidecar does not hold its shared experts"
            refuse("sidecar-layer", message, block.name, RECONVERT)
        if block.name not in self.taken:
            self.sidecar.check_original(prefix)
        if self.taken.setdefault(block.name, prefix) != prefix:
            message = f"the model puts {self.taken[block.name]} and {prefix} into one layer"
            refuse("sidecar-layer", message, block.name, WITHOUT)
        return prefix

    def _parameter_loader(self, block: Block) -> Callable[[str, Tensor], str]:
        """Make what replaces 0.33's ``load_shared_expert_weight(name, tensor)``; it returns the name that the original would."""

        def load(name: str, tensor: Tensor) -> str:
            prefix = self._arrive(block, tensor)
            layer = "l2" if ".w2." in name or ".down_proj." in name else "l1"
            part = KernelTensorName(f"shared_{layer}_weight" + ("_scale" if "scale" in name.rpartition(".")[2] else ""))
            if part not in self._parts[block.name]:
                self._copy(block, part, getattr(block.experts, part.value).data, self.sidecar.tensor(prefix, part))
            return f"{name.partition('shared_experts.')[0]}experts.{part.value}"

        return load

    def _fill(self, block: Block, prefix: str) -> None:
        """Put a layer's tensors into the slots of 0.29-0.32, on the device of its routed experts."""
        experts = block.experts
        self._check_width(block, experts.intermediate_size)  # final only now: 0.30 pads after loading
        device = experts._transformed_l1_weights[0].device
        held = []
        for part in KernelTensorName:
            source = self.sidecar.tensor(prefix, part)
            held.append(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device))
            self._copy(block, part, held[-1], source)
        for slot, weights in zip(SLOTS, (held[:2], held[2:]), strict=True):
            setattr(experts, slot, tuple(weights))

    def _copy(self, block: Block, part: KernelTensorName, target: Tensor, source: Tensor) -> None:
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            message = (
                f"the model's {part.value} is {target.dtype} {list(target.shape)}, "
                f"the sidecar's {source.dtype} {list(source.shape)}"
            )
            refuse("layout-mismatch", message, block.name, WITHOUT)
        _rows(target).copy_(_rows(source))
        self._parts[block.name].add(part)
        self.nbytes += source.nbytes


def _rows(tensor: Tensor) -> Tensor:
    """View an MN-major matrix as it lies in memory, and any other as is."""
    return tensor if tensor.stride(-1) == 1 else tensor.t()


def _kernel_takes_shared(experts: Any) -> bool:
    """Ask as the server does: 0.31 models/deepseek_v4/nvidia/model.py:377, 0.32 fused_moe/deep_gemm_mega_moe.py:177."""
    from vllm.utils.deep_gemm import _import_deep_gemm

    if hasattr(experts, "_ensure_backend"):
        return bool(experts._ensure_backend().supports_shared_experts(_import_deep_gemm()))
    return bool(experts._deep_gemm_supports_shared_experts(_import_deep_gemm()))


def _sink(mlp: nn.Module, arrive: Callable[[Tensor], object]) -> nn.Module:
    """Make a module with the parameter names of ``mlp``: empty ones that pass what is loaded into them to ``arrive``."""

    def weight_loader(_parameter: nn.Parameter, tensor: Tensor, *_shard: object) -> None:
        arrive(tensor)

    sink = nn.Module()
    for path, _ in mlp.named_parameters():
        *parents, leaf = path.split(".")
        module = sink
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        parameter = nn.Parameter(torch.empty(0), requires_grad=False)
        parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
        module.register_parameter(leaf, parameter)
    return sink
