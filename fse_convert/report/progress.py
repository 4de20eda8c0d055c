"""Progress on stderr, phase by phase: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event as Signal
from threading import Lock, Thread
from typing import TYPE_CHECKING

from fse_convert.errors import counted, size
from fse_convert.progress import Event, Observer, Work
from fse_convert.report.console import console, duration, is_dumb
from fse_convert.report.log import Log

if TYPE_CHECKING:
    from rich.text import Text

BAR = 20
"""Columns of a bar."""
SOON = 0.1
"""Seconds after which a rate means something."""


@contextmanager
def progress(works: Sequence[Work], log: Log) -> Iterator[Observer]:
    """Show progress on stderr: bars on a terminal, elsewhere a line per finished file and at least one every 30 s."""
    if log.quiet:
        yield lambda _: None
    elif sys.stderr.isatty() and not is_dumb() and not log.as_json:
        with _bars(works, log) as observe:
            yield observe
    else:
        beat = Heartbeat(works, log)
        with beat.beating():
            yield beat.observe


class Track:
    """How far one phase is."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.done = self.bytes = self.kept = 0
        self.start = self.last = 0.0

    def add(self, event: Event) -> None:
        """Count an event; the phase begins with its first one."""
        self.last = time.monotonic()
        self.start = self.start or self.last
        self.done += event.done
        self.bytes += event.bytes
        self.kept += event.bytes if event.kept else 0

    @property
    def share(self) -> float:
        """How much of it is done: of the bytes where they are known, else of files or layers."""
        done, total = (self.bytes, self.work.bytes) if self.work.bytes else (self.done, self.work.count)
        return min(1.0, done / total) if total else 0.0

    def rate(self) -> float:
        """Bytes per second since the phase began, without those of earlier runs; of a phase without bytes, layers. 0: not known."""
        moved = self.bytes - self.kept if self.work.bytes else self.done
        now = self.last if self.done == self.work.count else time.monotonic()
        return moved / (now - self.start) if self.start and now - self.start > SOON else 0.0

    def left(self) -> float | None:
        """Seconds that are left at this rate, if there is one."""
        rate, total = self.rate(), self.work.bytes or self.work.count
        return (1 - self.share) * total / rate if rate and total else None

    def words(self) -> list[str]:
        """Say how far it is: count, bytes, rate, time left; the most important first."""
        work, rate, left = self.work, self.rate(), self.left()
        words = [f"{self.done}/{counted(work.count, work.noun)}" if work.count else counted(self.done, work.noun)]
        if work.bytes:
            words += [f"{size(self.bytes)} of {size(work.bytes)}", *([f"{size(rate)}/s"] if rate else [])]
        elif work.count:
            words += [f"{rate:.1f} {work.noun}s/s"] if rate else []
        elif self.bytes:
            words += [size(self.bytes)]
        return [*words, *([f"{duration(left)} left"] if left and self.share < 1 else [])]


@contextmanager
def _bars(works: Sequence[Work], log: Log) -> Iterator[Observer]:
    from rich.live import Live
    from rich.text import Text

    out, lock = console(stderr=True), Lock()
    tracks = {work.phase: Track(work) for work in works}

    def shown() -> Text:
        with lock:
            lines = [_line(track, bar=True) for track in tracks.values()]
            if max(map(len, lines)) > out.width:
                lines = [_line(track, bar=False) for track in tracks.values()]
            return Text("\n", no_wrap=True, overflow="crop").join(lines)

    with Live(get_renderable=shown, console=out, transient=True, refresh_per_second=4):

        def observe(event: Event) -> None:
            with lock:
                tracks[event.phase].add(event)
            if event.done and log.verbose:
                log.line("file", f"{event.phase.value}: {event.file} {event.how}".strip())

        yield observe


def _line(track: Track, *, bar: bool) -> Text:
    """Return a phase as a line, with a bar where that fits."""
    from rich.text import Text

    filled = round(BAR * track.share)
    drawn = Text.assemble(("━" * filled, "green"), ("━" * (BAR - filled), "dim"))
    words = map(Text, track.words() if track.start else ["-"])
    return Text("  ").join([Text(f"{track.work.phase.value:<9}"), *([drawn] if bar else []), *words])


class Heartbeat:
    """Progress as lines, for logs: rich shows nothing off a terminal until the end."""

    interval = 30.0

    def __init__(self, works: Sequence[Work], log: Log) -> None:
        self.log = log
        self.tracks = {work.phase: Track(work) for work in works}
        self.last = time.monotonic()
        self.now: Event | None = None
        self.lock = Lock()
        phases = [{"phase": w.phase.value, "count": w.count, "unit": w.noun, "bytes": w.bytes} for w in works]
        if log.as_json:
            log.line("start", "", phases=phases)

    def observe(self, event: Event) -> None:
        """Record an event, and print a line when one is due."""
        with self.lock:
            self.tracks[event.phase].add(event)
            self.now = event
            if event.done or time.monotonic() - self.last >= self.interval:
                self._line(event)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Print a line every 30 s also while nothing happens: a slow disk at work looks like a program that hangs."""
        end = Signal()

        def beat() -> None:
            while not end.wait(self.interval / 10):
                with self.lock:
                    if self.now and time.monotonic() - self.last >= self.interval:
                        self._line(self.now)

        thread = Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _line(self, event: Event) -> None:
        self.last = time.monotonic()
        track = self.tracks[event.phase]
        left = track.left()
        self.log.line(
            "file" if event.done else "progress",
            f"{event.phase.value} {'  '.join(track.words())}  {event.file} {event.how}".rstrip(),
            phase=event.phase.value,
            file=event.file,
            how=event.how,
            done=track.done,
            count=track.work.count,
            unit=track.work.noun,
            bytes=track.bytes,
            total=track.work.bytes,
            rate=round(track.rate(), 1),
            eta=None if left is None else round(left),
        )
