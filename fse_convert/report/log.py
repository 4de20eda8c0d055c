"""What goes to stderr besides errors: notes, progress and, when asked for, what the program does; as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

from fse_convert.errors import Problem, printable

LOGGER = "fse_convert"


@dataclass(slots=True)
class Log:
    """How much goes to stderr, as text or as JSON lines.

    ``quiet``: nothing but errors. ``verbose``: 1 for what the program does, 2 for every decision. ``as_json``: one object
    a line, each with ``event`` and ``elapsed`` seconds.
    """

    quiet: bool = False
    verbose: int = 0
    as_json: bool = False
    start: float = field(default_factory=time.monotonic)
    lock: Lock = field(default_factory=Lock)

    def line(self, event: str, text: str, **fields: object) -> None:
        """Print one line: ``text`` for people, ``fields`` for programs. A closed stderr must not stop the work."""
        if self.quiet:
            return
        elapsed = round(time.monotonic() - self.start, 3)
        shown = json.dumps({"event": event, "elapsed": elapsed, **fields}) if self.as_json else printable(text)
        with self.lock, suppress(OSError):
            print(shown, file=sys.stderr, flush=True)  # noqa: T201

    def note(self, note: Problem) -> None:
        """Print what to know though nothing is wrong."""
        self.line("note", f"note[{note.code}]: {note}", code=note.code, message=note.message, where=note.where)


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
