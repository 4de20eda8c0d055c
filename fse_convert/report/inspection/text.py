"""An inspection as text for a terminal: the answer first, then a strip of layers per target, reasons and costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from fse_convert.report.console import console, grid, painted, put, wrapped
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
        put(out, part)


def text(view: View, columns: int, *, unicode: bool = True) -> Iterator[RenderableType]:
    """Yield an inspection in parts for a terminal of so many columns; none where nothing could be read."""
    if view.found.problems and not view.found.checkpoint.tensors:
        return
    yield wrapped(view.headline, columns, style="bold")
    if view.verdict:
        yield wrapped(view.verdict, columns, style="bold red" if view.exit_code else "bold")
    if view.required:
        yield grid([(f"required: {row.label}", _answer(row)) for row in view.required], columns, flexible=(1,), indent=2)
    if view.layers:
        yield from _layers(view, columns)
    yield from _seen(view, columns)
    yield from _advice(view, columns)
    if view.sections:
        yield from _sections(view, columns, unicode=unicode)
    yield from _words(view, columns)
    if view.costs:
        head = (view.cost_title, "on disk", "per rank", "")
        rows = [(r.what, r.disk, r.rank, r.remark) for r in view.costs]
        yield grid(rows, columns, flexible=(0, 3), numbers=(1, 2), head=head)
        yield from [wrapped(view.cost_note, columns)] if view.cost_note else []


def _words(view: View, columns: int) -> Iterator[RenderableType]:
    """Yield reasons and remarks."""
    digits = len(str(len(view.reasons)))
    yield from [""] * bool(view.reasons)
    for number, r in enumerate(view.reasons, 1):
        yield from _told(f"{number:>{digits}} {r.code}: {r.message}", r.hint, columns, indent=2, hang=digits + 1)
    yield from [""] * bool(view.remarks)
    for p in view.remarks:
        yield from _told(f"note[{p.code}]: {p}", p.hint, columns, hang=2)


def _told(content: str, hint: str, columns: int, *, indent: int = 0, hang: int) -> Iterator[Text]:
    """Yield what is to be known, and its hint on a line of its own; names of a checkpoint may hold line breaks."""
    yield painted(wrapped(content, columns, indent=indent, hang=hang).plain)
    if hint:
        yield wrapped(f"-> {hint}", columns, indent=indent + hang, hang=3)


def _layers(view: View, columns: int) -> Iterator[RenderableType]:
    rows = view.layers if len(view.layers) <= LAYERS else view.layers[: LAYERS - 1]
    shared = [r.shared.removesuffix(f", {r.routed.rpartition(', ')[2]}") for r in rows]  # an equal width is said once
    cells = [(r.name, r.routed, f"shared: {s}  {r.problem}".rstrip()) for r, s in zip(rows, shared, strict=True)]
    yield grid(cells, columns, flexible=(2,), indent=2)
    if len(view.layers) > len(rows):
        yield wrapped(f"  ... and {len(view.layers) - len(rows)} more kinds of layers: --format json lists all", columns)


def _seen(view: View, columns: int) -> Iterator[RenderableType]:
    seen = view.seen
    if seen:
        rows = [(f"{s.count:,} x", s.pattern, f"{s.example.dtype} {list(s.example.shape)}") for s in seen[:SEEN]]
        yield grid(rows, columns, flexible=(), numbers=(0,), indent=2)
    if len(seen) > SEEN:
        yield f"  and {len(seen) - SEEN} more patterns"


def _advice(view: View, columns: int) -> Iterator[RenderableType]:
    advice = view.found.advice
    if advice.sentences:
        yield ""
    for sentence in advice.sentences:
        yield wrapped(sentence, columns, hang=2, style="bold")
    if advice.command:
        yield Text(f"  {advice.command}")
    if view.advised_cost:
        yield wrapped(view.advised_cost, columns, indent=2)
    for number, (sentence, command) in enumerate(view.offers):
        yield from [""] * bool(number and command)
        yield wrapped(sentence, columns, hang=2)
        if command:
            yield Text(f"  {command}")


def _sections(view: View, columns: int, *, unicode: bool) -> Iterator[RenderableType]:
    label = max((len(row.label) for row in view.rows), default=0)
    room = columns - label - ANSWER - 6
    step = -(-len(view.found.description.layers) // (room if room >= 10 else max(columns - ANSWER - 6, 10)))
    cells = {outcome: look.cell if unicode else look.plain for outcome, look in LOOKS.items()}
    for section in view.sections:
        yield ""
        yield wrapped(section.question.heading, columns, style="bold")
        if section.rows:
            rows = [(f"{row.label:<{label}}", _strip(row, step, cells), _answer(row)) for row in section.rows]
            yield grid(rows, columns, flexible=(2,), indent=2)
        for what, names in section.silent.items():
            yield wrapped(f"{what}: {', '.join(names)}", columns, indent=2, hang=2, style="dim")
    yield ""
    legend = [f"{cells[outcome]} {look.word}" for outcome, look in view.legend]
    if legend:
        of = f"up to {step} layers and shows the worst of them" if step > 1 else "a layer"
        yield wrapped(f"{', '.join(legend)}; a mark stands for {of}, drafter layers apart", columns, indent=2, style="dim")


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
