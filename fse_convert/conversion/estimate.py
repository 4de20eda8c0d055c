"""What a conversion takes of the machine: bytes per file, disk, memory. Pure: free space is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fse_convert.output.copying import SHARED
from fse_convert.plan.plan import Plan
from fse_convert.verification.findings import Level

PER_WORKER = 64 << 20
"""Bytes of memory per file that is written or read back, whatever its size (tests/benchmarks/memory.py)."""
NUMERICS = 536 << 20
"""Bytes of memory that computing one expert takes on top, at the widths of DeepSeek-V4.1 and V4-Pro."""


@dataclass(frozen=True, slots=True)
class FileEstimate:
    """One file of the output: what becomes of it, and how many bytes that reads and writes."""

    name: str
    what: str
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a conversion takes: files, and bytes of disk, memory, reading and writing, the proof's included.

    ``disk``: bytes that the output takes. ``free``: free bytes minus the margin that must stay.
    """

    files: tuple[FileEstimate, ...]
    disk: int
    free: int
    memory: int
    read: int
    written: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.disk <= self.free


def estimate(plan: Plan, level: Level, workers: int, *, way: str, part: Collection[str] | None = None) -> Estimate:
    """Estimate a conversion of which nothing is there yet; ``free`` is left 0, for the caller to fill in.

    ``way``: how untouched shards reach the output. ``part``: names of the files of a part, which proves nothing.
    """
    sizes = plan.source.checkpoint.folder.files
    files = tuple(f for f in _files(plan, sizes, way) if part is None or f.name in part)
    proved = level is not Level.NONE and part is None
    written = sum(f.written for f in files)
    read = sum(f.read for f in files) + written  # what was written is hashed once it is on disk
    if proved:
        read += sum(sizes[name] for name in plan.source.checkpoint.files)
        read += sum(s.size for s in (*plan.shards, *plan.sidecar, *plan.originals))
    memory = workers * PER_WORKER + (NUMERICS if proved and level.rank >= Level.NUMERICS.rank else 0)
    return Estimate(files=files, disk=written, free=0, memory=memory, read=read, written=written)


def _files(plan: Plan, sizes: Mapping[str, int], way: str) -> Iterator[FileEstimate]:
    for shard in plan.shards:
        if shard.carried:  # a clone is hashed as a copy is
            yield FileEstimate(shard.name, way, 0 if way == "hard link" else shard.size, 0 if way in SHARED else shard.size)
        else:
            yield FileEstimate(shard.name, "rewrite", sizes[shard.name], shard.size)
    for shard in (*plan.sidecar, *plan.originals):
        read = sum(source.nbytes for t in shard.tensors for source in t.change.sources)
        yield FileEstimate(shard.name, "kernel layout" if shard.kernel_tensors else "originals", read, shard.size)
    for name in plan.source.checkpoint.others:
        yield FileEstimate(name, "other file", sizes[name], sizes[name])
