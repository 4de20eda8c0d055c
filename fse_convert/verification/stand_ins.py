"""Which tensors must stand in the place of the source's after changes of format: names, dtypes, shapes, and what each holds.

Worked out a second time, from the names of the changes and the source alone, not by ``fse_convert/plan/changes``: experts by the
description of the source's layers, labels by pairs of tensors in the headers, whatever layer they belong to. The edits of
config.json are taken from the plan: to list again which keys servers read would only repeat the planner's list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from fse_convert.checkpoint.header import E8M0_DTYPES, TensorInfo
from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.families.with_shared import DEEPSEEK_V4
from fse_convert.model.formats import StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Copied, Recoded, Rule, TensorSpec

Tensors = dict[str, tuple[TensorSpec, ...]]
"""By the name of a source tensor, what must stand in its place."""
GROUP = 32
"""Elements of a row that share a scale in MXFP4."""
SCALE_NAMES = ("scale", "weight_scale", "weight_scale_inv")
PACKED = ("I8", "U8")


def stand_ins(source: Source, changes: Iterable[str]) -> Tensors:
    """Return what must stand in the place of every tensor that changes, by the changes' names; a name without a rule has none."""
    found: Tensors = {}
    for rule in (RULES[name] for name in changes if name in RULES):
        found |= rule(source)
    return found


def kept_originals(tensors: Tensors) -> set[str]:
    """Name the source tensors that do not follow from the output: group scales of what became FP8, all of what was rounded."""
    kept: set[str] = set()
    for change in (spec.change for specs in tensors.values() for spec in specs):
        if isinstance(change, Recoded) and change.rule is not Rule.F32:
            kept.update(t.name for t in (change.sources[1:] if change.rule is Rule.FP8 else change.sources))
    return kept


Found = Iterator[tuple[str, tuple[TensorSpec, ...]]]


def _routed_fp8(source: Source) -> Found:
    """Routed experts become E4M3 in the config's blocks; the scales of shared experts become F32 with theirs."""
    rows, columns = source.quantization.block or (1, 1)
    for layer in source.description.layers:
        for weight, scale, _ in _matrices(layer.routed):
            n, k = shape = weight.shape[0], 2 * weight.shape[1]
            specs = (weight.name, "F8_E4M3", shape), (scale.name, "F32", (-(-n // rows), -(-k // columns)))
            for i, (name, dtype, stored) in enumerate(specs):
                change = Recoded(rule=Rule.FP8, weight=weight, scale=scale, shape=shape, block=(rows, columns), is_scale=i == 1)
                yield name, (TensorSpec(name, dtype, stored, change),)
        yield from _f32(layer.shared)


def _fp8_scales(source: Source) -> Found:
    for layer in source.description.layers:
        for group in layer.groups:
            yield from _f32(group)


def _f32(group: ExpertGroup | None) -> Found:
    for weight, scale, block in _matrices(group):
        if weight.dtype == "F8_E4M3" and scale.dtype in E8M0_DTYPES:
            n, k = weight.shape
            change = Recoded(rule=Rule.F32, weight=None, scale=scale, shape=(n, k), block=block, is_scale=True)
            yield scale.name, (TensorSpec(scale.name, "F32", scale.shape, change),)


def _matrices(group: ExpertGroup | None) -> Iterator[tuple[TensorInfo, TensorInfo, tuple[int, int] | None]]:
    """Yield weight, scale and block of every matrix that has scales."""
    for expert in group.experts if group else ():
        for role, projection in expert.projections.items():
            f = group.formats[role] if group else None
            if f and f.scale:
                yield projection.parts[f.weight], projection.parts[f.scale], f.block


def _shared_mxfp4(source: Source) -> Found:
    """Shared experts become MXFP4 under Quark's names; where Quark did not write the checkpoint, all else takes its names too."""
    rounded: Tensors = {}
    for layer in source.description.layers:
        if layer.shared and _becomes_mxfp4(source, layer):
            for role, projection in layer.shared.experts[0].projections.items():
                f = layer.shared.formats[role]
                scale = projection.parts[f.scale] if f.scale else None
                rounded |= _mxfp4(projection.name, projection.parts[f.weight], scale, f.block)
    if source.quantization.method != "quark":
        for module, weight, scale in _pairs(source):
            if weight.name not in rounded:
                label = "U8" if weight.dtype in PACKED else "F8_E8M0"
                yield from _relabelled(weight, f"{module}.weight", "U8" if weight.dtype in PACKED else weight.dtype)
                yield from _relabelled(scale, f"{module}.weight_scale", label)
    yield from rounded.items()


def _becomes_mxfp4(source: Source, layer: LayerDescription) -> bool:
    """Tell whether a layer's shared experts change: those of DeepSeek-V4's drafter do not, nor any that are MXFP4 already."""
    family = source.description.family
    if layer.layer.kind is LayerKind.MTP and ((family and family.name == DEEPSEEK_V4.name) or not _is_mxfp4(layer.routed)):
        return False
    return not _is_mxfp4(layer.shared)


def _is_mxfp4(group: ExpertGroup | None) -> bool:
    return group is not None and {f.kind for f in group.formats.values()} == {StorageKind.MXFP4}


def _mxfp4(module: str, weight: TensorInfo, scale: TensorInfo | None, block: tuple[int, int] | None) -> Tensors:
    n, k = weight.shape
    both = tuple(
        TensorSpec(
            f"{module}.{part}", "U8", (n, k // per_byte),
            Recoded(rule=Rule.MXFP4, weight=weight, scale=scale, shape=(n, k), block=block, is_scale=per_byte == GROUP),
        )
        for part, per_byte in (("weight", 2), ("weight_scale", GROUP))
    )  # fmt: skip
    return {weight.name: both} if scale is None else {weight.name: both[:1], scale.name: both[1:]}


def _labels(source: Source, *, of_scales: bool) -> Found:
    """Label as bytes the weights or scales of modules that are MXFP4 by their headers: a byte of scale for 16 bytes of codes."""
    for _, weight, scale in _pairs(source):
        packed = weight.dtype in PACKED and scale.dtype in E8M0_DTYPES
        if packed and scale.shape == (weight.shape[0], 2 * weight.shape[1] // GROUP):
            info = scale if of_scales else weight
            yield from _relabelled(info, info.name, "U8")


def _pairs(source: Source) -> Iterator[tuple[str, TensorInfo, TensorInfo]]:
    """Yield name, weight and scale of every module that has both."""
    tensors = source.checkpoint.tensors
    for name, weight in tensors.items():
        module, _, part = name.rpartition(".")
        scale = next((tensors[n] for n in (f"{module}.{s}" for s in SCALE_NAMES) if n in tensors), None)
        if part in ("weight", "weight_packed") and scale:
            yield module, weight, scale


def _relabelled(info: TensorInfo, name: str, dtype: str) -> Found:
    if (info.name, info.dtype) != (name, dtype):
        yield info.name, (TensorSpec(name, dtype, info.shape, Copied(info)),)


RULES: Mapping[str, Callable[[Source], Found]] = {
    "routed-fp8": _routed_fp8,
    "shared-mxfp4": _shared_mxfp4,
    "heal-fp8-scales": _fp8_scales,
    "heal-quark-scale-labels": partial(_labels, of_scales=True),
    "heal-quark-weight-labels": partial(_labels, of_scales=False),
}
"""What each change of format does to tensors; those of config.json alone are not here."""
