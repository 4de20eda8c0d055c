"""What every form of an inspection's report says, before it is text: rows of targets, folded layers, footnotes, costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from fse_convert.inspection import Inspection
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.advice import releases
from fse_convert.report.common import size
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.targets import CONTRACT, TARGETS, HeldTwice
from fse_convert.servers.verdict import Outcome, Reason

UNSUPPORTED_MODEL = frozenset({"model-unsupported", "aiter-family-unsupported"})
"""Reasons that say nothing about the checkpoint beyond its model type: such targets share one line."""
WORDS = {
    Outcome.FUSED: "fused",
    Outcome.UNFUSED: "not fused",
    Outcome.REFUSED: "refused",
    Outcome.ERROR: "error",
    Outcome.UNKNOWN: "unknown",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring targets with one answer: their outcome per layer and as a whole, reasons and doubts."""

    answers: tuple[Answer, ...]

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


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one question, and the targets that have no path for this model at all, by what is said of them."""

    question: Question
    rows: tuple[Row, ...]
    silent: tuple[tuple[str, tuple[str, ...]], ...]


def sections(found: Inspection, *, everything: bool = False) -> list[Section]:
    """Arrange the answers by question. ``everything``: bare contracts and targets without a path get rows too."""
    listed = []
    for question in Question:
        answers = [a for a in found.answers if a.question is question and (everything or a.engine != CONTRACT)]
        silent = [] if everything else [a for a in answers if _is_silent(a)]
        rows = tuple(_rows(a for a in answers if a not in silent))
        if answers:
            listed.append(Section(question, rows, tuple(_silent_lines(silent))))
    return listed


def _is_silent(answer: Answer) -> bool:
    codes = {r.code for v in answer.layers for r in v.reasons} | {r.code for r in answer.model.reasons}
    return bool(codes) and codes <= UNSUPPORTED_MODEL


def _silent_lines(answers: Iterable[Answer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    by_outcome: dict[str, list[str]] = {}
    for a in answers:
        what = "not known for this model" if a.model.outcome is Outcome.UNKNOWN else "no path for this model"
        by_outcome.setdefault(what, []).append(a.name)
    yield from ((what, tuple(names)) for what, names in by_outcome.items())


def _rows(answers: Iterable[Answer]) -> Iterator[Row]:
    def alike(a: Answer) -> tuple[object, ...]:
        reasons = [r.code for r in a.model.reasons]
        layers = [(v.outcome, tuple(r.code for r in v.reasons)) for v in a.layers]
        return (a.engine, a.started_with, a.model.outcome, reasons, layers, [n.code for n in a.notes])

    yield from (Row(tuple(group)) for _, group in groupby(answers, alike))


class Footnotes:
    """Every distinct reason of some rows, numbered in the order of its first row."""

    def __init__(self, rows: Iterable[Row]) -> None:
        found: dict[tuple[str, str], Reason] = {}
        for row in rows:
            for reason in row.reasons:
                found.setdefault((reason.code, reason.message), reason)
        self.entries = tuple(enumerate(found.values(), 1))
        self._numbers = {key: number for number, key in enumerate(found, 1)}

    def of(self, row: Row) -> str:
        """The numbers of a row's reasons: ``3, 5``."""
        return ", ".join(dict.fromkeys(str(self._numbers[r.code, r.message]) for r in row.reasons))


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
        return (d.layer.kind is LayerKind.MTP, _routed(d), _shared(d), tuple(p.code for p in d.problems))

    rows = []
    for _, group in groupby(description.layers, alike):
        layers = list(group)
        name = span([d.layer.name for d in layers])
        problem = ", ".join(dict.fromkeys(p.code for p in layers[0].problems))
        rows.append(LayerRow(name, _routed(layers[0]), _shared(layers[0]), problem))
    return rows


def span(names: list[str]) -> str:
    """Name a run of layers: ``layers.0..39.ffn (40)``."""
    first, last = names[0].split("."), names[-1].split(".")
    if len(names) == 1:
        return names[0]
    different = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    if len(first) != len(last) or len(different) != 1:
        return f"{names[0]} .. {names[-1]} ({len(names)})"
    first[different[0]] += f"..{last[different[0]]}"
    return f"{'.'.join(first)} ({len(names)})"


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


def headline(found: Inspection) -> str:
    """What was inspected, in a line."""
    description, checkpoint = found.description, found.checkpoint
    family = description.family.name if description.family else "unknown family"
    parts = [
        f"{family} ({description.model_type or 'no model_type'})",
        *(["converted by fse-convert"] if found.converted else []),
        f"{len(checkpoint.shards)} shards",
        f"{len(checkpoint.tensors):,} tensors",
        size(checkpoint.total_size),
    ]
    quantization = found.subject.quantization
    if quantization.quantized:
        block = f" {quantization.block[0]}x{quantization.block[1]}" if quantization.block else ""
        algo = quantization.moe_quant_algo or quantization.quant_algo
        parts.append(f"{quantization.method or 'no quant_method'}{block}{f' {algo}' if algo else ''} by {quantization.source}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CostRow:
    """One figure: what, bytes on disk, bytes per rank, and a remark; empty where it does not apply."""

    what: str
    disk: str = ""
    rank: str = ""
    remark: str = ""


def cost_rows(found: Inspection) -> list[CostRow]:
    """The costs as rows."""
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


def gib(n: float) -> str:
    """Bytes in GiB, so that figures compare at a glance; small ones in their own unit."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**26 else size(n)


def gain_cost(found: Inspection) -> str:
    """What the advised padding costs, in brackets."""
    gain, c = found.advice.gain, found.costs
    if gain is None or c is None or gain.contract not in c.paddings:
        return ""
    p = c.paddings[gain.contract]
    return f"(+{gib(p.disk)} on disk, +{gib(p.per_rank(c.serving))} per rank at EP {c.serving.ep})"
