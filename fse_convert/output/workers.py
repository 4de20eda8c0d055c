"""Write the files of an output on several threads, each journaled when it is on disk, and stop quickly on a failure or signal.

Threads are enough: copying, reading, writing, syncing and hashing all happen outside of Python's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event as Flag
from threading import Lock

from fse_convert.output.digests import file_xxh3_128
from fse_convert.output.free_space import check_space
from fse_convert.output.parts import Job
from fse_convert.output.resume import how_finished
from fse_convert.output.staging import Staging
from fse_convert.progress import Event, Observer

logger = logging.getLogger(__name__)
POLL = 0.1
"""Seconds between two looks at whether a signal has come."""


class Cancelled(Exception):
    """Raised in a worker that is to stop; its file is not finished."""


def run_jobs(jobs: Sequence[Job], staging: Staging, workers: int, observe: Observer, fresh: Collection[str] = ()) -> dict[str, str]:
    """Write every file that no journal vouches for; return how each came to be. The first failure stops all and is raised."""
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
        record = self.staging.journal.done.get(job.name)
        how = how_finished(job, self.staging.folder, record, fresh=job.name in self.fresh)
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
