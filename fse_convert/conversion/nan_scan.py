"""NaN codes in shards that are carried over: bytes of an expert's FP8 weight or E8M0 scale that would be a NaN.

What is computed is scanned on the way. What is carried over, or copied into a rewritten shard, is read back for its digest anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.nan_and_one import NAN_BYTES
from fse_convert.model.description import Description, ExpertGroup
from fse_convert.model.formats import Tile
from fse_convert.output.digests import Scan
from fse_convert.plan.tensors import Copied, OutputShard, OutputTensor

Tensors = Sequence[TensorInfo] | Sequence[OutputTensor]
DAMAGED = "the checkpoint is damaged: compare its checksum"


def expert_codes(description: Description) -> dict[str, tuple[int, ...]]:
    """Return the NaN codes of every expert tensor of one-byte elements, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in description.layers:
        for group in (layer.routed, layer.shared):
            for info, tile in _tiled(group) if group else ():
                if tile and tile.nan and tile.nan in NAN_BYTES:
                    found[info.name] = NAN_BYTES[tile.nan]
    return found


def _tiled(group: ExpertGroup) -> Iterator[tuple[TensorInfo, Tile | None]]:
    for expert in group.experts:
        for role, projection in expert.projections.items():
            yield from ((info, group.formats[role].tiles[suffix]) for suffix, info in projection.parts.items())
    yield from ((s.info, s.tile) for s in group.stacked)


def scans(shard: Shard, codes: Mapping[str, tuple[int, ...]]) -> tuple[Scan, ...]:
    """List what to look for in a shard that is carried over."""
    return _scans(shard.name, shard.header.data_start, shard.header.tensors, codes)


def copied_scans(shard: OutputShard, codes: Mapping[str, tuple[int, ...]]) -> tuple[Scan, ...]:
    """List what to look for in the tensors of a rewritten shard that are copied: nothing computes with them on the way."""
    copied = ((t, t.change.source.name) for t in shard.tensors if isinstance(t.change, Copied))
    wanted = {t.name: codes[source] for t, source in copied if source in codes}
    return _scans(shard.name, len(shard.header), shard.tensors, wanted) if wanted else ()


def _scans(name: str, start: int, tensors: Tensors, codes: Mapping[str, tuple[int, ...]]) -> tuple[Scan, ...]:
    """List ranges in file order; neighbours of one format make one. ``start``: of the payload in the file."""
    refuse = partial(_refuse, name, start, tensors)
    found: list[Scan] = []
    for t, wanted in ((t, codes[t.name]) for t in tensors if t.name in codes):
        if found and found[-1].end == start + t.start and found[-1].codes == wanted:
            found[-1] = Scan(found[-1].start, start + t.end, wanted, refuse)
        else:
            found.append(Scan(start + t.start, start + t.end, wanted, refuse))
    return tuple(found)


def _refuse(name: str, start: int, tensors: Tensors, offset: int) -> NoReturn:
    t = next(t for t in tensors if t.start <= offset - start < t.end)
    row, column = divmod(offset - start - t.start, t.shape[-1] if t.shape else 1)
    raise InvalidCheckpoint(Problem("nan", f"NaN code at row {row}, column {column}", f"{name}: {t.name}", DAMAGED))
