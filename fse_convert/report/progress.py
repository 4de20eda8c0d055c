"""Progress on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Signal
from threading import Lock, Thread
from typing import TYPE_CHECKING

from fse_convert.report.console import console, size
from fse_convert.report.log import Log

if TYPE_CHECKING:
    from fse_convert.progress import Event, Observer


@contextmanager
def progress(total: int, files: int, log: Log) -> Iterator[Observer]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line per finished file and at least one every 30 s.

    ``total``: bytes to come, read or written; ``files``: how often one will be finished; 0 where that is not known.
    """
    if log.quiet:
        yield lambda _: None
    elif sys.stderr.isatty() and not log.as_json:
        with _bar(total, log) as observe:
            yield observe
    else:
        beat = Heartbeat(total, files, log)
        with beat.beating():
            yield beat.observe


@contextmanager
def _bar(total: int, log: Log) -> Iterator[Observer]:
    from rich import progress as rp
    from rich.table import Column

    columns = (
        rp.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        rp.BarColumn(bar_width=20),
        rp.DownloadColumn(),
        rp.TransferSpeedColumn(),
        rp.TimeRemainingColumn(),
    )
    with rp.Progress(*columns, console=console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("", total=total or None)

        def observe(event: Event) -> None:
            if not event.done:
                bar.update(task, advance=event.bytes, description=event.file)
            elif log.verbose:
                log.line("file", f"{event.file} {event.how}".strip(), file=event.file, how=event.how)

        yield observe


class Heartbeat:
    """Progress as lines, for logs: rich shows nothing off a terminal until the end."""

    interval = 30.0

    def __init__(self, total: int, files: int, log: Log) -> None:
        self.total, self.files, self.log = total, files, log
        self.bytes = self.done = 0
        self.start = self.last = time.monotonic()
        self.now = ""
        self.lock = Lock()

    def observe(self, event: Event) -> None:
        """Record an event, and print a line when one is due."""
        with self.lock:
            self.bytes += 0 if event.done else event.bytes
            self.done += event.done
            self.now = f"{event.file} {event.how}".strip()
            if event.done or time.monotonic() - self.last >= self.interval:
                self._line(event.file, event.how, finished=event.done)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Print a line every 30 s also while nothing happens: a slow disk at work looks like a program that hangs."""
        end = Signal()

        def beat() -> None:
            while not end.wait(self.interval / 10):
                with self.lock:
                    if time.monotonic() - self.last >= self.interval:
                        self._line(self.now, "", finished=False)

        thread = Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _line(self, file: str, how: str, *, finished: bool) -> None:
        self.last = time.monotonic()
        rate = self.bytes / max(self.last - self.start, 1e-9)
        eta = max(0, self.total - self.bytes) / rate if rate else 0
        done = f"{self.done}/{self.files} done  {size(self.bytes)} of {size(self.total)}  {size(rate)}/s  eta {eta:.0f} s"
        self.log.line(
            "file" if finished else "progress",
            f"{done if self.total else f'{self.done} done  {size(self.bytes)}'}  {file} {how}".rstrip(),
            file=file,
            how=how,
            done=self.done,
            files=self.files,
            bytes=self.bytes,
            total=self.total,
            rate=round(rate),
            eta=round(eta),
        )
