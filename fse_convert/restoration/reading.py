"""Reads tensors of an output, each compared with its digest, and gives back what of them is the source's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TypeAlias

import xxhash

from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import Problem, VerificationFailure
from fse_convert.output.copying import read_into
from fse_convert.progress import Event, Observer
from fse_convert.sidecar.manifest import FETCH_AGAIN

CHUNK = 8 << 20
"""Bytes that are read at once."""
Bytes: TypeAlias = memoryview | bytearray


class TensorFile:
    """One file of an output. A tensor that is read to its end must have the digest that the manifest lists, if it lists any."""

    def __init__(self, shard: Shard, path: Path, digests: Mapping[str, str] | None, observe: Observer) -> None:
        self.shard, self.path, self.digests, self.observe = shard, path, digests, observe
        self.descriptor = -1

    def __enter__(self) -> TensorFile:
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, t: TensorInfo, sizes: Iterable[int]) -> Iterator[memoryview]:
        """Read a tensor in consecutive pieces of these sizes. Raises VerificationFailure at its end, OSError, EOFError."""
        digest = xxhash.xxh3_128()
        at = self.shard.header.data_start + t.start
        for size in sizes:
            piece = memoryview(bytearray(size))
            read_into(self.descriptor, piece, at)
            at += size
            digest.update(piece)
            self.observe(Event(self.shard.name, size))
            yield piece
        listed = self.digests.get(t.name) if self.digests is not None else digest.hexdigest()
        if listed != digest.hexdigest():
            message = f"its XXH3-128 is {digest.hexdigest()}, in the manifest {listed}"
            raise unlike("tensor-damaged", f"{self.shard.name}: {t.name}", message)

    def whole(self, t: TensorInfo) -> memoryview:
        """Read all of a small tensor."""
        (piece,) = self.read(t, (t.nbytes,))
        return piece

    def pieces(self, t: TensorInfo) -> Iterator[memoryview]:
        """Read a tensor as it is stored."""
        return self.read(t, (min(CHUNK, t.nbytes - at) for at in range(0, t.nbytes, CHUNK)))


def without_padding(file: TensorFile, t: TensorInfo, shape: tuple[int, ...], stretches: int) -> Iterator[Bytes]:
    """Read a tensor and yield what of it is the source's, of ``shape``: the head of each of its equal stretches of bytes."""
    source = prod(shape) * BITS[t.dtype] // 8
    if t.nbytes % stretches or source % stretches or source > t.nbytes:
        message = f"{list(t.shape)} does not hold the original {list(shape)} in {stretches} parts"
        raise unlike("tensor-shape", f"{file.shard.name}: {t.name}", message)
    size, kept = t.nbytes // stretches, source // stretches
    tiles = list(_tiles(stretches, size))
    for (offset, _, columns), piece in zip(tiles, file.read(t, (length for _, length, _ in tiles)), strict=True):
        yield _cut(piece, columns, max(0, min(columns, kept - offset % size)))


def _tiles(rows: int, row: int) -> Iterator[tuple[int, int, int]]:
    """Cut ``rows`` of ``row`` bytes into (offset, bytes, bytes per row): whole rows, or parts of one long row."""
    if row > CHUNK:
        yield from ((first * row + at, n, n) for first in range(rows) for at in range(0, row, CHUNK) if (n := min(CHUNK, row - at)))
    elif row:
        step = CHUNK // row
        yield from ((first * row, min(step, rows - first) * row, row) for first in range(0, rows, step))


def _cut(rows: memoryview, row_bytes: int, keep: int) -> memoryview | bytearray:
    """Return the first ``keep`` bytes of every row."""
    if not rows or not keep:
        return bytearray()
    if row_bytes == keep:
        return rows
    import torch

    out = bytearray(len(rows) // row_bytes * keep)
    kept = torch.frombuffer(out, dtype=torch.uint8).view(-1, keep)
    kept.copy_(torch.frombuffer(rows, dtype=torch.uint8).view(-1, row_bytes)[:, :keep])
    return out


def unlike(code: str, where: str, message: str) -> VerificationFailure:
    """Return the error for an output that is not as its manifest describes it."""
    return VerificationFailure(Problem(code, message, where, f"{FETCH_AGAIN}; verify says what else is damaged"))
