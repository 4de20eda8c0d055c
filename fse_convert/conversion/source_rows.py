"""Reads rows of a source's tensors, and refuses the NaN codes among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.model.formats import NAN_BYTES, NAN_WORDS, NaN
from fse_convert.output.copying import read_into
from fse_convert.plan.tensors import matrix

CHUNK = 1 << 20
"""Bytes of source that are in memory at once, per stream: they stay in the cache between being read and being written."""


class SourceReader:
    """Reads tensors of one checkpoint's shards; keeps one descriptor per shard open."""

    def __init__(self, folder: LocalFolder, shards: tuple[Shard, ...]) -> None:
        self.folder = folder
        self.starts = {s.name: s.header.data_start for s in shards}
        self.descriptors: dict[str, int] = {}
        self.buffers: dict[int, bytearray] = {}

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

    def rows(self, info: TensorInfo, first: int, count: int, nan: NaN | None, slot: int = 0) -> Tensor:
        """Read rows ``[first, first + count)`` of a stored matrix as uint8 ``[count, row_bytes]``; refuse a NaN code.

        The rows lie in a buffer that the next read into the same ``slot`` overwrites: touching new memory costs more than reading.
        """
        _, row_bytes = matrix(info)
        return self.part(info, first * row_bytes, count * row_bytes, nan, slot).view(count, row_bytes)

    def part(self, info: TensorInfo, at: int, size: int, nan: NaN | None, slot: int = 0) -> Tensor:
        """Read ``size`` bytes of a tensor from byte ``at`` on, whole elements, as `rows` does: uint8 ``[size]``."""
        fd, start = self.locate(info)
        if len(self.buffers.get(slot, b"")) < size:
            self.buffers[slot] = bytearray(size)
        buffer = self.buffers[slot]
        read_into(fd, memoryview(buffer)[:size], start + at)
        found = torch.frombuffer(buffer, dtype=torch.uint8, count=size)
        if nan:
            _refuse_nan(found, buffer, nan, info, at)
        return found


@contextmanager
def open_reader(folder: LocalFolder, shards: tuple[Shard, ...]) -> Iterator[SourceReader]:
    """Open a `SourceReader`; afterwards, check that the source is still what it was, and close it."""
    reader = SourceReader(folder, shards)
    try:
        yield reader
        reader.check()
    finally:
        reader.close()


def _refuse_nan(read: Tensor, raw: bytearray, nan: NaN, info: TensorInfo, start: int) -> None:
    """Refuse a NaN among bytes of a tensor that begin at ``start``; rows of stacked experts are numbered through."""
    at = _first_nan(read, raw, nan)
    if at < 0:
        return
    size, _ = NAN_WORDS.get(nan, (1, 0))
    columns = info.shape[-1] if len(info.shape) == 3 else matrix(info)[1] // size
    code = bytes(raw[at * size : (at + 1) * size])[::-1].hex().upper()
    row, column = divmod(start // size + at, columns)
    message = f"NaN code 0x{code} at row {row}, column {column}"
    raise InvalidCheckpoint(Problem("nan", message, f"{info.shard}: {info.name}", DAMAGED))


def _first_nan(read: Tensor, raw: bytearray, nan: NaN) -> int:
    """Return the index of the first NaN element, or -1. Bytes are searched at memory speed, wider floats as integers."""
    if nan in NAN_BYTES:
        found = [i for i in (raw.find(code, 0, read.numel()) for code in NAN_BYTES[nan]) if i >= 0]
        return min(found, default=-1)
    size, infinity = NAN_WORDS[nan]
    hits = (read.view({2: torch.int16, 4: torch.int32}[size]) & (1 << 8 * size - 1) - 1) > infinity
    return int(hits.to(torch.uint8).argmax()) if hits.any() else -1
