"""The verdicts of every server on a checkpoint, per layer and per target, from headers and config alone.

Three questions with three names, never mixed: fusion inside NVIDIA's MegaMoE kernel (`fse_convert.servers.native`), vLLM's AITER
fused shared experts on AMD (`fse_convert.servers.aiter`), and slots for shared experts among the routed ones
(`fse_convert.servers.slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fse_convert.errors import Problem, UsageError
from fse_convert.model.description import Description
from fse_convert.model.quantization import Quantization
from fse_convert.servers.aiter.question import AITER_TARGETS, AiterTarget, ask_aiter, judge_layer, judge_whole, notes
from fse_convert.servers.aiter.vllm_config import NEWEST
from fse_convert.servers.naming import find_named
from fse_convert.servers.native import target_verdict
from fse_convert.servers.scales import UNREAD, Scales, f32_scales, with_scales
from fse_convert.servers.slots import SLOT_TARGETS, SlotTarget, slot_notes, slot_verdicts
from fse_convert.servers.targets import TARGETS, Target
from fse_convert.servers.verdict import Outcome, Reason, Verdict, because, whole


class Question(str, Enum):
    """The question that is asked of a server. The value is for people and machines alike."""

    NATIVE = "native-megamoe"
    AITER = "aiter-fse"
    SLOTS = "slots"

    @property
    def heading(self) -> str:
        """The question in words."""
        return {
            Question.NATIVE: "Native MegaMoE fusion (NVIDIA): the shared expert inside the routed kernel",
            Question.AITER: "AITER FSE (vLLM on AMD): the shared expert as an extra routed one, by quantisation config",
            Question.SLOTS: "Slot fusion (SGLang, ATOM): the shared expert as an extra routed one, by storage format",
        }[self]


AnyTarget = Target | AiterTarget | SlotTarget
ALL_TARGETS: tuple[AnyTarget, ...] = (*TARGETS, *AITER_TARGETS, *SLOT_TARGETS)
"""Every target that `judge` knows, in the order in which answers come."""


def find_convertible(name: str) -> Target:
    """Find the kernel contract or server release that a user wants to convert for. Raises UsageError."""
    target = find_named(name, ALL_TARGETS)
    if isinstance(target, Target):
        return target
    message = f"{target.name} is judged by inspect; there is no conversion for it"
    raise UsageError(Problem("target-inspect-only", message, "--target", f"fse-convert inspect CHECKPOINT --target {target.name}"))


@dataclass(frozen=True, slots=True)
class Answer:
    """One target's answer: a verdict per layer of the description, in its order, and one for the model as a whole.

    ``notes`` are what the verdicts do not say: doubts, and fusion that changes numbers.
    """

    name: str
    question: Question
    engine: str
    release: str
    started_with: str
    source: str
    layers: tuple[Verdict, ...]
    model: Verdict
    notes: tuple[Reason, ...] = ()

    @property
    def fused(self) -> bool:
        """True where every layer fuses, and the model as a whole."""
        return self.model.fused

    @property
    def objections(self) -> tuple[Reason, ...]:
        """The reasons not to publish a model on this answer: what keeps it from fusing, or makes fusing it wrong."""
        return (*self.model.reasons, *(n for n in self.notes if n.code in UNSAFE))

    @property
    def safe(self) -> bool:
        """True where it fuses, and nothing known says that it would then load wrongly."""
        return self.fused and not self.objections


UNSAFE = frozenset({"aiter-storage-differs", "scale-f32-unread", "scale-f32-rounded"})
"""Codes of notes by which a server that fuses does the wrong thing, or may do it for all that is known."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint as the rules see it. ``scales``: what reading the F32 scales showed, if they were read."""

    config: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    quantization: Quantization
    description: Description
    scales: Scales = UNREAD


def judge(checkpoint: Subject) -> tuple[Answer, ...]:
    """Answer for every target."""
    return tuple(_answer(checkpoint, target) for target in ALL_TARGETS)


def _answer(checkpoint: Subject, target: AnyTarget) -> Answer:
    if isinstance(target, Target):
        return _native(checkpoint, target)
    if isinstance(target, AiterTarget):
        return _aiter(checkpoint, target)
    verdicts = slot_verdicts(checkpoint.description, checkpoint.quantization, target)
    return _put_together(target, Question.SLOTS, verdicts, whole(verdicts), slot_notes(checkpoint.description, target, verdicts))


def _put_together(
    target: AnyTarget,
    question: Question,
    layers: tuple[Verdict, ...],
    model: Verdict,
    notes: tuple[Reason, ...] = (),
    conditions: tuple[str, ...] = (),
) -> Answer:
    return Answer(
        name=target.name,
        question=question,
        engine=target.engine,
        release=target.release,
        started_with=", ".join((target.started_with, *conditions)),
        source=target.source,
        layers=layers,
        model=model,
        notes=notes,
    )


def _native(checkpoint: Subject, target: Target) -> Answer:
    """Judge natively; a bare contract by the kernel alone, at the stored widths and formats."""
    layers = checkpoint.description.layers
    verdicts = tuple(target_verdict(d, target, checkpoint.config) for d in layers)
    notes = _scale_notes(checkpoint, target, verdicts)
    if target.is_contract:
        verdicts = tuple(with_scales(d, v, checkpoint.scales) for d, v in zip(layers, verdicts, strict=True))
    return _put_together(target, Question.NATIVE, verdicts, whole(verdicts), notes)


def _scale_notes(checkpoint: Subject, target: Target, verdicts: tuple[Verdict, ...]) -> tuple[Reason, ...]:
    """Note F32 scales of fused layers: those that nobody read, and those that a server would round."""
    layers = [d for d, v in zip(checkpoint.description.layers, verdicts, strict=True) if v.fused and f32_scales(d)]
    scales = checkpoint.scales
    inexact = [d for d in layers if scales.inexact_of(d)]
    unread = [d for d in layers if not scales.inexact_of(d) and any(t.name not in scales.read for t in f32_scales(d))]
    notes = []
    if unread:
        message = f"F32 scales in {len(unread)} layers fit only where every one is a power of two; headers cannot tell"
        notes.append(Reason("scale-f32-unread", message, hint="fse-convert CHECKPOINT OUT --dry-run reads them"))
    if inexact and not target.is_contract:
        message = f"{target.title} rounds the F32 scales of {len(inexact)} layers to powers of two while loading"
        notes.append(Reason("scale-f32-rounded", message, hint="the result is not that of the checkpoint's own weights"))
    return tuple(notes)


def _aiter(checkpoint: Subject, target: AiterTarget) -> Answer:
    layers = checkpoint.description.layers
    question = ask_aiter(checkpoint.config, checkpoint.quant_config, checkpoint.quantization, target)
    if question is None:
        message = f"no model class of vLLM {NEWEST} that is known to ask this has this architecture or type"
        unknown = because(Outcome.UNKNOWN, "model-unsupported", message)
        return _put_together(target, Question.AITER, (unknown,) * len(layers), unknown)
    verdicts = tuple(judge_layer(question, d) for d in layers)
    conditions = () if target.mega_moe else question.family.needs
    return _put_together(
        target, Question.AITER, verdicts, judge_whole(layers, verdicts), notes(question, layers, verdicts), conditions
    )
