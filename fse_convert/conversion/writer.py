"""Write one output shard from its plan: byte ranges that are copied, and streams of padded or permuted rows.

Memory is bounded by a few buffers of `CHUNK` bytes, whatever the size of a tensor. Everything that is computed is
scanned for NaN codes on the way, since one NaN in a padded or fused expert would reach every token.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import megamoe, ue8m0
from fse_convert.layout.padding import pad
from fse_convert.model.formats import NAN_BYTES, NAN_WORDS, NaN
from fse_convert.model.moe import Role
from fse_convert.output.copying import copy_range, new_file, read_into, write_all, writing_back
from fse_convert.plan.tensors import Computed, Copied, OutputShard, Padded, SharedExpert, Tripwire, matrix
from fse_convert.progress import Advance
from fse_convert.sidecar.tensors import KernelTensorName

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
        fd, start = self.locate(info)
        size = count * row_bytes
        if len(self.buffers.get(slot, b"")) < size:
            self.buffers[slot] = bytearray(size)
        buffer = self.buffers[slot]
        read_into(fd, memoryview(buffer)[:size], start + first * row_bytes)
        rows = torch.frombuffer(buffer, dtype=torch.uint8, count=size).view(count, row_bytes)
        if nan:
            _refuse_nan(rows, buffer, nan, info, first)
        return rows


@contextmanager
def open_reader(folder: LocalFolder, shards: tuple[Shard, ...]) -> Iterator[SourceReader]:
    """Open a `SourceReader`; afterwards, check that the source is still what it was, and close it."""
    reader = SourceReader(folder, shards)
    try:
        yield reader
        reader.check()
    finally:
        reader.close()


def write_shard(shard: OutputShard, reader: SourceReader, path: Path, advance: Advance) -> None:
    """Write one output shard durably, tensor by tensor as each one's change says; neighbours that are copied are one range."""
    with new_file(path) as fd:
        write_all(fd, shard.header)
        advance = writing_back(fd, advance)
        advance(len(shard.header))
        for copied, run in groupby(shard.tensors, lambda t: isinstance(t.change, Copied)):
            tensors = list(run)
            if copied:
                first, last = tensors[0].change.sources[0], tensors[-1].change.sources[0]
                _copy(fd, first, last.end - first.start, reader, advance)
                continue
            for tensor in tensors:
                if isinstance(tensor.change, Padded):
                    _write_padded(fd, tensor.change, reader, advance)
                elif isinstance(tensor.change, Computed):
                    _write(fd, kernel_rows(tensor.change, reader), advance)
                elif not isinstance(tensor.change, Tripwire):
                    raise TypeError(f"{tensor.name}: no way to write {type(tensor.change).__name__}")


def padded_rows(change: Padded, reader: SourceReader) -> Iterator[Tensor]:
    """Yield a padded matrix as chunks of uint8 rows: source rows widened, then rows of fill. A chunk lives until the next."""
    step = _step(change)
    wide = change.row_bytes != change.new_row_bytes
    out = _filled(min(step, change.rows), change) if wide else None
    for first in range(0, change.rows, step):
        count = min(step, change.rows - first)
        rows = reader.rows(change.source, first, count, change.nan)
        if out is not None:
            out[:count, : change.row_bytes] = rows
            rows = out[:count]
        yield rows
    yield from _tail(change)


def kernel_rows(change: Computed, reader: SourceReader) -> Iterator[Tensor]:
    """Yield the bytes of one kernel-layout tensor as chunks of uint8 rows."""
    shared = change.shared
    if change.name is KernelTensorName.L1_WEIGHT:
        yield from _l1_weight(shared, reader)
    elif change.name is KernelTensorName.L2_WEIGHT:
        hidden, width = shared.group.hidden, shared.group.width
        down = Padded(
            source=shared.weight(Role.DOWN),
            rows=hidden,
            row_bytes=width,
            new_rows=hidden,
            new_row_bytes=shared.width,
            fill=b"\0",
            nan=NaN.E4M3,
        )
        yield from padded_rows(down, reader)
    elif change.name is KernelTensorName.L1_SCALE:
        gate, up = (kernel_scale(shared, role, reader) for role in (Role.GATE, Role.UP))
        yield megamoe.l1_scale(gate, up).view(torch.uint8)
    else:
        yield megamoe.l2_scale(kernel_scale(shared, Role.DOWN, reader)).view(torch.uint8)


def kernel_scale(shared: SharedExpert, role: Role, reader: SourceReader) -> Tensor:
    """Return one projection's scales as UE8M0 bytes per row and 32 columns, padded: uint8 ``[n', k' / 32]``."""
    f = shared.group.formats[role]
    if f.scale is None or f.block is None:
        raise ValueError(f"{shared.prefix}: shared {role.value} has no block scales")
    info, tile = shared.scale(role), f.tiles[f.scale]
    rows = reader.rows(info, 0, info.shape[0], tile.nan if tile else None)
    n, k = f.shape
    expanded = ue8m0.expand(e8m0_bytes(rows, info), n, k, *f.block)
    new_n, new_k = (n, shared.width) if role is Role.DOWN else (shared.width, k)
    return pad(expanded, new_n, new_k // ue8m0.GROUP, bytes([ue8m0.ONE]))


def e8m0_bytes(rows: Tensor, info: TensorInfo) -> Tensor:
    """Return scales of a stored tensor as E8M0 bytes ``[rows, cols]``; F32 is turned losslessly or refused."""
    if info.dtype != "F32":
        return rows
    try:
        return ue8m0.from_fp32(rows.view(torch.float32))
    except ValueError as e:
        raise InvalidCheckpoint(
            Problem("scale-inexact", str(e), f"{info.shard}: {info.name}", "requantise to E8M0 scales first")
        ) from e


def _l1_weight(shared: SharedExpert, reader: SourceReader) -> Iterator[Tensor]:
    h, width = shared.group.hidden, shared.group.width
    step = max(megamoe.INTERLEAVE, CHUNK // h // megamoe.INTERLEAVE * megamoe.INTERLEAVE)
    for first in range(0, shared.width, step):
        count = min(step, shared.width - first)
        halves = []
        for slot, role in enumerate((Role.GATE, Role.UP)):
            real = max(0, min(count, width - first))
            stored = shared.weight(role)
            rows = reader.rows(stored, first, real, NaN.E4M3, slot) if real else torch.empty(0, h, dtype=torch.uint8)
            halves.append(rows if real == count else pad(rows, count, h, b"\0"))
        yield megamoe.interleave(*halves)


def _tail(change: Padded) -> Iterator[Tensor]:
    step = _step(change)
    missing = change.new_rows - change.rows
    fill = _filled(min(step, missing), change) if missing else None
    for first in range(0, missing, step):
        if fill is not None:
            yield fill[: min(step, missing - first)]


def _step(change: Padded) -> int:
    return max(1, CHUNK // max(change.row_bytes, change.new_row_bytes, 1))


def _filled(rows: int, change: Padded) -> Tensor:
    return pad(torch.empty(0, change.new_row_bytes, dtype=torch.uint8), rows, change.new_row_bytes, change.fill)


def _write_padded(fd: int, change: Padded, reader: SourceReader, advance: Advance) -> None:
    if change.nan is None and change.row_bytes == change.new_row_bytes:
        _copy(fd, change.source, change.source.nbytes, reader, advance)
        _write(fd, _tail(change), advance)
    else:
        _write(fd, padded_rows(change, reader), advance)


def _copy(fd: int, first: TensorInfo, length: int, reader: SourceReader, advance: Advance) -> None:
    src, offset = reader.locate(first)
    copy_range(src, fd, offset, length, advance)


def _write(fd: int, chunks: Iterator[Tensor], advance: Advance) -> None:
    for rows in chunks:
        write_all(fd, _bytes(rows))
        advance(rows.numel())


def _bytes(rows: Tensor) -> memoryview:
    """Return a tensor's memory as a buffer, without numpy."""
    flat = rows.contiguous().flatten()
    storage = flat.untyped_storage()
    array = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    array._keep = storage  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _refuse_nan(rows: Tensor, raw: bytearray, nan: NaN, info: TensorInfo, first: int) -> None:
    at = _first_nan(rows, raw, nan)
    if at < 0:
        return
    size, _ = NAN_WORDS.get(nan, (1, 0))
    columns = rows.shape[1] // size
    code = bytes(raw[at * size : (at + 1) * size])[::-1].hex().upper()
    message = f"NaN code 0x{code} at row {first + at // columns}, column {at % columns}"
    raise InvalidCheckpoint(Problem("nan", message, f"{info.shard}: {info.name}", DAMAGED))


def _first_nan(rows: Tensor, raw: bytearray, nan: NaN) -> int:
    """Return the index of the first NaN element, or -1. Bytes are searched at memory speed, wider floats as integers."""
    if nan in NAN_BYTES:
        found = [i for i in (raw.find(code, 0, rows.numel()) for code in NAN_BYTES[nan]) if i >= 0]
        return min(found, default=-1)
    size, infinity = NAN_WORDS[nan]
    hits = (rows.view({2: torch.int16, 4: torch.int32}[size]) & (1 << 8 * size - 1) - 1) > infinity
    return int(hits.flatten().to(torch.uint8).argmax()) if hits.any() else -1
