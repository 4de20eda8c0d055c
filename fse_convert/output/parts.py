"""The files of an output as jobs, and the parts of a conversion among which they are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fse_convert.output.digests import Scan
from fse_convert.progress import Advance


@dataclass(frozen=True, slots=True)
class Job:
    """One file: its name, its size and the room that it takes in bytes, and what writes it to a path and returns how.

    ``linked``: the file that it is to be a hard link of, which is not read. ``scans``: what to look for when it is read back.
    """

    name: str
    size: int
    room: int
    write: Callable[[Path, Advance], str]
    linked: Path | None = None
    scans: tuple[Scan, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` of one conversion, counted from 1; parts may be written at once, on several machines."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}-of-{self.count}"

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """Return this part's files, in order: all parts together have every file once, and bytes as evenly as files allow."""
        load = [0] * self.count
        mine = set()
        for job in sorted(jobs, key=lambda j: (-j.size, j.name)):
            part = load.index(min(load))
            load[part] += 0 if job.linked else job.size
            if part == self.index - 1:
                mine.add(job.name)
        return [job for job in jobs if job.name in mine]
