"""Write a conversion's files on a Ray cluster whose nodes share a file system: every task is a part; needs the extra ``ray``."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from fse_convert.errors import EnvironmentFailure, FseConvertError, Problem
from fse_convert.output.parts import Part
from fse_convert.output.signals import handling

if TYPE_CHECKING:
    from types import ModuleType

PartWriter = Callable[[bytes, Part], dict[str, str]]
"""Writes one part in any process that sees the same folders, and returns how each of its files came to be."""
REACH = 10.0
"""Seconds to wait for a cluster's port."""
POLL = 0.2
"""Seconds between two looks at whether a signal has come."""
PARTS_PER_CPU = 4
"""More parts than CPUs: a slow file holds up little, and progress is seen."""


def run_parts(write: PartWriter, order: bytes, count: int, address: str) -> Iterator[dict[str, str]]:
    """Run ``write(order, part)`` for parts of a conversion, one Ray task and one CPU each; yield what each returns.

    ``count``: of files, the most parts that make sense. ``address``: what ``ray.init`` takes, ``auto`` included. The first
    failure is raised, and ends the other tasks. Raises EnvironmentFailure without Ray or without a cluster.
    """
    pending: list[tuple[int, FrameType | None]] = []

    def defer(number: int, frame: FrameType | None) -> None:
        """Remember a signal: no Python handler may raise while Ray's own code runs."""
        pending.append((number, frame))

    with handling(defer) as before:

        def raise_pending() -> None:
            if pending and callable(handler := before[pending[0][0]]):
                handler(*pending[0])

        ray = _connected(address)
        with handling(defer):  # Ray's own handler would end the process as if all were well
            try:
                count = max(1, min(count, PARTS_PER_CPU * int(ray.cluster_resources().get("CPU", 1))))
                task = ray.remote(num_cpus=1, max_retries=0)(write)
                running = {task.remote(order, Part(index=i, count=count)) for i in range(1, count + 1)}
                while running:
                    raise_pending()
                    done, _ = ray.wait(list(running), num_returns=1, timeout=POLL)
                    running.difference_update(done)
                    for finished in done:
                        yield _result(ray, finished)
            finally:
                ray.shutdown()
        raise_pending()


def _connected(address: str) -> ModuleType:
    try:
        import ray
    except ImportError as e:
        raise EnvironmentFailure(Problem("no-ray", "Ray is not installed", "--ray", "pip install 'ray>=2.40'")) from e
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
    hint = "start one with: ray start --head"
    return EnvironmentFailure(Problem("no-cluster", f"no Ray cluster answers: {why}", f"--ray {address}", hint))


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
