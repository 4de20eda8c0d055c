"""What a report of an inspection says, in every format: headline, folded layers, rows of targets, footnotes, costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fse_convert.inspection import Inspection
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.advice import releases
from fse_convert.report.console import counted, problem_lines, runs, size, span
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.targets import CONTRACT, TARGETS, HeldTwice
from fse_convert.servers.verdict import Outcome, Reason, Verdict

UNSUPPORTED_MODEL = frozenset({"model-unsupported", "aiter-family-unsupported"})
"""Reasons that say nothing about the checkpoint beyond its model type: such targets share one line."""
WORDS = {
    Outcome.FUSED: "fused",
    Outcome.UNFUSED: "not fused",
    Outcome.UNSAFE: "unsafe",
    Outcome.REFUSED: "refused",
    Outcome.ERROR: "error",
    Outcome.UNKNOWN: "unknown",
}


class View:
    """A report of an inspection, part by part; a format leaves out the parts that it has no place for.

    ``names``: targets that the user asked for, all of which get a row; ``required``: those that must fuse. ``reasons``: every
    distinct one of the rows, in the order of its first row; the first has the number 1. ``remarks``: what is not understood,
    where config and headers contradict each other, and what to know.
    """

    def __init__(self, found: Inspection, names: Sequence[str] = (), required: Sequence[str] = ()) -> None:
        self.found = found
        self.headline = headline(found)
        self.required = [a for a in found.answers if a.name in required]
        self.layers = layer_rows(found.description)
        self.sections = sections(found, everything=bool(names))
        self.rows = [row for section in self.sections for row in section.rows]
        distinct: dict[tuple[str, str], Reason] = {}
        for reason in (r for row in self.rows for r in row.reasons):
            distinct.setdefault((reason.code, reason.message), reason)
        self.reasons = list(distinct.values())
        self._numbers = {key: str(number) for number, key in enumerate(distinct, 1)}
        self.remarks = [*found.unsupported, *found.conflicts, *found.notes]
        self.costs = cost_rows(found)
        self.advised_cost = advised_cost(found)

    def numbers(self, row: Row) -> str:
        """Return the numbers of a row's reasons: ``3, 5``."""
        return ", ".join(dict.fromkeys(self._numbers[r.code, r.message] for r in row.reasons))


def headline(found: Inspection) -> str:
    """Say in a line what was inspected."""
    description, checkpoint, quantization = found.description, found.checkpoint, found.subject.quantization
    family = description.family.name if description.family else "unknown family"
    parts = [
        f"{family} ({description.model_type or 'no model_type'})",
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


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring targets with one answer, and the layers that it is about."""

    answers: tuple[Answer, ...]
    layers: tuple[LayerDescription, ...]

    @property
    def first(self) -> Answer:
        """The answer that stands for all."""
        return self.answers[0]

    @property
    def label(self) -> str:
        """``vllm-0.31..33``: the first name, with the last release's own digits."""
        first, last = self.first.release, self.answers[-1].release
        if len(self.answers) == 1:
            return self.first.name
        pairs = zip(first.split("."), last.split("."), strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        return self.first.name.replace(first, f"{first}..{'.'.join(last.split('.')[same:])}", 1)

    @property
    def word(self) -> str:
        """The outcome in a word or two; ``mixed 40/43`` where only some layers fuse."""
        fused = sum(v.fused for v in self.first.layers)
        if 0 < fused < len(self.first.layers) and self.first.model.outcome is not Outcome.ERROR:
            return f"mixed {fused}/{len(self.first.layers)}"
        return WORDS[self.first.model.outcome]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why not, and what to know: of the model as a whole, of layers, and doubts."""
        layers = (r for v in self.first.layers for r in v.reasons)
        return tuple(dict.fromkeys((*self.first.model.reasons, *layers, *self.first.notes)))

    @property
    def cells(self) -> list[list[tuple[Outcome, str]]]:
        """Outcome and title of one cell per layer, decoder and drafter layers apart."""
        pairs = list(zip(self.layers, self.first.layers, strict=True))
        kinds = ([(v.outcome, _title(d, v)) for d, v in pairs if d.layer.kind is kind] for kind in LayerKind)
        return [cells for cells in kinds if cells]

    @property
    def unfused(self) -> str:
        """The layers that do not fuse; none or all need no names."""
        names = [d.layer.name for d, v in zip(self.layers, self.first.layers, strict=True) if not v.fused]
        if not names:
            return ""
        return "all" if len(names) == len(self.layers) else f"`{span(names)}`"


def _title(d: LayerDescription, verdict: Verdict) -> str:
    codes = ", ".join(r.code for r in verdict.reasons)
    return f"{d.layer.name}: {verdict.outcome.value}{f' ({codes})' if codes else ''}"


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one question, and the targets that have no path for this model at all, by what is said of them."""

    question: Question
    rows: tuple[Row, ...]
    silent: dict[str, list[str]]


def sections(found: Inspection, *, everything: bool = False) -> list[Section]:
    """Arrange the answers by question. ``everything``: bare contracts and targets without a path get rows too."""
    listed = []
    for question in Question:
        answers = [a for a in found.answers if a.question is question and (everything or a.engine != CONTRACT)]
        silent = [] if everything else [a for a in answers if _is_silent(a)]
        if answers:
            rows = _rows((a for a in answers if a not in silent), found.description.layers)
            listed.append(Section(question, tuple(rows), _by_outcome(silent)))
    return listed


def _is_silent(answer: Answer) -> bool:
    codes = {r.code for v in answer.layers for r in v.reasons} | {r.code for r in answer.model.reasons}
    return bool(codes) and codes <= UNSUPPORTED_MODEL


def _by_outcome(answers: Iterable[Answer]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for a in answers:
        what = "not known for this model" if a.model.outcome is Outcome.UNKNOWN else "no path for this model"
        names.setdefault(what, []).append(a.name)
    return names


def _rows(answers: Iterable[Answer], layers: tuple[LayerDescription, ...]) -> Iterator[Row]:
    def alike(a: Answer) -> tuple[object, ...]:
        reasons = [r.code for r in a.model.reasons]
        verdicts = [(v.outcome, tuple(r.code for r in v.reasons)) for v in a.layers]
        return (a.engine, a.started_with, a.model.outcome, reasons, verdicts, [n.code for n in a.notes])

    yield from (Row(tuple(group), layers) for _, group in groupby(answers, alike))


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
        return (d.layer.kind is LayerKind.MTP, _routed(d), _shared(d), _problem(d))

    folded = runs(description.layers, alike, lambda d: d.layer.name)
    return [LayerRow(name, _routed(d), _shared(d), _problem(d)) for name, d in folded]


def _routed(d: LayerDescription) -> str:
    if d.layer.stacked:
        t = d.layer.stacked[0]
        return f"one tensor {t.dtype} {list(t.shape)}"
    count = len(d.layer.routed)
    if d.routed is None:
        return f"{count} x ?" if count else "no routed experts"
    return f"{count} x {d.routed.label}, {d.routed.width} wide"


def _shared(d: LayerDescription) -> str:
    if d.layer.shared is None:
        return "no shared expert"
    gated = " (gated)" if d.layer.gate_tensor else ""
    return f"shared {d.shared.label}, {d.shared.width} wide{gated}" if d.shared else f"shared ?{gated}"


def _problem(d: LayerDescription) -> str:
    return ", ".join(dict.fromkeys(p.code for p in d.problems))


@dataclass(frozen=True, slots=True)
class CostRow:
    """One figure: what, bytes on disk, bytes per rank, and a remark; empty where it does not apply."""

    what: str
    disk: str = ""
    rank: str = ""
    remark: str = ""


def cost_rows(found: Inspection) -> list[CostRow]:
    """Return the costs as rows."""
    c = found.costs
    if c is None:
        return []
    stored = c.decoder.per_rank(c.serving) + c.mtp.per_rank(c.serving)
    rows = [CostRow("experts as stored", gib(c.decoder.total + c.mtp.total), gib(stored))]
    if c.shared_kernel:
        sharded = f", {gib(c.shared_sharded)} sharded over TP {c.serving.tp}" if c.serving.tp > 1 else ""
        remark = f"kept twice {gib(2 * c.shared_kernel)}{sharded}"
        rows.append(CostRow("shared experts in the kernel, decoder layers", "", gib(c.shared_kernel), remark))
    for contract, p in c.paddings.items():
        what = f"padding {p.width} to {p.new_width} ({contract})"
        rows.append(CostRow(what, f"+{gib(p.disk)}", f"+{gib(p.per_rank(c.serving))}", f"{p.work - 1:+.0%} expert work"))
    d = c.duplicates
    if d.sglang_scales and found.description.model_type.startswith("deepseek_v4"):
        loading = f"{gib(d.sglang_loading)} while loading"
        rows.append(CostRow(_duplicate(HeldTwice.ROUTED_SCALES), "", f"+{gib(d.sglang_scales)}", loading))
        rows.append(CostRow(_duplicate(HeldTwice.SHARED_GATE_UP), "", f"+{gib(d.sglang_shared)}", "where it fuses"))
    return rows


def _duplicate(what: HeldTwice) -> str:
    """Name what is held twice, and the releases whose rows say that they do."""
    return f"duplicates, {releases((t for t in TARGETS if what in t.held_twice), TARGETS)}: {what.value}"


def advised_cost(found: Inspection) -> str:
    """Say in brackets what the advised padding costs."""
    gain, c = found.advice.gain, found.costs
    if gain is None or c is None or gain.contract not in c.paddings:
        return ""
    p = c.paddings[gain.contract]
    return f"(+{gib(p.disk)} on disk, +{gib(p.per_rank(c.serving))} per rank at EP {c.serving.ep})"


def gib(n: float) -> str:
    """Return bytes in GiB, so that figures compare at a glance; small ones in their own unit."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**26 else size(n)


def complaints(found: Inspection, required: Sequence[str]) -> list[str]:
    """Return the lines for stderr: everything that is broken, and the required targets that do not fuse, with every reason."""
    problems = (*found.problems, *(found.contradictions if required else ()))
    lines = [line for problem in problems for line in problem_lines(problem)]
    for answer in found.failing(required):
        reasons = "; ".join(f"{r.code}: {r.message}" for r in answer.model.reasons)
        lines.append(f"error[not-fused]: {answer.name} does not fuse every layer: {reasons}")
    return lines
