"""Reads rows of a source's tensors, and refuses the NaN codes among them; without torch but for elements wider than a byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.padding import filled
from fse_convert.model.formats import NAN_BYTES, NAN_WORDS, NaN
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
        fd, start = self.locate(info)
        size = count * row_bytes
        if len(self.buffers.get(slot, b"")) < size:
            self.buffers[slot] = bytearray(size)
        buffer = self.buffers[slot]
        view = memoryview(buffer)[:size]
        read_into(fd, view, start + first * row_bytes)
        _refuse_nan(buffer, (count, row_bytes), nan, info, first)
        return view

    def tensor(self, info: TensorInfo, first: int, count: int, nan: NaN | None, slot: int = 0) -> Tensor:
        """Read rows as `rows` does: uint8 ``[count, row_bytes]``."""
        import torch

        rows = self.rows(info, first, count, nan, slot)
        return torch.frombuffer(rows, dtype=torch.uint8).view(count, -1) if rows else torch.empty(count, 0, dtype=torch.uint8)

    def grown(self, info: TensorInfo, first: int, growth: Growth) -> memoryview:
        """Read rows from ``first`` on into the heads of wider ones, as many as make a chunk; as `rows` does.

        The system puts every row in its place: what follows it was filled once.
        """
        if growth not in self.frames:
            rows, wide = min(growth.rows, ROWS, max(1, CHUNK // growth.new_row_bytes)), growth.new_row_bytes
            frame = filled(rows, wide, growth.fill)
            self.frames[growth] = frame, [memoryview(frame)[at : at + growth.row_bytes] for at in range(0, len(frame), wide)]
        frame, heads = self.frames[growth]
        heads = heads[: growth.rows - first]
        fd, start = self.locate(info)
        read_rows(fd, heads, start + first * growth.row_bytes)
        _refuse_nan(frame, (len(heads), growth.new_row_bytes), growth.nan, info, first)
        return memoryview(frame)[: len(heads) * growth.new_row_bytes]


@contextmanager
def open_reader(folder: LocalFolder, shards: tuple[Shard, ...]) -> Iterator[SourceReader]:
    """Open a `SourceReader`; afterwards, check that the source is still what it was, and close it."""
    reader = SourceReader(folder, shards)
    try:
        yield reader
        reader.check()
    finally:
        reader.close()


def _refuse_nan(raw: bytearray, shape: tuple[int, int], nan: NaN | None, info: TensorInfo, first: int) -> None:
    """Refuse a NaN code in rows of bytes at the head of ``raw``; padding, which is never one, may follow each."""
    rows, row_bytes = shape
    at = _first_nan(raw, rows * row_bytes, nan) if nan else -1
    if nan is None or at < 0:
        return
    size, _ = NAN_WORDS.get(nan, (1, 0))
    row, column = divmod(at, row_bytes // size)
    code = bytes(raw[at * size : (at + 1) * size])[::-1].hex().upper()
    message = f"NaN code 0x{code} at row {first + row}, column {column}"
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
