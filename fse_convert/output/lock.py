"""Locks of a staging folder: one run alone, or several parts of one conversion side by side.

Locks are `flock` on files, which die with their process and which NFS passes on to other machines; a folder cannot be
locked there, since an exclusive lock needs a descriptor that may write.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fse_convert.errors import EnvironmentFailure, Locked, Problem, UsageError
from fse_convert.output.journal import JOURNAL

LOCK = "lock"
OUTPUT = "output"
GONE = (errno.ENOENT, errno.ESTALE)
"""What the system says of a path that another run removed; ESTALE is NFS's word for it."""
TRIES = 100
"""How often a lock is sought in a folder that other runs remove."""


def staging_root(out: Path) -> Path:
    """Return the staging folder of an output: beside it, so that one rename publishes what is in it."""
    return out.parent / f".{out.name}.fse-partial"


@dataclass(frozen=True, slots=True)
class Hold:
    """A staging folder that this process has locked, by descriptor: its path may come to lead elsewhere."""

    root: Path
    root_fd: int
    lock_fd: int

    def check(self) -> None:
        """Refuse a folder, or a lock in it, that is no longer the one that is held. Raises EnvironmentFailure, OSError."""
        try:
            same = os.path.samestat(os.stat(self.root), os.fstat(self.root_fd))
            same = same and os.path.samestat(os.stat(LOCK, dir_fd=self.root_fd), os.fstat(self.lock_fd))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise staging_lost("the folder of unfinished work was removed or replaced during the run", self.root)


def staging_lost(message: str, where: Path) -> EnvironmentFailure:
    """Return the error for unfinished work that something else touched."""
    hint = "find what does it (a cleaner of temporary files, another user, an unmounted disk), then give the same command again"
    return EnvironmentFailure(Problem("staging-lost", message, str(where), hint))


@contextmanager
def locked(root: Path, out: Path, part: str = "") -> Iterator[Hold]:
    """Hold the staging folder ``root`` of ``out``, creating it: alone, or as one ``part`` such as ``2-of-8`` beside others.

    Raises Locked when that is not possible, UsageError when what is there is not a staging folder, OSError.
    """
    _check_ours(root)
    fds = [_hold(root, LOCK, out, fcntl.LOCK_SH if part else fcntl.LOCK_EX, "another run is writing this output")]
    try:
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fds.append(root_fd)
        sync_folder(root)  # the lock is the mark by which the next run knows this folder as its own
        sync_folder(root.parent)
        if part:
            fds.append(_hold_count(root, part.rpartition("-")[2], out))
            fds.append(_hold(root, f"{LOCK}.{part}", out, fcntl.LOCK_EX, f"another run is writing part {part} of this output"))
        yield Hold(root=root, root_fd=root_fd, lock_fd=fds[0])
    finally:
        for fd in fds:
            os.close(fd)
        with suppress(OSError):  # NFS and FUSE keep the name of an open file that was removed, so this failed before
            root.rmdir()


def is_held(root: Path) -> bool:
    """Return whether a run holds a staging folder; true also where that cannot be told."""
    try:
        fd = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        return e.errno != errno.ENOENT
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable; file systems that cannot are left alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _hold_count(root: Path, count: str, out: Path) -> int:
    """Hold the lock of parts of ``count``; refuse to run beside parts of another count, which would share files with these."""
    mine = f"{LOCK}.of-{count}"
    fd = _hold(root, mine, out, fcntl.LOCK_SH, "a run is ending")
    for other in root.glob(f"{LOCK}.of-*"):
        if other.name != mine:
            try:
                os.close(_hold(root, other.name, out, fcntl.LOCK_EX, f"parts {other.suffix[1:]} of this output are being written"))
            except Locked:
                os.close(fd)
                raise
    return fd


def _check_ours(root: Path) -> None:
    """Refuse what this tool did not make: it would be emptied, and a link would lead the emptying elsewhere."""
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        what = "a symbolic link" if root.is_symlink() else "not a folder"
    elif (root / OUTPUT).is_symlink():
        what = "a folder whose content lies elsewhere"
    elif not (inside := _names(root)) or inside == {OUTPUT} or any(n.startswith((LOCK, JOURNAL)) for n in inside):
        return
    else:
        what = "a folder with something else in it"
    hint = "move it away, or give another output folder"
    raise UsageError(Problem("staging-foreign", f"the place for unfinished work is {what}", str(root), hint))


def _names(root: Path) -> set[str]:
    try:
        return {p.name for p in root.iterdir()}
    except OSError as e:
        if e.errno in GONE:  # there is none, or a run that just finished removed it
            return set()
        raise


def _hold(root: Path, name: str, out: Path, kind: int, message: str) -> int:
    path = root / name
    tries = 0
    while True:
        tries += 1
        try:
            root.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                _check_leads_to(path, fd)
            except BaseException:
                os.close(fd)
                raise
        except BlockingIOError as e:
            hint = "wait for the other run, or give another output folder"
            raise Locked(Problem("locked", message, str(out), hint)) from e
        except OSError as e:
            if e.errno not in GONE or tries == TRIES:
                raise
        else:
            return fd


def _check_leads_to(path: Path, fd: int) -> None:
    """Raise FileNotFoundError unless a path leads to an open file.

    It is opened once more, since NFS asks the server then, and answers `stat` from what it remembers.
    """
    again = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not os.path.samestat(os.fstat(again), os.fstat(fd)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    finally:
        os.close(again)
