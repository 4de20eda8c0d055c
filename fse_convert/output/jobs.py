"""Writes the files of an output on several threads, each journaled when it is on disk, and stops quickly when told to.

Threads are enough: copying, reading, writing, syncing and hashing all happen outside of Python's lock.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, NoReturn

import xxhash

from fse_convert.output.copying import read_into
from fse_convert.output.staging import Staging, check_space

logger = logging.getLogger(__name__)
BUFFER = 4 << 20
POLL = 0.1
"""Seconds between two looks at whether a signal has come."""

Tick = Callable[[str, int, bool, str], None]
"""Told of progress: file, bytes, whether it is finished, and how it came to be."""


class Cancelled(Exception):
    """Raised in a worker that is to stop; its file is not finished."""


@dataclass(frozen=True, slots=True)
class Scan:
    """File offsets ``[start, end)`` in which no byte may be one of ``codes``; ``refuse`` is told the offset and raises."""

    start: int
    end: int
    codes: tuple[int, ...]
    refuse: Callable[[int], NoReturn]


@dataclass(frozen=True, slots=True)
class Job:
    """One file: its name, its size in bytes, and what writes it to a path and says how.

    ``linked``: the file that it is to be a hard link of, which takes no space and is not read. ``scans``: what to look for
    when it is read back.
    """

    name: str
    size: int
    write: Callable[[Path, Callable[[int], None]], str]
    linked: Path | None = None
    scans: tuple[Scan, ...] = ()


def trusted(job: Job, staging: Staging) -> str | None:
    """How a file came to be that the journal vouches for, once it has been hashed again; None when it must be written."""
    known = staging.journal.done.get(job.name)
    if known is None:
        return None
    path, hashed, how = staging.folder / job.name, known.get("xxh3_128"), known.get("how")
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or not info.st_size == job.size == known.get("size") or not isinstance(how, str):
            return None
        # Whether the source of a hard link is still the same, the fingerprint tells.
        same = digest(path) == hashed if hashed else job.linked is not None and path.samefile(job.linked)
    except OSError:
        return None
    logger.info("%s: finished by an earlier run, %s", job.name, "its hash agrees" if same else "but not what it was: written anew")
    return how if same else None


def write_job(job: Job, staging: Staging, progress: Callable[[int], None]) -> dict[str, Any]:
    """Write one file durably and read it back; returns its line for the journal, which is for the caller to write."""
    check_space(staging.out, 0 if job.linked else job.size)
    path = staging.path(job.name)
    logger.debug("%s: writing %d bytes", job.name, job.size)
    how = job.write(path, progress)
    linked = job.linked is not None and path.samefile(job.linked)
    return {"size": job.size, "xxh3_128": None if linked else digest(path, job.scans), "how": how}


def run_jobs(jobs: Sequence[Job], staging: Staging, workers: int, tick: Tick) -> dict[str, str]:
    """Write every file that the journal does not vouch for; returns how each came to be.

    A file that the journal names is hashed again before it is trusted. The first failure stops all workers and is raised.
    """
    run = _Run(staging, tick)
    pool = ThreadPoolExecutor(workers)
    futures: set[Future[tuple[str, str]]] = {pool.submit(run.job, job) for job in jobs}
    how: dict[str, str] = {}
    try:
        while futures:
            done, futures = wait(futures, POLL, FIRST_COMPLETED)
            how.update(f.result() for f in done)
    except BaseException as e:
        run.stop.set()
        # A signal must not wait for a worker in the middle of an fsync; whatever it leaves, the journal does not vouch for.
        pool.shutdown(wait=isinstance(e, Exception), cancel_futures=True)
        raise
    pool.shutdown()
    return {job.name: how[job.name] for job in jobs}


def digest(path: Path, scans: tuple[Scan, ...] = ()) -> str:
    """XXH3-128 of a file, as hex; looks for forbidden bytes on the way."""
    hashed = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        buffer = bytearray(min(BUFFER, size))
        for at in range(0, size, BUFFER):
            part = memoryview(buffer)[: min(BUFFER, size - at)]
            read_into(fd, part, at)
            hashed.update(part)
            _look(scans, buffer, at, len(part))
    finally:
        os.close(fd)
    return hashed.hexdigest()


def _look(scans: tuple[Scan, ...], buffer: bytearray, at: int, size: int) -> None:
    for scan in scans:
        first, last = max(scan.start - at, 0), min(scan.end - at, size)
        for code in scan.codes if first < last else ():
            hit = buffer.find(code, first, last)
            if hit >= 0:
                scan.refuse(at + hit)


class _Run:
    def __init__(self, staging: Staging, tick: Tick) -> None:
        self.staging = staging
        self.tick = tick
        self.stop = Event()
        self.lock = Lock()

    def job(self, job: Job) -> tuple[str, str]:
        how = trusted(job, self.staging)
        if how is not None:
            self._tell(job.name, job.size, done=False, how="")
        else:
            record = write_job(job, self.staging, lambda n: self._progress(job.name, n))
            how = str(record["how"])
            with self.lock:
                self.staging.journal.add(job.name, record)
        self._tell(job.name, job.size, done=True, how=how)
        return job.name, how

    def _progress(self, name: str, n: int) -> None:
        if self.stop.is_set():
            raise Cancelled
        self._tell(name, n, done=False, how="")

    def _tell(self, name: str, n: int, *, done: bool, how: str) -> None:
        with self.lock:
            self.tick(name, n, done, how)
