"""An inspection as text for a terminal: the answer first, then a strip of layers per target, reasons and costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fse_convert.model.description import Description
from fse_convert.model.families import FAMILIES
from fse_convert.report.console import console
from fse_convert.report.inspection.view import Row, View
from fse_convert.servers.verdict import Outcome

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

COLUMNS = 100
"""Where there is no terminal."""
LEAST = 60
"""Columns below which nothing is made narrower."""
CELLS = {
    Outcome.FUSED: "█",
    Outcome.UNFUSED: "░",
    Outcome.UNSAFE: "▲",
    Outcome.REFUSED: "x",
    Outcome.ERROR: "!",
    Outcome.UNKNOWN: "?",
}
ASCII_CELLS = {**CELLS, Outcome.FUSED: "#", Outcome.UNFUSED: "-", Outcome.UNSAFE: "^"}
COLORS = {
    Outcome.FUSED: "green",
    Outcome.UNFUSED: "yellow",
    Outcome.UNSAFE: "bold red",
    Outcome.REFUSED: "red",
    Outcome.ERROR: "red",
    Outcome.UNKNOWN: "magenta",
}
WORST = (Outcome.UNSAFE, Outcome.ERROR, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.UNFUSED, Outcome.FUSED)
ANSWER = 18
"""Columns kept for an outcome and the numbers of its reasons."""
LAYERS = 8
"""Rows of layers that are listed."""
SEEN = 12
"""Patterns of names listed for an unknown family."""


def print_inspection(view: View) -> None:
    """Print an inspection to stdout; nothing where nothing could be read."""
    columns = shutil.get_terminal_size((COLUMNS, 40)).columns if sys.stdout.isatty() else COLUMNS
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    out = console(columns=max(columns, LEAST))
    for part in text(view, out.width, unicode=unicode):
        out.print(part, soft_wrap=False)


def text(view: View, columns: int, *, unicode: bool = True) -> Iterator[RenderableType]:
    """Yield an inspection in parts for a terminal of so many columns; none where nothing could be read."""
    found = view.found
    if found.problems and not found.checkpoint.tensors:
        return
    yield _line(view.headline, "bold")
    if found.problems:
        yield Text("Broken, see the errors; what follows rests on what could be read.", "bold")
    if found.description.family is None:
        yield from _unknown(found.description)
        return
    yield from _layers(view)
    yield from _advice(view)
    if not found.description.layers:
        yield "  no layers with experts under the names of this family"
        return
    yield from _sections(view, columns, CELLS if unicode else ASCII_CELLS)
    if view.reasons:
        yield ""
        reasons = [(str(number), _line(f"{r.code}: {r.message}")) for number, r in enumerate(view.reasons, 1)]
        yield Padding.indent(_grid(reasons, gap=1, numbers=(0,)), 2)
    if view.remarks:
        yield ""
        yield _grid([(f"note[{p.code}]:", _line(str(p))) for p in view.remarks], gap=1)
    yield from _costs(view)


def _grid(rows: Sequence[Sequence[str | Text]], *, gap: int = 2, numbers: Sequence[int] = (), whole: Sequence[int] = (0,)) -> Table:
    """Return rows in columns; lines of ``numbers``, and of columns that stay ``whole``, are not broken."""
    grid = Table.grid(padding=(0, gap))
    for column in range(len(rows[0])):
        justify: JustifyMethod = "right" if column in numbers else "left"
        grid.add_column(justify=justify, no_wrap=column in (*whole, *numbers), overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _line(content: str, style: str = "") -> Text:
    """Return a text that wraps at columns only: names of a checkpoint may hold line breaks."""
    return Text(" ".join(content.split()), style)


def _layers(view: View) -> Iterator[RenderableType]:
    rows = view.layers if len(view.layers) <= LAYERS else view.layers[: LAYERS - 1]
    if rows:
        yield Padding.indent(_grid([(r.name, r.routed, f"{r.shared}  {r.problem}".rstrip()) for r in rows]), 2)
    if len(view.layers) > len(rows):
        yield f"  ... and {len(view.layers) - len(rows)} more kinds of layers: --format json lists all"


def _advice(view: View) -> Iterator[RenderableType]:
    advice = view.found.advice
    if advice.sentences:
        yield ""
    for sentence in advice.sentences:
        yield _line(sentence, "bold")
    if advice.command:
        yield Padding.indent(Text(f"{advice.command}  {view.advised_cost}".rstrip()), 2)


def _sections(view: View, columns: int, cells: dict[Outcome, str]) -> Iterator[RenderableType]:
    label = max((len(row.label) for row in view.rows), default=0)
    room = max(columns - label - ANSWER - 6, 10)
    step = -(-len(view.found.description.layers) // room)
    for section in view.sections:
        yield ""
        yield Text(section.question.heading, "bold")
        if section.rows:
            rows = _grid([(row.label, _strip(row, step, cells), _answer(view, row)) for row in section.rows])
            rows.columns[0].min_width = label
            yield Padding.indent(rows, 2)
        for what, names in section.silent.items():
            yield Padding.indent(Text(f"{what}: {', '.join(names)}", "dim"), 2)
    if step > 1:
        yield Padding.indent(Text(f"a cell stands for up to {step} layers and shows the worst of them", "dim"), 2)


def _strip(row: Row, step: int, cells: dict[Outcome, str]) -> Text:
    """Return a cell per layer, drafter layers apart; where the terminal is too narrow, a cell is the worst of ``step`` layers."""
    parts = []
    for group in row.cells:
        outcomes = [outcome for outcome, _ in group]
        worst = [min(outcomes[i : i + step], key=WORST.index) for i in range(0, len(outcomes), step)]
        parts.append(Text.assemble(*((cells[outcome], COLORS[outcome]) for outcome in worst)))
    return Text(" ").join(parts)


def _answer(view: View, row: Row) -> Text:
    """Return the outcome, and the numbers of what is to be known of it."""
    numbers, outcome = view.numbers(row), row.first.model.outcome
    word = f"{row.word}, but" if outcome is Outcome.FUSED and numbers else row.word
    return Text.assemble((word, COLORS[outcome]), f" {numbers}" if numbers else "")


def _costs(view: View) -> Iterator[RenderableType]:
    if not view.costs or not view.found.costs:
        return
    serving = view.found.costs.serving
    head = Text(f"Costs at EP {serving.ep}, TP {serving.tp}", "bold"), Text("on disk", "bold"), Text("per rank", "bold"), ""
    yield ""
    yield _grid([head, *((r.what, r.disk, r.rank, r.remark) for r in view.costs)], numbers=(1, 2), whole=())


def _unknown(description: Description) -> Iterator[RenderableType]:
    known = ", ".join(f.name for f in FAMILIES)
    yield _line(f"No verdicts: model type {description.model_type!r} is of no known family ({known}).")
    if not description.seen:
        yield "  no tensor name has an expert in it"
        return
    seen = description.seen[:SEEN]
    yield Padding.indent(
        _grid([(f"{s.count:,} x", s.pattern, f"{s.example.dtype} {list(s.example.shape)}") for s in seen], numbers=(0,)), 2
    )
    if len(description.seen) > SEEN:
        yield f"  and {len(description.seen) - SEEN} more patterns"
