"""How the modules of a checkpoint are stored, and the tensors that stand in their place when only labels or scales change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fse_convert.checkpoint.header import E8M0_DTYPES, TensorInfo
from fse_convert.checkpoint.names import natural_key
from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.formats import SCALARS, SCALES, WEIGHTS, Format, FormatError, StorageKind, read_format
from fse_convert.model.grouping import ROUTED
from fse_convert.model.moe import Projection
from fse_convert.plan.tensors import Copied, Recoded, Rule, TensorSpec
from fse_convert.servers.subject import Subject

_PARTS = frozenset((*WEIGHTS, *SCALES, *SCALARS))

Tensors = dict[str, tuple[TensorSpec, ...]]
"""By the name of a source tensor, what stands in its place."""
Matrix = tuple[Projection, Format]
"""A module that is a matrix, and how it is stored."""


def linears(subject: Subject) -> list[Matrix]:
    """Return every matrix outside of the routed experts by name; what fits no format that is understood is left out."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in subject.tensors.items():
        if ROUTED not in name:
            module, _, suffix = name.rpartition(".")
            if suffix in _PARTS:
                found.setdefault(module, {})[suffix] = info
    matrices: list[Matrix] = []
    for module in sorted(found, key=natural_key):
        try:
            matrices.append((Projection(module, found[module]), read_format(found[module], subject.quantization.block_hint)))
        except FormatError:
            continue
    return matrices


def matrices(group: ExpertGroup) -> Iterator[Matrix]:
    """Yield every matrix of a layer's experts that is stored by itself."""
    return ((p, group.formats[role]) for expert in group.experts for role, p in expert.projections.items())


def every_matrix(subject: Subject) -> Iterator[Matrix]:
    """Yield every matrix of a checkpoint, the routed experts' after the others."""
    yield from linears(subject)
    for layer in subject.description.layers:
        if layer.routed:
            yield from matrices(layer.routed)


def unquantised(subject: Subject) -> list[str]:
    """Return the modules that are stored as plain floats by name; the routed experts of a layer are one."""
    routed = (layer for layer in subject.description.layers if layer.routed and is_all(layer.routed, StorageKind.PLAIN))
    plain = (p.name for p, f in linears(subject) if f.kind is StorageKind.PLAIN)
    return sorted((*plain, *(experts_module(layer) for layer in routed)), key=natural_key)


def experts_module(layer: LayerDescription) -> str:
    """Name the module that servers make of a layer's routed experts."""
    return f"{layer.layer.name}.experts"


def is_all(group: ExpertGroup, kind: StorageKind) -> bool:
    """Tell whether all matrices of a layer's experts are stored in one format."""
    return all(f.kind is kind for f in group.formats.values())


def relabelled(info: TensorInfo, name: str, dtype: str) -> Tensors:
    """Return a tensor under another name or an equally wide dtype, its bytes as they are; nothing where both are the same."""
    if (info.name, info.dtype) == (name, dtype):
        return {}
    return {info.name: (TensorSpec(name, dtype, info.shape, Copied(info)),)}


def f32_scales(found: Iterable[Matrix]) -> Tensors:
    """Return the E8M0 scales of FP8 blocks as F32, which holds every one of their powers of two; nothing for other matrices."""
    tensors: Tensors = {}
    for projection, f in found:
        if f.kind is StorageKind.FP8_BLOCK and f.scale and f.scale_dtype in E8M0_DTYPES:
            scale = projection.parts[f.scale]
            change = Recoded(rule=Rule.F32, weight=None, scale=scale, shape=f.shape, block=f.block, is_scale=True)
            tensors[scale.name] = (TensorSpec(scale.name, "F32", scale.shape, change),)
    return tensors


def stored_alike(layers: Iterable[LayerDescription], kind: StorageKind) -> bool:
    """Tell whether there are routed experts, all of them stored in one format."""
    groups = [layer.routed for layer in layers]
    return bool(groups) and all(group is not None and is_all(group, kind) for group in groups)
