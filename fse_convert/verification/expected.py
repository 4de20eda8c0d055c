"""What an output must hold, derived from the source and its widths.

Shapes, padding, config edits and headers are worked out here a second time, without the planner's or the writer's code; the
description of the source (`fse_convert.model`) and the names of formats are those that the planner reads too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.plan.source import Source

FUSED = "fused"
PACKED = 128
"""Columns under one int32 word of scales."""
ONES = {"F8_E8M0": b"\x7f", "U8": b"\x7f", "F32": b"\0\0\x80\x3f", "F8_E4M3": b"\x38", "BF16": b"\x80\x3f"}
"""The code of 1.0, which pads scales, by their dtype; weights are padded with zero bytes."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A stored matrix ``[rows, row_bytes]`` at the head of a larger one, ``fill`` (one element) in all the rest."""

    info: TensorInfo
    shape: tuple[int, ...]
    rows: int
    row_bytes: int
    new_rows: int
    new_row_bytes: int
    fill: bytes


@dataclass(frozen=True, slots=True)
class KernelExpert:
    """A shared expert that must be in the sidecar, at padded ``width``; ``prefix`` of its four tensors' names."""

    prefix: str
    group: ExpertGroup
    width: int

    def tensor(self, role: Role, *, scale: bool) -> TensorInfo:
        """A projection's weight or scale in the source."""
        f = self.group.formats[role]
        return self.group.experts[0].projections[role].parts[(f.scale or "") if scale else f.weight]

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and stored shape by name, as vLLM 0.33 registers them; scales are stored transposed (MN-major)."""
        h, s = self.group.hidden, self.width
        return {
            f"{self.prefix}.shared_l1_weight": ("F8_E4M3", (2 * s, h)),
            f"{self.prefix}.shared_l1_weight_scale": ("I32", (h // PACKED, 2 * s)),
            f"{self.prefix}.shared_l2_weight": ("F8_E4M3", (h, s)),
            f"{self.prefix}.shared_l2_weight_scale": ("I32", (s // PACKED, h)),
        }


def padded_tensors(description: Description, width: int, main: int) -> dict[str, Padded]:
    """Every tensor that must have grown when experts of ``width`` are stored ``main`` wide: gate, up in rows, down in columns."""
    if width == main:
        return {}
    return {p.info.name: p for layer in description.layers for p in _padded_of(layer, width, main)}


def _padded_of(layer: LayerDescription, width: int, main: int) -> Iterator[Padded]:
    for group in filter(None, (layer.routed, layer.shared)):
        for expert in group.experts:
            for role, projection in expert.projections.items():
                f = group.formats[role]
                n, k = f.shape
                new = (n, k // width * main) if role is Role.DOWN else (n // width * main, k)
                for suffix, info in projection.parts.items():
                    cell = _cell(f, suffix)
                    shape = _stored(new, cell, len(info.shape)) if cell else info.shape
                    if shape != info.shape:
                        yield _padded(info, shape, ONES[info.dtype] if suffix == f.scale else bytes(BITS[info.dtype] // 8))


def _cell(f: Format, suffix: str) -> tuple[int, int] | None:
    """Rows and columns of the logical matrix that one stored element stands for (0 columns: all); None for scalars."""
    if suffix == f.weight:
        return (1, 2) if f.weight_dtype in ("I8", "U8") else (1, 1)
    if suffix != f.scale or f.kind is StorageKind.FP8_TENSOR:
        return None
    if f.kind is StorageKind.FP8_CHANNEL:
        return 1, 0
    return {StorageKind.MXFP4: (1, 32), StorageKind.NVFP4: (1, 16)}.get(f.kind, f.block)


def _stored(logical: tuple[int, int], cell: tuple[int, int], dimensions: int) -> tuple[int, ...]:
    rows, columns = -(-logical[0] // cell[0]), -(-logical[1] // cell[1]) if cell[1] else 1
    return (rows, columns)[:dimensions]


def _padded(info: TensorInfo, shape: tuple[int, ...], fill: bytes) -> Padded:
    def row_bytes(s: tuple[int, ...]) -> int:
        return (s[1] if len(s) > 1 else 1) * len(fill)

    return Padded(info, shape, info.shape[0], row_bytes(info.shape), shape[0], row_bytes(shape), fill)


def kernel_experts(description: Description, verdicts: Mapping[str, str], width: int) -> list[KernelExpert]:
    """Shared experts of the layers with the verdict ``fused`` that are FP8 with block scales: what the sidecar must hold.

    ``verdicts`` come from the source (`fse_convert.verification.demanded`); without one, from the manifest.
    """
    return [
        KernelExpert(f"{d.layer.name}.experts", d.shared, width)
        for d in description.layers
        if d.shared
        and verdicts.get(d.layer.name) == FUSED
        and {f.kind for f in d.shared.formats.values()} == {StorageKind.FP8_BLOCK}
    ]


def config_edits(source: Source, n_shared: int, width: int, main: int) -> list[tuple[str, str, int, int]]:
    """Every integer of config.json that must have changed, as (section, key, old, new), wherever the family keeps widths."""
    family = source.description.family
    if family is None or width == main:
        return []
    keys = {family.width_key: 1} | ({family.shared_width_key: n_shared} if family.shared_width_key else {})
    found = []
    for section in family.sections:
        place = source.checkpoint.config.get(section) if section else source.checkpoint.config
        for key, times in keys.items():
            if isinstance(place, Mapping) and place.get(key) == times * width:
                found.append((section, key, times * width, times * main))
    return found


def edited(config: Mapping[str, Any], edits: Iterable[tuple[str, str, int, int]]) -> dict[str, Any]:
    """A config with edits done, keys in the source's order."""
    result: dict[str, Any] = json.loads(json.dumps(config))
    for section, key, _, new in edits:
        (result[section] if section else result)[key] = new
    return result


def swiglu_limit(source: Source) -> float | None:
    """The model's clamp of gate and up, from the config section that holds the widths; None for none."""
    config, section = source.checkpoint.config, source.description.section
    place = config.get(section) if section else config
    value = place.get("swiglu_limit") if isinstance(place, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def kernel_entries(experts: Iterable[KernelExpert]) -> dict[str, dict[str, Any]]:
    """Entries that the header of a shard of ``fse/`` must have: the four tensors of one expert after the other."""
    entries: dict[str, dict[str, Any]] = {}
    at = 0
    for expert in experts:
        for name, (dtype, shape) in expert.shapes.items():
            end = at + prod(shape) * BITS[dtype] // 8
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
    return entries


def header_entries(shard: Shard, padded: Mapping[str, Padded]) -> dict[str, dict[str, Any]]:
    """Entries that the header of a rewritten shard must have: the source's tensors in its order, at their new sizes."""
    entries: dict[str, dict[str, Any]] = {}
    at = 0
    for t in shard.header.tensors:
        p = padded.get(t.name)
        end = at + (p.new_rows * p.new_row_bytes if p else t.nbytes)
        entries[t.name] = {"dtype": t.dtype, "shape": list(p.shape if p else t.shape), "data_offsets": [at, end]}
        at = end
    return entries
