"""The cost of shared experts, padding and the servers' duplicates, in bytes, on disk and per rank: arithmetic on headers.

Per rank, routed experts are split over the expert-parallel ranks, and a fused shared expert is replicated: the kernel needs
the whole MLP on every rank (vLLM 0.33 models/deepseek_v4/nvidia/model.py:368-375). Sizes in the kernel's layout count a
scale byte per 32 columns of every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from fse_convert.checkpoint.header import BITS
from fse_convert.layout.sizes import GROUP
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.model.formats import Format
from fse_convert.model.moe import LayerKind, Projection
from fse_convert.model.padding_ends import padded_shape
from fse_convert.servers.native import LaunchWidths


@dataclass(frozen=True, slots=True)
class Serving:
    """The spread of the model over ranks: tensor-parallel size of shared experts, expert-parallel size of routed ones."""

    tp: int = 1
    ep: int = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of experts as stored: routed and shared, of all layers together."""

    routed: int
    shared: int

    @property
    def total(self) -> int:
        """Both."""
        return self.routed + self.shared

    def per_rank(self, serving: Serving) -> float:
        """Add up what one rank holds: its part of the routed experts, and every shared one."""
        return self.routed / serving.ep + self.shared


@dataclass(frozen=True, slots=True)
class Padding:
    """The cost of padding every expert from ``width`` to ``new_width``, beyond what is stored."""

    width: int
    new_width: int
    decoder: Stored
    mtp: Stored

    @property
    def disk(self) -> int:
        """Bytes that the checkpoint grows by."""
        return self.decoder.total + self.mtp.total

    def per_rank(self, serving: Serving) -> float:
        """Add up what one rank holds more."""
        return self.decoder.per_rank(serving) + self.mtp.per_rank(serving)

    @property
    def work(self) -> float:
        """The experts' share of arithmetic and bandwidth afterwards; 1.0 before."""
        return self.new_width / self.width


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Bytes per rank of decoder layers that a server holds twice after loading; `Target.held_twice` says which release does.

    ``sglang_scales``: routed scales. ``sglang_shared``: shared gate and up weights. ``sglang_loading``: routed scales as FP32,
    held while loading.
    """

    sglang_scales: float
    sglang_shared: int
    sglang_loading: float


@dataclass(frozen=True, slots=True)
class Costs:
    """All figures of one checkpoint for one way of serving it; ``paddings`` are by kernel contract where the width changes.

    ``uneven``: numbers of routed experts that ``serving.ep`` does not divide; with any, no figure per rank of them is true.
    """

    serving: Serving
    uneven: tuple[int, ...]
    decoder: Stored
    mtp: Stored
    shared_kernel: int
    duplicates: Duplicates
    paddings: dict[str, Padding]

    @property
    def shared_sharded(self) -> float:
        """Bytes of the shared experts per rank, were they split over the tensor-parallel ranks."""
        return self.shared_kernel / self.serving.tp


def costs(description: Description, serving: Serving, widths: Mapping[str, LaunchWidths]) -> Costs:
    """Work out all figures. ``widths``: by kernel contract, as `needed_widths` gives them."""
    decoder = [d for d in description.layers if d.layer.kind is LayerKind.DECODER]
    return Costs(
        serving=serving,
        uneven=uneven(description, serving.ep),
        decoder=stored(decoder),
        mtp=stored(d for d in description.layers if d.layer.kind is LayerKind.MTP),
        shared_kernel=kernel_shared(decoder),
        duplicates=_duplicates(decoder, serving),
        paddings={
            contract: padding(description, width) for contract, width in widths.items() if width.routed != description.widths[0]
        },
    )


def uneven(description: Description, ep: int) -> tuple[int, ...]:
    """Return the numbers of routed experts in a layer that cannot be spread evenly over so many ranks."""
    counts = {d.layer.count for d in description.layers}
    return tuple(sorted(n for n in counts if n % ep))


def stored(layers: Iterable[LayerDescription]) -> Stored:
    """Add up the bytes of experts as the checkpoint stores them."""
    routed = shared = 0
    for d in layers:
        if d.routed and d.routed.experts:  # all alike
            routed += len(d.layer.routed) * _nbytes(d.layer.routed[0].projections.values())
        else:
            routed += sum(_nbytes(e.projections.values()) for e in d.layer.routed) + sum(t.nbytes for t in d.layer.stacked)
        shared += _nbytes(d.layer.shared.projections.values()) if d.layer.shared else 0
        shared += sum(t.nbytes for t in d.layer.fused)
    return Stored(routed, shared)


def padding(description: Description, new: LaunchWidths) -> Padding:
    """Work out what padding every expert to ``new`` widths adds."""
    grown = {kind: [_grown(d, new) for d in description.layers if d.layer.kind is kind] for kind in LayerKind}
    total = {kind: Stored(sum(g.routed for g in each), sum(g.shared for g in each)) for kind, each in grown.items()}
    return Padding(description.widths[0], new.routed, total[LayerKind.DECODER], total[LayerKind.MTP])


def kernel_shared(layers: Iterable[LayerDescription]) -> int:
    """Add up the bytes of the shared experts in the kernel's layout, at their own width: FP8 and a scale per 32 columns."""
    sizes = (len(d.shared.formats) * d.shared.width * d.shared.hidden for d in layers if d.shared)
    return sum(size + size // GROUP for size in sizes)


def _nbytes(projections: Iterable[Projection]) -> int:
    return sum(t.nbytes for p in projections for t in p.parts.values())


def _grown(d: LayerDescription, new: LaunchWidths) -> Stored:
    routed = len(d.layer.routed) * _growth(d.routed, new.routed) + _stacked_growth(d.routed, new.routed) if d.routed else 0
    shared = _growth(d.shared, new.shared) + _stacked_growth(d.shared, new.shared) if d.shared else 0
    return Stored(routed, shared)


def _growth(group: ExpertGroup, width: int) -> int:
    """Add up the bytes that one expert of a group grows by."""
    return sum(
        _expert_bytes(p, f, padded_shape(role, f.shape, width)) - _expert_bytes(p, f, f.shape)
        for expert in group.experts[:1]
        for role, p in expert.projections.items()
        for f in (group.formats[role],)
    )


def _stacked_growth(group: ExpertGroup, width: int) -> int:
    """Add up the bytes by which the tensors that hold a group's experts grow."""
    grown = ((s.info, prod(s.shape(group.formats[s.role].shape, width))) for s in group.stacked)
    return sum(elements * BITS[info.dtype] // 8 - info.nbytes for info, elements in grown)


def _expert_bytes(projection: Projection, f: Format, shape: tuple[int, int]) -> int:
    """Add up the bytes of one projection ``[n, k]``, by how its tensors tile it; scalars do not grow."""
    tiles = ((suffix, tile) for suffix, tile in f.tiles.items() if tile)
    return sum(prod(tile.stored(*shape, 2)) * BITS[projection.parts[suffix].dtype] // 8 for suffix, tile in tiles)


def _duplicates(layers: list[LayerDescription], serving: Serving) -> Duplicates:
    scales = sum(d.layer.count * _scale_bytes(d.routed) for d in layers if d.routed)
    shared = sum(2 * d.shared.width * d.shared.hidden for d in layers if d.shared)
    return Duplicates(sglang_scales=scales / serving.ep, sglang_shared=shared, sglang_loading=4 * scales / serving.ep)


def _scale_bytes(group: ExpertGroup) -> int:
    """Add up the bytes of one FP4 expert's scales in the kernel's layout; other formats do not go that way."""
    columns = group.gate.kind.facts.group
    return len(group.formats) * group.width * group.hidden // columns if columns else 0
