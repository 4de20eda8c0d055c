"""One part of several that write a conversion together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fse_convert.output.jobs import Job


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count`` of one conversion, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}-of-{self.count}"

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """This part's files, in order: all parts together have every file once, and bytes as evenly as files allow."""
        load = [0] * self.count
        mine = set()
        for job in sorted(jobs, key=lambda j: (-j.size, j.name)):
            part = load.index(min(load))
            load[part] += 0 if job.linked else job.size
            if part == self.index - 1:
                mine.add(job.name)
        return [job for job in jobs if job.name in mine]
