"""torch on one thread, and its import beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Lock, Thread

_lock = Lock()
_users = 0
_before = 0


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch on one thread while any caller, on any thread, is inside.

    Files and layers have threads already, and copying rows of a kilobyte is not work for a pool: waiting for its threads
    makes it up to 30 times slower on a busy machine.
    """
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


def import_beside(module: str) -> None:
    """Start to import a module on a thread: torch takes a second, in which files can be copied."""

    def load() -> None:
        try:
            import_module(module)
        except Exception:  # noqa: BLE001 - whoever needs it imports it again, and sees why
            return

    Thread(target=load, daemon=True).start()
