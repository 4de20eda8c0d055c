"""What kinds of checkpoint are made of: tensors to write, storage formats of matrices, and the traits of a kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CONFIGS: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configs.json").read_text(encoding="utf-8"))
"""Published config.json files, parts of some, and the sizes of a demonstration; keys that depend on the knobs are empty."""


class Entry(NamedTuple):
    """A tensor to write: `fill` names its values, `seed` their random stream (its name, unless two must be equal)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str
    seed: str


Group = list[Entry] | tuple[Entry, ...]  # a shard's tensors; a tuple's are stored in its order


class Part(NamedTuple):
    """One stored tensor of a matrix: an element stands for `block` = (rows, columns) of it; no block means 0-d."""

    suffix: str
    dtype: str
    fill: str
    block: tuple[int, ...]
    tied: bool = False  # gate and up have the same value

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape for a matrix [rows, cols]; a partial block counts as one."""
        return tuple(-(-size // block) for size, block in zip((rows, cols), self.block, strict=False))


class Storage(NamedTuple):
    """The format of each sort of matrix; empty: as in the decoder layers."""

    routed: str = "bf16"
    shared: str = "bf16"
    linear: str = "bf16"  # attention and all others
    mtp_routed: str = ""
    mtp_shared: str = ""


@dataclass(frozen=True)
class Spec:
    """One checkpoint to write: `traits` is its kind, `config` its config.json, `shard_size` in bytes (none: as published)."""

    kind: str
    traits: Kind
    config: Mapping[str, Any]
    mtp: int
    mtp_experts: int
    power_of_two: bool = False  # of F32 scales
    shard_size: int | None = None
    seed: int = 0
    single_file: bool = False
    sparse: bool = False
    header_metadata: bool = True

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return self.config.get("text_config", self.config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kind:
    """One published checkpoint: its tensors by shard, its config, how its matrices are stored."""

    groups: Callable[[Spec], Iterator[Group]]
    config: Mapping[str, Any]
    storage: Storage
    dspark: bool = False  # the MTP layers are the stages of one drafter
    ratio: Callable[[int], int] = lambda _: 0  # KV compression of a layer
    power_of_two: bool = False
    real_mtp: int = 0  # MTP layers in the files, where the config says another number
    demo_experts: int = 8
    quantization: Callable[[Spec], dict[str, Any]] | None = None
    experts_key: str = "n_routed_experts"


def _fp8(scale: str, block: tuple[int, int], dtype: str = "F8_E8M0") -> tuple[Part, ...]:
    fill = "f32-scale" if dtype == "F32" else "e8m0-of-fp8"
    return Part("weight", "F8_E4M3", "e4m3", (1, 1)), Part(scale, dtype, fill, block)


FORMATS: Mapping[str, tuple[Part, ...]] = {
    "bf16": (Part("weight", "BF16", "normal-bf16", (1, 1)),),
    "fp8-128": _fp8("scale", (128, 128)),
    "fp8-32": _fp8("scale", (32, 32)),
    "fp8-row32": _fp8("scale", (1, 32)),
    "fp8-128-f32": _fp8("weight_scale_inv", (128, 128), "F32"),
    "fp8-128-f32-scale": _fp8("scale", (128, 128), "F32"),
    "fp8-128-quark": _fp8("weight_scale", (128, 128)),
    "mxfp4": (Part("weight", "I8", "fp4", (1, 2)), Part("scale", "F8_E8M0", "e8m0-of-fp4", (1, 32))),
    "mxfp4-u8": (Part("weight", "U8", "fp4", (1, 2)), Part("weight_scale", "U8", "e8m0-of-fp4", (1, 32))),
    "nvfp4": (
        Part("weight", "U8", "fp4", (1, 2)),
        Part("weight_scale", "F8_E4M3", "e4m3-scale", (1, 16)),
        Part("weight_scale_2", "F32", "global-f32", (), tied=True),
        Part("input_scale", "F32", "global-f32", (), tied=True),
    ),
}


def linear(spec: Spec, prefix: str, rows: int, cols: int, storage: str = "") -> Iterator[Entry]:
    """Yield the stored tensors of the matrix `prefix` [rows, cols], by default in the format of the attention."""
    for part in FORMATS[storage or spec.traits.storage.linear]:
        fill = "f32-scale-pow2" if part.fill == "f32-scale" and spec.power_of_two else part.fill
        stream = prefix.removesuffix("w3") + "w1" if part.tied and prefix.endswith("w3") else prefix
        yield Entry(f"{prefix}.{part.suffix}", part.dtype, part.shape(rows, cols), fill, f"{stream}.{part.suffix}")


def mlp(spec: Spec, storage: str, prefix: str, width: int, names: str = "w1 w2 w3") -> Iterator[Entry]:
    """Yield gate and up [width, hidden], down [hidden, width]; `names` are those of gate, down, up."""
    gate, down, up = (f"{prefix}.{name}" for name in names.split())
    hidden = spec.text["hidden_size"]
    yield from linear(spec, gate, width, hidden, storage)
    yield from linear(spec, down, hidden, width, storage)
    yield from linear(spec, up, width, hidden, storage)


def plain(name: str, *shape: int, dtype: str = "BF16", fill: str = "") -> Entry:
    """Return a tensor that is never quantised; norms are near one."""
    return Entry(name, dtype, shape, fill or ("unit-" if "norm" in name else "normal-") + dtype.lower(), name)


def experts(spec: Spec, mtp: bool) -> int:
    """Return the number of routed experts of a decoder or of an MTP layer."""
    return spec.mtp_experts if mtp else int(spec.text[spec.traits.experts_key])


def moe(spec: Spec, prefix: str, *, mtp: bool, names: str = "w1 w2 w3") -> Iterator[Entry]:
    """Yield the router's matrix, the routed experts, and the shared ones as one MLP of `n_shared_experts` widths, if any."""
    c, formats = spec.text, spec.traits.storage
    width, shared = c["moe_intermediate_size"], c.get("n_shared_experts", 0)
    routed_format = (mtp and formats.mtp_routed) or formats.routed
    shared_format = (mtp and formats.mtp_shared) or formats.shared
    yield plain(f"{prefix}.gate.weight", experts(spec, mtp), c["hidden_size"])
    for expert in range(experts(spec, mtp)):
        yield from mlp(spec, routed_format, f"{prefix}.experts.{expert}", width, names)
    if shared:
        yield from mlp(spec, shared_format, f"{prefix}.shared_experts", shared * width, names)
