"""Which servers fuse a checkpoint's shared experts: a verdict per layer and per target, from headers and config alone.

Three questions with three names, never mixed: fusion inside NVIDIA's MegaMoE kernel (`fusion.megamoe`), vLLM's AITER
fused shared experts on AMD (`fusion.aiter`), and slots for shared experts among the routed ones (`fusion.slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar

from fse_convert.errors import Problem, UsageError
from fse_convert.model.describe import Description, LayerDescription
from fse_convert.model.moe import LayerKind, Role
from fse_convert.model.quantization import Quantization, read_quantization
from fse_convert.servers.aiter.question import AiterQuestion, ask_aiter, doubts, judge_decoder_layer, judge_model, judge_mtp_layer
from fse_convert.servers.aiter.vllm_config import RELEASES, VllmRelease
from fse_convert.servers.native import target_verdict
from fse_convert.servers.scales import UNREAD, Scales, f32_scales, with_scales
from fse_convert.servers.slots import SLOT_TARGETS, SlotTarget, slot_notes, slot_verdicts
from fse_convert.servers.targets import TARGETS, Target
from fse_convert.servers.verdict import Outcome, Reason, Verdict, whole


class Question(str, Enum):
    """What is asked of a server. The value is for people and machines alike."""

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


@dataclass(frozen=True)
class AiterTarget:
    """A vLLM release on ROCm, and the MoE backend it is started with."""

    name: str
    release: VllmRelease
    moe_backend: str | None = None

    @property
    def needs(self) -> str:
        """What the server must be started with."""
        switches = "ROCm, VLLM_ROCM_USE_AITER=1, ..._MOE=1, ..._FUSION_SHARED_EXPERTS=1"
        if self.moe_backend is None:
            return switches
        return f"{switches}, --moe-backend {self.moe_backend}, gfx950, TP 1, PP 1, DP with EP, --all2all-backend mori_*, no EPLB"


AITER_SOURCE = "model_executor/layers/quantization/utils/config_utils.py (is_shared_expert_quant_fse_compatible)"
AITER_TARGETS: tuple[AiterTarget, ...] = (
    *(AiterTarget(f"vllm-{name}-aiter", release) for name, release in RELEASES.items()),
    AiterTarget("vllm-0.33-aiter-mega", RELEASES["0.33"], "aiter_mega_moe"),
)
AnyTarget = Target | AiterTarget | SlotTarget
ALL_TARGETS: tuple[AnyTarget, ...] = (*TARGETS, *AITER_TARGETS, *SLOT_TARGETS)
"""Every target that `judge` knows, in the order in which answers come."""
SomeTarget = TypeVar("SomeTarget", bound=AnyTarget)


def target_named(name: str, rows: Sequence[SomeTarget]) -> SomeTarget:
    """Return the row of that name. Raises UsageError with the nearest name."""
    names = [t.name for t in rows]
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else "see: fse-convert targets"
        raise UsageError(Problem("target-unknown", f"no target {name!r}", "--target", hint))
    return rows[names.index(name)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One target's answer: a verdict per layer of the description, in its order, and one for the model as a whole.

    ``notes`` are what the verdicts do not say: doubts, and fusion that changes numbers.
    """

    name: str
    question: Question
    engine: str
    release: str
    needs: str
    source: str
    layers: tuple[Verdict, ...]
    model: Verdict
    notes: tuple[Reason, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether every layer fuses, and the model as a whole."""
        return self.model.fused

    @property
    def objections(self) -> tuple[Reason, ...]:
        """Why this is no yes that a model may be published on: what keeps it from fusing, or makes fusing it wrong."""
        return (*self.model.reasons, *(n for n in self.notes if n.code in UNSAFE))

    @property
    def safe(self) -> bool:
        """Whether it fuses, and nothing known says that it would then load wrongly."""
        return self.fused and not self.objections


UNSAFE = frozenset({"aiter-storage-differs", "scale-f32-unread", "scale-f32-rounded"})
"""Codes of notes by which a server that fuses does the wrong thing, or may do it for all that is known."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint as the rules see it."""

    config: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    quantization: Quantization
    description: Description
    scales: Scales = UNREAD


def subject(
    config: Mapping[str, Any], quant_config: Mapping[str, Any] | None, description: Description, scales: Scales = UNREAD
) -> Subject:
    """Put together what the rules look at. ``scales``: what reading the F32 scales showed, if they were read."""
    return Subject(config, quant_config, read_quantization(config, quant_config), description, scales)


def judge(checkpoint: Subject) -> tuple[Answer, ...]:
    """Answer for every target."""
    return tuple(_answer(checkpoint, target) for target in ALL_TARGETS)


def _answer(checkpoint: Subject, target: AnyTarget) -> Answer:
    if isinstance(target, Target):
        return _native(checkpoint, target)
    if isinstance(target, AiterTarget):
        return _aiter(checkpoint, target)
    verdicts = slot_verdicts(checkpoint.description, checkpoint.quantization, target)
    notes = slot_notes(checkpoint.description, target, verdicts)
    row = (target.engine, target.release, target.needs, target.source)
    return Answer(target.name, Question.SLOTS, *row, verdicts, whole(verdicts), notes)


def _native(checkpoint: Subject, target: Target) -> Answer:
    """A bare contract is judged by the kernel alone, at the stored widths and formats."""
    layers = checkpoint.description.layers
    verdicts = tuple(target_verdict(d, target, checkpoint.config) for d in layers)
    notes = _scale_notes(checkpoint, target, verdicts)
    if target.is_contract:
        verdicts = tuple(with_scales(d, v, checkpoint.scales) for d, v in zip(layers, verdicts, strict=True))
    row = (target.engine, target.release, target.needs, target.source)
    return Answer(target.name, Question.NATIVE, *row, verdicts, whole(verdicts), notes)


def _scale_notes(checkpoint: Subject, target: Target, verdicts: tuple[Verdict, ...]) -> tuple[Reason, ...]:
    """F32 scales of fused layers: those that nobody read, and those that a server would round."""
    layers = [d for d, v in zip(checkpoint.description.layers, verdicts, strict=True) if v.fused and f32_scales(d)]
    unread = [d for d in layers if any(t.name not in checkpoint.scales.read for t in f32_scales(d))]
    unread = [d for d in unread if not checkpoint.scales.inexact_of(d)]
    rounded = [d for d in layers if checkpoint.scales.inexact_of(d)] if not target.is_contract else []
    notes = []
    if unread:
        message = f"F32 scales in {len(unread)} layers fit only where every one is a power of two; headers cannot tell"
        notes.append(Reason("scale-f32-unread", message, "fse-convert CHECKPOINT OUT --dry-run reads them"))
    if rounded:
        message = f"{target.title} rounds the F32 scales of {len(rounded)} layers to powers of two while loading"
        notes.append(Reason("scale-f32-rounded", message, "the result is not that of the checkpoint's own weights"))
    return tuple(notes)


def _aiter(checkpoint: Subject, target: AiterTarget) -> Answer:
    release = target.release
    row = ("vLLM ROCm", release.name, target.needs, AITER_SOURCE)
    layers = checkpoint.description.layers
    question = ask_aiter(checkpoint.config, checkpoint.quant_config, release=release, moe_backend=target.moe_backend)
    if question is None:
        reason = Reason("model-unsupported", "no model class of vLLM 0.33 that is known to ask this has this architecture or type")
        unknown = Verdict(Outcome.UNKNOWN, (reason,))
        return Answer(target.name, Question.AITER, *row, (unknown,) * len(layers), unknown)
    verdicts = tuple(_aiter_layer(question, d) for d in layers)
    notes = doubts(question) + _storage_notes(layers, verdicts)
    needs = ", ".join((target.needs, *(question.family.needs if target.moe_backend is None else ())))
    model = _aiter_model(layers, verdicts)
    return Answer(target.name, Question.AITER, row[0], row[1], needs, row[3], verdicts, model, notes)


def _aiter_layer(question: AiterQuestion, layer: LayerDescription) -> Verdict:
    if layer.layer.shared is None:
        return Verdict(Outcome.UNFUSED, (Reason("no-shared-expert", "the layer has no shared expert"),))
    ask: Callable[[AiterQuestion, int], Any] = judge_mtp_layer if layer.layer.kind is LayerKind.MTP else judge_decoder_layer
    verdict: Verdict = ask(question, layer.layer.index).verdict
    return verdict


def _aiter_model(layers: tuple[LayerDescription, ...], verdicts: tuple[Verdict, ...]) -> Verdict:
    """Judge decoder layers and the drafter apart, as vLLM does, each all or nothing; both must fuse for a whole answer."""
    parts = [
        judge_model(v for d, v in zip(layers, verdicts, strict=True) if d.layer.kind is kind)
        for kind in LayerKind
        if any(d.layer.kind is kind for d in layers)
    ]
    return next((p for p in parts if p.outcome is Outcome.ERROR), None) or next((p for p in parts if not p.fused), whole(verdicts))


def _storage_notes(layers: tuple[LayerDescription, ...], verdicts: tuple[Verdict, ...]) -> tuple[Reason, ...]:
    """The rules read configs only; say where they call two experts alike that are not stored alike (ROCm/ATOM#958)."""
    apart = [
        d.layer.name
        for d, v in zip(layers, verdicts, strict=True)
        if v.fused and d.routed and d.shared
        if any(d.routed.formats[r].same_storage != d.shared.formats[r].same_storage for r in Role)
    ]
    if not apart:
        return ()
    message = (
        f"the config calls routed and shared experts alike, but they are stored otherwise in {len(apart)} layers, {apart[0]} first"
    )
    return (Reason("aiter-storage-differs", message, "vLLM would fuse and then fail to load, or load wrongly"),)
