"""A layer over `os` that lets the Nth file operation fail, be torn, be the process's last, or let somebody else act before it.

SQLite tests itself so. The program calls `os` as always. Only operations on files below a watched folder count. A crash can also
lose what was not yet on disk: files that were written but not fsynced are cut to nothing before the process ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH_CALLS = ("open", "mkdir", "rename", "link", "unlink", "rmdir")
FD_CALLS = ("write", "fsync", "copy_file_range")
CALLS = (*PATH_CALLS, *FD_CALLS)


class Injector:
    """A count of operations below ``root`` and what happens at one of them.

    ``action``: ``kill`` ends the process before the operation, ``torn`` does half of it first, ``lose`` drops what was
    not synced and ends; ``error`` raises ``errno`` once, ``errors`` from then on; a function is called before the operation.
    ``at`` 0 only counts.
    """

    def __init__(self, root: str, at: int = 0, action: str | Callable[[], None] = "kill", errno: int = 0) -> None:
        self.root, self.at, self.action, self.errno = root, at, action, errno
        self.count = 0
        self.trace: list[tuple[str, str]] = []
        self.unsynced: set[str] = set()
        self.real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}

    def install(self) -> None:
        """Replace the functions of `os`."""
        for name in self.real:
            setattr(os, name, self._wrapped(name))

    def remove(self) -> None:
        """Put the functions of `os` back."""
        for name, call in self.real.items():
            setattr(os, name, call)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            path = self._path(name, args)
            if path is None or not self._watched(name, path, args):
                return real(*args, **kwargs)
            self.step(name, path, real, args)
            result = real(*args, **kwargs)
            self._note(name, path, args)
            return result

        return call

    def step(self, name: str, path: str = "", real: Callable[..., Any] | None = None, args: tuple[Any, ...] = ()) -> None:
        """Count an operation, one of the program's own steps for one, and act before it if its turn has come."""
        self.count += 1
        self.trace.append((name, path))
        if not self.at or self.count < self.at or (self.count > self.at and self.action != "errors"):
            return
        if callable(self.action):
            self.action()
        else:
            self._act(name, path, real, args)

    def _path(self, name: str, args: tuple[Any, ...]) -> str | None:
        if name in PATH_CALLS:
            which = args[1] if name == "link" else args[0]  # what a link is made of lies in the source
            return os.fsdecode(which) if isinstance(which, (str, bytes, os.PathLike)) else None
        fd = args[1] if name == "copy_file_range" else args[0]
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{fd}").readlink())
        return None

    def _watched(self, name: str, path: str, args: tuple[Any, ...]) -> bool:
        return path.startswith(self.root) and (name != "open" or bool(args[1] & (os.O_WRONLY | os.O_RDWR)))

    def _note(self, name: str, path: str, args: tuple[Any, ...]) -> None:
        if name in ("write", "copy_file_range"):
            self.unsynced.add(path)
        elif name == "fsync":
            self.unsynced.discard(path)
        elif name == "rename":
            target = os.fsdecode(args[1])
            self.unsynced = {target + p[len(path) :] if p == path or p.startswith(path + "/") else p for p in self.unsynced}

    def _act(self, name: str, path: str, real: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        if self.action in ("error", "errors"):
            raise OSError(self.errno, os.strerror(self.errno), path)
        if self.action == "torn" and name == "write" and real:
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        if self.action == "lose":
            for lost in self.unsynced:
                with contextlib.suppress(OSError):
                    os.truncate(lost, 0)
        os._exit(137)
