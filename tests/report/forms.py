"""What the forms of a report say, read back: text, Markdown and HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from rich.console import Console

from fse_convert.plan.advice import TOPICS
from fse_convert.report.inspection.text import text
from fse_convert.report.inspection.view import View

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
        if tag not in ("meta", "wbr"):
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
