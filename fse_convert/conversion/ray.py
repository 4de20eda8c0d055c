"""The files of a conversion as tasks of a Ray cluster whose nodes share a file system; needs the extra ``ray``."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fse_convert.errors import EnvironmentFailure, FseConvertError, Problem
from fse_convert.output.jobs import Job, Tick, trusted
from fse_convert.output.staging import Staging

if TYPE_CHECKING:
    from types import ModuleType

REACH = 10.0
"""Seconds to wait for a cluster's port."""
POLL = 0.2
"""Seconds between two looks at whether a signal has come."""
Elsewhere = Callable[[str], "dict[str, Any]"]
"""Writes one file by name in another process, and returns its line for the journal; it can be pickled."""


def run_on_ray(
    jobs: Sequence[Job], staging: Staging, address: str, elsewhere: Elsewhere, place: Path, tick: Tick
) -> dict[str, str]:
    """Write every file that the journal does not vouch for as a Ray task; returns how each came to be.

    ``address``: what ``ray.init`` takes, ``auto`` included. A task takes one CPU of its node and writes into ``place``; this
    process alone moves what is finished and writes the journal, so that a task which outlives it damages nothing. The
    first failure is raised, and takes the tasks that are left with it.
    Raises EnvironmentFailure without Ray or without a cluster at that address.
    """
    with _noted_signals() as look:
        ray = _connected(address)
        look.again()
        try:
            how = _collect(ray, jobs, staging, elsewhere, place, tick, look)
        except Exception:
            ray.shutdown()
            raise
        ray.shutdown()
        look.whether_to_stop()
        return how


def _collect(
    ray: ModuleType, jobs: Sequence[Job], staging: Staging, elsewhere: Elsewhere, place: Path, tick: Tick, look: _Noted
) -> dict[str, str]:
    write = ray.remote(num_cpus=1, max_retries=0)(_task(elsewhere))
    how: dict[str, str] = {}
    running: dict[Any, Job] = {}
    for job in jobs:
        look.whether_to_stop()
        if (known := trusted(job, staging)) is not None:
            how[job.name] = known
            _tell(tick, job, known)
        else:
            running[write.remote(job.name)] = job
    while running:
        look.whether_to_stop()
        for done in ray.wait(list(running), num_returns=1, timeout=POLL)[0]:
            job = running.pop(done)
            record = _result(ray, done)
            (place / job.name).replace(staging.path(job.name))
            staging.journal.add(job.name, record)
            how[job.name] = str(record["how"])
            _tell(tick, job, how[job.name])
    return {job.name: how[job.name] for job in jobs}


class _Noted:
    """Signals that came while Ray's own code ran, in which no Python handler may raise."""

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.before: dict[int, Any] = {n: signal.getsignal(n) for n in self.numbers}
        self.came: list[tuple[int, FrameType | None]] = []

    def again(self) -> None:
        """Take the handlers; Ray puts in one of its own, which ends the process as if all were well."""
        for number in self.numbers:
            signal.signal(number, lambda n, frame: self.came.append((n, frame)))

    def back(self) -> None:
        """Give the handlers back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def whether_to_stop(self) -> None:
        """Call the program's own handler for a signal that came."""
        if self.came:
            number, frame = self.came[0]
            handler = self.before[number]
            if callable(handler):
                handler(number, frame)


class _Nothing(_Noted):
    """On a thread that may not handle signals."""

    def again(self) -> None:
        """Leave them alone."""

    back = again


@contextmanager
def _noted_signals() -> Iterator[_Noted]:
    look = _Noted() if threading.current_thread() is threading.main_thread() else _Nothing()
    look.again()
    try:
        yield look
    finally:
        look.back()


def _task(elsewhere: Elsewhere) -> Elsewhere:
    """A plain function: Ray takes no partial ones."""

    def write(name: str) -> dict[str, Any]:
        return elsewhere(name)

    return write


def _connected(address: str) -> ModuleType:
    try:
        import ray
    except ImportError as e:
        raise EnvironmentFailure(Problem("no-ray", "Ray is not installed", "--ray", "pip install 'fse-convert[ray]'")) from e
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as e:
        raise _unreachable(address, str(e).splitlines()[0] if str(e) else type(e).__name__) from e
    found: ModuleType = ray
    return found


def reach(address: str) -> None:
    """Fail at once where nothing listens: Ray itself asks for minutes. Raises EnvironmentFailure."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH).close()
        except OSError as e:
            raise _unreachable(address, e.strerror or str(e)) from e


def _unreachable(address: str, why: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        Problem("no-cluster", f"no Ray cluster answers: {why}", f"--ray {address}", "start one with: ray start --head")
    )


def _result(ray: ModuleType, done: Any) -> dict[str, Any]:
    try:
        record: dict[str, Any] = ray.get(done)
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, FseConvertError | OSError | EOFError):
            raise e.cause from None
        if isinstance(e.cause, ImportError) or "Error: No module named" in str(e) or "failed to import" in str(e):
            hint = "install the same version of fse-convert on every node"
            raise EnvironmentFailure(Problem("node-lacks", "a node cannot import fse_convert", "--ray", hint)) from None
        raise
    except ray.exceptions.RayError as e:
        lines = str(e).splitlines()
        message = f"a worker was lost: {lines[0] if lines else type(e).__name__}"
        raise EnvironmentFailure(Problem("worker-lost", message, "--ray", "look at the cluster's logs")) from e
    return record


def _tell(tick: Tick, job: Job, how: str) -> None:
    tick(job.name, job.size, False, "")
    tick(job.name, job.size, True, how)
