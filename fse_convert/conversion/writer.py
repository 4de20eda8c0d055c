"""Runs of bytes: one output shard from its plan, by range copies and by streams of padded or permuted rows.

Memory is bounded by a few buffers of `CHUNK` bytes, whatever the size of a tensor. Everything that is computed is
scanned for NaN codes on the way, since one NaN in a padded or fused expert would reach every token.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import megamoe, ue8m0
from fse_convert.layout.padding import pad
from fse_convert.model.formats import NaN
from fse_convert.model.moe import Role
from fse_convert.output.copying import copy_range, read_into, write_all, writing_back
from fse_convert.plan.plan import Growth, KernelTensor, OutputTensor, Part, ShardPlan, SharedExpert, SidecarPlan, matrix

CHUNK = 1 << 20
"""Bytes of source that are in memory at once, per stream: they stay in the cache between being read and being written."""
Progress = Callable[[int], None]


class Reader:
    """Reads tensors of one checkpoint's shards; keeps one descriptor per shard open."""

    def __init__(self, folder: LocalFolder, shards: tuple[Shard, ...]) -> None:
        self.folder = folder
        self.starts = {s.name: s.header.data_start for s in shards}
        self.open: dict[str, int] = {}
        self.buffers: dict[int, bytearray] = {}

    def close(self) -> None:
        """Close all descriptors."""
        for fd in self.open.values():
            os.close(fd)
        self.open.clear()

    def check(self, *names: str) -> None:
        """Refuse shards that changed since their headers were read; all that are open by default."""
        for name in names or self.open:
            self.folder.check(name, os.fstat(self.open[name]))

    def at(self, info: TensorInfo) -> tuple[int, int]:
        """Descriptor and file offset of a tensor's first byte."""
        if info.shard not in self.open:
            self.open[info.shard] = os.open(self.folder.path(info.shard), os.O_RDONLY | os.O_CLOEXEC)
            self.check(info.shard)
        return self.open[info.shard], self.starts[info.shard] + info.start

    def rows(self, info: TensorInfo, first: int, count: int, nan: NaN | None, slot: int = 0) -> Tensor:
        """Rows ``[first, first + count)`` of a stored matrix as uint8 ``[count, row_bytes]``, refused if one holds a NaN code.

        The rows lie in a buffer that the next read into the same ``slot`` overwrites: touching new memory costs more than reading.
        """
        _, row_bytes = matrix(info)
        fd, start = self.at(info)
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
def reading(folder: LocalFolder, shards: tuple[Shard, ...]) -> Iterator[Reader]:
    """Open a `Reader`; afterwards, check that the source is still what it was, and close it."""
    reader = Reader(folder, shards)
    try:
        yield reader
        reader.check()
    finally:
        reader.close()


def write_shard(plan: ShardPlan, reader: Reader, path: Path, progress: Progress) -> None:
    """Write one rewritten standard-layout shard durably: copied ranges and grown tensors, in the source's order."""
    with _new_file(path) as fd:
        write_all(fd, plan.header)
        progress = writing_back(fd, progress)
        progress(len(plan.header))
        for run in _runs(plan.tensors):
            first, growth = run[0].source, run[0].growth
            if growth is None:
                _copy(fd, first, run[-1].source.end - first.start, reader, progress)
            elif growth.nan is None and growth.row_bytes == growth.new_row_bytes:
                _copy(fd, first, first.nbytes, reader, progress)
                _write(fd, _tail(growth), progress)
            else:
                _write(fd, grown(first, growth, reader), progress)


def write_sidecar(plan: SidecarPlan, reader: Reader, path: Path, progress: Progress) -> None:
    """Write one kernel-layout shard durably."""
    with _new_file(path) as fd:
        write_all(fd, plan.header)
        progress = writing_back(fd, progress)
        progress(len(plan.header))
        for tensor in plan.tensors:
            _write(fd, kernel_rows(tensor, reader), progress)


def grown(info: TensorInfo, growth: Growth, reader: Reader) -> Iterator[Tensor]:
    """The bytes of a grown matrix as chunks of uint8 rows: source rows widened, then rows of fill. A chunk lives until the next."""
    step = _step(growth)
    wide = growth.row_bytes != growth.new_row_bytes
    out = _filled(min(step, growth.rows), growth) if wide else None
    for first in range(0, growth.rows, step):
        count = min(step, growth.rows - first)
        rows = reader.rows(info, first, count, growth.nan)
        if out is not None:
            out[:count, : growth.row_bytes] = rows
            rows = out[:count]
        yield rows
    yield from _tail(growth)


def kernel_rows(tensor: KernelTensor, reader: Reader) -> Iterator[Tensor]:
    """The bytes of one kernel-layout tensor as chunks of uint8 rows."""
    shared = tensor.shared
    if tensor.part is Part.L1_WEIGHT:
        yield from _l1_weight(shared, reader)
    elif tensor.part is Part.L2_WEIGHT:
        info = _weight(shared, Role.DOWN)
        yield from grown(
            info,
            Growth(shared.group.hidden, shared.group.width, shared.group.hidden, shared.width, b"\0", NaN.E4M3),
            reader,
        )
    elif tensor.part is Part.L1_SCALE:
        gate, up = (kernel_scale(shared, role, reader) for role in (Role.GATE, Role.UP))
        yield megamoe.l1_scale(gate, up).view(torch.uint8)
    else:
        yield megamoe.l2_scale(kernel_scale(shared, Role.DOWN, reader)).view(torch.uint8)


def kernel_scale(shared: SharedExpert, role: Role, reader: Reader) -> Tensor:
    """One projection's scales as UE8M0 bytes per row and 32 columns, padded: uint8 ``[n', k' / 32]``."""
    f = shared.group.formats[role]
    if f.scale is None or f.block is None:
        raise ValueError(f"{shared.prefix}: shared {role.value} has no block scales")
    info = shared.expert.projections[role].parts[f.scale]
    tile = f.tiles[f.scale]
    rows = reader.rows(info, 0, info.shape[0], tile.nan if tile else None)
    blocks = e8m0_bytes(rows, info)
    n, k = f.shape
    expanded = ue8m0.expand(blocks, n, k, *f.block)
    new_n, new_k = (n, shared.width) if role is Role.DOWN else (shared.width, k)
    return pad(expanded, new_n, new_k // ue8m0.GROUP, bytes([ue8m0.ONE]))


def e8m0_bytes(rows: Tensor, info: TensorInfo) -> Tensor:
    """Scales of a stored tensor as E8M0 bytes ``[rows, cols]``; F32 is turned losslessly or refused."""
    if info.dtype != "F32":
        return rows
    try:
        return ue8m0.from_fp32(rows.view(torch.float32))
    except ValueError as e:
        raise InvalidCheckpoint(
            Problem("scale-inexact", str(e), f"{info.shard}: {info.name}", "requantise to E8M0 scales first")
        ) from e


def _l1_weight(shared: SharedExpert, reader: Reader) -> Iterator[Tensor]:
    gate, up = _weight(shared, Role.GATE), _weight(shared, Role.UP)
    h, width = shared.group.hidden, shared.group.width
    step = max(megamoe.INTERLEAVE, CHUNK // h // megamoe.INTERLEAVE * megamoe.INTERLEAVE)
    for first in range(0, shared.width, step):
        count = min(step, shared.width - first)
        halves = []
        for slot, info in enumerate((gate, up)):
            real = max(0, min(count, width - first))
            rows = reader.rows(info, first, real, NaN.E4M3, slot) if real else torch.empty(0, h, dtype=torch.uint8)
            halves.append(rows if real == count else pad(rows, count, h, b"\0"))
        yield megamoe.interleave(*halves)


def _tail(growth: Growth) -> Iterator[Tensor]:
    step = _step(growth)
    missing = growth.new_rows - growth.rows
    fill = _filled(min(step, missing), growth) if missing else None
    for first in range(0, missing, step):
        if fill is not None:
            yield fill[: min(step, missing - first)]


def _step(growth: Growth) -> int:
    return max(1, CHUNK // max(growth.row_bytes, growth.new_row_bytes, 1))


def _filled(rows: int, growth: Growth) -> Tensor:
    return pad(torch.empty(0, growth.new_row_bytes, dtype=torch.uint8), rows, growth.new_row_bytes, growth.fill)


def _copy(fd: int, first: TensorInfo, length: int, reader: Reader, progress: Progress) -> None:
    src, offset = reader.at(first)
    copy_range(src, fd, offset, length, progress)


def _write(fd: int, chunks: Iterator[Tensor], progress: Progress) -> None:
    for rows in chunks:
        write_all(fd, _bytes(rows))
        progress(rows.numel())


def _weight(shared: SharedExpert, role: Role) -> TensorInfo:
    return shared.expert.projections[role].parts[shared.group.formats[role].weight]


def _runs(tensors: tuple[OutputTensor, ...]) -> Iterator[list[OutputTensor]]:
    """Neighbours that are copied as one range; a grown tensor is a run of its own."""
    run: list[OutputTensor] = []
    for tensor in tensors:
        if run and (tensor.growth or run[0].growth):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _bytes(rows: Tensor) -> memoryview:
    """A tensor's memory as a buffer, without numpy."""
    flat = rows.contiguous().flatten()
    storage = flat.untyped_storage()
    array = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    array._keep = storage  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _refuse_nan(rows: Tensor, raw: bytearray, nan: NaN, info: TensorInfo, first: int) -> None:
    at = _first_nan(rows, raw, nan)
    if at < 0:
        return
    size = {NaN.E4M3: 1, NaN.E8M0: 1, NaN.BF16: 2, NaN.F16: 2, NaN.F32: 4}[nan]
    columns = rows.shape[1] // size
    row, column = first + at // columns, at % columns
    code = bytes(raw[at * size : (at + 1) * size])[::-1].hex().upper()
    message = f"NaN code 0x{code} at row {row}, column {column}"
    raise InvalidCheckpoint(
        Problem("nan", message, f"{info.shard}: {info.name}", "the checkpoint is damaged: compare its checksum")
    )


def _first_nan(rows: Tensor, raw: bytearray, nan: NaN) -> int:
    """Index of the first NaN element, or -1. Bytes are searched at memory speed, wider floats as integers."""
    end = rows.numel()
    if nan is NaN.E8M0:
        return raw.find(ue8m0.NAN, 0, end)
    if nan is NaN.E4M3:
        found = [i for i in (raw.find(code, 0, end) for code in ue8m0.E4M3_NAN) if i >= 0]
        return min(found, default=-1)
    dtype, mask, infinity = {
        NaN.BF16: (torch.int16, 0x7FFF, 0x7F80),
        NaN.F16: (torch.int16, 0x7FFF, 0x7C00),
        NaN.F32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    }[nan]
    hits = (rows.view(dtype) & mask) > infinity
    return int(hits.flatten().to(torch.uint8).argmax()) if hits.any() else -1
