"""Decide what a conversion will write: pure, and the same for everyone who asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod

from fse_convert.checkpoint.header import TensorInfo, element_bytes
from fse_convert.checkpoint.names import SIDECAR
from fse_convert.checkpoint.reader import Checkpoint, Shard, garbage_collection_paused
from fse_convert.model.description import ExpertGroup
from fse_convert.model.formats import StorageKind, Tile
from fse_convert.model.moe import Role
from fse_convert.model.padding_ends import padded_shape
from fse_convert.plan.changes.apply import changed_tensors, lay_out
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Decision, Options, Plan
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import (
    Computed,
    Copied,
    Grown,
    Growth,
    OutputShard,
    SharedExpert,
    TensorSpec,
    Tripwire,
    placed,
)
from fse_convert.servers.targets import Contract
from fse_convert.sidecar.manifest import stretches
from fse_convert.sidecar.tensors import kernel_prefix, kernel_shapes, original_name, originals_file, shard_metadata

SIDECAR_SHARD_BYTES = 1 << 30
"""Layers are added to a sidecar shard until it holds this many bytes."""
EMBEDDINGS = (".embed.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".wte.weight")


@garbage_collection_paused()
def make_plan(source: Source, options: Options) -> Plan:
    """Decide what to write.

    Raises InvalidCheckpoint for what is broken or not understood, NotConvertible for layers that would not fuse.
    """
    decision, checkpoint = decide(source, options), source.checkpoint
    specs, grown = changed_tensors(decision.changes), dict(_padding(decision))
    originals = frozenset[str]() if options.drop_originals else frozenset().union(*(c.originals for c in decision.changes))
    return Plan(
        source=source,
        options=options,
        decision=decision,
        shards=tuple(_shard(shard, specs, grown) for shard in checkpoint.shards),
        sidecar=_sidecar(decision, options.contract, tripwire(checkpoint)) if options.contract else (),
        originals=tuple(filter(None, (_originals(shard, originals) for shard in checkpoint.shards if originals))),
    )


def tripwire(checkpoint: Checkpoint) -> TensorSpec:
    """Return the tripwire of ``fse/``: the text model's embedding, which its loaders know, else the first tensor by name."""
    names = [n for n in checkpoint.tensors if f".{n}".endswith(EMBEDDINGS)] or [min(checkpoint.tensors)]
    name = min(names, key=lambda n: (len(n), n))  # a vision tower's has a longer one
    return TensorSpec(name, checkpoint.tensors[name].dtype, (0,), Tripwire())


def _padding(decision: Decision) -> Iterator[tuple[str, Grown]]:
    """Find every expert tensor that grows in the standard layout; yield its name, and what it grows to."""
    if not decision.pads:
        return
    for layer in decision.after.description.layers:
        for group, width in ((layer.routed, decision.at_main.routed), (layer.shared, decision.at_main.shared)):
            yield from _padded(group, width) if group else ()


def _padded(group: ExpertGroup, width: int) -> Iterator[tuple[str, Grown]]:
    known: dict[tuple[Role, str, tuple[int, ...]], Grown | None] = {}
    for expert in group.experts:
        for role, projection in expert.projections.items():
            for suffix, info in projection.parts.items():
                key = role, suffix, info.shape
                if key not in known:
                    f = group.formats[role]
                    tile = f.tiles[suffix]
                    shape = tile.stored(*padded_shape(role, f.shape, width), len(info.shape)) if tile else info.shape
                    known[key] = _growth(info, shape, stretches(info.shape, shape), tile)
                if grown := known[key]:
                    yield info.name, grown
    for s in group.stacked:
        f = group.formats[s.role]
        if grown := _growth(s.info, s.shape(f.shape, width), s.stretches, s.tile):
            yield s.info.name, grown


def _growth(info: TensorInfo, shape: tuple[int, ...], count: int, tile: Tile | None) -> Grown | None:
    """Return a shape that a tensor grows to, and how, in so many stretches; None where it stays."""
    if tile is None or shape == info.shape:
        return None
    new = prod(shape) * element_bytes(info.dtype) // count
    return shape, Growth(stretches=count, old=info.nbytes // count, new=new, fill=tile.fill, nan=tile.nan)


def _shard(shard: Shard, specs: Mapping[str, tuple[TensorSpec, ...]], grown: Mapping[str, Grown]) -> OutputShard:
    """Plan a shard of the standard layout."""
    metadata = {"format": "pt", **shard.header.metadata}  # loaders ask for `format: pt`
    return OutputShard(name=shard.name, tensors=lay_out(shard, specs, grown), metadata=metadata, source=shard)


def _originals(shard: Shard, names: Collection[str]) -> OutputShard | None:
    """Plan the file that keeps tensors of a source shard as they are; None where there is nothing to keep."""
    kept = [TensorSpec(original_name(t.name), t.dtype, t.shape, Copied(t)) for t in shard.header.tensors if t.name in names]
    return OutputShard(name=originals_file(shard.name), tensors=placed(kept), metadata={"format": "pt"}) if kept else None


def _sidecar(decision: Decision, contract: Contract, wire: TensorSpec) -> tuple[OutputShard, ...]:
    """Plan the kernel layout: fused layers are added to a shard until it is full."""
    width = decision.at_kernel.shared
    files: list[list[SharedExpert]] = []
    room = 0
    for layer in (v.layer for v in decision.verdicts if v.verdict.fused):
        if layer.shared is None or any(f.kind is not StorageKind.FP8_BLOCK for f in layer.shared.formats.values()):
            continue
        size = 3 * width * layer.shared.hidden
        if room < size:
            files.append([])
            room = SIDECAR_SHARD_BYTES
        files[-1].append(SharedExpert(prefix=kernel_prefix(layer.layer.name), group=layer.shared, width=width))
        room -= size
    return tuple(
        OutputShard(
            name=f"{SIDECAR}/shared-{i:05d}-of-{len(files):05d}.safetensors",
            tensors=placed((*((wire,) if i == 1 else ()), *_kernel_tensors(experts))),
            metadata=shard_metadata(contract.name),
        )
        for i, experts in enumerate(files, 1)
    )


def _kernel_tensors(experts: Iterable[SharedExpert]) -> Iterator[TensorSpec]:
    for shared in experts:
        for name, (dtype, shape) in kernel_shapes(shared.group.hidden, shared.width).items():
            yield TensorSpec(f"{shared.prefix}.{name.value}", dtype, shape, Computed(name, shared))
