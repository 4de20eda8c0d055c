"""The files of a conversion as tasks of a Ray cluster whose nodes share a file system; needs the extra ``ray``."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.jobs import Job, Tick, trusted
from fse_convert.checkpoint.transaction import Staging
from fse_convert.errors import EnvironmentFailure, FseConvertError, Problem

if TYPE_CHECKING:
    from types import ModuleType

REACH = 10.0
"""Seconds to wait for a cluster's port."""
POLL = 0.5
"""Seconds between two looks at whether a signal has come."""
Elsewhere = Callable[[str], "dict[str, Any]"]
"""Writes one file by name in another process, and returns its line for the journal; it can be pickled."""


def run_on_ray(jobs: Sequence[Job], staging: Staging, address: str, elsewhere: Elsewhere, tick: Tick) -> dict[str, str]:
    """Write every file that the journal does not vouch for as a Ray task; returns how each came to be.

    ``address``: what ``ray.init`` takes, ``auto`` included. A task takes one CPU of its node. The journal is written by
    this process alone. The first failure is raised, and takes the tasks that are left with it.
    Raises EnvironmentFailure without Ray or without a cluster at that address.
    """
    ray = _connected(address)
    try:
        write = ray.remote(num_cpus=1, max_retries=0)(_task(elsewhere))
        how: dict[str, str] = {}
        running: dict[Any, Job] = {}
        for job in jobs:
            if (known := trusted(job, staging)) is not None:
                how[job.name] = known
                _tell(tick, job, known)
            else:
                running[write.remote(job.name)] = job
        while running:
            for done in ray.wait(list(running), num_returns=1, timeout=POLL)[0]:
                job = running.pop(done)
                record = _result(ray, done)
                staging.journal.add(job.name, record)
                how[job.name] = str(record["how"])
                _tell(tick, job, how[job.name])
        return {job.name: how[job.name] for job in jobs}
    finally:
        ray.shutdown()


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
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as e:
        message = f"no Ray cluster answers: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
        raise EnvironmentFailure(Problem("no-cluster", message, f"--ray {address}", "start one with: ray start --head")) from e
    found: ModuleType = ray
    return found


def _reach(address: str) -> None:
    """Fail at once where nothing listens: Ray itself asks for minutes. Raises OSError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()


def _result(ray: ModuleType, done: Any) -> dict[str, Any]:
    try:
        record: dict[str, Any] = ray.get(done)
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, FseConvertError | OSError | EOFError):
            raise e.cause from None
        raise
    except ray.exceptions.RayError as e:
        lines = str(e).splitlines()
        message = f"a worker was lost: {lines[0] if lines else type(e).__name__}"
        raise EnvironmentFailure(Problem("worker-lost", message, "--ray", "look at the cluster's logs")) from e
    return record


def _tell(tick: Tick, job: Job, how: str) -> None:
    tick(job.name, job.size, False, "")
    tick(job.name, job.size, True, how)
