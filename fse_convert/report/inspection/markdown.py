"""An inspection as GitHub Markdown, and as the annotations that GitHub Actions shows beside a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fse_convert.errors import Problem
from fse_convert.inspection import Inspection
from fse_convert.report.inspection.view import (
    Footnotes,
    Row,
    Section,
    cost_rows,
    gain_cost,
    headline,
    layer_rows,
    sections,
    span,
)
from fse_convert.servers.verdict import Outcome

MARKS = {
    Outcome.FUSED: ":white_check_mark:",
    Outcome.UNFUSED: ":x:",
    Outcome.REFUSED: ":no_entry:",
    Outcome.ERROR: ":boom:",
    Outcome.UNKNOWN: ":grey_question:",
}


def markdown(found: Inspection, names: Sequence[str] = (), required: Sequence[str] = ()) -> str:
    """Render as Markdown; ``names`` are the targets that the user asked for, ``required`` those that must fuse."""
    return "\n".join(_lines(found, bool(names), required)) + "\n"


def _lines(found: Inspection, everything: bool, required: Sequence[str]) -> Iterator[str]:
    yield f"## {_cell(found.checkpoint.folder.label)}"
    yield ""
    yield _cell(headline(found))
    yield ""
    for answer in (a for a in found.answers if a.name in required):
        yield f"- {MARKS[answer.model.outcome]} required: `{answer.name}`"
    for sentence in found.advice.sentences:
        yield f"- **{_cell(sentence)}**"
    if found.advice.command:
        yield f"- `{found.advice.command}` {gain_cost(found)}".rstrip()
    yield ""
    yield from _problems(found.problems)
    yield from _table(
        ("layers", "routed experts", "shared expert"), ((r.name, r.routed, r.shared) for r in layer_rows(found.description))
    )
    if found.description.seen:
        seen = ((f"{s.count:,}", f"`{s.pattern}`", f"{s.example.dtype} {list(s.example.shape)}") for s in found.description.seen)
        yield from _table(("tensors", "names with experts", "stored as"), seen)
    listed = sections(found, everything=everything)
    notes = Footnotes(row for s in listed for row in s.rows)
    for section in listed:
        yield from _section(found, section, notes)
    for number, reason in notes.entries:
        yield f"{number}. `{reason.code}`: {_cell(reason.message)}"
    yield ""
    yield from _problems((*found.unsupported, *found.conflicts, *found.notes))
    yield from _costs(found)


def _section(found: Inspection, section: Section, notes: Footnotes) -> Iterator[str]:
    yield f"### {section.question.heading}"
    yield ""
    rows = ((r.label, f"{MARKS[r.first.model.outcome]} {r.word}", _exceptions(found, r), notes.of(r)) for r in section.rows)
    yield from _table(("target", "answer", "layers that do not fuse", "why"), rows)
    for what, names in section.silent:
        yield f"{what}: {', '.join(names)}"
        yield ""


def _exceptions(found: Inspection, row: Row) -> str:
    """Name the layers that do not fuse; none or all need no names."""
    pairs = list(zip(found.description.layers, row.first.layers, strict=True))
    unfused = [d.layer.name for d, v in pairs if not v.fused]
    if not unfused:
        return ""
    return "all" if len(unfused) == len(pairs) else f"`{span(unfused)}`"


def _costs(found: Inspection) -> Iterator[str]:
    if found.costs:
        serving = found.costs.serving
        head = (f"costs at EP {serving.ep}, TP {serving.tp}", "on disk", "per rank", "")
        yield from _table(head, ((r.what, r.disk, r.rank, r.remark) for r in cost_rows(found)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        return
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in listed:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _problems(problems: Iterable[Problem]) -> Iterator[str]:
    listed = list(problems)
    for p in listed:
        yield f"- `{p.code}` {_cell(str(p))}{f' ({_cell(p.hint)})' if p.hint else ''}"
    if listed:
        yield ""


def _cell(content: str) -> str:
    return content.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def workflow_commands(found: Inspection, required: Sequence[str]) -> list[str]:
    """Workflow commands: an error for what is broken and for required targets that do not fuse, a warning for conflicts."""
    lines = [_command("error", p.code, str(p)) for p in (*found.problems, *(found.contradictions if required else ()))]
    for answer in found.failing(required):
        for reason in answer.objections:
            lines.append(_command("error", f"{answer.name} does not fuse", f"{reason.code}: {reason.message}"))
    lines += [_command("warning", p.code, str(p)) for p in (*found.unsupported, *found.conflicts)]
    doubted = (a for a in found.answers if a.name in required and a.safe)
    lines += [_command("warning", f"{a.name}: {n.code}", n.message) for a in doubted for n in a.notes]
    return lines


def _command(level: str, title: str, message: str) -> str:
    """One command, with what GitHub would read as its syntax escaped."""
    safe = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    body = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={safe}::{body}"
