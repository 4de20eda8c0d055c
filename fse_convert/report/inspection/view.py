"""What a report of an inspection says, the same in every form: verdict, advice, layers, answers by question, reasons, costs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fse_convert.errors import Problem, counted, size
from fse_convert.inspection import Inspection
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.advice import NO_PATH, TOPICS, told_family
from fse_convert.report.console import gathered, runs, span
from fse_convert.report.inspection.costs import advised_cost, cost_rows, cost_words
from fse_convert.servers.commands import serve_command
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.release_names import server_of
from fse_convert.servers.targets import CONTRACT
from fse_convert.servers.verdict import Outcome, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Look:
    """An outcome in a report: its word, its cell in a strip (also in ASCII), its colour on a terminal, its mark on GitHub."""

    word: str
    cell: str
    plain: str
    color: str
    mark: str


LOOKS = {
    Outcome.UNSAFE: Look("unsafe", "▲", "^", "bold red", ":warning:"),
    Outcome.ERROR: Look("error", "!", "!", "red", ":boom:"),
    Outcome.REFUSED: Look("refused", "x", "x", "red", ":no_entry:"),
    Outcome.UNKNOWN: Look("unknown", "?", "?", "magenta", ":grey_question:"),
    Outcome.UNFUSED: Look("not fused", "░", "-", "yellow", ":x:"),
    Outcome.FUSED: Look("fused", "█", "#", "green", ":white_check_mark:"),
}
"""The worst first: where a cell stands for several layers, it is the worst of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer, of neighbouring releases: what becomes of the layers, and why.

    ``names``: the targets, ``label``: them all, as ``vllm-0.31..33``. ``word``: the outcome, or ``mixed 40/43`` where only some
    layers fuse. ``cells``: outcome and title of each layer, decoder and drafter layers apart. ``unfused``: the layers that do
    not fuse, ``all`` or none. ``reasons``: why not, and what to know, with ``numbers`` in the list of all.
    """

    names: tuple[str, ...]
    label: str
    needs: str
    outcome: Outcome
    word: str
    cells: tuple[tuple[tuple[Outcome, str], ...], ...]
    unfused: str
    reasons: tuple[Reason, ...]
    numbers: str = ""

    @property
    def look(self) -> Look:
        """The look of the outcome."""
        return LOOKS[self.outcome]

    @property
    def fused(self) -> bool:
        """True where every layer fuses, and the model as a whole."""
        return self.outcome is Outcome.FUSED

    @property
    def decoder_fused(self) -> bool:
        """True where there are layers of a drafter, and all others fuse; the server may still refuse the model as a whole."""
        starts = self.outcome in (Outcome.UNFUSED, Outcome.UNSAFE)
        return starts and len(self.cells) == len(LayerKind) and all(outcome is Outcome.FUSED for outcome, _ in self.cells[0])

    @property
    def strip(self) -> str:
        """The cells in words."""
        cells = [outcome for group in self.cells for outcome, _ in group]
        rest = f", not: {self.unfused}" if self.unfused else ""
        return f"{cells.count(Outcome.FUSED)} of {counted(len(cells), 'layer')} fused{rest}"


@dataclass(frozen=True, slots=True)
class Section:
    """The answers to one question: rows, and by what they say targets whose answer is about the model type alone."""

    question: Question
    rows: tuple[Row, ...]
    silent: dict[str, list[str]]

    @property
    def needs(self) -> dict[str, list[str]]:
        """Labels of rows by what their servers must be started with."""
        return gathered((row.needs, row.label) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Card:
    """One sentence of the advice: its topic, the rest, and who is meant: labels by word, each with its outcome."""

    topic: str
    sentence: str
    tally: dict[tuple[Outcome, str], list[str]]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What stderr and GitHub's annotations tell: an error, which the exit code counts, or a warning.

    ``said``: of a target, ``vllm-0.30 does not fuse``; empty where the problem is the checkpoint's.
    """

    error: bool
    said: str
    problem: Problem


class View:
    """A report of an inspection, part by part; a form that leaves a part out has no place for it.

    ``names``: targets that the user asked for, all of which get a row; ``required``: those that must fuse, which get one too.
    ``verdict``: what the exit code says, in words; empty where nothing is asked and nothing is wrong. ``reasons``: every
    distinct one of the rows; the first has the number 1. ``remarks``: what is not understood, where config and headers
    contradict each other, and what to know. ``legend``: the outcomes of layers, as they look. ``seen``: names
    that look like experts', where the family is not known though config.json could be read.
    """

    def __init__(self, found: Inspection, names: Sequence[str] = (), required: Sequence[str] = ()) -> None:
        self.found = found
        self.title = found.checkpoint.folder.label
        self.exit_code = found.exit_code(required)
        self.headline = headline(found)
        self.layers = layer_rows(found.description)
        self.seen = found.description.seen if found.checkpoint.config else ()
        sections = _sections(found, frozenset(required), everything=bool(names))
        self.reasons = list(dict.fromkeys(reason for section in sections for row in section.rows for reason in row.reasons))
        self.sections = [replace(s, rows=tuple(map(self._numbered, s.rows))) for s in sections]
        self.rows = [row for section in self.sections for row in section.rows]
        shown = {outcome for row in self.rows for cells in row.cells for outcome, _ in cells}
        self.legend = [(outcome, look) for outcome, look in reversed(LOOKS.items()) if outcome in shown]
        self.required = [replace(row, names=(name,), label=name) for row in self.rows for name in row.names if name in required]
        self.verdict = self._verdict()
        self.remarks = [*found.unsupported, *found.conflicts, *found.notes]
        self.complaints = list(self._complaints([a for a in found.answers if a.name in required]))
        self.costs = cost_rows(found)
        self.cost_title, self.cost_note = cost_words(found.costs) if found.costs else ("", "")
        self.advised_cost = advised_cost(found)
        self.offers = [*(found.ranks.lines() if found.ranks else ()), *found.offers.lines()]

    def _numbered(self, row: Row) -> Row:
        return replace(row, numbers=", ".join(str(self.reasons.index(r) + 1) for r in row.reasons))

    def _verdict(self) -> str:
        failing = [row.label for row in self.required if not row.fused]
        if self.found.problems:
            return "Broken, see the errors; what follows rests on what could be read."
        if failing:
            drafter = ", ".join(row.label for row in self.required if not row.fused and row.decoder_fused)
            rest = f" Only the drafter's layers do not in {drafter}: --without-drafter leaves them out." if drafter else ""
            return f"Failed: not every layer fuses safely in {', '.join(failing)}.{rest}"
        if self.required:
            return f"Passed: every layer fuses in {', '.join(row.label for row in self.required)}."
        if not self.found.description.layers and self.found.answers:
            model = self.found.answers[0].model
            return " ".join(f"{LOOKS[model.outcome].word.capitalize()}: {told(r)}" for r in model.reasons)
        return ""

    @property
    def name(self) -> str:
        """The name of the folder or repository."""
        return self.title.rstrip("/").rpartition("/")[2] or self.title

    @property
    def troubled(self) -> bool:
        """Whether some layer has a problem."""
        return any(row.problem for row in self.layers)

    @property
    def revision(self) -> str:
        """The commit of a checkpoint that has one."""
        return str(getattr(self.found.checkpoint.folder, "commit", ""))

    @property
    def cards(self) -> Iterator[Card]:
        """The advice at a glance, a card per sentence."""
        sections = {TOPICS[s.question]: s for s in self.sections}
        for sentence in self.found.advice.sentences:
            topic, _, rest = sentence.partition(": ")
            rows = sections[topic].rows if topic in sections else ()
            known = topic in TOPICS.values()
            best_first = sorted(rows, key=lambda row: -list(LOOKS).index(row.outcome))
            tally = gathered(((row.outcome, row.word), row.label) for row in best_first)
            yield Card(topic if known else "", rest if known else sentence, tally)

    @property
    def next_steps(self) -> list[str]:
        """The command that serves the checkpoint with fusion: by a required server, else by the newest that fuses it."""
        fused = [a for a in self.found.answers if a.fused]
        required = [a for a in fused if a.name in {row.label for row in self.required}]
        place, model_type = shlex.quote(self.title), self.found.description.model_type
        if self.revision:
            place = f"{self.title.removeprefix('hf://').removesuffix(f'@{self.revision}')} --revision {self.revision}"
        served = required or [a for a in fused if a.question is Question.NATIVE]
        fse, tp = self.found.converted, self.found.costs.serving.tp if self.found.costs else 1
        by_engine = {a.engine: serve_command(a, place, model_type, fse=fse, tp=tp) for a in served}
        return [] if self.exit_code else [command for command in by_engine.values() if command]

    def _complaints(self, required: Sequence[Answer]) -> Iterator[Complaint]:
        yield from (Complaint(error=True, said="", problem=p) for p in self.found.problems)
        for a in required:
            verb = {Outcome.UNSAFE: "is unsafe", Outcome.UNKNOWN: "is not known to fuse"}.get(a.model.outcome, "does not fuse")
            said = f"{a.name} {verb}"
            for r in () if a.fused else a.model.reasons or (Reason("not-fused", LOOKS[a.model.outcome].word),):
                yield Complaint(error=True, said=said, problem=r)
        yield from (Complaint(error=False, said="", problem=p) for p in (*self.found.unsupported, *self.found.conflicts))
        for a in required:
            yield from (Complaint(error=False, said=a.name, problem=n) for n in a.notes if a.fused)

    @property
    def errors(self) -> list[Problem]:
        """The errors for stderr."""
        return [
            replace(c.problem, code="not-fused", message=f"{c.said}: {c.problem.code}: {c.problem.message}")
            if c.said
            else c.problem
            for c in self.complaints
            if c.error
        ]


def told(problem: Problem) -> str:
    """Return a problem or reason with its hint in one sentence."""
    return f"{problem} -> {problem.hint}" if problem.hint else str(problem)


def headline(found: Inspection) -> str:
    """Say in a line what was inspected."""
    description, checkpoint, quantization = found.description, found.checkpoint, found.subject.quantization
    family = told_family(description) or "unknown family"
    parts = [
        f"{family} ({description.model_type or ('no model_type' if checkpoint.config else 'config.json could not be read')})",
        *(["converted by fse-convert"] if found.converted else []),
        counted(len(checkpoint.shards), "shard"),
        counted(len(checkpoint.tensors), "tensor"),
        size(checkpoint.total_size),
    ]
    if quantization.quantized:
        block = f" {quantization.block[0]}x{quantization.block[1]}" if quantization.block else ""
        algo = quantization.moe_quant_algo or quantization.quant_algo
        parts.append(f"{quantization.method or 'no quant_method'}{block}{f' {algo}' if algo else ''} by {quantization.source}")
    return ", ".join(parts)


def _sections(found: Inspection, required: frozenset[str], *, everything: bool) -> list[Section]:
    """Arrange the answers by question. ``everything``: bare contracts and targets without a path get rows too.

    Where a model has no layers to judge, all answers are the verdict, and only targets that were asked for get rows.
    """
    listed = []
    for question in Question:
        answers = [
            a for a in found.answers if a.question is question and (everything or a.engine != CONTRACT or a.name in required)
        ]
        silent = [] if everything else [a for a in answers if a.name not in required and _is_silent(a)]
        groups = groupby((a for a in answers if a not in silent), _alike)
        rows = tuple(_row(tuple(group), found.description.layers) for _, group in groups)
        listed.append(Section(question, rows, gathered(map(_silence, silent)) if found.description.layers else {}))
    return [s for s in listed if s.rows or s.silent]


def _is_silent(answer: Answer) -> bool:
    codes = {r.code for v in (answer.model, *answer.layers) for r in v.reasons}
    return not answer.layers or (bool(codes) and codes <= NO_PATH) or _falls_back(answer)


def _falls_back(answer: Answer) -> bool:
    """Tell whether the server goes on as another row says, without the kernel that the target is about."""
    return any(n.code == "aiter-heterogeneous" for n in answer.notes)


def _silence(answer: Answer) -> tuple[str, str]:
    why = f"no {'rule' if answer.model.outcome is Outcome.UNKNOWN else 'path'} for this model"
    if _falls_back(answer):
        why = "as without its kernel, which this model does not get"
    return f"{LOOKS[answer.model.outcome].word}, {why}", answer.name


def _generic(reason: Reason, release: str, name: str = "\0", hint: str = "\0") -> Reason:
    """Return a reason with another name where it names its own release; a hint may be a command, so it may get another one."""
    own = rf"(?<![\d.]){re.escape(release)}(?!\.?\d)"
    return replace(reason, message=re.sub(own, name, reason.message), hint=re.sub(own, hint, reason.hint))


def _alike(a: Answer) -> tuple[object, ...]:
    """Return what answers share that differ in nothing but the release that they name."""
    verdicts = [(v.outcome, [_generic(r, a.release) for r in v.reasons]) for v in (a.model, *a.layers)]
    return (server_of(a), a.started_with, verdicts, [_generic(n, a.release) for n in a.notes])


def _row(answers: tuple[Answer, ...], layers: tuple[LayerDescription, ...]) -> Row:
    first, model = answers[0], answers[0].model
    judged = list(zip(layers, first.layers, strict=True))
    unfused = [d.layer.name for d, v in judged if not v.fused]
    mixed = model.outcome is Outcome.UNFUSED and 0 < len(unfused) < len(judged)
    kinds = (tuple((v.outcome, _title(d, v)) for d, v in judged if d.layer.kind is kind) for kind in LayerKind)
    several = _range(first.release, answers[-1].release)
    reasons = (*model.reasons, *(r for v in first.layers for r in v.reasons), *first.notes)
    return Row(
        names=tuple(a.name for a in answers),
        label=first.name.replace(first.release, several, 1),
        needs=first.started_with,
        outcome=model.outcome,
        word=f"mixed {len(judged) - len(unfused)}/{len(judged)}" if mixed else LOOKS[model.outcome].word,
        cells=tuple(cells for cells in kinds if cells),
        unfused="" if not unfused else "all" if len(unfused) == len(judged) else span(unfused),
        reasons=tuple(dict.fromkeys(_generic(r, first.release, several, first.release) for r in reasons)),
    )


def _range(first: str, last: str) -> str:
    """Return ``0.31..33``: the first release, with the last one's own digits."""
    if first == last:
        return first
    parts = last.split(".")
    same = next((i for i, (a, b) in enumerate(zip(first.split("."), parts, strict=False)) if a != b), 0)
    return f"{first}..{'.'.join(parts[same:])}"


def _title(d: LayerDescription, verdict: Verdict) -> str:
    codes = ", ".join(r.code for r in verdict.reasons)
    return f"{d.layer.name}: {LOOKS[verdict.outcome].word}{f' ({codes})' if codes else ''}"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Neighbouring layers that look alike."""

    name: str
    routed: str
    shared: str
    problem: str


def layer_rows(description: Description) -> list[LayerRow]:
    """Fold layers that look alike into one row each."""

    def alike(d: LayerDescription) -> tuple[object, ...]:
        return (d.layer.kind is LayerKind.MTP, _routed(d), _shared(d), [p.code for p in d.problems])

    folded = runs(description.layers, alike, lambda d: d.layer.name)
    return [LayerRow(name, _routed(d), _shared(d), ", ".join(dict.fromkeys(p.code for p in d.problems))) for name, d in folded]


def _routed(d: LayerDescription) -> str:
    count = d.layer.count
    if d.routed is None and d.layer.stacked:
        t = d.layer.stacked[0]
        return f"one tensor {t.dtype} {list(t.shape)}"
    if d.routed is None:
        return f"{count} x ?" if count else "none"
    return f"{count} x {d.routed.label}, {d.routed.width} wide"


def _shared(d: LayerDescription) -> str:
    if d.layer.shared is None:
        return "none"
    return (f"{d.shared.label}, {d.shared.width} wide" if d.shared else "?") + (" (gated)" if d.layer.gate_tensor else "")
