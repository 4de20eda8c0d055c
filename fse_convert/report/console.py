"""What all reports share: one console with one rule for colour, tables that break no word, and words for counts and names."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, TextIO, TypeVar

from fse_convert.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

K = TypeVar("K")
T = TypeVar("T")
COLUMNS = 100
"""Off a terminal, where COLUMNS does not say otherwise."""
NARROW = 16
"""Columns of a cell below which a table is hard to read: its rows are stacked then."""
PAINTS = (
    (r"(?m)^ *(error|mismatch)\[[\w-]+\]", "bold red"),
    (r"(?m)^ *note(?=:|\[)(\[[\w-]+\])?", "cyan"),
    (r"\bFAILED\b|\bNOT [A-Za-z]+", "bold red"),
    (r"(?m)^\w+: passed", "green"),
    (r"(?m)^  (where|hint):", "dim"),
)
"""What is coloured in lines of text."""


class Color(str, Enum):
    """Whether to print colours; ``auto``: on a terminal."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class _Choice:
    """What ``--color`` says, for all consoles of the process."""

    color = Color.AUTO


def choose_color(value: Color) -> None:
    """Set what every console of this process does about colour from now on."""
    _Choice.color = value


def is_dumb() -> bool:
    """Tell whether the terminal can do nothing but print lines."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def colored(stream: TextIO) -> bool:
    """Decide on colour: ``--color``, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""
    if _Choice.color is not Color.AUTO:
        return _Choice.color is Color.ALWAYS
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and not is_dumb())


def console(*, stderr: bool = False) -> Console:
    """Return a rich console for results (stdout) or everything else (stderr); off a terminal it wraps no lines."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else int(columns) if columns.isdecimal() else COLUMNS,
        soft_wrap=not stream.isatty(),
        force_terminal=stream.isatty(),
        color_system="standard" if colored(stream) else None,
        no_color=False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(parts: Iterable[RenderableType]) -> None:
    """Print results to stdout, one below the other."""
    out = console()
    for part in parts:
        put(out, painted(part, None if out.soft_wrap else out.width) if isinstance(part, str) else part)


def put(out: Console, part: RenderableType) -> None:
    """Print what is laid out already."""
    out.print(part, soft_wrap=False, no_wrap=True, overflow="ignore", crop=False)


def painted(lines: str, columns: int | None = None) -> Text:
    """Return lines of text with what matters in colour, wrapped to a terminal of so many columns if there is one."""
    from rich.text import Text

    shown = Text("\n").join(Text(line) if columns is None else wrapped(line, columns, hang=2) for line in lines.split("\n"))
    for pattern, style in PAINTS:
        shown.highlight_regex(pattern, style)
    return shown


def wrapped(content: str, columns: int, *, indent: int = 0, hang: int = 0, style: str = "") -> Text:
    """Return a text in lines that break at spaces only: a path or a flag that is longer than a line stays whole.

    ``indent``: columns that stay free, beside those that the text itself begins with; ``hang``: further ones from the second line.
    """
    from rich.text import Text

    words = " ".join(content.split())
    indent += len(content) - len(content.lstrip(" "))
    first, rest = " " * indent, " " * (indent + hang)
    lines = textwrap.wrap(
        words,
        max(columns, len(rest) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return Text("\n".join(lines), style)


def grid(
    rows: Sequence[Sequence[str | Text]],
    columns: int,
    *,
    flexible: Sequence[int],
    head: Sequence[str] = (),
    numbers: Sequence[int] = (),
    indent: int = 0,
) -> RenderableType:
    """Lay rows out in columns, of which the ``flexible`` ones may wrap; where not even that fits, stack the cells of each row.

    ``columns``: of the terminal. ``numbers``: columns that are aligned to the right. With a ``head``, a rule is drawn below it.
    """
    from rich import box
    from rich.padding import Padding
    from rich.table import Table

    listed = [head, *rows] if head else rows
    widths = [max(len(line) for row in listed for line in str(row[i]).split("\n")) for i in range(len(listed[0]))]
    gap, edges = (3, 2) if head else (2, 0)
    excess = sum(widths) + gap * (len(widths) - 1) + edges + indent - columns
    for i in sorted(flexible, key=lambda i: -widths[i]):
        longest = max(len(word) for row in listed for word in str(row[i]).split() or [""])
        cut = min(max(0, excess), max(0, widths[i] - max(longest, NARROW)))
        widths[i], excess = widths[i] - cut, excess - cut
    if excess > 0:
        return _stacked(rows, columns, head, indent)
    if rows and not flexible:  # nothing wraps, and one row of many lines takes rich half as long as many rows
        rows = [["\n".join(map(str, column)) for column in zip(*rows, strict=True)]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False) if head else Table.grid(padding=(0, gap))
    for i, width in enumerate(widths):
        table.add_column(head[i] if head else "", width=width, justify="right" if i in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return Padding.indent(table, indent)


def _stacked(rows: Sequence[Sequence[str | Text]], columns: int, head: Sequence[str], indent: int) -> Text:
    """Return each row as its first cell and, below it, the others that say something: all on one line, else one a line."""
    from rich.text import Text

    lines: list[Text] = [Text(), Text(head[0], "bold")] if head else []
    for name, *cells in rows:
        lines.append(wrapped(str(name), columns, indent=indent, hang=2))
        labels = [f"{label}: " for label in head[1:]] or [""] * len(cells)
        shown = [Text.assemble(label, cell) for label, cell in zip(labels, cells, strict=True) if str(cell)]
        joined = Text("  ").join(shown)
        if len(joined) + indent + 2 <= columns:
            lines += [Text.assemble(" " * (indent + 2), joined)] if shown else []
        else:
            lines += [wrapped(str(cell), columns, indent=indent + 2, hang=2) for cell in shown]
    return Text("\n").join(lines)


def duration(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


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
