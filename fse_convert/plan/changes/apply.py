"""Changes made to a source in memory: the checkpoint that the output will be before any padding, described as if it lay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.plan.changes.change import FormatChange, changed_config
from fse_convert.plan.source import Source, describe_source
from fse_convert.plan.tensors import Copied, Grown, OutputTensor, Padded, Recoded, TensorSpec, placed
from fse_convert.servers.f32_scales import Scales


def with_changes(source: Source, changes: Sequence[FormatChange]) -> Source:
    """Return the source as it is after some changes; the F32 scales that they write are exact powers of two.

    Its headers are those of the output but for ``data_start``, and its folder is the source's: it is judged, and never read.
    """
    if not changes:
        return source
    checkpoint, specs = source.checkpoint, changed_tensors(changes)
    shards = tuple(_shard(shard, specs) for shard in checkpoint.shards) if specs else checkpoint.shards
    config = changed_config(checkpoint.config, (c for change in changes for c in change.config))
    tensors = {t.name: t for shard in shards for t in shard.header.tensors}
    described = describe_source(replace(checkpoint, config=config, shards=shards, tensors=tensors), source.description.family_name)
    return replace(described, scales=_scales(source.scales, specs), stated_widths=source.stated_widths)


def changed_tensors(changes: Iterable[FormatChange]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return what stands in the place of every source tensor that some change replaces."""
    found: dict[str, tuple[TensorSpec, ...]] = {}
    for change in changes:
        found |= change.tensors
    return found


def lay_out(shard: Shard, specs: Mapping[str, tuple[TensorSpec, ...]], grown: Mapping[str, Grown]) -> tuple[OutputTensor, ...]:
    """Lay out one shard, in the source's tensor order: what stands in the place of a tensor, the tensor grown, or as it is."""
    return placed(_stand_ins(shard, specs, grown))


def _stand_ins(shard: Shard, specs: Mapping[str, tuple[TensorSpec, ...]], grown: Mapping[str, Grown]) -> Iterator[TensorSpec]:
    for t in shard.header.tensors:
        if t.name in specs:
            yield from specs[t.name]
        elif t.name in grown:
            shape, growth = grown[t.name]
            yield TensorSpec(t.name, t.dtype, shape, Padded(t, growth))
        else:
            yield TensorSpec(t.name, t.dtype, t.shape, Copied(t))


def _shard(shard: Shard, specs: Mapping[str, tuple[TensorSpec, ...]]) -> Shard:
    if specs.keys().isdisjoint(t.name for t in shard.header.tensors):
        return shard
    tensors: list[TensorInfo] = []
    at = 0
    for t in shard.header.tensors:
        for new in specs.get(t.name, (t,)):
            end = at + new.nbytes
            tensors.append(TensorInfo(name=new.name, shard=shard.name, dtype=new.dtype, shape=new.shape, start=at, end=end))
            at = end
    return replace(shard, header=replace(shard.header, tensors=tuple(tensors), payload=at))


def _scales(scales: Scales, specs: Mapping[str, tuple[TensorSpec, ...]]) -> Scales:
    written = (spec for stand_ins in specs.values() for spec in stand_ins)
    exact = {spec.name for spec in written if isinstance(spec.change, Recoded) and spec.dtype == "F32"}
    return Scales(scales.read | exact, {name: found for name, found in scales.inexact.items() if name not in exact})
