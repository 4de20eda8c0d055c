"""Progress on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fse_convert.report.common import console, size

if TYPE_CHECKING:
    from fse_convert.convert import Event, Observer


@contextmanager
def progress(total: int, files: int) -> Iterator[Observer]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line per finished file and at least one every 30 s.

    ``total``: bytes to come, read or written; ``files``: how often one will be finished.
    """
    if sys.stderr.isatty():
        with _bar(total) as observe:
            yield observe
    else:
        yield Heartbeat(total, files).observe


@contextmanager
def _bar(total: int) -> Iterator[Observer]:
    from rich import progress as rp

    columns = (
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        rp.DownloadColumn(),
        rp.TransferSpeedColumn(),
        rp.TimeRemainingColumn(),
    )
    with rp.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def observe(event: Event) -> None:
            if not event.done:
                bar.update(task, advance=event.bytes, description=event.file)

        yield observe


class Heartbeat:
    """Progress as lines, for logs: rich shows nothing off a terminal until the end."""

    interval = 30.0

    def __init__(self, total: int, files: int) -> None:
        self.total, self.files = total, files
        self.bytes = self.done = 0
        self.start = self.last = time.monotonic()

    def observe(self, event: Event) -> None:
        """Take note of an event, and print a line when one is due."""
        self.bytes += 0 if event.done else event.bytes
        self.done += event.done
        now = time.monotonic()
        if event.done or now - self.last >= self.interval:
            self.last = now
            rate = self.bytes / max(now - self.start, 1e-9)
            eta = max(0, self.total - self.bytes) / rate if rate else 0
            done = f"{self.done}/{self.files} done  {size(self.bytes)} of {size(self.total)}"
            what = f"{event.file} {event.how}".strip()
            with suppress(OSError):  # that nobody reads it any more is no reason to stop the work
                print(f"{done}  {size(rate)}/s  eta {eta:.0f} s  {what}", file=sys.stderr, flush=True)  # noqa: T201
