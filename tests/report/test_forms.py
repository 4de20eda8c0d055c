"""The five forms of a report say the same: read back, each has the outcomes, reasons, hints and exit code of the others."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fse_convert.errors import ExitCode, Problem
from fse_convert.inspection import Inspection
from fse_convert.plan.advice import TOPICS, Advice
from fse_convert.report.inspection.pages import html, markdown, workflow_commands
from fse_convert.report.inspection.records import inspection_record
from fse_convert.report.inspection.text import text
from fse_convert.report.inspection.view import View
from fse_convert.report.records import dump
from fse_convert.servers.judge import ALL_TARGETS, Answer, judge
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict, whole
from fse_convert.testing.memory import Model, checkpoint

MODEL = Model(layers=2, mtp=1)
CHECKPOINT = checkpoint(MODEL.full_config(), MODEL.tensors())
SUBJECT = MODEL.subject()
ANSWERS = judge(SUBJECT)
UNKNOWN = Model(layers=1, mtp=0, config={"model_type": "newcomer"}).subject()
OWN = "own-release"
"""The code of a reason that names its own release."""
CELLS = r"[█░▲x!?]+(?: [█░▲x!?]+)?"
MARKS = {
    ":white_check_mark:": "fused",
    ":x:": "not fused",
    ":warning:": "unsafe",
    ":no_entry:": "refused",
    ":boom:": "error",
    ":grey_question:": "unknown",
}


def word(outcome: str) -> str:
    return "not fused" if outcome == "unfused" else outcome


# Inspections


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


# Reading back


Answered = tuple[str, frozenset[tuple[str, str, str]]]
"""The word of an answer, and its reasons: code, message, hint."""


@dataclass
class Said:
    """What a form says. ``rows``: word and reasons (code, message, hint) by label; ``silent``: word by name."""

    verdict: str = ""
    required: dict[str, Answered] = field(default_factory=dict)
    rows: dict[str, Answered] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    remarks: list[tuple[str, str, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def squeezed(value: str) -> str:
    return " ".join(value.split())


def of_hint(told: str) -> tuple[str, str]:
    message, _, hint = told.partition(" -> ")
    return squeezed(message), squeezed(hint)


def answered(answer: str, numbers: Sequence[str], found: Sequence[tuple[str, str, str]]) -> Answered:
    """The word of an answer, with the reasons that its numbers lead to; every number leads somewhere."""
    return answer, frozenset(found[int(n) - 1] for n in numbers)


def plain(view: View, columns: int) -> str:
    out = Console(file=io.StringIO(), width=columns, force_terminal=False, markup=False, highlight=False, emoji=False)
    for part in text(view, columns):
        out.print(part)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= columns for line in shown.splitlines())
    return str(shown)


def blocks(lines: Sequence[str], start: str, more: str = " {4,}") -> list[str]:
    """Lines that begin in some way, each joined with those that continue it."""
    found: list[list[str]] = []
    open_block = False
    for line in lines:
        if re.match(start, line):
            found.append([line])
            open_block = True
        elif open_block and re.match(rf"{more}\S", line):
            found[-1].append(line.strip())
        else:
            open_block = False
    return [" ".join(block).rstrip() for block in found]


def read_row(block: str, label: str, listed: Sequence[tuple[str, str, str]]) -> tuple[str, Answered]:
    found = re.fullmatch(rf"  {label}  +(?:{CELLS}  )?(mixed \d+/\d+|[a-z ]+?)((?: [\d, ]+)?)", block)
    assert found, block
    return found[1], answered(found[2], re.findall(r"\d+", found[3]), listed)


def read_text(view: View, columns: int) -> Said:
    said, lines = Said(), [line.rstrip() for line in plain(view, columns).splitlines()]
    reasons = [re.fullmatch(r" *\d+ ([a-z-]+): (.*)", block) for block in blocks(lines, r" {2,}\d+ [a-z-]+: ")]
    listed = [(found[1], *of_hint(found[2])) for found in reasons if found]
    if found := re.search(r"(?m)^(Broken, |Failed: |Passed: |Unknown: )", "\n".join(lines)):
        said.verdict = found[0]
    said.required = dict(read_row(b, r"required: (\S+)", listed) for b in blocks(lines, "  required: "))
    said.rows = dict(
        read_row(b, r"(\S+)", listed)
        for b in blocks(
            lines, rf"  [a-z]\S+ +(?:{CELLS}  )?(?:fused|not fused|unsafe|refused|error|unknown|mixed \d+/\d+)(?: \d|$)"
        )
    )
    for block in blocks(lines, r"  (?:not fused|refused|error|unsafe|unknown), no (?:path|rule)", "  (?=[a-z0-9.-]+(,|$| +$))"):
        word_, _, names = squeezed(block).partition(": ")
        said.silent |= dict.fromkeys(names.split(", "), word_.partition(",")[0])
    for block in blocks(lines, r"note\[", " {2,}"):
        code, _, told = block.removeprefix("note[").partition("]: ")
        said.remarks.append((code, *of_hint(told)))
    return said


def read_markdown(page: str) -> Said:
    said, lines = Said(), page.splitlines()

    def raw(value: str) -> str:
        return value.replace("\\|", "|").replace("&lt;", "<")

    listed = [(found[1], *of_hint(raw(found[2]))) for line in lines if (found := re.fullmatch(r"\d+\. `([a-z-]+)`: (.*)", line))]
    remarks = lines[max((i for i, line in enumerate(lines) if re.match(r"#|\||\d+\. ", line)), default=0) :]
    for line in lines:
        if found := re.fullmatch(r"- (:\w+:) required: `(\S+)` (mixed \d+/\d+|[a-z ]+?)(?: ([\d, ]+))?", line):
            assert MARKS[found[1]] == ("not fused" if found[3].startswith("mixed") else found[3])
            said.required[found[2]] = answered(found[3], (found[4] or "").split(", ") if found[4] else [], listed)
        elif found := re.fullmatch(
            r"\| (\S+) \| (:\w+:) (mixed \d+/\d+|[a-z ]+) \| \S*(?: \(\d+\))?(?: .*)? ?\| ([\d, ]*) ?\|", line
        ):
            assert MARKS[found[2]] == ("not fused" if found[3].startswith("mixed") else found[3])
            said.rows[found[1]] = answered(found[3], re.findall(r"\d+", found[4]), listed)
        elif found := re.fullmatch(r"([a-z ]+), no (?:path|rule) for this model: (.*)", line):
            said.silent |= dict.fromkeys(found[2].split(", "), found[1])
        elif found := re.fullmatch(r"\*\*(.*)\*\*", line):
            said.verdict = raw(found[1])
        elif found := re.fullmatch(r"- \*\*(.*)\*\*", line):
            said.advice.append(raw(found[1]))
    for line in remarks:
        if found := re.fullmatch(r"- `([a-z-]+)` (.*)", line):
            said.remarks.append((found[1], *of_hint(raw(found[2]))))
    return said


class Page(HTMLParser):
    """What an HTML report says, by the roles of its elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.path: list[tuple[str, str]] = []
        self.items: list[tuple[str, str, str]] = []
        self.lists: dict[str, list[tuple[str, str, str]]] = {"reasons": [], "remarks": [], "problems": []}
        self.answers: list[dict[str, str]] = []
        self.silent: list[str] = []
        self.verdict, self.advice, self.colours = "", [], []  # type: ignore[var-annotated]
        self.topic = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        name = values.get("class", "")
        if tag not in ("meta",):
            self.path.append((tag, name))
        if tag == "li" or (tag == "tr" and any(n == "answers" for _, n in self.path)):
            self.answers.append({"label": "", "word": "", "numbers": "", "mark": "", "code": "", "text": "", "hint": ""})
        if name.startswith("mark ") and self.answers and self.inside("li", "tr"):
            self.answers[-1]["mark"] = name.split()[1]
        if tag == "p" and name == "dim":
            self.silent.append("")
        if tag == "p" and name == "advice":
            self.advice.append(f"{self.topic}: " if self.topic in TOPICS.values() else "")
        if tag == "h2":
            self.topic = ""

    def inside(self, *tags: str) -> bool:
        return any(tag in tags for tag, _ in self.path)

    def handle_endtag(self, tag: str) -> None:
        popped, _ = self.path.pop()
        assert popped == tag
        if tag == "li":
            item = self.answers[-1]
            kind = next((n for _, n in reversed(self.path) if n in self.lists), "")
            if kind:
                hint = squeezed(item["hint"]).removeprefix("-> ")
                self.lists[kind].append((item["code"], squeezed(item["text"]), hint))

    def handle_data(self, data: str) -> None:
        tag, name = self.path[-1] if self.path else ("", "")
        if name.startswith("verdict"):
            self.verdict += data
        elif name == "advice":
            self.advice[-1] += data
        elif tag == "h2":
            self.topic += data
        elif tag == "p" and name == "dim":
            self.silent[-1] += data
        elif self.inside("li") or any(n == "answers" for _, n in self.path):
            key = {"b": "word", "a": "numbers", "code": "code", "th": "label"}.get(tag) or {"hint": "hint", "target": "label"}.get(
                name
            )
            key = key or ("text" if tag == "li" else "")
            if key and self.answers:
                self.answers[-1][key] += f" {data}" if key == "numbers" else data


def read_html(page: str) -> Said:
    parser = Page()
    parser.feed(page)
    assert parser.path == []
    said, listed = Said(), parser.lists["reasons"]
    said.verdict, said.remarks, said.advice = (
        squeezed(parser.verdict),
        parser.lists["remarks"],
        [squeezed(a) for a in parser.advice],
    )
    for item in parser.answers:
        if not item["word"]:
            continue
        shown = answered(item["word"], item["numbers"].split(), listed)
        assert word(item["mark"]) == ("not fused" if item["word"].startswith("mixed") else item["word"])
        (said.required if "required" in item["text"] else said.rows)[item["label"]] = shown
    for line in parser.silent:
        if found := re.fullmatch(r"([a-z ]+), no (?:path|rule) for this model: (.*)", squeezed(line)):
            said.silent |= dict.fromkeys(found[2].split(", "), found[1])
    return said


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

    parsed = [re.fullmatch(r"::(error|warning) title=([^:,]*)::(.*)", line) for line in workflow_commands(view)]
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
