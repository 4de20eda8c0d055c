"""What goes to stderr besides errors: notes, progress and, when asked for, what the program does; as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from threading import Lock

from fse_convert.errors import Problem, printable
from fse_convert.report.console import colored, console, duration, painted, problem_lines, put

LOGGER = "fse_convert"


@dataclass(slots=True)
class Log:
    """How much goes to stderr, as text or as JSON lines.

    ``quiet``: nothing but errors. ``verbose``: 1 for what the program does, 2 for every decision. ``as_json``: one object
    a line, each with ``event``, ``time`` (UTC) and ``elapsed`` seconds.
    """

    quiet: bool = False
    verbose: int = 0
    as_json: bool = False
    start: float = field(default_factory=time.monotonic)
    lock: Lock = field(default_factory=Lock)

    def line(self, event: str, text: str, *, steps: Sequence[str] = (), **fields: object) -> None:
        """Print one line: ``text`` for people, and commands that they can paste; ``fields`` for programs.

        A closed stderr must not stop the work.
        """
        if not self.quiet:
            self._print(event, text, steps, fields)

    def _print(self, event: str, text: str, steps: Sequence[str], fields: Mapping[str, object]) -> None:
        if self.as_json:
            now, elapsed = datetime.now(timezone.utc), round(time.monotonic() - self.start, 3)
            head = {"event": event, "time": now.isoformat(timespec="milliseconds"), "elapsed": elapsed}
            shown = json.dumps({**head, **fields})
        else:
            shown = _rendered(text, steps)
        with self.lock, suppress(OSError):
            print(shown, file=sys.stderr, flush=True)  # noqa: T201

    def error(self, problem: Problem) -> None:
        """Print what is wrong, also where it is to be quiet."""
        where = {"code": problem.code, "message": problem.message, "where": problem.where, "hint": problem.hint}
        self._print("error", "\n".join(problem_lines(problem)), (), where)

    def done(self, *steps: str) -> None:
        """Say how long the command took, and by which commands to go on."""
        took = duration(time.monotonic() - self.start)
        self.line("done", f"done in {took}{'; next:' if steps else ''}", steps=steps, next=steps)

    def note(self, note: Problem) -> None:
        """Print what to know though nothing is wrong."""
        self.line("note", f"note[{note.code}]: {note}", code=note.code, message=note.message, where=note.where)


def _rendered(text: str, steps: Sequence[str]) -> str:
    """Return lines as they are printed to stderr: through it, since a bar that is shown there stays below them."""
    if not (sys.stderr.isatty() or colored(sys.stderr)):  # nothing to lay out: rich need not be loaded
        return "\n  ".join(map(printable, [text, *steps]))
    out = console(stderr=True)
    with out.capture() as capture:
        put(out, painted(printable(text), None if out.soft_wrap else out.width))
    return "\n  ".join([capture.get().rstrip("\n"), *map(printable, steps)])


class _Handler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__(logging.DEBUG if log.verbose > 1 else logging.INFO)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        level, message = record.levelname.lower(), record.getMessage()
        self.log.line("log", f"{level}: {message}", level=level, logger=record.name, message=message)


@contextmanager
def listening(log: Log) -> Iterator[Log]:
    """Print what the package logs, as far as ``log`` is verbose."""
    if log.quiet or not log.verbose:
        yield log
        return
    logger, handler = logging.getLogger(LOGGER), _Handler(log)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield log
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
