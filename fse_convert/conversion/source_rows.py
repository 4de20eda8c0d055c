"""Reads rows of a source's tensors, and refuses the NaN codes among them; without torch but for elements wider than a byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.nan_and_one import NAN_BYTES, NAN_WORDS, NaN
from fse_convert.layout.padding import filled
from fse_convert.output.copying import ROWS, read_into, read_rows
from fse_convert.plan.tensors import Growth, matrix

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 20
"""Bytes of source that are in memory at once, per stream: they stay in the cache between being read and being written."""


class SourceReader:
    """Reads tensors of one checkpoint's shards; keeps one descriptor per shard open."""

    def __init__(self, folder: LocalFolder, shards: tuple[Shard, ...]) -> None:
        self.folder = folder
        self.starts = {s.name: s.header.data_start for s in shards}
        self.descriptors: dict[str, int] = {}
        self.buffers: dict[int, bytearray] = {}
        self.frames: dict[Growth, tuple[bytearray, list[memoryview]]] = {}

    def close(self) -> None:
        """Close all descriptors."""
        for fd in self.descriptors.values():
            os.close(fd)
        self.descriptors.clear()

    def check(self, *names: str) -> None:
        """Refuse shards that changed since their headers were read; all that are open by default."""
        for name in names or self.descriptors:
            self.folder.check(name, os.fstat(self.descriptors[name]))

    def locate(self, info: TensorInfo) -> tuple[int, int]:
        """Return descriptor and file offset of a tensor's first byte."""
        if info.shard not in self.descriptors:
            self.descriptors[info.shard] = os.open(self.folder.path(info.shard), os.O_RDONLY | os.O_CLOEXEC)
            self.check(info.shard)
        return self.descriptors[info.shard], self.starts[info.shard] + info.start

    def rows(self, info: TensorInfo, first: int, count: int, nan: NaN | None, slot: int = 0) -> memoryview:
        """Read rows ``[first, first + count)`` of a stored matrix; refuse a NaN code.

        The rows lie in a buffer that the next read into the same ``slot`` overwrites: touching new memory costs more than reading.
        """
        _, row_bytes = matrix(info)
        return self.part(info, first * row_bytes, count * row_bytes, nan, slot)

    def part(self, info: TensorInfo, at: int, size: int, nan: NaN | None, slot: int = 0) -> memoryview:
        """Read ``size`` bytes of a tensor from byte ``at`` on, whole elements, as `rows` does."""
        fd, start = self.locate(info)
        if len(self.buffers.get(slot, b"")) < size:
            self.buffers[slot] = bytearray(size)
        buffer = self.buffers[slot]
        view = memoryview(buffer)[:size]
        read_into(fd, view, start + at)
        _refuse_nan(buffer, size, nan, info, lambda found: at + found)
        return view

    def tensor(self, info: TensorInfo, first: int, count: int, nan: NaN | None, slot: int = 0) -> Tensor:
        """Read rows as `rows` does: uint8 ``[count, row_bytes]``."""
        import torch

        rows = self.rows(info, first, count, nan, slot)
        return torch.frombuffer(rows, dtype=torch.uint8).view(count, -1) if rows else torch.empty(count, 0, dtype=torch.uint8)

    def grown(self, info: TensorInfo, first: int, growth: Growth) -> memoryview:
        """Read stretches from ``first`` on into the heads of longer ones, as many as make a chunk; as `rows` does.

        The system puts every stretch in its place: what follows it was filled once.
        """
        old, new = growth.old, growth.new
        if growth not in self.frames:
            frame = filled(min(growth.stretches, ROWS, max(1, CHUNK // new)) * new, growth.fill)
            self.frames[growth] = frame, [memoryview(frame)[at : at + old] for at in range(0, len(frame), new)]
        frame, heads = self.frames[growth]
        heads = heads[: growth.stretches - first]
        fd, start = self.locate(info)
        read_rows(fd, heads, start + first * old)
        _refuse_nan(frame, len(heads) * new, growth.nan, info, lambda found: (first + found // new) * old + found % new)
        return memoryview(frame)[: len(heads) * new]


@contextmanager
def open_reader(folder: LocalFolder, shards: tuple[Shard, ...]) -> Iterator[SourceReader]:
    """Open a `SourceReader`; afterwards, check that the source is still what it was, and close it."""
    reader = SourceReader(folder, shards)
    try:
        yield reader
        reader.check()
    finally:
        reader.close()


def _refuse_nan(raw: bytearray, length: int, nan: NaN | None, info: TensorInfo, place: Callable[[int], int]) -> None:
    """Refuse a NaN code at the head of ``raw``; padding in between is never one. Rows of stacked experts are numbered through.

    ``place``: a byte of the tensor by the byte of ``raw`` that holds it.
    """
    at = _first_nan(raw, length, nan) if nan else -1
    if nan is None or at < 0:
        return
    size, _ = NAN_WORDS.get(nan, (1, 0))
    columns = info.shape[-1] if len(info.shape) == 3 else matrix(info)[1] // size
    code = bytes(raw[at * size : (at + 1) * size])[::-1].hex().upper()
    row, column = divmod(place(at * size) // size, columns)
    message = f"NaN code 0x{code} at row {row}, column {column}"
    raise InvalidCheckpoint(Problem("nan", message, f"{info.shard}: {info.name}", DAMAGED))


def _first_nan(raw: bytearray, length: int, nan: NaN) -> int:
    """Return the index of the first NaN element, or -1. Bytes are searched at memory speed, wider floats as integers."""
    if nan in NAN_BYTES:
        return min((i for i in (raw.find(code, 0, length) for code in NAN_BYTES[nan]) if i >= 0), default=-1)
    import torch

    size, infinity = NAN_WORDS[nan]
    words = torch.frombuffer(raw, dtype={2: torch.int16, 4: torch.int32}[size], count=length // size)
    hits = (words & (1 << 8 * size - 1) - 1) > infinity
    return int(hits.to(torch.uint8).argmax()) if hits.any() else -1
