"""Write one output shard from its plan: byte ranges that are copied, and streams of padded or permuted rows.

Memory is bounded by a few buffers of `CHUNK` bytes, whatever the size of a tensor. Everything that is computed is
scanned for NaN codes on the way, since one NaN in a padded or fused expert would reach every token.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.conversion.recoding import recoded_bands
from fse_convert.conversion.source_rows import CHUNK, SourceReader
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import megamoe, ue8m0
from fse_convert.layout.padding import pad
from fse_convert.layout.sizes import GROUP
from fse_convert.model.formats import NaN
from fse_convert.model.moe import Role
from fse_convert.output.copying import copy_range, new_file, write_all, writing_back
from fse_convert.plan.tensors import Change, Computed, Copied, OutputShard, OutputTensor, Padded, Recoded, SharedExpert, Tripwire
from fse_convert.progress import Advance
from fse_convert.sidecar.tensors import KernelTensorName


def write_shard(shard: OutputShard, reader: SourceReader, path: Path, advance: Advance) -> None:
    """Write one output shard durably, tensor by tensor as each one's change says; neighbours that are copied are one range.

    A weight that is coded again and its scale are computed at once, and written where each has its place.
    """
    header, start = shard.header, len(shard.header)
    matrices: dict[tuple[TensorInfo, ...], dict[bool, int]] = {}
    for tensor in shard.tensors:
        if isinstance(tensor.change, Recoded):
            matrices.setdefault(tensor.change.sources, {})[tensor.change.is_scale] = start + tensor.start
    with new_file(path) as fd:
        write_all(fd, header)
        advance = writing_back(fd, advance)
        advance(start)
        for tensor, length in _runs(shard.tensors):
            change = tensor.change
            if isinstance(change, Copied):
                _copy(fd, change.source, length, reader, advance)
            elif isinstance(change, Padded):
                _write_padded(fd, change, reader, advance)
            elif isinstance(change, Recoded):
                if places := matrices.pop(change.sources, None):
                    _write_matrix(fd, change, places, reader, advance)
                os.lseek(fd, start + tensor.end, os.SEEK_SET)
            elif isinstance(change, Computed):
                _write(fd, kernel_rows(change, reader), advance)
            elif not isinstance(change, Tripwire):
                raise TypeError(f"{tensor.name}: no way to write {type(change).__name__}")


def padded_rows(change: Padded, reader: SourceReader) -> Iterator[Tensor]:
    """Yield a padded tensor as chunks of uint8, short stretches as rows, long ones in parts. A chunk lives until the next."""
    if change.new > CHUNK:
        for first in range(0, change.stretches * change.old, change.old):
            parts = ((first + at, min(CHUNK, change.old - at)) for at in range(0, change.old, CHUNK))
            yield from (reader.part(change.source, at, size, change.nan) for at, size in parts)
            yield from _padding(change)
        return
    step = max(1, CHUNK // max(change.new, 1))
    out = _filled(min(step, change.stretches) * change.new, change.fill).view(-1, change.new)
    for first in range(0, change.stretches, step):
        count = min(step, change.stretches - first)
        held = reader.part(change.source, first * change.old, count * change.old, change.nan)
        out[:count, : change.old] = held.view(count, change.old)
        yield out[:count]


def kernel_rows(change: Computed, reader: SourceReader) -> Iterator[Tensor]:
    """Yield the bytes of one kernel-layout tensor as chunks of uint8 rows."""
    shared = change.shared
    if change.name is KernelTensorName.L1_WEIGHT:
        yield from _l1_weight(shared, reader)
    elif change.name is KernelTensorName.L2_WEIGHT:
        hidden, width = shared.group.hidden, shared.group.width
        source = shared.weight(Role.DOWN)
        down = Padded(source=source, stretches=hidden, old=width, new=shared.width, fill=b"\0", nan=NaN.E4M3)
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
    return pad(expanded, new_n, new_k // GROUP, bytes([ue8m0.ONE]))


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


def _runs(tensors: tuple[OutputTensor, ...]) -> Iterator[tuple[OutputTensor, int]]:
    """Yield tensors and their bytes in file order; those that are copied from one stretch of a shard are one, under the first's."""
    run: list[OutputTensor] = []
    for tensor in tensors:
        if run and not _continues(run[-1].change, tensor.change):
            yield run[0], tensor.start - run[0].start
            run = []
        run.append(tensor)
    if run:
        yield run[0], run[-1].end - run[0].start


def _continues(a: Change, b: Change) -> bool:
    return isinstance(a, Copied) and isinstance(b, Copied) and (a.source.shard, a.source.end) == (b.source.shard, b.source.start)


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


def _padding(change: Padded) -> Iterator[Tensor]:
    """Yield what is added to one stretch."""
    missing = change.new - change.old
    fill = _filled(min(CHUNK, missing), change.fill)
    yield from (fill[: min(CHUNK, missing - at)] for at in range(0, missing, CHUNK))


def _filled(size: int, fill: bytes) -> Tensor:
    return torch.tensor(list(fill), dtype=torch.uint8).repeat(size // len(fill))


def _write_padded(fd: int, change: Padded, reader: SourceReader, advance: Advance) -> None:
    if change.nan is not None or change.new <= CHUNK:
        _write(fd, padded_rows(change, reader), advance)
        return
    src, offset = reader.locate(change.source)
    for at in range(0, change.source.nbytes, change.old):
        copy_range(src, fd, offset + at, change.old, advance)
        _write(fd, _padding(change), advance)


def _copy(fd: int, first: TensorInfo, length: int, reader: SourceReader, advance: Advance) -> None:
    src, offset = reader.locate(first)
    copy_range(src, fd, offset, length, advance)


def _write(fd: int, chunks: Iterable[Tensor], advance: Advance) -> None:
    for rows in chunks:
        write_all(fd, _bytes(rows))
        advance(rows.numel())


def _write_matrix(fd: int, change: Recoded, places: dict[bool, int], reader: SourceReader, advance: Advance) -> None:
    """Write the tensors of one matrix: weight and scale, or one of them. ``places``: offsets by `Recoded.is_scale`."""
    for band in recoded_bands(change, reader):
        for is_scale, at in places.items():
            os.lseek(fd, at, os.SEEK_SET)
            _write(fd, (band[is_scale],), advance)
            places[is_scale] = at + band[is_scale].nbytes


def _bytes(rows: Tensor) -> memoryview:
    """Return a tensor's memory as a buffer, without numpy."""
    flat = rows.contiguous().flatten()
    storage = flat.untyped_storage()
    array = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    array._keep = storage  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
