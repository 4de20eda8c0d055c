"""The verdicts of every server on a checkpoint, per layer and per target, from headers and config alone.

Three questions with three names, never mixed: fusion inside NVIDIA's MegaMoE kernel (`fse_convert.servers.native`), vLLM's AITER
fused shared experts on AMD (`fse_convert.servers.aiter`), and slots for shared experts among the routed ones
(`fse_convert.servers.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from fse_convert.errors import Problem
from fse_convert.model.config_against_tensors import UNSTATED
from fse_convert.model.description import LayerDescription
from fse_convert.servers.aiter.all_or_nothing import judge_whole
from fse_convert.servers.aiter.question import AITER_TARGETS, AiterTarget, ask_aiter, judge_layer, notes
from fse_convert.servers.config_keys import key_refusals
from fse_convert.servers.f32_scales import with_scales
from fse_convert.servers.hazards import with_hazards
from fse_convert.servers.native import KERNEL, SILU, LaunchWidths, config_verdict, kernel_verdict, native_verdict, with_activation
from fse_convert.servers.release_names import find_named
from fse_convert.servers.slots import SLOT_KINDS, SLOT_TARGETS, SlotTarget, slot_needs, slot_notes, slot_verdicts
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import TARGETS, Contract, Target
from fse_convert.servers.verdict import Outcome, Reason, Verdict, because, not_understood, whole


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
QUESTIONS = {Target: Question.NATIVE, AiterTarget: Question.AITER, SlotTarget: Question.SLOTS}
ALL_TARGETS: tuple[AnyTarget, ...] = (*TARGETS, *AITER_TARGETS, *SLOT_TARGETS)
"""Every target that `judge` knows, in the order in which answers come."""


def find_any(name: str) -> AnyTarget:
    """Find the kernel contract or the server that a user means. Raises UsageError."""
    return find_named(name, ALL_TARGETS)


@dataclass(frozen=True, slots=True)
class Answer:
    """One target's answer: a verdict per layer of the description, in its order, and one for the model as a whole.

    ``notes`` are only worth knowing: weights that a server requantises while loading.
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


def judge(checkpoint: Subject) -> tuple[Answer, ...]:
    """Answer for every target."""
    return tuple(answer(checkpoint, target) for target in ALL_TARGETS)


def kernel_layer(
    checkpoint: Subject, target: Target, contract: Contract, layer: LayerDescription, widths: LaunchWidths | None = None
) -> Verdict:
    """Judge one layer by the kernel alone, with what is known of its F32 scales and of the activation.

    ``contract``: the one that a checkpoint for ``target`` is converted to; ``widths``: as `native_layer` has them.
    """
    verdict = with_scales(layer, kernel_verdict(layer, contract, target.pairings, widths), checkpoint.scales)
    return with_activation(checkpoint.config, verdict, KERNEL)


def native_layer(checkpoint: Subject, target: Target, layer: LayerDescription, widths: LaunchWidths | None = None) -> Verdict:
    """Judge one layer natively, with what is known of its F32 scales and of the server's loader; a contract by the kernel alone.

    ``widths``: those that padding would give the layer; its own without them.
    """
    if target.is_contract:
        return kernel_layer(checkpoint, target, target.contract, layer, widths)
    verdict = native_verdict(layer, target, checkpoint.config, widths)
    verdict = config_verdict(verdict, target.title, checkpoint.quantization)
    verdict = with_hazards(checkpoint, target, layer, with_scales(layer, verdict, checkpoint.scales, target.title))
    return _as_stated(checkpoint, target, verdict)


def _as_stated(checkpoint: Subject, target: AnyTarget, verdict: Verdict, activation: str = SILU) -> Verdict:
    """Take a yes back where config.json does not state what the server builds the model from, or states what it does not take."""
    verdict = with_activation(checkpoint.config, verdict, (activation,))
    if not verdict.fused:
        return verdict
    vague = [Problem(c.code, str(c), hint=c.hint) for c in checkpoint.description.conflicts if c.code == UNSTATED]
    if vague:
        return not_understood(vague)
    refused = tuple(dict.fromkeys(key_refusals(checkpoint.config, target, checkpoint.router_tensors)))
    return Verdict(Outcome.REFUSED, refused) if refused else verdict


def _of_read_formats(layer: LayerDescription, verdict: Verdict) -> Verdict:
    """Take a yes to slots back for experts in a format that no server was read for; kernels name theirs."""
    if not (verdict.fused and layer.routed and layer.routed.gate.kind not in SLOT_KINDS):
        return verdict
    return because(Outcome.UNKNOWN, "slot-format", f"what servers make of {layer.routed.label} experts in slots is not known")


def answer(checkpoint: Subject, target: AnyTarget) -> Answer:
    """Answer for one target."""
    description, layers = checkpoint.description, checkpoint.description.layers
    if not layers:
        return _put_together(target, (), not_understood((description.unknown,)) if description.unknown else whole(()))
    if isinstance(target, Target):
        verdicts = tuple(native_layer(checkpoint, target, d) for d in layers)
        return _put_together(target, verdicts, whole(verdicts))
    if isinstance(target, SlotTarget):
        own = tuple(map(_of_read_formats, layers, slot_verdicts(checkpoint, target)))
        judged = (with_hazards(checkpoint, target, d, v) for d, v in zip(layers, own, strict=True))
        verdicts = tuple(_as_stated(checkpoint, target, v) for v in judged)
        needs = slot_needs(target, [d.routed.label for d in layers if d.routed])
        return _put_together(target, verdicts, whole(verdicts), slot_notes(description, target, verdicts), needs)
    question = ask_aiter(checkpoint.config, checkpoint.quant_config, checkpoint.quantization, target)
    if isinstance(question, Verdict):
        return _put_together(target, (question,) * len(layers), question)
    own = tuple(_of_read_formats(d, judge_layer(question, d)) for d in layers)
    judged = (with_hazards(checkpoint, target, d, v, question) for d, v in zip(layers, own, strict=True))
    verdicts = tuple(_as_stated(checkpoint, target, v, question.family.activation) for v in judged)
    model = _model_with_unsafe_layers(judge_whole(layers, own), verdicts)
    model = _as_stated(checkpoint, target, model, question.family.activation)
    needs = replace(target, conditions=question.conditions).started_with
    return _put_together(target, verdicts, model, notes(question, layers, verdicts), needs)


def _model_with_unsafe_layers(model: Verdict, layers: Sequence[Verdict]) -> Verdict:
    """Return what becomes of a model that a server would start, where some of its layers are unsafe."""
    unsafe = [v for v in layers if v.outcome is Outcome.UNSAFE]
    if not unsafe or model.outcome in (Outcome.ERROR, Outcome.REFUSED):
        return model
    return Verdict(Outcome.UNSAFE, tuple(dict.fromkeys((*model.reasons, *(r for v in unsafe for r in v.reasons)))))


def _put_together(
    target: AnyTarget,
    layers: tuple[Verdict, ...],
    model: Verdict,
    notes: tuple[Reason, ...] = (),
    needs: str = "",
) -> Answer:
    return Answer(
        name=target.name,
        question=QUESTIONS[type(target)],
        engine=target.engine,
        release=target.release,
        started_with=needs or target.started_with,
        source=target.source,
        layers=layers,
        model=model,
        notes=notes,
    )
