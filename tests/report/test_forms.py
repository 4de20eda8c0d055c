"""The five forms of a report say the same: read back, each has the outcomes, reasons, hints and exit code of the others."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fse_convert.errors import Problem
from fse_convert.exit_codes import ExitCode
from fse_convert.inspection import Inspection
from fse_convert.plan.advice import Advice
from fse_convert.report.inspection.pages import annotation, html, markdown
from fse_convert.report.inspection.records import inspection_record
from fse_convert.report.inspection.text import text
from fse_convert.report.inspection.view import View
from fse_convert.report.records import dump
from fse_convert.servers.judge import ALL_TARGETS, Answer, judge
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict, whole
from fse_convert.testing.memory import Model, checkpoint
from tests.report.forms import Answered, Said, plain, read_html, read_markdown, read_text, squeezed, word

MODEL = Model(layers=2, mtp=1)
CHECKPOINT = checkpoint(MODEL.full_config(), MODEL.tensors())
SUBJECT = MODEL.subject()
ANSWERS = judge(SUBJECT)
UNKNOWN = Model(layers=1, mtp=0, config={"model_type": "newcomer"}).subject()
OWN = "own-release"
"""The code of a reason that names its own release."""


WORDS = [
    "a",
    "2304",
    "is",
    "0.30",
    "not",
    "x|y",
    "<b>",
    "don't",
    "50%",
    "a&b",
    "(c),",
    "`q`",
    "weight_block_size",
    "layers.0.ffn",
    "2.",
    "1",
]
words = st.sampled_from(WORDS)
sentences = st.lists(words, min_size=1, max_size=14).map(" ".join)
codes = st.sampled_from(["width-ratio", "scale-block", "shared-format", "aiter-no", "slot-width", "no-moe-layers", "other-code"])
reasons = st.builds(Reason, code=codes, message=sentences, hint=st.just("") | sentences)
problems = st.builds(Problem, code=codes, message=sentences, where=st.just("") | words, hint=st.just("") | sentences)
bad = st.builds(
    Verdict,
    outcome=st.sampled_from([o for o in Outcome if o is not Outcome.FUSED]),
    reasons=st.lists(reasons, min_size=1, max_size=3).map(tuple),
)
verdicts = st.just(FUSED) | bad


@st.composite
def answers(draw: st.DrawFn, base: Answer) -> Answer:
    """An answer of that target: verdicts of layers and of the whole that go together."""
    if draw(st.booleans()):  # one verdict for all, which neighbours may share
        verdict = draw(
            st.sampled_from(
                [
                    FUSED,
                    *(
                        Verdict(o, (Reason(OWN, f"{base.engine} {base.release} says so", hint=f"take {base.release}"),))
                        for o in Outcome
                        if o != "fused"
                    ),
                ]
            )
        )
        layers: tuple[Verdict, ...] = (verdict,) * len(base.layers)
    else:
        layers = draw(st.tuples(*[verdicts] * len(base.layers)))
    model = draw(bad) if not base.layers or draw(st.integers(0, 9)) == 0 else whole(layers)
    return replace(base, layers=layers, model=model, notes=tuple(draw(st.lists(reasons, max_size=1))))


class Case:
    """An inspection with the targets that were named and those that were required."""

    def __init__(self, found: Inspection, names: list[str], required: list[str]) -> None:
        self.found, self.names, self.required = found, names, required

    def __repr__(self) -> str:
        lines = [f"  {a.name}: {a.model}, {a.layers}, {a.notes}" for a in self.found.answers]
        others = [self.found.problems, self.found.unsupported, self.found.conflicts, self.found.notes, self.found.advice.sentences]
        return "\n".join([f"Case(names={self.names}, required={self.required},", *lines, *map(str, others), ")"])


@st.composite
def inspections(draw: st.DrawFn) -> Case:
    known = draw(st.integers(0, 5)) > 0
    subject = SUBJECT if known else UNKNOWN
    chosen = draw(st.lists(st.sampled_from(range(len(ANSWERS))), min_size=1, max_size=8, unique=True).map(sorted))
    found = judge(subject) if not known else ANSWERS
    picked = [found[i] for i in chosen]
    judged = [draw(answers(a)) for a in picked] if known else picked
    names = [a.name for a in judged]
    required = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    broken = draw(st.integers(0, 7)) == 0
    some = st.lists(problems, max_size=2).map(tuple)
    inspection = Inspection(
        checkpoint=CHECKPOINT,
        subject=subject,
        answers=tuple(judged),
        costs=None,
        advice=Advice(draw(st.lists(sentences, max_size=2).map(tuple))),
        problems=draw(st.lists(problems, min_size=1, max_size=2).map(tuple)) if broken else (),
        unsupported=draw(some),
        conflicts=draw(some),
        notes=draw(some),
        converted=draw(st.booleans()),
    )
    return Case(inspection, names if draw(st.booleans()) else [], required)


def told_by(target: dict[str, Any], own: str, hint: str) -> Answered:
    """The word and reasons of a JSON target; those that name its own release with other names in its place."""
    layers = target["layers"]
    fused, count = len(layers.get("fused", [])), sum(map(len, layers.values()))
    mixed = target["verdict"] == "unfused" and 0 < fused < count
    why = set()
    for r in (*target["reasons"], *target["notes"]):
        message, way_out = (r["message"], r["hint"]) if r["code"] != OWN else (f"{target['engine']} {own} says so", f"take {hint}")
        why.add((r["code"], squeezed(message), squeezed(way_out)))
    return f"mixed {fused}/{count}" if mixed else word(target["verdict"]), frozenset(why)


def expected(view: View) -> Said:
    """What the JSON object says, in the terms of the others: a row names all its releases at once, and in hints the first."""
    record = json.loads(dump(inspection_record(view)))
    targets = {t["target"]: t for t in record["targets"]}
    said = Said(advice=[squeezed(s) for s in record["advice"]["sentences"]])
    for row in view.rows:
        first = targets[row.names[0]]
        before, own, after = first["target"].partition(first["release"])
        releases = row.label.removeprefix(before).removesuffix(after) if own else first["release"]
        each = [told_by(targets[name], releases, first["release"]) for name in row.names]
        assert len(set(each)) == 1, "targets of one row say the same"
        assert row.label == first["target"] or len(row.names) > 1
        assert len(row.names) == 1 or re.fullmatch(r".+\d\.\.\d.*", row.label)
        said.rows[row.label] = each[0]
        said.required |= {r["target"]: each[0] for r in record["required"] if r["target"] in row.names}
    assert len(said.required) == len(record["required"])
    in_rows = {name for row in view.rows for name in row.names}
    contracts = {t.name for t in ALL_TARGETS if t.engine == "contract"}
    if record["layers"]:
        said.silent = {n: word(t["verdict"]) for n, t in targets.items() if n not in in_rows | contracts}
    said.remarks = [
        (p["code"], squeezed(f"{p['where']}: {p['message']}" if p["where"] else p["message"]), squeezed(p["hint"]))
        for p in (*record["unsupported"], *record["conflicts"], *record["notes"])
    ]
    assert record["ok"] == (record["exit_code"] == 0)
    assert all(r["passed"] == r["fused"] == (targets[r["target"]]["verdict"] == "fused") for r in record["required"])
    if record["exit_code"] != 3:
        assert record["exit_code"] == (0 if all(r["passed"] for r in record["required"]) else 1)
    return said


def same(one: Said, other: Said, *, advice: bool = True) -> None:
    assert one.rows == other.rows
    assert one.required == other.required
    assert one.silent == other.silent
    assert one.remarks == other.remarks
    if advice:
        assert one.advice == other.advice


@settings(max_examples=320, deadline=None)
@given(case=inspections(), columns=st.sampled_from([60, 80, 100, 200]))
def test_five_forms_say_the_same(case: Case, columns: int) -> None:
    inspection, required = case.found, case.required
    view = View(inspection, case.names, required)
    code = inspection.exit_code(required)
    json_says = expected(view)
    page, web = markdown(view), html(view)
    markdown_says, html_says, text_says = read_markdown(page), read_html(web), read_text(view, columns)
    same(markdown_says, json_says)
    same(html_says, json_says)
    same(text_says, json_says, advice=False)
    shown = squeezed(plain(view, columns)) if json_says.advice else ""
    assert all(sentence in shown for sentence in json_says.advice)

    begin = {ExitCode.INVALID: "Broken", ExitCode.NO: "Failed", ExitCode.OK: "Passed" if required else ""}[code]
    for said in (text_says, markdown_says, html_says):
        assert said.verdict.startswith(begin)
        assert bool(said.verdict) == (bool(begin) or not inspection.subject.description.layers)
    assert squeezed(html_says.verdict) == squeezed(markdown_says.verdict)
    check_annotations(view, json_says, code)


def check_annotations(view: View, said: Said, code: ExitCode) -> None:
    """Errors are what the exit code counts, reason by reason; and stderr has the same."""

    def raw(value: str) -> str:
        return value.replace("%0A", "\n").replace("%0D", "\r").replace("%3A", ":").replace("%2C", ",").replace("%25", "%")

    parsed = [re.fullmatch(r"::(error|warning) title=([^:,]*)::(.*)", line) for line in map(annotation, view.complaints)]
    commands = [(found[1], raw(found[2]), raw(found[3])) for found in parsed if found]
    assert len(commands) == len(parsed)
    errors = [(title, message) for level, title, message in commands if level == "error"]
    assert bool(errors) == bool(code)
    answers = {a.name: a for a in view.found.answers}
    wanted = set()
    for name, (shown, _) in said.required.items():
        for r in answers[name].model.reasons:
            saying = {"unsafe": "is unsafe", "unknown": "is not known to fuse"}.get(shown, "does not fuse")
            wanted.add((f"{name} {saying}", f"{r.code}: {r.message}" + (f" -> {r.hint}" if r.hint else "")))
    wanted |= {(p.code, f"{p}" + (f" -> {p.hint}" if p.hint else "")) for p in view.found.problems}
    assert set(errors) == wanted
    on_stderr = {(p.code, p.hint) for p in view.errors}
    assert on_stderr == {
        ("not-fused" if said_ else p.code, p.hint) for said_, p in ((c.said, c.problem) for c in view.complaints if c.error)
    }


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.FUSED])
def test_nothing_is_green_that_is_not_fused(outcome: Outcome) -> None:
    """Of one target with one outcome no form shows the colour, the mark or the word of a fused one."""
    verdict = Verdict(outcome, (Reason("why", "because", hint="do that"),))
    answer = next(a for a in ANSWERS if a.name == "vllm-0.33")
    answer = replace(answer, layers=(verdict,) * len(answer.layers), model=verdict)
    inspection = Inspection(CHECKPOINT, SUBJECT, (answer,), None, Advice(), (), (), (), (), converted=False)
    view = View(inspection, (), ["vllm-0.33"])
    out = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", markup=False, highlight=False)
    for part in text(view, 100):
        out.print(part)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m" not in shown
    assert "█" not in shown
    assert ":white_check_mark:" not in markdown(view)
    assert 'class="fused"' not in html(view)
    assert "mark fused" not in html(view)
    assert '"fused": true' not in dump(inspection_record(view))
    assert view.exit_code is ExitCode.NO
