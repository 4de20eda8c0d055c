"""The process around a command: signals, closed pipes, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import click

from fse_convert.cli.app import cli
from fse_convert.cli.command import is_given
from fse_convert.cli.options import FORMS
from fse_convert.errors import Bug, EnvironmentFailure, FseConvertError, Interrupted, Problem, UsageError, limits
from fse_convert.exit_codes import CLOSED_PIPE, ExitCode, of_signal
from fse_convert.output.signals import handling
from fse_convert.report.log import Log

DEBUG = "FSE_CONVERT_DEBUG"
STOPPED = Problem("interrupted", "stopped by a signal", hint="the same command begins again; nothing was written")
STOP_WITHIN = 0.7
"""Seconds that a stopped run has to end by itself."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a documented code; bad input never shows a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed by a daemon, for good
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with handling(_stop):
        code = _run(args)
    try:
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)
    sys.exit(code)


class Stopped(BaseException):
    """A signal asked the program to stop; no KeyboardInterrupt, which click turns into something of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = of_signal(number)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Stop within a second, even while a thread waits for the disk: a run can resume from what is on disk at any instant."""
    timer = threading.Timer(STOP_WITHIN, os._exit, (of_signal(number),))
    timer.daemon = True
    timer.start()
    raise Stopped(number)


def _run(args: list[str]) -> int:
    form = _form(args)
    log = Log(as_json=is_given("--log-json", args))
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, and this tool needs no numpy
    try:
        _check_working_folder()
        with limits():
            code = cli.main(args or ["--help"], standalone_mode=False, prog_name="fse-convert")
        sys.stdout.flush()
    except FseConvertError as e:
        return _fail(e, log, form=form)
    except (Stopped, click.exceptions.Abort, KeyboardInterrupt) as e:
        code = e.code if isinstance(e, Stopped) else of_signal(signal.SIGINT)
        left = getattr(e, "left", getattr(e.__cause__, "left", STOPPED))  # click makes an Abort of what it knows
        return _fail(Interrupted(left), log, form=form, code=code)
    except click.ClickException as e:
        context = getattr(e, "ctx", None)
        hint = f"see: {context.command_path if context else 'fse-convert'} --help"
        return _fail(UsageError(Problem("usage", e.format_message(), hint=hint)), log, form=form)
    except (BrokenPipeError, SystemExit):  # click turns a closed pipe into an exit with 1
        _silence(sys.stdout)
        return CLOSED_PIPE
    except OSError as e:
        _silence(sys.stdout)
        message = f"the result could not be printed: {e.strerror or e}"
        problem = Problem("output-lost", message, "stdout", "what was written to disk is there")
        return _fail(EnvironmentFailure(problem), log, form="")
    except Exception as e:  # noqa: BLE001 - the last resort: a bug is told, not thrown
        hint = f"please report it with what {DEBUG}=1 shows; the source was not changed"
        bug = Bug(Problem("bug", f"{type(e).__name__}: {e}", hint=hint))
        bug.__cause__ = e
        return _fail(bug, log, form=form)
    return code if isinstance(code, int) else int(ExitCode.OK)


def _form(args: list[str]) -> str:
    """Return the form for programs that was asked for by ``--json`` or ``--format``, empty for none."""
    line = " ".join(args)
    asked = (form for form in FORMS if f"--format={form}" in args or f"--format {form}" in line)
    return "json" if is_given("--json", args) else next(asked, "")


def _check_working_folder() -> None:
    """Refuse to run in a folder that is gone: torch would end the process with words and a code of its own."""
    try:
        Path.cwd()
    except OSError as e:
        message = f"the folder that this was started in cannot be found: {e.strerror}"
        raise EnvironmentFailure(Problem("no-working-folder", message, hint="change to a folder that is there")) from e


def _silence(stream: TextIO) -> None:
    """Discard what is still to be printed, so that the interpreter's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(null, stream.fileno())


def _fail(error: FseConvertError, log: Log, *, form: str, code: int | None = None) -> int:
    code = int(error.exit_code) if code is None else code
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    if form:
        from fse_convert.report.inspection.pages import failure

        click.echo(failure(form, error.problems, code))
    for problem in error.problems:
        log.error(problem)
    if code == ExitCode.INVALID and sys.stderr.isatty() and not log.as_json:
        codes = " ".join(dict.fromkeys(p.code for p in error.problems))
        click.secho(f"more: fse-convert explain {codes}", dim=True, err=True)
    return code
