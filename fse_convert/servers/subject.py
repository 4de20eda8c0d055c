"""What the rules of servers judge: a checkpoint by its configs and headers, and what reading its F32 scales showed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.description import Description
from fse_convert.model.hash_layers import hash_layers
from fse_convert.model.quantization import Quantization
from fse_convert.servers.config_keys import ROUTER_TENSORS
from fse_convert.servers.f32_scales import UNREAD, Scales


@dataclass(frozen=True)
class Subject:
    """A checkpoint as the rules see it.

    ``tensors``: every tensor by name, for rules that look beside the experts. ``scales``: what reading the F32 scales showed, if
    they were read.
    """

    config: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    quantization: Quantization
    description: Description
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    scales: Scales = UNREAD

    def fp8_modules(self, block: str) -> tuple[str, ...]:
        """Return the modules stored in FP8 of the layer that a MoE block is in, but for its routed experts."""
        return self._fp8_by_layer.get(_layer_of(block), ())

    @cached_property
    def router_tensors(self) -> frozenset[str]:
        """Those of `ROUTER_TENSORS` with which the name of some tensor ends."""
        names = [name for name in self.tensors if name.endswith(ROUTER_TENSORS)]
        return frozenset(end for end in ROUTER_TENSORS if any(name.endswith(end) for name in names))

    @cached_property
    def hash_layers(self) -> tuple[frozenset[int], bool]:
        """The decoder layers that route by a table, and whether the gate of every decoder layer is there."""
        family = self.description.family
        return hash_layers(family, self.config, self.tensors) if family else (frozenset(), False)

    @cached_property
    def _fp8_by_layer(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for name, info in self.tensors.items():
            if info.dtype == "F8_E4M3" and name.endswith(".weight") and ".experts." not in name:
                found.setdefault(_layer_of(name), []).append(name.removesuffix(".weight"))
        return {layer: tuple(modules) for layer, modules in found.items()}


def _layer_of(name: str) -> str:
    """Return a name up to its first number: ``model.layers.3`` of ``model.layers.3.mlp``."""
    return name[: found.end()] if (found := re.search(r"\.\d+(?=\.)", name)) else name


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the model classes that a config names; empty where it names none."""
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def vllm_class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the model classes that vLLM looks for: DeepSeek-V4 with a vision tower names the text model's and is another one.

    0.30 transformers_utils/model_arch_config_convertor.py:602, 0.33 :576; 0.29 has no class for the tower's tensors.
    """
    names, layers = class_names(config), config.get("vision_n_layers")
    vision = names == ("DeepseekV4ForCausalLM",) and isinstance(layers, int) and layers > 0
    return ("DeepseekV4ForConditionalGeneration",) if vision else names
