"""An inspection as text for a terminal: the answer first, then a strip of layers per target, reasons and costs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from fse_convert.inspection import Inspection
from fse_convert.model.description import Description
from fse_convert.model.families import FAMILIES
from fse_convert.model.moe import LayerKind
from fse_convert.report.inspection.view import Footnotes, Section, cost_rows, gain_cost, headline, layer_rows, sections
from fse_convert.servers.verdict import Outcome, Verdict

CELLS = {Outcome.FUSED: "█", Outcome.UNFUSED: "░", Outcome.REFUSED: "x", Outcome.ERROR: "!", Outcome.UNKNOWN: "?"}
ASCII_CELLS = {Outcome.FUSED: "#", Outcome.UNFUSED: "-", Outcome.REFUSED: "x", Outcome.ERROR: "!", Outcome.UNKNOWN: "?"}
COLORS = {
    Outcome.FUSED: "green",
    Outcome.UNFUSED: "yellow",
    Outcome.REFUSED: "red",
    Outcome.ERROR: "red",
    Outcome.UNKNOWN: "magenta",
}
WORST = (Outcome.ERROR, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.UNFUSED, Outcome.FUSED)
WORD_WIDTH = 18
"""Columns kept for an outcome and the numbers of its reasons."""
SEEN = 12
"""Patterns of names listed for an unknown family."""


def text(found: Inspection, names: Sequence[str] = (), *, width: int = 100, unicode: bool = True) -> str:
    """Render for a terminal of ``width`` columns, with ANSI styles; empty where nothing could be read.

    ``names`` are the targets that the user asked for.
    """
    lines = list(_Text(found, bool(names), width, CELLS if unicode else ASCII_CELLS).lines())
    return "\n".join(lines)


class _Text:
    def __init__(self, found: Inspection, everything: bool, width: int, cells: dict[Outcome, str]) -> None:
        self.found = found
        self.sections = sections(found, everything=everything)
        self.width = max(width, 60)
        self.cells = cells
        self.notes = Footnotes(row for s in self.sections for row in s.rows)
        self.label = max((len(row.label) for s in self.sections for row in s.rows), default=0)
        room = max(self.width - self.label - WORD_WIDTH - 6, 10)
        self.step = -(-len(found.description.layers) // room)

    def lines(self) -> Iterator[str]:
        if self.found.problems and not self.found.checkpoint.tensors:
            return
        yield from self._wrap(headline(self.found), style=_bold)
        if self.found.problems:
            yield from self._wrap("Broken, see the errors; what follows rests on what could be read.", style=_bold)
        if self.found.description.family is None:
            yield from self._unknown(self.found.description)
            return
        yield from self._layers()
        yield from self._advice()
        if not self.found.description.layers:
            yield "  no layers with experts under the names of this family"
            return
        for section in self.sections:
            yield from self._section(section)
        if self.step > 1:
            yield _dim(f"  a cell stands for up to {self.step} layers and shows the worst of them")
        yield from self._footnotes()
        yield from self._conflicts()
        yield from self._costs()

    def _layers(self) -> Iterator[str]:
        rows = layer_rows(self.found.description)
        shown = rows if len(rows) <= 8 else rows[:7]
        wide = [max((len(getattr(r, column)) for r in shown), default=0) for column in ("name", "routed")]
        for r in shown:
            problem = f"  {r.problem}" if r.problem else ""
            yield f"  {r.name:{wide[0]}}  {r.routed:{wide[1]}}  {r.shared}{problem}".rstrip()
        if len(rows) > len(shown):
            yield f"  ... and {len(rows) - len(shown)} more kinds of layers: --format json lists all"

    def _advice(self) -> Iterator[str]:
        if self.found.advice.sentences:
            yield ""
        for sentence in self.found.advice.sentences:
            yield from self._wrap(sentence, style=_bold)
        if self.found.advice.command:
            yield f"  {self.found.advice.command}  {gain_cost(self.found)}".rstrip()

    def _section(self, section: Section) -> Iterator[str]:
        yield ""
        yield _bold(section.question.heading)
        for row in section.rows:
            numbers = self.notes.of(row)
            word = f"{row.word}, but" if row.first.fused and numbers else row.word
            styled = click.style(word, fg=COLORS[row.first.model.outcome])
            yield f"  {row.label:{self.label}}  {self._strip(row.first.layers)}  {styled} {numbers}".rstrip()
        for what, names in section.silent:
            yield from self._wrap(f"{what}: {', '.join(names)}", indent="  ", style=_dim)

    def _strip(self, verdicts: Sequence[Verdict]) -> str:
        """One cell per layer, drafter layers apart; where the terminal is too narrow, a cell is the worst of several."""
        layers, step, parts = self.found.description.layers, self.step, []
        for kind in LayerKind:
            outcomes = [v.outcome for d, v in zip(layers, verdicts, strict=True) if d.layer.kind is kind]
            cells = [min(outcomes[i : i + step], key=WORST.index) for i in range(0, len(outcomes), step)]
            if cells:
                parts.append("".join(click.style(self.cells[o], fg=COLORS[o]) for o in cells))
        return " ".join(parts)

    def _footnotes(self) -> Iterator[str]:
        if self.notes.entries:
            yield ""
        for number, reason in self.notes.entries:
            yield from self._wrap(f"{reason.code}: {reason.message}", indent=f"  {number:2} ", hang="     ")

    def _conflicts(self) -> Iterator[str]:
        found = [*self.found.unsupported, *self.found.conflicts, *self.found.notes]
        if found:
            yield ""
        for problem in found:
            yield from self._wrap(f"note[{problem.code}]: {problem}", hang="  ")

    def _costs(self) -> Iterator[str]:
        rows = cost_rows(self.found)
        if not rows or self.found.costs is None:
            return
        serving = self.found.costs.serving
        what = max(len(r.what) for r in rows)
        yield ""
        head = f"Costs at EP {serving.ep}, TP {serving.tp}"
        yield _bold(f"{head:{what + 2}}  {'on disk':>11}  {'per rank':>11}")
        for r in rows:
            yield f"  {r.what:{what}}  {r.disk:>11}  {r.rank:>11}  {r.remark}".rstrip()

    def _unknown(self, description: Description) -> Iterator[str]:
        known = ", ".join(f.name for f in FAMILIES)
        yield from self._wrap(f"No verdicts: model type {description.model_type!r} is of no known family ({known}).")
        if not description.seen:
            yield "  no tensor name has an expert in it"
        for seen in description.seen[:SEEN]:
            yield f"  {seen.count:8,} x {seen.pattern}  {seen.example.dtype} {list(seen.example.shape)}"
        if len(description.seen) > SEEN:
            yield f"  and {len(description.seen) - SEEN} more patterns"

    def _wrap(
        self, content: str, *, indent: str = "", hang: str | None = None, style: Callable[[str], str] | None = None
    ) -> Iterator[str]:
        lines = textwrap.wrap(
            content, self.width, initial_indent=indent, subsequent_indent=indent if hang is None else hang, break_on_hyphens=False
        )
        yield from (style(line) if style else line for line in lines)


def _bold(content: str) -> str:
    return click.style(content, bold=True)


def _dim(content: str) -> str:
    return click.style(content, dim=True)
