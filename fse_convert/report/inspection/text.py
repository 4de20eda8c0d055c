"""An inspection as text for a terminal: the answer first, then a strip of layers per target, reasons and costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fse_convert.report.console import console
from fse_convert.report.inspection.view import LOOKS, Row, View
from fse_convert.servers.verdict import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWER = 18
"""Columns kept for an outcome and the numbers of its reasons."""
LAYERS = 8
"""Rows of layers that are listed."""
SEEN = 12
"""Patterns of names listed for an unknown family."""


def print_inspection(view: View) -> None:
    """Print an inspection to stdout; nothing where nothing could be read."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    out = console()
    for part in text(view, out.width, unicode=unicode):
        out.print(part, soft_wrap=False)


def text(view: View, columns: int, *, unicode: bool = True) -> Iterator[RenderableType]:
    """Yield an inspection in parts for a terminal of so many columns; none where nothing could be read."""
    if view.found.problems and not view.found.checkpoint.tensors:
        return
    yield _line(view.headline, "bold")
    if view.verdict:
        yield _line(view.verdict, "bold red" if view.exit_code else "bold")
    if view.required:
        yield _indented([(f"required: {row.label}", _answer(row)) for row in view.required])
    if view.layers:
        yield from _layers(view)
    yield from _seen(view)
    yield from _advice(view)
    if view.sections:
        yield from _sections(view, columns, unicode=unicode)
    if view.reasons:
        yield ""
        reasons = [(str(number), _told(f"{r.code}: {r.message}", r.hint)) for number, r in enumerate(view.reasons, 1)]
        yield _indented(reasons, gap=1, numbers=(0,))
    if view.remarks:
        yield ""
        yield from (_told(f"note[{p.code}]: {p}", p.hint) for p in view.remarks)
    if view.costs:
        head = (_line(view.cost_title, "bold"), Text("on disk", "bold"), Text("per rank", "bold"), "")
        yield ""
        yield _grid([head, *((r.what, r.disk, r.rank, r.remark) for r in view.costs)], numbers=(1, 2), whole=())
        yield from [_line(view.cost_note)] if view.cost_note else []


def _grid(rows: Sequence[Sequence[str | Text]], *, gap: int = 2, numbers: Sequence[int] = (), whole: Sequence[int] = (0,)) -> Table:
    """Return rows in columns; lines of ``numbers``, and of columns that stay ``whole``, are not broken."""
    grid = Table.grid(padding=(0, gap))
    for column in range(len(rows[0])):
        grid.add_column(justify="right" if column in numbers else "left", no_wrap=column in (*whole, *numbers), overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _indented(rows: Sequence[Sequence[str | Text]], *, gap: int = 2, numbers: Sequence[int] = ()) -> Padding:
    return Padding.indent(_grid(rows, gap=gap, numbers=numbers), 2)


def _line(content: str, style: str = "") -> Text:
    """Return a text that wraps at columns only: names of a checkpoint may hold line breaks."""
    return Text(" ".join(content.split()), style)


def _told(content: str, hint: str) -> Text:
    """Return what is to be known, and its hint on a line of its own."""
    return Text("\n").join([_line(content), *([_line(f"-> {hint}")] if hint else [])])


def _layers(view: View) -> Iterator[RenderableType]:
    rows = view.layers if len(view.layers) <= LAYERS else view.layers[: LAYERS - 1]
    yield _indented([(r.name, r.routed, f"shared: {r.shared}  {r.problem}".rstrip()) for r in rows])
    if len(view.layers) > len(rows):
        yield f"  ... and {len(view.layers) - len(rows)} more kinds of layers: --format json lists all"


def _seen(view: View) -> Iterator[RenderableType]:
    seen = view.found.description.seen
    if seen:
        rows = [(f"{s.count:,} x", s.pattern, f"{s.example.dtype} {list(s.example.shape)}") for s in seen[:SEEN]]
        yield _indented(rows, numbers=(0,))
    if len(seen) > SEEN:
        yield f"  and {len(seen) - SEEN} more patterns"


def _advice(view: View) -> Iterator[RenderableType]:
    advice = view.found.advice
    if advice.sentences:
        yield ""
    for sentence in advice.sentences:
        yield _line(sentence, "bold")
    if advice.command:
        yield Padding.indent(Text(f"{advice.command}  {view.advised_cost}".rstrip()), 2)
    for sentence, command in view.offers:
        yield _line(sentence)
        if command:
            yield Padding.indent(Text(command), 2)


def _sections(view: View, columns: int, *, unicode: bool) -> Iterator[RenderableType]:
    label = max((len(row.label) for row in view.rows), default=0)
    room = max(columns - label - ANSWER - 6, 10)
    step = -(-len(view.found.description.layers) // room)
    cells = {outcome: look.cell if unicode else look.plain for outcome, look in LOOKS.items()}
    for section in view.sections:
        yield ""
        yield _line(section.question.heading, "bold")
        if section.rows:
            rows = _grid([(row.label, _strip(row, step, cells), _answer(row)) for row in section.rows])
            rows.columns[0].min_width = label
            yield Padding.indent(rows, 2)
        for what, names in section.silent.items():
            yield Padding.indent(_line(f"{what}: {', '.join(names)}", "dim"), 2)
    yield ""
    legend = [f"{cells[outcome]} {look.word}" for outcome, look in view.legend]
    several = f"; a cell stands for up to {step} layers and shows the worst of them" if step > 1 else ""
    yield Padding.indent(_line(f"{', '.join(legend)}{several}", "dim"), 2)


def _strip(row: Row, step: int, cells: Mapping[Outcome, str]) -> Text:
    """Return a cell per layer, drafter layers apart; where the terminal is too narrow, a cell is the worst of ``step`` layers."""
    order, parts = list(LOOKS), []
    for group in row.cells:
        outcomes = [outcome for outcome, _ in group]
        worst = (min(outcomes[i : i + step], key=order.index) for i in range(0, len(outcomes), step))
        parts.append(Text.assemble(*((cells[outcome], LOOKS[outcome].color) for outcome in worst)))
    return Text(" ").join(parts)


def _answer(row: Row) -> Text:
    """Return the outcome, and the numbers of what is to be known of it."""
    return Text.assemble((row.word, row.look.color), f" {row.numbers}" if row.numbers else "")
