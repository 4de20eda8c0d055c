"""A disk that logs every write and every flush: one file of a FUSE file system, for a loop device to lie on.

``python -m tests.filesystems.disk MOUNTPOINT MEGABYTES LOG`` serves it until it is unmounted; it needs root, /dev/fuse and
nothing else. The log holds what reached the disk in that order, so that `image` can make the disk of any instant: everything up to
the last flush, and of what came after it whatever a power cut may leave. (Linux include/uapi/linux/fuse.h, protocol 7.31.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen
from typing import NamedTuple

DISK = "disk"
SECTOR = 4096
MAX_WRITE = 1 << 20
ROOT, FILE = 1, 2
RECORD = struct.Struct("<QI")
FLUSH = (1 << 64) - 1
"""Offset of a log record that is a flush."""
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSHED, INIT = (
    1,
    2,
    3,
    4,
    14,
    15,
    16,
    17,
    18,
    20,
    25,
    26,
)
BATCH_FORGET = 42
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22


class Served:
    """The kernel's requests, answered from memory."""

    def __init__(self, fuse: int, size: int, log: Path) -> None:
        self.fuse, self.size = fuse, size
        self.memory = bytearray(size)
        self.log = log.open("wb", buffering=0)

    def run(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(self.fuse, MAX_WRITE + SECTOR)
            except OSError as e:
                if e.errno == errno.ENODEV:
                    return
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            if opcode in (FORGET, BATCH_FORGET):
                continue
            answer = self.answer(opcode, node, memoryview(request)[40:])
            error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(self.fuse, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    def answer(self, opcode: int, node: int, body: memoryview) -> bytes | int:
        """Return the body of an answer, or an errno."""
        if opcode == INIT:
            flags = BIG_WRITES | MAX_PAGES
            return struct.pack("<IIIIHHIIHHI7I", 7, 31, MAX_WRITE, flags, 16, 12, MAX_WRITE, 1, MAX_WRITE // SECTOR, 0, 0, *[0] * 7)
        if opcode == LOOKUP:
            if bytes(body).rstrip(b"\0") != DISK.encode():
                return errno.ENOENT
            return struct.pack("<QQQQII", FILE, 0, 3600, 3600, 0, 0) + self.attributes(FILE)
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            return bytes(16)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(self.memory[offset : offset + size])
        if opcode == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            data = body[40 : 40 + size]
            self.memory[offset : offset + size] = data
            self.log.write(RECORD.pack(offset, size) + data)
            return struct.pack("<II", size, 0)
        if opcode == FSYNC:
            self.log.write(RECORD.pack(FLUSH, 0))
            return b""
        if opcode == STATFS:
            return struct.pack("<5Q10I", 1 << 20, 1 << 19, 1 << 19, 16, 8, SECTOR, 255, SECTOR, *[0] * 7)
        return b"" if opcode in (RELEASE, FLUSHED) else errno.ENOSYS

    def attributes(self, node: int) -> bytes:
        """Return a ``fuse_attr``."""
        mode, size = (stat.S_IFDIR | 0o700, 0) if node == ROOT else (stat.S_IFREG | 0o600, self.size)
        return struct.pack("<6Q10I", node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR, 0)


def main(mountpoint: str, megabytes: str, log: str) -> None:
    """Mount and serve; print a line when the disk can be used."""
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,max_read={MAX_WRITE}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"logged", mountpoint.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount", mountpoint)
    served = Served(fuse, int(megabytes) << 20, Path(log))
    print("mounted", flush=True)
    served.run()


class Write(NamedTuple):
    """One write that reached the disk, or a flush: then ``data`` is empty."""

    offset: int
    data: bytes

    @property
    def flush(self) -> bool:
        """True for a flush."""
        return self.offset == FLUSH


class LoggedDisk:
    """A disk that is being served. ``path``: what a loop device can lie on."""

    def __init__(self, path: Path, size: int, log: Path) -> None:
        self.path, self.size, self.log = path, size, log

    @property
    def position(self) -> int:
        """Bytes of the log so far: the instant that is now."""
        return self.log.stat().st_size

    def writes(self) -> Iterator[tuple[int, Write]]:
        """Yield every write and flush with the position of the log behind it."""
        with self.log.open("rb") as log:
            at = 0
            while len(head := log.read(RECORD.size)) == RECORD.size:
                offset, size = RECORD.unpack(head)
                data = log.read(size)
                if len(data) < size:
                    return
                at += RECORD.size + size
                yield at, Write(offset, data)

    def image(self, position: int, path: Path, random: Random) -> str:
        """Make the disk as a power cut at ``position`` may leave it; return in words what of the unflushed writes is there."""
        durable: list[Write] = []
        loose: list[Write] = []
        for at, write in self.writes():
            if at > position:
                break
            if write.flush:
                durable += loose
                loose = []
            else:
                loose.append(write)
        kept, how = _survivors(loose, random)
        with path.open("wb") as disk:
            disk.truncate(self.size)
            for write in (*durable, *kept):
                disk.seek(write.offset)
                disk.write(write.data)
        return f"{len(durable)} durable writes, {how} of {len(loose)} others"


def _survivors(loose: list[Write], random: Random) -> tuple[list[Write], str]:
    """Choose which unflushed writes a power cut leaves: none, all, the first ones, any, or any in whole sectors only."""
    how = random.choice(["none", "all", "prefix", "subset", "torn"])
    if how == "all":
        return loose, how
    if how == "prefix":
        return loose[: random.randint(0, len(loose))], how
    if how == "subset":
        return [w for w in loose if random.random() < 0.5], how
    if how == "torn":
        sectors = (Write(w.offset + i, w.data[i : i + SECTOR]) for w in loose for i in range(0, len(w.data), SECTOR))
        return [s for s in sectors if random.random() < 0.5], how
    return [], how


@contextmanager
def logged_disk(folder: Path, megabytes: int) -> Iterator[LoggedDisk]:
    """Serve a logged disk below a folder for the length of a ``with`` block; whatever uses it must be gone at its end."""
    mountpoint, log = folder / "fuse", folder / "log"
    mountpoint.mkdir()
    log.touch()
    command = [sys.executable, "-m", "tests.filesystems.disk", str(mountpoint), str(megabytes), str(log)]
    with Popen(command, stdout=PIPE, text=True, cwd=Path(__file__).parents[2]) as server:
        assert server.stdout
        if server.stdout.readline() != "mounted\n":
            raise OSError(errno.EIO, "the logged disk did not come up")
        try:
            yield LoggedDisk(mountpoint / DISK, megabytes << 20, log)
        finally:
            umount = ctypes.CDLL(None, use_errno=True).umount2
            if umount(str(mountpoint).encode(), 2):  # lazily: a loop device may still be letting go
                server.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
