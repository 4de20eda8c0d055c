"""The F32 scales of FP8 experts, and what follows from their values once they have been read.

The kernel takes UE8M0 scales, so an F32 scale fits only if it is a power of two: rounding one changes every weight of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.formats import REQUANTISE, StorageKind
from fse_convert.servers.verdict import Outcome, Verdict, because

INEXACT = "scale-inexact"


@dataclass(frozen=True, slots=True)
class Scales:
    """The outcome of reading F32 scales: names of the tensors that were read, and what E8M0 cannot hold, by tensor name."""

    read: frozenset[str] = frozenset()
    inexact: Mapping[str, str] = field(default_factory=dict)

    def inexact_of(self, layer: LayerDescription) -> tuple[str, ...]:
        """Return the names of a layer's scale tensors that hold a value E8M0 cannot."""
        return tuple(t.name for t in f32_block_scales(layer.shared, layer.routed) if t.name in self.inexact) if self.inexact else ()


UNREAD = Scales()


def f32_block_scales(*groups: ExpertGroup | None) -> tuple[TensorInfo, ...]:
    """List every F32 block scale of groups of experts."""
    return tuple(info for group in groups if group for info in _f32(group))


def _f32(group: ExpertGroup) -> Iterable[TensorInfo]:
    blocks = ((r, f) for r, f in group.formats.items() if f.kind is StorageKind.FP8_BLOCK and f.scale_dtype == "F32")
    names = {r: f.scale for r, f in blocks if f.scale}
    if not names:
        return ()
    of_experts = (p.parts[names[role]] for e in group.experts for role, p in e.projections.items() if role in names)
    return chain(of_experts, (s.info for s in group.stacked if s.part == names.get(s.role)))


def with_scales(layer: LayerDescription, verdict: Verdict, scales: Scales, rounded_by: str = "") -> Verdict:
    """Take back a verdict of fusing that the scales' values contradict, or that they have yet to confirm.

    ``rounded_by``: the server that rounds such scales to powers of two while loading; empty where nothing takes them. A reason
    names no tensor, so that it is the same in every layer.
    """
    found = f32_block_scales(layer.shared, layer.routed) if verdict.fused else ()
    if not found:
        return verdict
    if scales.inexact_of(layer):
        if rounded_by:
            message = f"{rounded_by} rounds F32 scales to powers of two while loading, and some are none: their weights change"
            return because(Outcome.UNSAFE, "scale-f32-rounded", message, REQUANTISE)
        message = "F32 scales are no powers of two, which is all that the kernel's E8M0 scales can hold"
        return because(Outcome.UNFUSED, INEXACT, message, REQUANTISE)
    if all(t.name in scales.read for t in found):
        return verdict
    message = "F32 scales fit only where every one is a power of two; headers cannot tell"
    return because(Outcome.UNKNOWN, "scale-f32-unread", message, "a conversion with --dry-run reads them")
