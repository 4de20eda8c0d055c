"""An inspection as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from fse_convert.inspection import Inspection
from fse_convert.model.moe import LayerKind
from fse_convert.report.inspection.view import (
    Footnotes,
    Row,
    Section,
    cost_rows,
    gain_cost,
    headline,
    layer_rows,
    sections,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem } .advice { font-weight: 600 }
table { border-collapse: collapse; margin: .6rem 0 } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top }
th { border-bottom: 1px solid #bbb } td.n { text-align: right; white-space: nowrap } code { font-size: .95em }
.strip { white-space: nowrap; line-height: 0 } .strip i { display: inline-block; width: 9px; height: 16px; margin-right: 1px }
.strip i.gap { width: 5px; background: none }
.fused { background: #2da44e } .unfused { background: #d4a72c } .refused { background: #cf222e } .error { background: #82071e }
.unknown { background: #8250df } .mark { display: inline-block; width: .7em; height: .7em; margin-right: .4em }
li code { color: #555 } .dim { color: #666 }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616 } .dim, li code { color: #aaa } th { border-color: #555 }
}
"""


def html(found: Inspection, names: Sequence[str] = ()) -> str:
    """Render as a whole page; ``names`` are the targets that the user asked for."""
    body = "\n".join(_body(found, bool(names)))
    title = escape(found.checkpoint.folder.label)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fse-convert inspect: {title}</title><style>{STYLE}</style></head>
<body>
{body}
</body></html>
"""


def _body(found: Inspection, everything: bool) -> Iterator[str]:
    yield f"<h1>{escape(found.checkpoint.folder.label)}</h1>"
    yield f"<p>{escape(headline(found))}</p>"
    for sentence in found.advice.sentences:
        yield f'<p class="advice">{escape(sentence)}</p>'
    if found.advice.command:
        yield f"<p><code>{escape(found.advice.command)}</code> {escape(gain_cost(found))}</p>"
    yield from _list(f"<code>{escape(p.code)}</code> {escape(str(p))} {escape(p.hint)}" for p in found.problems)
    yield from _table(
        ("layers", "routed experts", "shared expert"),
        ((escape(r.name), escape(r.routed), escape(r.shared)) for r in layer_rows(found.description)),
    )
    yield from _table(
        ("tensors", "names with experts", "stored as"),
        ((f"{s.count:,}", escape(s.pattern), escape(f"{s.example.dtype} {list(s.example.shape)}")) for s in found.description.seen),
    )
    listed = sections(found, everything=everything)
    notes = Footnotes(row for s in listed for row in s.rows)
    for section in listed:
        yield from _section(found, section, notes)
    if notes.entries:
        reasons = (
            f"<code>{escape(r.code)}</code> {escape(r.message)} <span class=dim>{escape(r.hint)}</span>" for _, r in notes.entries
        )
        yield "<h2>Reasons</h2>"
        yield from _list(reasons, tag="ol")
    yield from _list(
        f"<code>{escape(p.code)}</code> {escape(str(p))}" for p in (*found.unsupported, *found.conflicts, *found.notes)
    )
    yield from _costs(found)


def _section(found: Inspection, section: Section, notes: Footnotes) -> Iterator[str]:
    yield f"<h2>{escape(section.question.heading)}</h2>"
    rows = (
        (
            f'<span title="{escape(", ".join(a.name for a in row.answers))}">{escape(row.label)}</span>',
            _strip(found, row),
            f'<span class="mark {row.first.model.outcome.value}"></span>{escape(row.word)}',
            notes.of(row),
            f"<span class=dim>{escape(row.first.started_with)}</span>",
        )
        for row in section.rows
    )
    yield from _table(("target", "layers", "answer", "why", "needs"), rows)
    for what, names in section.silent:
        yield f"<p class=dim>{escape(what)}: {escape(', '.join(names))}</p>"


def _strip(found: Inspection, row: Row) -> str:
    """One cell per layer, its name and verdict in the tooltip; drafter layers behind a gap."""
    cells, kind = [], LayerKind.DECODER
    for d, v in zip(found.description.layers, row.first.layers, strict=True):
        if d.layer.kind is not kind:
            kind = d.layer.kind
            cells.append('<i class="gap"></i>')
        codes = ", ".join(r.code for r in v.reasons)
        title = f"{d.layer.name}: {v.outcome.value}{f' ({codes})' if codes else ''}"
        cells.append(f'<i class="{v.outcome.value}" title="{escape(title)}"></i>')
    return f'<span class="strip">{"".join(cells)}</span>'


def _costs(found: Inspection) -> Iterator[str]:
    if found.costs:
        serving = found.costs.serving
        yield f"<h2>Costs at EP {serving.ep}, TP {serving.tp}</h2>"
        rows = ((escape(r.what), escape(r.disk), escape(r.rank), escape(r.remark)) for r in cost_rows(found))
        yield from _table(("", "on disk", "per rank", ""), rows, numeric=(1, 2))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: tuple[int, ...] = ()) -> Iterator[str]:
    listed = list(rows)
    if listed:
        yield "<table><tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"
        for row in listed:
            cells = (f"<td{' class=n' if i in numeric else ''}>{cell}</td>" for i, cell in enumerate(row))
            yield "<tr>" + "".join(cells) + "</tr>"
        yield "</table>"


def _list(items: Iterable[str], tag: str = "ul") -> Iterator[str]:
    listed = list(items)
    if listed:
        yield f"<{tag}>" + "".join(f"<li>{item}</li>" for item in listed) + f"</{tag}>"
