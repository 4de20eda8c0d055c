"""torch on one thread, and its import beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from threading import Lock, Thread
from types import ModuleType

_lock = Lock()
_beside: Future[ModuleType] | None = None
_users = 0
_before = 0


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch on one thread while any caller, on any thread, is inside.

    Files and layers have threads already, and copying rows of a kilobyte is not work for a pool: waiting for its threads
    makes it up to 30 times slower on a busy machine. Raises what `import_beside` ended with: a second import of what failed
    half-way says something else.
    """
    if _beside:
        _beside.result()
    import torch

    global _users, _before  # noqa: PLW0603 - torch's setting is one for the process, and so is the count of who needs it
    with _lock:
        if not _users:
            _before = torch.get_num_threads()
            torch.set_num_threads(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                torch.set_num_threads(_before)


def need_torch() -> None:
    """Raise ImportError where torch is not installed, before anything is begun that needs it."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def import_beside(module: str) -> None:
    """Start to import a module on a thread: torch takes a second, in which files can be copied."""
    global _beside  # noqa: PLW0603 - a process imports a module once
    _beside = done = Future[ModuleType]()

    def load() -> None:
        try:
            done.set_result(import_module(module))
        except BaseException as e:  # noqa: BLE001 - raised where it is needed
            done.set_exception(e)

    Thread(target=load, daemon=True).start()
