"""A server that runs the command line with faults: everything is imported once, and a child forked per request.

So a thousand crashes take a minute. ``python -m tests.faults.server``
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from fse_convert.testing.faults import Injector


def preload() -> None:
    """Import once what every child would import again."""
    modules = (
        "conversion.files",
        "report.conversion",
        "report.proof",
        "report.progress",
        "verification.layers",
        "verification.proof",
    )
    for name in ("torch", "rich.box", "rich.console", "rich.table", *(f"fse_convert.{module}" for module in modules)):
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
        from fse_convert.output import free_space

        free_space.MARGIN = -(1 << 60)
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
