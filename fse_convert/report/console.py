"""What all reports share: consoles, and words for sizes, counts, names and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from fse_convert.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

K = TypeVar("K")
T = TypeVar("T")
COLUMNS = 100
"""Where there is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """Return a rich console for results (stdout) or everything else (stderr); off a terminal it wraps no lines."""
    from rich.console import Console

    wraps = (sys.stderr if stderr else sys.stdout).isatty()
    columns = None if wraps else COLUMNS
    return Console(stderr=stderr, width=columns, soft_wrap=not wraps, highlight=False, markup=False, emoji=False)


def say(lines: Iterable[str | Table]) -> None:
    """Print results to stdout, one below the other."""
    console().print(*lines, sep="\n")


def boxed(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table with a rule below its head; columns of ``numbers`` are not broken."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        number = column in numbers
        table.add_column(column, overflow="fold", justify="right" if number else "left", no_wrap=number)
    return table


def size(n: float) -> str:
    """Return bytes in words, in powers of 1024."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(round(n, digits)) < 1024:
            return f"{n:.{digits}f} {unit}"
        n /= 1024
    return f"{n:,.2f} TiB"


def counted(n: int, noun: str) -> str:
    """Return ``1 shard`` or ``1,200 shards``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def gathered(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Gather values by key, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def runs(items: Iterable[T], alike: Callable[[T], object], name: Callable[[T], str]) -> Iterator[tuple[str, T]]:
    """Fold neighbours that look alike; yield the name of each run, and its first item."""
    for _, group in groupby(items, alike):
        listed = list(group)
        yield span([name(item) for item in listed]), listed[0]


def span(names: list[str]) -> str:
    """Name a run of layers: ``layers.0..39.ffn (40)``."""
    first, last = names[0].split("."), names[-1].split(".")
    if len(names) == 1:
        return names[0]
    different = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    if len(first) != len(last) or len(different) != 1:
        return f"{names[0]} .. {names[-1]} ({len(names)})"
    first[different[0]] += f"..{last[different[0]]}"
    return f"{'.'.join(first)} ({len(names)})"


def problem_lines(problem: Problem) -> list[str]:
    """Return an error in at most three lines: what, where, hint."""
    below = (("  where: ", problem.where), ("  hint:  ", problem.hint))
    return [f"error[{problem.code}]: {problem.message}", *(name + value for name, value in below if value)]
