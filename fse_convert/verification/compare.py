"""One pass over one file of the output: read in file order, hashed, and compared with what each piece must be.

SHA-256 runs in a thread of its own (hashlib releases the GIL), XXH3-128 per tensor beside the comparison. Memory is
bounded by a few buffers of `CHUNK` bytes per file, whatever the size of a tensor; a single row may exceed that.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import torch
import xxhash
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.output.copying import read_into
from fse_convert.progress import Event, Observer, Phase
from fse_convert.verification.findings import Mismatch, hexadecimal

CHUNK = 2 << 20
"""Bytes that are read and compared at once."""
BUFFERS = 4
"""Chunks of the output in memory: one being compared, the others on their way through SHA-256."""
AHEAD = 16 << 20
"""How far in front of the reader the system is asked to read."""
LARGE = 256 << 10
"""Bytes of a read that asks for more: small ones, of scales, are made elsewhere in a file, between the large ones."""


class Memory:
    """Byte buffers that are used again and again, by purpose; each grows to the largest request."""

    def __init__(self) -> None:
        self.buffers: dict[str, bytearray] = {}

    def take(self, purpose: str, size: int) -> memoryview:
        """Return a buffer of ``size`` bytes with arbitrary content, valid until the next call for the same purpose."""
        buffer = self.buffers.get(purpose)
        if buffer is None or len(buffer) < size:
            buffer = self.buffers[purpose] = bytearray(max(size, min(CHUNK, 2 * size)))
        return memoryview(buffer)[:size]


class Undefined(ValueError):
    """The source has a value that the output's format cannot hold, so that no bytes would be right."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file: where it starts, how its bytes divide among tensors (name, bytes), and what they must be.

    ``is_padding``: whether the byte at an offset of the file is padding.
    """

    start: int
    parts: tuple[tuple[str, int], ...]
    expect: Callable[[Memory], memoryview] | None = None
    is_padding: Callable[[int], bool] = lambda _: False

    @property
    def size(self) -> int:
        """Bytes of the range."""
        return sum(size for _, size in self.parts)


@dataclass(slots=True)
class FileReport:
    """What one pass found: mismatches, digests, and how many bytes were read and compared; ``sha256`` of what was read."""

    name: str
    mismatches: list[Mismatch] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    size: int = 0
    sha256: str = ""


class InputFiles:
    """Descriptors of files being read, opened when first needed and closed by ``with``; several threads may read at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open: dict[str, int] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        self.lock = Lock()

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.open.values():
            os.close(fd)

    def read(self, name: str, offset: int, into: memoryview) -> memoryview:
        """Fill a buffer from a file at ``offset``; raises EOFError when the file ends early."""
        with self.lock:
            fd = self.open.get(name)
            if fd is None:
                fd = self.open[name] = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        if len(into) >= LARGE:
            self._read_ahead(name, fd, offset + len(into))
        read_into(fd, into, offset)
        return into

    def _read_ahead(self, name: str, fd: int, offset: int) -> None:
        """Ask the system for what comes next, a stretch at a time, so that the disk works while this compares."""
        start, end = self.asked.get(name, (0, 0))
        if not start <= offset <= end - AHEAD // 2:
            begin = end if start <= offset <= end else offset
            os.posix_fadvise(fd, begin, offset + AHEAD - begin, os.POSIX_FADV_WILLNEED)
            self.asked[name] = (offset, offset + AHEAD)


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
        """Fill a buffer from a tensor's bytes at ``offset``, and from its neighbours after it."""
        return self.files.read(info.shard, self.starts[info.shard] + info.start + offset, into)

    def rows(self, info: TensorInfo, start: int, stop: int, memory: Memory, purpose: str) -> Tensor:
        """Read rows ``[start, stop)`` of a matrix into the buffer for ``purpose``: uint8 ``[rows, row bytes]``."""
        size = info.nbytes // info.shape[0]
        buffer = memory.take(purpose, (stop - start) * size)
        self.read(info, start * size, buffer)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(stop - start, size)

    def whole(self, info: TensorInfo) -> Tensor:
        """Read all of a small matrix, uint8 ``[rows, row bytes]``."""
        buffer = bytearray(info.nbytes)
        self.read(info, 0, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(info.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose ``count`` rows of ``size`` bytes are computed, some at a time, in multiples of ``multiple``.

    ``expected``: (first, count, memory) -> the bytes of these rows. ``is_padding``: of a byte, by row and place in the row.
    ``work``: bytes that computing a row takes, where these are more.
    """

    count: int
    size: int
    expected: Callable[[int, int, Memory], memoryview]
    is_padding: Callable[[int, int], bool] = lambda _row, _at: False
    multiple: int = 1
    work: int = 0


class _Sha256:
    """SHA-256 of a stream of buffers, in a thread; a buffer is handed out again once it is hashed."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.thread = ThreadPoolExecutor(1)
        self.held: deque[tuple[bytearray, Future[None] | None]] = deque((bytearray(), None) for _ in range(BUFFERS))

    def take(self, size: int) -> bytearray:
        """Return a buffer of at least ``size`` bytes."""
        buffer, hashed = self.held.popleft()
        if hashed:
            hashed.result()
        return buffer if len(buffer) >= size else bytearray(max(size, min(CHUNK, 2 * size)))

    def give(self, buffer: bytearray, size: int) -> None:
        """Hash the first ``size`` bytes of a buffer that `take` gave, some time later."""
        self.held.append((buffer, self.thread.submit(self.hash.update, memoryview(buffer)[:size])))


def walk(out: InputFiles, name: str, pieces: Iterable[Piece], observe: Observer) -> FileReport:
    """Read the pieces of one file in order, hash them, and compare each with what it must be. Raises OSError, EOFError."""
    report = FileReport(name)
    hashed, digest = "", xxhash.xxh3_128()
    memory, sha = Memory(), _Sha256()
    mismatches: dict[str, Mismatch] = {}
    with sha.thread:
        for piece in pieces:
            size = piece.size
            buffer = sha.take(size)
            view = memoryview(buffer)[:size]
            out.read(name, piece.start, view)
            at = 0
            for tensor, part in piece.parts:
                if tensor != hashed:
                    hashed, digest = tensor, xxhash.xxh3_128()
                digest.update(view[at : at + part])
                report.tensors[tensor] = digest.hexdigest()
                at += part
            _compare(name, piece, buffer, memory, mismatches)
            report.compared += size if piece.expect else 0
            report.size += size
            sha.give(buffer, size)
            observe(Event(name, size, phase=Phase.READ))
    report.tensors.pop("", None)
    report.mismatches = list(mismatches.values())
    report.sha256 = sha.hash.hexdigest()
    observe(Event(name, done=True, phase=Phase.READ))
    return report


def _compare(name: str, piece: Piece, buffer: bytearray, memory: Memory, mismatches: dict[str, Mismatch]) -> None:
    """Compare the start of a buffer with what a piece must be; ``mismatches`` are by tensor."""
    if piece.expect is None:
        return
    try:
        expected = piece.expect(memory)
    except Undefined as e:
        tensor = piece.parts[0][0]
        new = Mismatch("source-unfit", name, tensor, piece.start, expected="values that the format can hold", found=str(e))
        mismatches.setdefault(tensor, new)
        return
    size = piece.size
    if not buffer.startswith(expected, 0, size) or len(expected) != size:
        _locate(name, piece, memoryview(buffer)[:size], expected, mismatches)


def _locate(name: str, piece: Piece, view: memoryview, expected: memoryview, mismatches: dict[str, Mismatch]) -> None:
    """Record the first wrong byte of every tensor in a piece, and how many there are."""
    ours, theirs = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (view, expected))
    at = 0
    for tensor, size in piece.parts:
        wrong = (ours[at : at + size] != theirs[at : at + size]).nonzero().flatten()
        if len(wrong):
            first = at + int(wrong[0])
            offset = piece.start + first
            want, got = (hexadecimal(side[first : first + 1]) for side in (expected, view))
            new = Mismatch("padding" if piece.is_padding(offset) else "bytes", name, tensor, offset, want, got)
            known = mismatches.get(tensor, new)
            mismatches[tensor] = replace(known, count=known.count + len(wrong))
        at += size
