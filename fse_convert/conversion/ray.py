"""Write a conversion's files on a Ray cluster whose nodes share a file system: every task is a part; needs the extra ``ray``."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from fse_convert.errors import EnvironmentFailure, FseConvertError, Problem, UsageError
from fse_convert.output.jobs import Job, Part
from fse_convert.progress import Event, Observer, ignore

if TYPE_CHECKING:
    from types import ModuleType

    from fse_convert.conversion.run import Conversion, Request

REACH = 10.0
"""Seconds to wait for a cluster's port."""
POLL = 0.2
"""Seconds between two looks at whether a signal has come."""
PARTS_PER_CPU = 4
"""More parts than CPUs: a slow file holds up little, and progress is seen."""


def write_parts(request: Request, jobs: Sequence[Job], observe: Observer) -> frozenset[str]:
    """Write every file with tensors as parts, one Ray task and one CPU each; return the names of what they wrote.

    The first failure is raised, and ends the other tasks. Raises EnvironmentFailure without Ray or without a cluster.
    """
    sizes = {job.name: job.size for job in jobs}
    with _deferred_signals() as signals:
        ray = _connected(request.ray or "")
        signals.install()  # Ray's own handler would end the process as if all were well
        try:
            count = max(1, min(len(jobs), PARTS_PER_CPU * int(ray.cluster_resources().get("CPU", 1))))
            task = ray.remote(num_cpus=1, max_retries=0)(write_part)
            source, out = request.source.absolute(), request.out.absolute()
            whole = replace(request, source=source, out=out, ray=None, restart=False, workers=1)
            parts = (replace(whole, part=Part(i, count)) for i in range(1, count + 1))
            running = {task.remote(part) for part in parts}
            while running:
                signals.raise_pending()
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL)
                for finished in done:
                    running.remove(finished)
                    for name, how in _result(ray, finished).items():
                        observe(Event(name, sizes[name]))
                        observe(Event(name, done=True, how=how))
        finally:
            ray.shutdown()
        signals.raise_pending()
    return frozenset(sizes)


def write_part(request: Request) -> dict[str, str]:
    """Write one part, in any process that sees the same folders; return how each of its files came to be."""
    conversion = _planned(replace(request, part=None))
    conversion.request = request
    try:
        return conversion.run(ignore).files
    except UsageError as e:
        if e.problems[0].code != "resume-differs":
            raise
        hint = "install the same version on every node, and let all of them see the same file system"
        message = e.problems[0].message.rpartition(": ")[2]
        problem = Problem("node-differs", f"a node sees something else: {message}", str(request.source), hint)
        raise EnvironmentFailure(problem) from None


@lru_cache(maxsize=4)
def _planned(request: Request) -> Conversion:
    """Plan once per process: a process writes many parts of one conversion."""
    from fse_convert.conversion.run import Conversion

    return Conversion(request)


class DeferredSignals:
    """Signals that came while Ray's own code ran, in which no Python handler may raise."""

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        self.before: dict[int, Any] = {n: signal.getsignal(n) for n in self.numbers}
        self.pending: list[tuple[int, FrameType | None]] = []

    def install(self) -> None:
        """Take the handlers; on a thread that may not handle signals, leave them alone."""
        for number in self.numbers if self.main else ():
            signal.signal(number, lambda n, frame: self.pending.append((n, frame)))

    def restore(self) -> None:
        """Give the handlers back."""
        for number, handler in self.before.items() if self.main else ():
            signal.signal(number, handler)

    def raise_pending(self) -> None:
        """Call the program's own handler for a signal that came."""
        if self.pending:
            number, frame = self.pending[0]
            handler = self.before[number]
            if callable(handler):
                handler(number, frame)


@contextmanager
def _deferred_signals() -> Iterator[DeferredSignals]:
    signals = DeferredSignals()
    signals.install()
    try:
        yield signals
    finally:
        signals.restore()


def _connected(address: str) -> ModuleType:
    try:
        import ray
    except ImportError as e:
        raise EnvironmentFailure(Problem("no-ray", "Ray is not installed", "--ray", "pip install 'fse-convert[ray]'")) from e
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as e:
        raise _unreachable(address, str(e).splitlines()[0] if str(e) else type(e).__name__) from e
    module: ModuleType = ray
    return module


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


def _result(ray: ModuleType, finished: Any) -> dict[str, str]:
    """Return what a task returned, or raise what it raised as the command line knows it."""
    try:
        files: dict[str, str] = ray.get(finished)
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
    return files
