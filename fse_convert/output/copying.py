"""Moving bytes between files without bringing them into Python: ranges in the kernel, whole files by clone, link or copy."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from fse_convert.errors import naming
from fse_convert.output.mounts import mount_of

logger = logging.getLogger(__name__)
FICLONE = 0x40049409
"""Linux ioctl that makes one file share another's blocks, on file systems that can (btrfs, xfs)."""
AT_FDCWD = -100
RENAME_EXCHANGE = 2
SYNC_FILE_RANGE_WRITE = 2
STEP = 64 << 20
"""Bytes per copy_file_range call, so that progress is seen and signals are served."""
BUFFER = 8 << 20
ROWS = 1024
"""Buffers that one read can fill (IOV_MAX of Linux)."""
WRITE_BACK = 32 << 20
"""Bytes after which the system is asked to start writing them to disk."""
NOT_HERE = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.EBADF, errno.ETXTBSY}
)
"""Errors by which a kernel or file system says that it cannot do this, not that it failed."""


class Link(str, Enum):
    """How untouched shards reach the output: clone where possible else copy, always copy, or hard links."""

    AUTO = "auto"
    COPY = "copy"
    HARD = "hard"


SHARED = frozenset({"hard link", "clone"})
"""Ways in which a file reaches the output that take no room."""


def way(source: Path, folder: Path, link: Link) -> str:
    """Say how `carry` will bring a file into a folder: ``hard link``, ``clone``, ``copy``, or ``hard link or copy``.

    ``hard link or copy``: an overlay copies a file of a lower layer before it links it. Cloning is tried, on a file without a
    name. Raises OSError.
    """
    here = mount_of(folder)
    if link is Link.HARD and mount_of(source) == here:
        return "hard link or copy" if here.kind == "overlay" else "hard link"
    return "clone" if link is not Link.COPY and _clones(source, folder) else "copy"


def shares_blocks(folder: Path) -> bool:
    """Return whether files of a folder can share blocks, as `carry` makes them do; tried on files without names. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=folder) as target:
        source.write(bytes(4096))
        source.flush()
        return _clone(source.fileno(), target.fileno())


def copy_range(
    src: int, dst: int, offset: int, length: int, progress: Callable[[int], None] | None = None, *, share: bool = True
) -> None:
    """Append ``length`` bytes at ``offset`` of descriptor ``src`` to the current position of ``dst``.

    ``share``: the file system may let both files share the blocks. Raises OSError, which names the one of the two files that
    it is about, and EOFError when the source ends early.
    """
    done = 0
    copy: Callable[[int, int, int, int], int] = _in_kernel if share else _through_buffer
    while done < length:
        try:
            n = copy(src, dst, offset + done, min(STEP, length - done))
        except OSError as e:
            if copy is _through_buffer:
                raise
            # That the kernel cannot, or that one of the files fails: reading and writing show which.
            logger.debug("no copy within the kernel (%s): through a buffer", e.strerror)
            copy = _through_buffer
            continue
        if n == 0:
            raise EOFError(f"the file ends {length - done} bytes early")
        done += n
        if progress:
            progress(n)


def carry(source: Path, target: Path, link: Link, progress: Callable[[int], None] | None = None) -> str:
    """Bring a whole file over, unchanged; returns how: ``hard link``, ``clone`` or ``copy``.

    Symlinks are resolved first, so that a hard link goes to a hub cache's blob and never to the link. Where linking is
    not possible the file is copied. The new file's mode follows the umask.
    """
    source = Path(os.path.realpath(source, strict=True))
    if link is Link.HARD:
        try:
            os.link(source, target)
        except OSError as e:
            if e.errno not in NOT_HERE | {errno.EMLINK}:
                raise
            logger.info("%s: no hard link (%s), copied instead", target.name, e.strerror)
        else:
            return "hard link"
    src = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with new_file(target) as dst:
            cloned = link is Link.AUTO and _clone(src, dst)
            if not cloned:
                copy_range(src, dst, 0, os.fstat(src).st_size, writing_back(dst, progress), share=link is not Link.COPY)
            return "clone" if cloned else "copy"
    finally:
        os.close(src)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Make a file that is not there yet, and hand over a descriptor to write to; it is on disk afterwards. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step; False where the kernel or the file system cannot (renameat2 with RENAME_EXCHANGE)."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(b))


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of ``data``, whatever the kernel takes at once."""
    view = memoryview(data).cast("B")
    with naming(fd):
        while view:
            view = view[os.write(fd, view) :]


def writing_back(fd: int, progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """Wrap a progress callback for what is appended to ``fd`` so that it is also written to disk as it comes.

    Otherwise the system waits until memory is full of it, and the disk idles until fsync. A hint only: failures are ignored.
    """
    sync = getattr(ctypes.CDLL(None), "sync_file_range", None)
    start = os.lseek(fd, 0, os.SEEK_CUR)
    done = begun = 0

    def tell(n: int) -> None:
        nonlocal done, begun
        done += n
        if sync is not None and done - begun >= WRITE_BACK:
            sync(fd, ctypes.c_int64(start + begun), ctypes.c_int64(done - begun), SYNC_FILE_RANGE_WRITE)
            begun = done
        if progress:
            progress(n)

    return tell


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset``; raises EOFError when the file ends early."""
    while buffer:
        with naming(fd):
            n = os.preadv(fd, [buffer], offset)
        if n == 0:
            raise EOFError(f"the file ends {len(buffer)} bytes early")
        buffer, offset = buffer[n:], offset + n


def read_rows(fd: int, rows: Sequence[memoryview], offset: int) -> None:
    """Fill at most `ROWS` buffers of one size, one after the other, from ``offset``; raises EOFError when the file ends early."""
    with naming(fd):
        n = os.preadv(fd, rows, offset)
    if n < len(rows) * len(rows[0]):
        for i, row in enumerate(rows):
            read_into(fd, row, offset + i * len(row))


def _in_kernel(src: int, dst: int, offset: int, length: int) -> int:
    copy: Callable[[int, int, int, int], int] | None = getattr(os, "copy_file_range", None)
    if copy is None:
        raise OSError(errno.ENOSYS, "no copy_file_range")
    return copy(src, dst, length, offset)


def _through_buffer(src: int, dst: int, offset: int, length: int) -> int:
    with naming(src):
        data = os.pread(src, min(BUFFER, length), offset)
    write_all(dst, data)
    return len(data)


def _clones(source: Path, folder: Path) -> bool:
    """Return whether files of a folder can share a file's blocks; False where a file without a name cannot be made to try it."""
    fds: list[int] = []
    try:
        fds.append(os.open(source, os.O_RDONLY | os.O_CLOEXEC))
        fds.append(os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC))
        return _clone(*fds)
    except OSError:
        return False
    finally:
        for fd in fds:
            os.close(fd)


def _clone(src: int, dst: int) -> bool:
    try:
        fcntl.ioctl(dst, FICLONE, src)
    except OSError:  # that it cannot be, or that a file fails, which copying then shows
        return False
    return True
