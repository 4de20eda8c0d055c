"""What a conversion takes of the machine: bytes per file, disk, memory. Pure: free space is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fse_convert.model.moe import Role
from fse_convert.plan.plan import KernelTensor, Plan
from fse_convert.verification.findings import Level

PER_WORKER = 64 << 20
"""Bytes of memory per file that is written or read back, whatever its size (tests/benchmarks/memory.py)."""
NUMERICS = 536 << 20
"""Bytes of memory that computing one expert takes on top, at the widths of DeepSeek-V4.1 and V4-Pro."""


@dataclass(frozen=True, slots=True)
class FileNeed:
    """One file of the output: what becomes of it, and how many bytes that reads and writes."""

    name: str
    what: str
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a conversion takes: files, and bytes of disk, memory, reading and writing, the proof's included.

    ``disk``: that the output takes, ``free``: that there are less the margin that must stay.
    """

    files: tuple[FileNeed, ...]
    disk: int
    free: int
    memory: int
    read: int
    written: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.disk <= self.free


def needs(plan: Plan, sizes: Mapping[str, int], level: Level, workers: int, *, linked: bool, free: int) -> Needs:
    """Tell what a plan needs.

    ``sizes``: bytes of the source's files. ``linked``: untouched shards become hard links. ``free``: bytes of room.
    """
    files = (*_main(plan, linked=linked), *_sidecar(plan), *_beside(plan, sizes))
    written = sum(f.written for f in files)
    read = sum(f.read for f in files) + written  # each file is hashed once it is on disk
    if level is not Level.NONE:
        read += sum(sizes.values()) + sum(s.size for s in plan.shards) + sum(s.size for s in plan.sidecar)
    memory = workers * PER_WORKER + (NUMERICS if level.rank >= Level.NUMERICS.rank else 0)
    return Needs(files, written, free, memory, read, written)


def only(found: Needs, names: Collection[str], workers: int) -> Needs:
    """The same for a part of the files, which proves nothing."""
    files = tuple(f for f in found.files if f.name in names)
    written = sum(f.written for f in files)
    return Needs(files, written, found.free, workers * PER_WORKER, sum(f.read for f in files) + written, written)


def _main(plan: Plan, *, linked: bool) -> Iterator[FileNeed]:
    for shard in plan.shards:
        if shard.rewritten:
            yield FileNeed(shard.name, "rewrite", shard.source.size, shard.size)
        elif linked:
            yield FileNeed(shard.name, "hard link", 0, 0)
        else:
            yield FileNeed(shard.name, "copy or clone", shard.size, shard.size)


def _sidecar(plan: Plan) -> Iterator[FileNeed]:
    for sidecar in plan.sidecar:
        yield FileNeed(sidecar.name, "kernel layout", sum(_read_for(t) for t in sidecar.tensors), sidecar.size)


def _read_for(tensor: KernelTensor) -> int:
    roles = (Role.DOWN,) if tensor.part.value.startswith("shared_l2") else (Role.GATE, Role.UP)
    formats, expert = tensor.shared.group.formats, tensor.shared.expert
    parts = [(role, formats[role].scale if tensor.part.value.endswith("scale") else formats[role].weight) for role in roles]
    return sum(expert.projections[role].parts[part].nbytes for role, part in parts if part is not None)


def _beside(plan: Plan, sizes: Mapping[str, int]) -> Iterator[FileNeed]:
    for name in plan.checkpoint.others:
        yield FileNeed(name, "copy beside", sizes[name], sizes[name])
