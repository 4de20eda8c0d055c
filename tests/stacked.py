"""Checkpoints of stacked experts, made from one matrix per expert, and the same of wider matrices: what padding must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from fse_convert.testing import memory

HIDDEN, EXPERTS, LAYERS = 64, 3, 2
Tensors = dict[str, Tensor]
Matrices = tuple[Tensor, Tensor, Tensor]
"""Gate and up ``[E, n, k]``, down ``[E, k, n]``."""


class Part(NamedTuple):
    """A tensor of a matrix: its suffix, rows and columns per element (0: a vector of rows), what pads it, and its dtype."""

    suffix: str
    cell: tuple[int, int]
    fill: int | float
    dtype: torch.dtype


def concatenated(m: Matrices) -> list[Tensor]:
    return [torch.cat(m[:2], 1), m[2]]


def transposed(m: Matrices) -> list[Tensor]:
    return [t.transpose(1, 2).contiguous() for t in concatenated(m)]


def interleaved(m: Matrices) -> list[Tensor]:
    gate, up, down = m
    return [torch.stack((gate, up), 2).flatten(1, 2), down]


def interleaved_transposed(m: Matrices) -> list[Tensor]:
    return [t.transpose(1, 2).contiguous() for t in interleaved(m)]


def apart(m: Matrices) -> list[Tensor]:
    return list(m)


BF16 = (Part("", (1, 1), 0, torch.bfloat16),)
FP8 = (Part("", (1, 1), 0, torch.float8_e4m3fn), Part("_scale_inv", (32, 32), 1.0, torch.float32))
MXFP4 = (
    Part("_blocks", (1, 2), 0, torch.uint8),
    Part("_scales", (1, 32), 127, torch.uint8),
    Part("_bias", (1, 0), 0, torch.bfloat16),
)
E8M0 = (Part(".weight", (1, 1), 0, torch.float8_e4m3fn), Part(".weight_scale_inv", (32, 32), 127, torch.float8_e8m0fnu))
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def with_weight(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(p._replace(suffix=f".weight{p.suffix}") for p in parts)


@dataclass(frozen=True)
class Case:
    """A layout of stacked experts as a release has it.

    ``width`` needs padding on ``tp`` ranks; ``stacks``: names below ``block``, in the order of ``form``; ``shared``: the module of
    the shared MLP in a layer, ``fused`` the one of its matrices that holds gate and up.
    """

    name: str
    model_type: str
    block: str
    form: Callable[[Matrices], list[Tensor]]
    stacks: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    parts: tuple[Part, ...] = BF16
    width: int = 33
    padded: int = 34
    tp: int = 2
    hidden: int = HIDDEN
    shared: str = ""
    fused: tuple[str, str] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    mtp: str = ""

    @property
    def blocks(self) -> list[str]:
        return [self.block.format(i) for i in range(LAYERS)] + [f"{self.mtp}.{self.block.partition('{}.')[2]}"] * bool(self.mtp)

    def tensors(self, width: int, seed: int = 0) -> Tensors:
        """The experts as wide as that; the first 33 (or ``width``) channels are the same whatever it is."""
        generator, found = torch.Generator().manual_seed(seed), {}
        for block in self.blocks:
            for part in self.parts:
                matrices = self._matrices(part, EXPERTS, width, generator)
                stored = _biases(matrices) if part.cell[1] == 0 else self.form(matrices)
                for stack, tensor in zip(self.stacks, stored, strict=True):
                    packed = tensor.unflatten(2, (-1, 16)) if part.suffix == "_blocks" else tensor
                    found[f"{block}.{stack}{part.suffix}"] = packed.view(part.dtype).contiguous()
            found |= self._shared(block, width, generator) if self.shared else {}
            found[f"{block}.gate.weight"] = torch.ones(EXPERTS, self.hidden).bfloat16()
        return found | {"model.embed_tokens.weight": torch.ones(8, self.hidden).bfloat16()}

    def _shared(self, block: str, width: int, generator: torch.Generator) -> Tensors:
        at, found = self.shared.replace("BLOCK", block).replace("LAYER", block.rpartition(".")[0]), {}
        parts = tuple(p._replace(suffix=f".weight{p.suffix.removeprefix('.weight')}") for p in self.parts)
        for part in parts:
            gate, up, down = (m[0] for m in self._matrices(part, 1, width, generator))
            matrices = {f"{at}.{name}": m for name, m in zip(PROJECTIONS, (gate, up, down), strict=True)}
            if self.fused:
                matrices = {f"{at}.{self.fused[0]}": torch.cat((gate, up)), f"{at}.{self.fused[1]}": down}
            found |= {f"{name}{part.suffix}": m.view(part.dtype).contiguous() for name, m in matrices.items()}
        if "shared_expert_intermediate_size" in self.config:
            found[f"{at}_gate.weight"] = torch.ones(1, self.hidden).bfloat16()
        return found

    def _matrices(self, part: Part, count: int, width: int, generator: torch.Generator) -> Matrices:
        """Numbers of channels that a release of ``self.width`` has, and what pads them behind."""
        rows, columns = part.cell

        def grown(n: int, k: int, *, down: bool) -> Tensor:
            shape = (-(-n // rows), -(-k // columns) if columns else 1)
            wide = (-(-(width if not down else n) // rows), -(-(width if down else k) // columns) if columns else 1)
            real = _random(part, (count, *shape), generator)
            out = torch.full((count, *wide), part.fill, dtype=part.dtype if part.dtype.itemsize > 1 else torch.float32)
            out = out.to(torch.uint8) if part.dtype.itemsize == 1 else out
            out[:, : shape[0], : shape[1]] = real
            return out

        w, h = self.width, self.hidden
        return grown(w, h, down=False), grown(w, h, down=False), grown(h, w, down=True)

    def config_of(self, width: int) -> dict[str, Any]:
        """config.json, with every width that it states."""
        config = {"model_type": self.model_type, "hidden_size": self.hidden, "num_hidden_layers": LAYERS, **self.config}
        return {key: width if value == "WIDTH" else value for key, value in config.items()}

    def save(self, root: Path, shards: int = 1) -> Tensors:
        """Write a release, in a number of shards, and return its tensors."""
        root.mkdir(parents=True)
        tensors = self.tensors(self.width)
        names = sorted(tensors)
        files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)}
        for file, of_file in files.items():
            save_file({n: tensors[n] for n in of_file}, root / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: file for file, of_file in files.items() for n in of_file}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        (root / "config.json").write_text(json.dumps(self.config_of(self.width), indent=2))
        return tensors


def _random(part: Part, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if part.dtype.itemsize > 1:
        return torch.randn(shape, generator=generator).to(part.dtype) if part.fill == 0 else _powers(shape, generator)
    high = 120 if part.fill == 0 else 130  # no NaN code
    return torch.randint(0 if part.fill == 0 else 120, high, shape, generator=generator, dtype=torch.uint8)


def _powers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2.0 ** torch.randint(-8, 8, shape, generator=generator)


def _biases(m: Matrices) -> list[Tensor]:
    """gpt-oss: of gate and up in turn, and of down, one for every row."""
    gate, up, down = (t[:, :, 0] for t in m)
    return [torch.stack((gate, up), 2).flatten(1), down]


DEEPSEEK = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": "WIDTH", "first_k_dense_replace": 0}
STEP = {
    "moe_num_experts": EXPERTS, "moe_intermediate_size": "WIDTH", "share_expert_dim": "WIDTH", "share_expert_dims": "WIDTH",
}  # fmt: skip
MOE = {"num_experts": EXPERTS, "moe_intermediate_size": "WIDTH"}
MUSE = {"num_local_experts": EXPERTS, "moe_intermediate_size": "WIDTH"}
EITHER = {"num_local_experts": EXPERTS, "intermediate_size": "WIDTH"}
MLP = "model.layers.{}.mlp"
OF_MOE = tuple(PROJECTIONS)
LLM, W13 = "model.llm.layers.{}.mlp", ("experts.w13_weight", "experts.w2_weight")
INKLING = {"n_routed_experts": EXPERTS, "moe_intermediate_size": "WIDTH", "intermediate_size": "WIDTH"}
CASES = (
    Case(
        "L1 Qwen3.5",
        "qwen3_5_moe_text",
        MLP,
        concatenated,
        shared="BLOCK.shared_expert",
        mtp="mtp.layers.0",
        config={"num_experts": EXPERTS, "moe_intermediate_size": "WIDTH", "shared_expert_intermediate_size": "WIDTH"},
    ),
    Case(
        "L1 FP8",
        "hy_v4",
        MLP,
        concatenated,
        parts=FP8,
        width=96,
        padded=128,
        shared="BLOCK.shared_experts",
        config={**DEEPSEEK, **FP8_CONFIG},
    ),
    Case(
        "L1 Granite alone",
        "granitemoe",
        "model.layers.{}.block_sparse_moe",
        concatenated,
        ("input_linear", "output_linear"),
        with_weight(BF16),
        config=EITHER,
    ),
    Case(
        "L1 Granite",
        "granitemoehybrid",
        "model.layers.{}.block_sparse_moe",
        concatenated,
        ("input_linear", "output_linear"),
        with_weight(BF16),
        shared="LAYER.shared_mlp",
        fused=("input_linear", "output_linear"),
        config={**EITHER, "shared_intermediate_size": "WIDTH"},
    ),
    Case(
        "L1 MiniMax-M3",
        "minimax_m3_text",
        MLP,
        concatenated,
        shared="BLOCK.shared_experts",
        fused=("gate_up_proj", "down_proj"),
        config={**EITHER, "n_shared_experts": 1, "shared_intermediate_size": "WIDTH"},
    ),
    *(
        Case(
            f"L1 Granite {name}",
            "granitemoehybrid",
            "model.layers.{}.block_sparse_moe",
            concatenated,
            ("input_linear", "output_linear"),
            parts,
            width=96,
            padded=128,
            shared="LAYER.shared_mlp",
            fused=("input_linear", "output_linear"),
            config={**EITHER, "shared_intermediate_size": "WIDTH", **FP8_CONFIG},
        )
        for name, parts in (("FP8", with_weight(FP8)), ("FP8 E8M0", E8M0))
    ),
    *(
        Case(
            f"L1 MiniMax-M3 {name}",
            "minimax_m3_text",
            MLP,
            concatenated,
            parts=parts,
            width=96,
            padded=128,
            shared="BLOCK.shared_experts",
            fused=("gate_up_proj", "down_proj"),
            config={**EITHER, "n_shared_experts": 1, "shared_intermediate_size": "WIDTH", **FP8_CONFIG},
        )
        for name, parts in (("FP8", FP8), ("FP8 E8M0", E8M0))
    ),
    Case("L2 Llama 4", "llama4_text", "model.layers.{}.feed_forward", transposed, shared="BLOCK.shared_expert", config=EITHER),
    Case(
        "L2 square",  # 2 x width is the hidden size: the shapes do not tell which is which
        "qwen3_vl_moe_text",
        MLP,
        transposed,
        hidden=66,
        config={"num_experts": EXPERTS, "moe_intermediate_size": "WIDTH"},
    ),
    Case(
        "L2 FP8",
        "qwen3_vl_moe_text",
        MLP,
        transposed,
        parts=FP8,
        width=96,
        padded=128,
        config={"num_experts": EXPERTS, "moe_intermediate_size": "WIDTH", **FP8_CONFIG},
    ),
    Case(
        "L2 Aria",
        "aria_text",
        MLP,
        transposed,
        ("experts.fc1", "experts.fc2"),
        with_weight(BF16),
        shared="BLOCK.shared_experts",
        config={"moe_num_experts": EXPERTS, "moe_num_shared_experts": 1, "intermediate_size": "WIDTH"},
    ),
    Case(
        "L3 MXFP4",
        "gpt_oss",
        MLP,
        interleaved,
        parts=MXFP4,
        width=96,
        padded=160,  # servers cut whole blocks of 32 by themselves wherever the ranks divide the width
        tp=5,
        config={**EITHER, "quantization_config": {"quant_method": "mxfp4"}},
    ),
    Case("L3 Inkling 2", "inkling2_text", LLM, interleaved, W13, config=INKLING),
    Case(
        "L3 MXFP8",
        "inkling2_text",
        LLM,
        interleaved,
        W13,
        (FP8[0], Part("_scale", (1, 32), 127, torch.float8_e8m0fnu)),
        width=96,
        padded=128,
        config={**INKLING, "quantization_config": {"quant_method": "mxfp8"}},
    ),
    Case("L3 BF16", "gpt_oss", MLP, interleaved_transposed, parts=(*BF16, MXFP4[2]), config=EITHER),
    Case("L4 BF16", "step3p5", "model.layers.{}.moe", apart, OF_MOE, with_weight(BF16), shared="LAYER.share_expert", config=STEP),
    Case(
        "L4 FP8",  # the last block of scales is a part of one
        "step3p5",
        "model.layers.{}.moe",
        apart,
        OF_MOE,
        with_weight(FP8),
        width=80,
        padded=128,
        shared="LAYER.share_expert",
        config={**STEP, **FP8_CONFIG},
    ),
    Case(
        "L4 MXFP8",
        "step3p7",
        "model.layers.{}.moe",
        apart,
        OF_MOE,
        E8M0,
        width=96,
        padded=128,
        shared="LAYER.share_expert",
        config={**STEP, **FP8_CONFIG},
    ),
)


ALIKE = (
    Case("L1 Mistral 4", "mistral4", MLP, concatenated, shared="BLOCK.shared_experts", config=DEEPSEEK),
    Case("L1 Gemma 4", "gemma4_text", "model.layers.{}", concatenated, config={**MOE, "expert_intermediate_size": "WIDTH"}),
    Case("L1 Muse Spark", "muse_spark_text", MLP, concatenated, config={**MUSE, "moe_hidden_size": HIDDEN}),
    Case(
        "L1 Granite SWA",
        "granitemoe_swa",
        "model.layers.{}.block_sparse_moe",
        concatenated,
        shared="LAYER.shared_mlp",
        fused=("input_linear", "output_linear"),
        config={**EITHER, "shared_intermediate_size": "WIDTH"},
    ),
    Case(
        "L4 Step-3",
        "step3_text",
        "model.layers.{}.moe",
        apart,
        OF_MOE,
        with_weight(BF16),
        shared="LAYER.share_expert",
        config={k: v for k, v in STEP.items() if k != "share_expert_dims"},
    ),
)
"""Other families whose releases are stored as some of these are."""


DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float32": "F32", "uint8": "U8"}


def headers(case: Case, width: int) -> memory.Tensors:
    """The tensors of a case as headers."""
    return {n: (DTYPES[str(t.dtype).partition(".")[2]], tuple(t.shape)) for n, t in case.tensors(width).items()}
