"""Checkpoints that exist as headers only, in memory: for rules that never look at a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from fse_convert.checkpoint.header import BITS, Header, TensorInfo
from fse_convert.checkpoint.left_out import Kind
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.model.description import Description
from fse_convert.plan.advice import Decider
from fse_convert.plan.decide import decider
from fse_convert.plan.source import describe_source
from fse_convert.servers.subject import Subject
from fse_convert.testing.parts import FORMATS

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name."""
W = ("w1", "w3", "w2")
PROJ = ("gate_proj", "up_proj", "down_proj")


@dataclass
class NoFolder:
    """A folder that cannot be read."""

    label: str = "memory"
    files: dict[str, int] = field(default_factory=dict)
    clutter: dict[str, Kind] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    workers: int = 1

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:  # noqa: ARG002
        """Fail: a rule that reads is a bug."""
        raise AssertionError(f"{name} was read")


def matrix(store: str, n: int, k: int) -> Tensors:
    """Return the tensors of an [n, k] matrix by suffix, in a storage format named in `parts.FORMATS` or below."""
    if store in FORMATS:
        return {part.suffix: (part.dtype, part.shape(n, k)) for part in FORMATS[store]}

    def blocks(rows: int, cols: int) -> tuple[int, int]:
        return -(-n // rows), -(-k // cols)

    fp8, f32 = ("F8_E4M3", (n, k)), "F32"
    others: dict[str, Tensors] = {
        "f16": {"weight": ("F16", (n, k))},
        "fp8-32-u8": {"weight": fp8, "weight_scale": ("U8", blocks(32, 32))},
        "fp8-16": {"weight": fp8, "scale": ("F8_E8M0", blocks(16, 16))},
        "fp8-128-bf16": {"weight": fp8, "weight_scale": ("BF16", blocks(128, 128))},
        "fp8-pb-wo": {"weight": fp8, "weight_scale": (f32, (blocks(128, 128)[0], 1, blocks(128, 128)[1], 1))},
        "mxfp8": {"weight": fp8, "weight_scale": ("F8_E8M0", blocks(1, 32))},
        "mxfp8-u8": {"weight": fp8, "weight_scale": ("U8", blocks(1, 32))},
        "fp8-1x16": {"weight": fp8, "weight_scale": ("F8_E8M0", blocks(1, 16))},
        "fp8-tensor": {"weight": fp8, "weight_scale": (f32, ()), "input_scale": (f32, ())},
        "fp8-channel": {"weight": fp8, "weight_scale": (f32, (n, 1))},
        "mxfp4-packed": {"weight_packed": ("U8", (n, k // 2)), "weight_scale": ("U8", blocks(1, 32))},
        "nvfp4-packed": {
            "weight_packed": ("U8", (n, k // 2)),
            "weight_scale": ("F8_E4M3", blocks(1, 16)),
            "weight_global_scale": (f32, (1,)),
            "input_global_scale": (f32, (1,)),
        },
        "ascend-int8": {"weight": ("I8", (n, k)), "weight_scale": (f32, (n, 1)), "weight_offset": (f32, (n, 1))},
        "int4-packed": {
            "weight_packed": ("I32", (n, k // 8)),
            "weight_scale": ("BF16", (n, k // 32)),
            "weight_shape": ("I64", (2,)),
        },
        "gptq": {"qweight": ("I32", (k // 8, n)), "scales": ("F16", (k // 128, n)), "qzeros": ("I32", (k // 128, n // 8))},
        "int8-128": {"weight": ("I8", (n, k)), "weight_scale_inv": (f32, blocks(128, 128))},
        "int8-channel": {"weight": ("I8", (n, k)), "weight_scale": (f32, (n, 1))},
        "w4afp8": {"weight": ("I8", (n, k // 2)), "weight_scale_inv": ("BF16", blocks(1, 128)), "input_scale": (f32, (1,))},
        "fp4-128": {"weight": ("I8", (n, k // 2)), "weight_scale": ("F8_E8M0", blocks(1, 128))},
        "mxfp6": {"weight": ("U8", (n, k * 6 // 8)), "weight_scale": ("U8", blocks(1, 32))},
        "awq": {"qweight": ("I32", (k, n // 8)), "scales": ("F16", (k // 128, n)), "qzeros": ("I32", (k // 128, n // 8))},
        "bnb-nf4": {"weight": ("U8", (n * k // 2, 1)), "weight.absmax": ("U8", (n * k // 64,)), "weight.quant_map": (f32, (16,))},
        "mlx": {"weight": ("U32", (n, k // 8)), "scales": ("F16", (n, k // 64)), "biases": ("F16", (n, k // 64))},
    }
    return others[store]


def expert(prefix: str, store: str, width: int, hidden: int, names: tuple[str, str, str] = W) -> Tensors:
    """Return an expert's tensors: gate and up [width, hidden], down [hidden, width]; without gate where its name is empty."""
    gate, up, down = names
    shapes = {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    shapes.pop("", None)
    return {f"{prefix}.{p}.{s}": info for p, (n, k) in shapes.items() for s, info in matrix(store, n, k).items()}


@dataclass
class Model:
    """A small DeepSeek-V4-like model; every field can be set."""

    hidden: int = 512
    width: int = 256
    experts: int = 2
    n_shared: int = 1
    shared_width: int | None = None
    routed: str = "mxfp4"
    shared: str = "fp8-32"
    layers: int = 2
    mtp: int = 1
    mtp_shared: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """Return dtypes and shapes of the whole model: an embedding, routers and experts."""
        width = self.n_shared * self.width if self.shared_width is None else self.shared_width
        tensors: Tensors = {"embed.weight": ("BF16", (8, self.hidden))}
        prefixes = [f"layers.{i}.ffn" for i in range(self.layers)] + [f"mtp.{i}.ffn" for i in range(self.mtp)]
        for prefix in prefixes:
            tensors[f"{prefix}.gate.weight"] = ("BF16", (self.experts, self.hidden))
            for e in range(self.experts):
                tensors |= expert(f"{prefix}.experts.{e}", self.routed, self.width, self.hidden)
            store = self.mtp_shared if self.mtp_shared and prefix.startswith("mtp") else self.shared
            if store:
                tensors |= expert(f"{prefix}.shared_experts", store, width, self.hidden)
        return tensors

    def full_config(self) -> dict[str, Any]:
        """Return config.json as the fields describe it; `config` overrides."""
        block = {"fp8-32": [32, 32], "fp8-128": [128, 128]}.get(self.shared)
        quant = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": block}
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "expert_dtype": "fp4",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.width,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.n_shared,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": self.mtp,
            "num_experts_per_tok": 1,
            "num_hash_layers": 0,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 10.0,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            **({"quantization_config": quant} if block else {}),
            **self.config,
        }

    def subject(self) -> Subject:
        """Return what servers judge."""
        return subject_of(self.full_config(), self.tensors())


def checkpoint(config: Mapping[str, Any], tensors: Tensors, quant_config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Return a checkpoint of one shard that was never written."""
    infos, at = [], 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        infos.append(TensorInfo(name, "model.safetensors", dtype, shape, at, at + size))
        at += size
    shard = Shard("model.safetensors", at, Header(tuple(infos), {}, 0, at))
    return Checkpoint(NoFolder(), config, quant_config, (shard,), {t.name: t for t in infos}, None, (), ())


def plans_of(about: Subject, tensors: Tensors) -> Decider:
    """Return what conversions of a model in memory would decide."""
    return decider(replace(describe_source(checkpoint(about.config, tensors)), scales=about.scales))


def description_of(config: Mapping[str, Any], tensors: Tensors) -> Description:
    """Describe a model in memory."""
    return describe_source(checkpoint(config, tensors)).description


def subject_of(config: Mapping[str, Any], tensors: Tensors, quant_config: Mapping[str, Any] | None = None) -> Subject:
    """Return what the rules see of a model in memory."""
    return describe_source(checkpoint(config, tensors, quant_config)).subject
