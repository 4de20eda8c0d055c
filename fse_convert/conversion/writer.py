"""Write one output shard from its plan: byte ranges that are copied, and streams of padded or permuted rows.

Memory is bounded by a few buffers of `CHUNK` bytes, whatever the size of a tensor. Everything that is computed is
scanned for NaN codes on the way, since one NaN in a padded or fused expert would reach every token.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.conversion.source_rows import CHUNK, SourceReader
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import megamoe, ue8m0
from fse_convert.layout.nan_and_one import E8M0_ONE, NAN_WORDS, NaN
from fse_convert.layout.padding import filled, padded
from fse_convert.layout.sizes import GROUP
from fse_convert.model.formats import REQUANTISE, Format
from fse_convert.model.moe import Role
from fse_convert.output.copying import copy_range, new_file, write_all, writing_back
from fse_convert.plan.tensors import Computed, Copied, Growth, OutputShard, OutputTensor, Padded, Recoded, SharedExpert, Tripwire
from fse_convert.progress import Advance
from fse_convert.sidecar.tensors import KernelTensorName

Bytes = memoryview | bytearray | bytes


def needs_torch(shard: OutputShard) -> bool:
    """Tell whether a shard has tensors in another format, or floats that are looked at on their way; all else is bytes."""
    wide = {nan.name for nan in NAN_WORDS}
    return any(
        isinstance(t.change, Recoded) or (not isinstance(t.change, Copied) and any(s.dtype in wide for s in t.change.sources))
        for t in shard.tensors
    )


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
                src, offset = reader.locate(change.source)
                copy_range(src, fd, offset, length, advance)
            elif isinstance(change, Padded):
                _write_padded(fd, change, reader, advance)
            elif isinstance(change, Recoded):
                if places := matrices.pop(change.sources, None):
                    _write_matrix(fd, change, places, reader, advance)
                os.lseek(fd, start + tensor.end, os.SEEK_SET)
            elif isinstance(change, Computed):
                _write(fd, _kernel_rows(change, reader), advance)
            elif not isinstance(change, Tripwire):
                raise TypeError(f"{tensor.name}: no way to write {type(change).__name__}")


def _padded(info: TensorInfo, growth: Growth, reader: SourceReader) -> Iterator[Bytes]:
    """Yield a padded tensor as chunks: many short stretches, or parts of a long one. A chunk lives until the next."""
    if growth.new <= CHUNK:
        first = 0
        while first < growth.stretches:
            chunk = reader.grown(info, first, growth)
            first += len(chunk) // growth.new
            yield chunk
        return
    for first in range(0, growth.stretches * growth.old, growth.old):
        for at in range(0, growth.old, CHUNK):
            yield reader.part(info, first + at, min(CHUNK, growth.old - at), growth.nan)
        yield from _tail(growth)


def _kernel_rows(change: Computed, reader: SourceReader) -> Iterator[Bytes]:
    """Yield the bytes of one kernel-layout tensor as chunks."""
    shared = change.shared
    if change.name is KernelTensorName.L1_WEIGHT:
        yield from _l1_weight(shared, reader)
    elif change.name is KernelTensorName.L2_WEIGHT:
        stretches, old = shared.group.hidden, shared.group.width
        growth = Growth(stretches=stretches, old=old, new=shared.width, fill=b"\0", nan=NaN.E4M3)
        yield from _padded(shared.weight(Role.DOWN), growth, reader)
    elif change.name is KernelTensorName.L1_SCALE:
        yield megamoe.l1_scale(*(_kernel_scale(shared, role, reader) for role in (Role.GATE, Role.UP)))
    else:
        yield megamoe.l2_scale(_kernel_scale(shared, Role.DOWN, reader))


def _kernel_scale(shared: SharedExpert, role: Role, reader: SourceReader) -> list[bytes]:
    """Return one projection's block scales as rows of UE8M0 bytes, one for 32 columns, padded.

    Rule: vLLM 0.33 model_executor/layers/fused_moe/deep_gemm_mega_moe.py, ``_pack_scale``.
    """
    f = shared.group.formats[role]
    if f.scale is None or f.block is None:
        raise ValueError(f"{shared.prefix}: shared {role.value} has no block scales")
    (n, k), (block_n, block_k) = f.shape, f.block
    stored = (bytes(byte for byte in row for _ in range(block_k // GROUP)) for row in _e8m0_rows(shared.scale(role), f, reader))
    rows = [row[: -(-k // GROUP)] for row in stored for _ in range(block_n)][:n]
    new_n, new_k = (n, shared.width) if role is Role.DOWN else (shared.width, k)
    return padded(rows, new_n, new_k // GROUP, bytes([E8M0_ONE]))


def _e8m0_rows(info: TensorInfo, f: Format, reader: SourceReader) -> list[bytes]:
    """Return the rows of scales as E8M0 bytes; F32 is turned losslessly or refused."""
    tile, count = f.tiles[f.scale or ""], info.shape[0]
    rows = reader.rows(info, 0, count, tile.nan if tile else None)
    if info.dtype == "F32":
        import torch

        try:
            codes = ue8m0.from_fp32(torch.frombuffer(rows, dtype=torch.float32))
        except ValueError as e:
            raise InvalidCheckpoint(Problem("scale-inexact", str(e), f"{info.shard}: {info.name}", REQUANTISE)) from e
        rows = memoryview(bytes(codes.tolist()))
    size = len(rows) // count
    return [bytes(rows[at : at + size]) for at in range(0, len(rows), size)]


def _runs(tensors: tuple[OutputTensor, ...]) -> Iterator[tuple[OutputTensor, int]]:
    """Yield tensors and their bytes in file order; those that are copied from one stretch of a shard are one, under the first's."""
    run: list[OutputTensor] = []
    for tensor in tensors:
        if run and not _continues(run[-1], tensor):
            yield run[0], tensor.start - run[0].start
            run = []
        run.append(tensor)
    if run:
        yield run[0], run[-1].end - run[0].start


def _continues(last: OutputTensor, tensor: OutputTensor) -> bool:
    a, b = last.change, tensor.change
    return isinstance(a, Copied) and isinstance(b, Copied) and (a.source.shard, a.source.end) == (b.source.shard, b.source.start)


def _l1_weight(shared: SharedExpert, reader: SourceReader) -> Iterator[Bytes]:
    h, width = shared.group.hidden, shared.group.width
    step = max(megamoe.INTERLEAVE, CHUNK // h // megamoe.INTERLEAVE * megamoe.INTERLEAVE)
    for first in range(0, shared.width, step):
        count = min(step, shared.width - first)
        real = max(0, min(count, width - first))
        halves = []
        for slot, role in enumerate((Role.GATE, Role.UP)):
            rows = reader.rows(shared.weight(role), first, real, NaN.E4M3, slot)
            halves.append([rows[at : at + h] for at in range(0, real * h, h)] + [memoryview(bytes(h))] * (count - real))
        yield b"".join(megamoe.interleave(*halves))


def _tail(growth: Growth) -> Iterator[Bytes]:
    """Yield what is added to one stretch."""
    missing = growth.new - growth.old
    fill = memoryview(filled(min(CHUNK, missing), growth.fill))
    yield from (fill[: min(CHUNK, missing - at)] for at in range(0, missing, CHUNK))


def _write_padded(fd: int, change: Padded, reader: SourceReader, advance: Advance) -> None:
    growth = change.growth
    if growth.nan is not None or growth.new <= CHUNK:
        _write(fd, _padded(change.source, growth, reader), advance)
        return
    src, offset = reader.locate(change.source)
    for at in range(0, change.source.nbytes, growth.old):
        copy_range(src, fd, offset + at, growth.old, advance)
        _write(fd, _tail(growth), advance)


def _write(fd: int, chunks: Iterable[Bytes], advance: Advance) -> None:
    for chunk in chunks:
        write_all(fd, chunk)
        advance(len(chunk))


def _write_matrix(fd: int, change: Recoded, places: dict[bool, int], reader: SourceReader, advance: Advance) -> None:
    """Write the tensors of one matrix: weight and scale, or one of them. ``places``: offsets by `Recoded.is_scale`."""
    from fse_convert.conversion.recoding import as_bytes, recoded_bands

    for band in recoded_bands(change, reader):
        for is_scale, at in places.items():
            os.lseek(fd, at, os.SEEK_SET)
            _write(fd, (as_bytes(band[is_scale]),), advance)
            places[is_scale] = at + band[is_scale].nbytes
