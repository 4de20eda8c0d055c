"""A layer over `os` that lets the Nth file operation fail, be torn, or be the process's last, as SQLite tests itself.

Used by tests only: the program calls `os` as always. Only operations on files below a watched folder count. Run as a
script it is a server: it has everything imported, and forks one child per request, so that a thousand crashes take
a minute.

A crash can also lose what was not yet on disk: files that were written but not fsynced are cut to nothing before the process ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH_CALLS = ("open", "mkdir", "rename", "link", "unlink", "rmdir")
FD_CALLS = ("write", "fsync", "copy_file_range")
CALLS = (*PATH_CALLS, *FD_CALLS)


class Injector:
    """Counts operations below ``root`` and acts at one of them.

    ``action``: ``kill`` ends the process before the operation, ``torn`` does half of it first, ``lose`` drops what was
    not synced and ends; ``error`` raises ``errno`` once, ``errors`` from then on. ``at`` 0 only counts. ``calls``: which
    operations count.
    """

    def __init__(self, root: str, at: int = 0, action: str = "kill", errno: int = 0, calls: tuple[str, ...] = CALLS) -> None:
        self.root, self.at, self.action, self.errno, self.calls = root, at, action, errno, calls
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
            self.count += 1
            self.trace.append((name, path))
            if self.at and (self.count == self.at or (self.action == "errors" and self.count > self.at)):
                self._act(name, path, real, args)
            result = real(*args, **kwargs)
            self._note(name, path, args)
            return result

        return call

    def _path(self, name: str, args: tuple[Any, ...]) -> str | None:
        if name in PATH_CALLS:
            which = args[1] if name == "link" else args[0]  # what a link is made of lies in the source
            return os.fsdecode(which) if isinstance(which, (str, bytes, os.PathLike)) else None
        fd = args[1] if name == "copy_file_range" else args[0]
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{fd}").readlink())
        return None

    def _watched(self, name: str, path: str, args: tuple[Any, ...]) -> bool:
        if name not in self.calls or not path.startswith(self.root):
            return False
        return name != "open" or bool(args[1] & (os.O_WRONLY | os.O_RDWR))

    def _note(self, name: str, path: str, args: tuple[Any, ...]) -> None:
        if name in ("write", "copy_file_range"):
            self.unsynced.add(path)
        elif name == "fsync":
            self.unsynced.discard(path)
        elif name == "rename":
            target = os.fsdecode(args[1])
            self.unsynced = {target + p[len(path) :] if p == path or p.startswith(path + "/") else p for p in self.unsynced}

    def _act(self, name: str, path: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.action in ("error", "errors"):
            raise OSError(self.errno, os.strerror(self.errno), path)
        if self.action == "torn" and name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        if self.action == "lose":
            for lost in self.unsynced:
                with contextlib.suppress(OSError):
                    os.truncate(lost, 0)
        os._exit(137)


def preload() -> None:
    """Import once what every child would import again."""
    for name in (
        "torch", "rich.box", "rich.console", "rich.table", "fse_convert.conversion.files",
        "fse_convert.report.conversion",
        "fse_convert.report.proof", "fse_convert.report.progress",
        "fse_convert.verification.layers", "fse_convert.verification.proof",
    ):  # fmt: skip
        importlib.import_module(name)


def serve() -> None:
    """Answer requests, one JSON object a line: ``args`` of the command line and the injector's arguments."""
    from fse_convert.cli import main

    preload()
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _child(main, request, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            report = pipe.read()
        _, status = os.waitpid(child, 0)
        answer = {"code": os.waitstatus_to_exitcode(status), **(json.loads(report) if report else {})}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _child(main: Callable[[list[str]], None], request: dict[str, Any], write: int) -> None:
    injector = Injector(request["root"], request.get("at", 0), request.get("action", "kill"), request.get("errno", 0))
    err = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(err, 1)
    os.dup2(err, 2)
    code = 0
    if request.get("no_margin"):
        from fse_convert.output import staging as transaction

        transaction.MARGIN = -(1 << 60)
    injector.install()
    try:
        main(request["args"])
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:  # noqa: BLE001 - a traceback is a finding, and is reported
        import traceback

        traceback.print_exc()
        code = 99
    injector.remove()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(write, json.dumps({"count": injector.count, "trace": injector.trace if request.get("trace") else []}).encode())
    os._exit(code)


if __name__ == "__main__":
    serve()
