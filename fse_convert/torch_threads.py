"""torch: whether it is there, its import beside other work, on one thread, with memory that it gets back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from threading import Lock, Thread
from types import ModuleType

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt, malloc.h."""
KEPT = 32 << 20
"""Bytes: more than the tensors between reading and writing a chunk take together; glibc takes no greater threshold."""
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


def keep_freed_memory() -> None:
    """Let the next tensors have the memory of the last ones: new pages for each take up to ten times as long as computing it.

    glibc would return the top of its heap to the system after every chunk. Other libraries are left alone. For good, and for the
    whole process: it is the command line's to call, not a library's.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, KEPT)


def has_torch() -> bool:
    """Tell whether torch is installed."""
    try:
        return find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def need_torch() -> None:
    """Raise ImportError where torch is not installed, before anything is begun that needs it."""
    if not has_torch():
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
