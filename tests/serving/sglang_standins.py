"""What stands in for SGLang's modules and registry in the tests of its hooks."""

from __future__ import annotations

import functools
import pkgutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fse_convert.errors import NotServable
from fse_convert.layout import ue8m0
from fse_convert.serving.sglang import hooks, modules

LAYER = "layers.1.ffn"
MODULE = "model.layers.1.mlp.shared_experts.gate_up_proj"
CONFIG = SimpleNamespace(hidden_size=512, moe_intermediate_size=384, n_shared_experts=1)


class Linear(nn.Module):
    """A block-FP8 linear as SGLang leaves it after loading: scales as FP32, blocks by way of the quantisation method."""

    def __init__(self, weight: Tensor, scale: Tensor, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        blocks = [weight.shape[axis] // scale.shape[axis] for axis in (0, 1)]
        self.quant_method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=blocks))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)


class SharedMlp(nn.Module):
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        return x


class Experts(nn.Module):
    """Routed experts after SGLang 0.5.23's builder, of E experts: tuples and registered copies share a storage."""

    def __init__(self, e: int, h: int, i: int, *, registered: bool = True) -> None:
        super().__init__()
        self.layer_id = 1
        self._mega_moe_nvfp4 = self._mega_moe_w4a4 = False
        shapes = {"w13": (e, 2 * i, h // 128), "w2": (e, h, i // 128)}
        for name, shape in shapes.items():
            copy = torch.empty(shape, dtype=torch.int32)
            self.register_parameter(
                f"{name}_weight_scale_inv", nn.Parameter(torch.empty(shape, dtype=torch.int32), requires_grad=False)
            )
            if registered:
                self.register_parameter(f"mega_{name}_weight_scale_utccp", nn.Parameter(copy, requires_grad=False))
            setattr(self, {"w13": "mega_l1_weights", "w2": "mega_l2_weights"}[name], (torch.empty(0), copy))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def run_moe_core(self, x: Tensor) -> Tensor:
        return x


class Registry:
    """SGLang's registry as far as it matters (0.5.21 to 0.5.23 plugins/hook_registry.py, the same file): it keeps hooks by target,
    wraps what is there once, and passes over targets that it has been at before; a failure is logged alone.

    ``lost``: targets that cannot be patched. ``deaf``: those that look patched and are not.
    """

    def __init__(self) -> None:
        self._hooks: dict[str, list[tuple[str, Any, Any]]] = {}
        self._patched: set[str] = set()
        self.lost: set[str] = set()
        self.deaf: set[str] = set()
        self.applied: list[str] = []

    @property
    def hooks(self) -> dict[str, Any]:
        return {target: registered[-1][1] for target, registered in self._hooks.items()}

    def register(self, target: str, hook: Any, kind: str, *, source: Any = None) -> None:
        self._hooks.setdefault(target, []).append((kind, hook, source))

    def apply_hooks(self) -> None:
        for target, registered in self._hooks.items():
            if target in self._patched:
                continue
            with suppress(Exception):
                self._apply_target(target, registered)
                self._patched.add(target)

    def _apply_target(self, target: str, registered: list[tuple[str, Any, Any]]) -> None:
        parent, _, name = target.rpartition(".")
        place = pkgutil.resolve_name(parent)
        wrapped = getattr(place, name)
        if target in self.lost:
            raise TypeError(target)
        for kind, hook, _source in registered:
            wrapped = _wrap(wrapped, hook, kind)
        if target not in self.deaf:
            setattr(place, name, wrapped)
        self.applied.append(target)


def _wrap(original: Any, hook: Any, kind: str) -> Any:
    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    @functools.wraps(original)
    def after(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return result if modified is None else modified

    return {"around": around, "after": after}[kind]


def method(*_args: Any, **_kwargs: Any) -> str:
    """A method of SGLang's that would read weights."""
    return "read"


def served(folder: Path | None, config: Any = CONFIG, loader: str = "DefaultModelLoader", *, local: bool = True) -> None:
    """Tell the plugin, by its own hooks, that a model is loaded from a folder, or from a hub id that it stands for."""
    path = str(folder) if folder and local else "org/model"
    model_config = SimpleNamespace(
        model_path=path, hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]), hf_text_config=config
    )
    hooks.after_get_model_loader(type(loader, (), {})(), None, model_config)
    if folder:
        hooks.after_prepare_weights((str(folder), [], True), None, path, None)


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if ".shared_experts." in name}  # noqa: SIM118
    return found


def loaded(folder: Path, layer: str = LAYER, prefix: str = MODULE) -> SharedMlp:
    """The shared MLP of a layer as SGLang's loaders leave it."""
    values = tensors(folder)

    def part(name: str, kind: str) -> Tensor:
        value = values[f"{layer}.shared_experts.{name}.{kind}"]
        return value if kind == "weight" else ue8m0.to_fp32(value)

    gate_up = Linear(*(torch.cat((part("w1", kind), part("w3", kind))) for kind in ("weight", "scale")), prefix)
    return SharedMlp(gate_up, Linear(part("w2", "weight"), part("w2", "scale"), prefix.replace("gate_up", "down")))


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def codes(error: pytest.ExceptionInfo[NotServable]) -> list[str]:
    return [p.code for p in error.value.problems]


def never(*_args: object) -> Any:
    raise AssertionError("SGLang's builder was called")


def refused(mlp: SharedMlp) -> pytest.ExceptionInfo[NotServable]:
    """Build, and see that the weights are still there."""
    with pytest.raises(NotServable) as error:
        hooks.around_shared(never, mlp)
    assert all(p.numel() for p in mlp.parameters())
    assert not modules.sealed_modules(mlp)
    return error
