"""Cut a file of the output into pieces, each with the source's bytes that it must hold, found by address."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.model.moe import Role
from fse_convert.sidecar.tensors import KernelTensorName
from fse_convert.verification.addresses import (
    GROUP,
    BlockScales,
    exponents,
    l1_scale_bytes,
    l1_scale_rows,
    l1_weight_rows,
    l2_scale_bytes,
)
from fse_convert.verification.expected import KernelExpert, Padded
from fse_convert.verification.stream import CHUNK, Expect, InputFiles, Memory, Piece

SCALE_CHUNK = 1 << 20
"""Bytes of a scale tensor that are computed at once."""


@dataclass(frozen=True, slots=True)
class SourceTensors:
    """The source's tensors, by name and by file offset."""

    files: InputFiles
    tensors: Mapping[str, TensorInfo]
    starts: Mapping[str, int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, files: InputFiles) -> SourceTensors:
        """Find the tensors of a checkpoint whose files are open."""
        return cls(files, checkpoint.tensors, {s.name: s.header.data_start for s in checkpoint.shards})

    def read(self, info: TensorInfo, offset: int, into: memoryview) -> memoryview:
        """Fill a buffer from a tensor's bytes at ``offset``."""
        return self.files.read(info.shard, self.starts[info.shard] + info.start + offset, into)

    def whole(self, info: TensorInfo) -> Tensor:
        """Read all of a small matrix, uint8 ``[rows, row bytes]``."""
        buffer = bytearray(info.nbytes)
        self.read(info, 0, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(info.shape[0], -1)


class _Bytes:
    """Bytes of one file of the source, as is."""

    def __init__(self, files: InputFiles, name: str, offset: int, size: int) -> None:
        self.files, self.name, self.offset, self.size = files, name, offset, size

    def __call__(self, memory: Memory) -> memoryview:
        return self.files.read(self.name, self.offset, memory.take("source", self.size))

    def is_padding(self, at: int) -> bool:  # noqa: ARG002 - part of the protocol
        return False


class _PaddedRows:
    """Rows ``[first, first + count)`` of a padded matrix."""

    def __init__(self, source: SourceTensors, padded: Padded, first: int, count: int) -> None:
        self.source, self.padded, self.first, self.count = source, padded, first, count

    def __call__(self, memory: Memory) -> memoryview:
        p = self.padded
        real = max(0, min(self.count, p.rows - self.first))
        rows = memory.take("source", real * p.row_bytes)
        if real:
            self.source.read(p.info, self.first * p.row_bytes, rows)
        if real == self.count and p.row_bytes == p.new_row_bytes:
            return rows
        expected = memory.take("expected", self.count * p.new_row_bytes)
        elements = _tensor(expected).view(self.count, -1, len(p.fill))
        fill = torch.tensor(list(p.fill), dtype=torch.uint8)
        column = p.row_bytes // len(p.fill)
        elements[real:] = fill
        elements[:real, column:] = fill
        if real:
            elements[:real, :column] = _tensor(rows).view(real, column, len(p.fill))
        return expected

    def is_padding(self, at: int) -> bool:
        row, column = divmod(at, self.padded.new_row_bytes)
        return self.first + row >= self.padded.rows or column >= self.padded.row_bytes


class _L1Rows:
    """Physical rows ``[first, first + count)`` of the L1 weight; both are multiples of 16."""

    def __init__(self, source: SourceTensors, expert: KernelExpert, first: int, count: int) -> None:
        self.source, self.expert, self.first, self.count = source, expert, first, count

    def __call__(self, memory: Memory) -> memoryview:
        h, width = self.expert.group.hidden, self.expert.group.width
        low, high = (min(width, d // 2) for d in (self.first, self.first + self.count))
        real = high - low
        rows = memory.take("source", (2 * real + 1) * h)
        for half, role in enumerate((Role.GATE, Role.UP)):
            if real:
                info = self.expert.tensor(role, scale=False)
                self.source.read(info, low * h, rows[half * real * h : (half + 1) * real * h])
        rows[2 * real * h :] = bytes(h)
        half_of, row_of = l1_weight_rows(torch.arange(self.first, self.first + self.count))
        index = torch.where(row_of < width, half_of * real + row_of - low, 2 * real)
        expected = memory.take("expected", self.count * h)
        torch.index_select(_tensor(rows).view(-1, h), 0, index, out=_tensor(expected).view(self.count, h))
        return expected

    def is_padding(self, at: int) -> bool:
        row = self.first + at // self.expert.group.hidden
        return int(l1_weight_rows(torch.tensor(row))[1]) >= self.expert.group.width


class _Scales:
    """Word columns of a scale tensor over ``rows`` physical rows; ``real`` tells from word and row what is not padding."""

    def __init__(self, compute: Callable[[range], Tensor], words: range, rows: int, real: Callable[[int, int], bool]) -> None:
        self.compute, self.words, self.rows, self.real = compute, words, rows, real

    def __call__(self, memory: Memory) -> memoryview:
        expected = memory.take("expected", len(self.words) * self.rows * 4)
        _tensor(expected).copy_(self.compute(self.words).flatten())
        return expected

    def is_padding(self, at: int) -> bool:
        word, s = divmod(at, 4)
        column, row = divmod(word, self.rows)
        return not self.real(4 * (self.words.start + column) + s, row)


@dataclass(slots=True)
class Comparison:
    """What of an output is compared with which checkpoint; whatever is left out is only hashed.

    ``checkpoint``: holds the bytes, below ``root``. ``main``: standard-layout tensors whose place and size are as expected,
    ``padded`` those of them that grew. ``experts``: whose tensor each comparable one of ``fse/`` is. ``same``: files that must
    be equal.
    """

    checkpoint: Checkpoint
    root: Path
    main: Collection[str] = ()
    padded: Mapping[str, Padded] = field(default_factory=dict)
    experts: Mapping[str, KernelExpert] = field(default_factory=dict)
    same: Collection[str] = ()

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Comparable tensors by kind."""
        return {
            "unchanged": sorted(n for n in self.main if n not in self.padded),
            "padded": sorted(n for n in self.main if n in self.padded),
            "kernel": sorted(self.experts),
        }


def plain_pieces(comparison: Comparison, name: str, size: int, source: SourceTensors) -> Iterator[Piece]:
    """Cut a file without tensors; it is only hashed where it need not be the source's file of the same name."""
    for at in range(0, size, CHUNK):
        n = min(CHUNK, size - at)
        yield Piece(at, (("", n),), _Bytes(source.files, name, at, n) if name in comparison.same else None)


def main_pieces(comparison: Comparison, shard: Shard, chosen: Collection[str] | None, source: SourceTensors) -> Iterator[Piece]:
    """Cut a standard-layout shard: neighbours that did not change are compared as one. ``chosen``: a sample, or None."""
    if chosen is None:
        yield Piece(0, (("", shard.header.data_start),))
    run: list[TensorInfo] = []
    for t in shard.header.tensors:
        if chosen is not None and t.name not in chosen:
            continue
        if run and not _follows(comparison, run[-1], t, source):
            yield from _run(comparison, shard, run, source)
            run = []
        run.append(t)
    if run:
        yield from _run(comparison, shard, run, source)


def _follows(comparison: Comparison, last: TensorInfo, t: TensorInfo, source: SourceTensors) -> bool:
    """Tell whether two tensors of the output are neighbours in both files, and neither grew."""
    if last.end != t.start or not comparison.main:
        return last.end == t.start
    if not all(x.name in comparison.main and x.name not in comparison.padded for x in (last, t)):
        return False
    a, b = source.tensors[last.name], source.tensors[t.name]
    return a.shard == b.shard and a.end == b.start


def _run(comparison: Comparison, shard: Shard, run: list[TensorInfo], source: SourceTensors) -> Iterator[Piece]:
    first = run[0]
    start = shard.header.data_start + first.start
    if first.name not in comparison.main:
        yield from _cut(run, start, lambda _offset, _size: None)
    elif first.name in comparison.padded:
        yield from _padded_pieces(first.name, start, comparison.padded[first.name], source)
    else:
        info = source.tensors[first.name]
        at = source.starts[info.shard] + info.start
        yield from _cut(run, start, lambda offset, size: _Bytes(source.files, info.shard, at + offset, size))


def _cut(run: Iterable[TensorInfo], start: int, expect: Callable[[int, int], Expect | None]) -> Iterator[Piece]:
    """Cut neighbours into pieces of at most `CHUNK` bytes; ``expect`` is called with offset in the run, and size."""
    parts: list[tuple[str, int]] = []
    at = room = 0
    for t in run:
        left = t.nbytes
        while left or not t.nbytes:
            take = min(left, CHUNK - room)
            parts.append((t.name, take))
            left, room = left - take, room + take
            if room == CHUNK:
                yield Piece(start + at, tuple(parts), expect(at, room))
                parts, at, room = [], at + room, 0
            if not left:
                break
    if parts:
        yield Piece(start + at, tuple(parts), expect(at, room))


def _padded_pieces(name: str, start: int, padded: Padded, source: SourceTensors) -> Iterator[Piece]:
    step = max(1, CHUNK // padded.new_row_bytes)
    for first in range(0, padded.new_rows, step):
        count = min(step, padded.new_rows - first)
        size = count * padded.new_row_bytes
        yield Piece(start + first * padded.new_row_bytes, ((name, size),), _PaddedRows(source, padded, first, count))


def sidecar_pieces(comparison: Comparison, shard: Shard, chosen: Collection[str] | None, source: SourceTensors) -> Iterator[Piece]:
    """Cut a shard of ``fse/``. ``chosen``: a sample, or None."""
    if chosen is None:
        yield Piece(0, (("", shard.header.data_start),))
    for t in shard.header.tensors:
        if (chosen is not None and t.name not in chosen) or not t.nbytes:  # the tripwire holds nothing
            continue
        start = shard.header.data_start + t.start
        expert = comparison.experts.get(t.name)
        if expert is None:
            yield from _cut([t], start, lambda _offset, _size: None)
        else:
            yield from _kernel_pieces(t, start, source, expert)


def _kernel_pieces(t: TensorInfo, start: int, source: SourceTensors, expert: KernelExpert) -> Iterator[Piece]:
    h, s, part = expert.group.hidden, expert.width, t.name.removeprefix(f"{expert.prefix}.")
    if part == KernelTensorName.L1_WEIGHT:
        step = max(16, CHUNK // h // 16 * 16)
        for first in range(0, 2 * s, step):
            count = min(step, 2 * s - first)
            yield Piece(start + first * h, ((t.name, count * h),), _L1Rows(source, expert, first, count))
    elif part == KernelTensorName.L2_WEIGHT:
        yield from _padded_pieces(
            t.name, start, Padded(expert.tensor(Role.DOWN, scale=False), (h, s), h, expert.group.width, h, s, b"\0"), source
        )
    elif part == KernelTensorName.L1_SCALE:
        gate, up = (block_scales(expert, role, source) for role in (Role.GATE, Role.UP))
        yield from _scale_pieces(
            t,
            start,
            lambda words: l1_scale_bytes(gate, up, s, words),
            lambda _group, row: int(l1_scale_rows(torch.tensor(row))[1]) < expert.group.width,
        )
    else:
        down = block_scales(expert, Role.DOWN, source)
        yield from _scale_pieces(
            t,
            start,
            lambda words: l2_scale_bytes(down, words),
            lambda group, _row: GROUP * group < expert.group.width,
        )


def _scale_pieces(
    t: TensorInfo, start: int, compute: Callable[[range], Tensor], real: Callable[[int, int], bool]
) -> Iterator[Piece]:
    columns, rows = t.shape
    step = max(1, SCALE_CHUNK // (4 * rows))
    for first in range(0, columns, step):
        words = range(first, min(columns, first + step))
        size = 4 * rows * len(words)
        yield Piece(start + 4 * rows * first, ((t.name, size),), _Scales(compute, words, rows, real))


def block_scales(expert: KernelExpert, role: Role, source: SourceTensors) -> BlockScales:
    """Read the scales of one projection of the source; raises ValueError when FP32 scales are not powers of two."""
    f = expert.group.formats[role]
    info = expert.tensor(role, scale=True)
    if f.block is None:
        raise ValueError(f"{info.name}: no block scales")
    raw = source.whole(info)
    codes = exponents(raw) if info.dtype == "F32" else raw
    if codes is None:
        raise ValueError(f"{info.name}: a scale is not a power of two")
    return BlockScales(codes, f.block, f.shape)


def _tensor(buffer: memoryview) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
