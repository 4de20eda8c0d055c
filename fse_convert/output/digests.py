"""Digests of files, read through one buffer; those of bytes in memory: `fse_convert.checkpoint.encoding.sha256`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import xxhash

from fse_convert.output.copying import read_into

BUFFER = 4 << 20


@dataclass(frozen=True, slots=True)
class Scan:
    """File offsets ``[start, end)`` in which no byte may be one of ``codes``; ``refuse`` is given the offset and raises."""

    start: int
    end: int
    codes: tuple[int, ...]
    refuse: Callable[[int], NoReturn]

    def check(self, buffer: bytearray, at: int, size: int) -> None:
        """Look at the first ``size`` bytes of a buffer, which lie at file offset ``at``. Raises what ``refuse`` raises."""
        first, last = max(self.start - at, 0), min(self.end - at, size)
        for code in self.codes if first < last else ():
            hit = buffer.find(code, first, last)
            if hit >= 0:
                self.refuse(at + hit)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex. Raises OSError."""
    digest = hashlib.sha256()
    for _, buffer, size in _pieces(path):
        digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def file_xxh3_128(path: Path, scans: tuple[Scan, ...] = ()) -> str:
    """Return the XXH3-128 of a file as hex, and look for forbidden bytes on the way. Raises OSError, and what a scan raises."""
    digest = xxhash.xxh3_128()
    for at, buffer, size in _pieces(path):
        digest.update(memoryview(buffer)[:size])
        for scan in scans:
            scan.check(buffer, at, size)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[tuple[int, bytearray, int]]:
    """Yield (offset, buffer, bytes of it that are filled); the buffer is the same one every time."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        buffer = bytearray(min(BUFFER, size))
        for at in range(0, size, BUFFER):
            filled = min(BUFFER, size - at)
            read_into(fd, memoryview(buffer)[:filled], at)
            yield at, buffer, filled
    finally:
        os.close(fd)
