"""Write the files of an output on several threads, each journaled when it is on disk, and stop quickly on a failure or signal.

Threads are enough: copying, reading, writing, syncing and hashing all happen outside of Python's lock.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Lock

from fse_convert.output.digests import Scan, file_xxh3_128
from fse_convert.output.staging import Staging, check_space
from fse_convert.progress import Advance, Event, Observer

logger = logging.getLogger(__name__)
POLL = 0.1
"""Seconds between two looks at whether a signal has come."""


class Cancelled(Exception):
    """Raised in a worker that is to stop; its file is not finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """One file: its name, its size and the room that it takes in bytes, and what writes it to a path and returns how.

    ``linked``: the file that it is to be a hard link of, which is not read. ``scans``: what to look for when it is read back.
    """

    name: str
    size: int
    room: int
    write: Callable[[Path, Advance], str]
    linked: Path | None = None
    scans: tuple[Scan, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` of one conversion, counted from 1; parts may be written at once, on several machines."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}-of-{self.count}"

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """Return this part's files, in order: all parts together have every file once, and bytes as evenly as files allow."""
        load = [0] * self.count
        mine = set()
        for job in sorted(jobs, key=lambda j: (-j.size, j.name)):
            part = load.index(min(load))
            load[part] += 0 if job.linked else job.size
            if part == self.index - 1:
                mine.add(job.name)
        return [job for job in jobs if job.name in mine]


def finished(job: Job, staging: Staging, fresh: Collection[str] = ()) -> str | None:
    """Return how a file came to be that the journal vouches for; None when it must be written.

    It is hashed again, unless it is one of the ``fresh`` files that this very run had other processes write.
    """
    known = staging.journal.done.get(job.name)
    if known is None:
        return None
    path, hashed, how = staging.folder / job.name, known.get("xxh3_128"), known.get("how")
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or not info.st_size == job.size == known.get("size") or not isinstance(how, str):
            return None
        if job.name in fresh:
            return how
        # Whether the source of a hard link is still the same, the fingerprint tells.
        same = file_xxh3_128(path) == hashed if hashed else job.linked is not None and path.samefile(job.linked)
    except OSError:
        return None
    state = "its hash agrees" if same else "but its content changed: written again"
    logger.info("%s: finished by an earlier run, %s", job.name, state)
    return how if same else None


def run_jobs(jobs: Sequence[Job], staging: Staging, workers: int, observe: Observer, fresh: Collection[str] = ()) -> dict[str, str]:
    """Write every file that is not `finished`; return how each came to be. The first failure stops all workers and is raised."""
    run = _Run(staging, observe, fresh)
    pool = ThreadPoolExecutor(workers)
    how: dict[str, str] = {}
    try:
        futures: set[Future[tuple[str, str]]] = {pool.submit(run.job, job) for job in jobs}
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


class _Run:
    """Jobs under way on several threads."""

    def __init__(self, staging: Staging, observe: Observer, fresh: Collection[str]) -> None:
        self.staging = staging
        self.observe = observe
        self.fresh = fresh
        self.stop = Flag()
        self.lock = Lock()

    def job(self, job: Job) -> tuple[str, str]:
        how = finished(job, self.staging, self.fresh)
        if how is None:
            how = self._write(job)
        else:
            self._report(Event(job.name, 0 if job.linked else job.size, kept=True))
        self._report(Event(job.name, done=True, how=how))
        return job.name, how

    def _write(self, job: Job) -> str:
        """Write one file durably, read it back, and record it in the journal."""
        check_space(self.staging.out, job.room)
        path = self.staging.path(job.name)
        logger.debug("%s: writing %d bytes", job.name, job.size)
        how = job.write(path, lambda n: self._advance(job.name, n))
        linked = job.linked is not None and path.samefile(job.linked)
        record = {"size": job.size, "xxh3_128": None if linked else file_xxh3_128(path, job.scans), "how": how}
        with self.lock:
            self.staging.journal.add(job.name, record)
        return how

    def _advance(self, name: str, n: int) -> None:
        if self.stop.is_set():
            raise Cancelled
        self._report(Event(name, n))

    def _report(self, event: Event) -> None:
        with self.lock:
            self.observe(event)
