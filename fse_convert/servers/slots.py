"""Slot fusion: the shared expert loaded as one more routed expert, which the router always picks. As data, and one judge.

SGLang does this for DeepSeek-V4 when asked to (--enforce-shared-experts-fusion); it requantises an FP8 shared expert to
MXFP4 while loading. AMD's ATOM does it where both are stored alike. vLLM's form of it is `fusion.aiter`. This is another
question than fusion inside NVIDIA's MegaMoE kernel (`fusion.megamoe`), where formats may differ and nothing is requantised.
"""

from __future__ import annotations

from dataclasses import dataclass

from fse_convert.model.describe import Description, LayerDescription
from fse_convert.model.formats import Kind
from fse_convert.model.moe import Role
from fse_convert.model.quantization import Quantization
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict


@dataclass(frozen=True)
class SlotTarget:
    """One server release that can append the shared expert to the routed ones.

    ``requantises``: FP8 shared experts become MXFP4 beside MXFP4 routed ones, else both must be stored alike.
    ``model_types``: whose gate was read.
    """

    name: str
    engine: str
    release: str
    source: str
    model_types: frozenset[str]
    requantises: bool
    needs: str


SGLANG_FLAG = "--enforce-shared-experts-fusion; under expert parallelism also DeepEP or MegaMoE"
V4 = frozenset({"deepseek_v4"})
V4_AND_V41 = frozenset({"deepseek_v4", "deepseek_v41"})

SLOT_TARGETS: tuple[SlotTarget, ...] = (
    SlotTarget("sglang-0.5.20-slots", "SGLang", "0.5.20", "models/deepseek_v4.py:3418-3444", V4, True, SGLANG_FLAG),
    SlotTarget("sglang-0.5.21-slots", "SGLang", "0.5.21", "models/deepseek_v4.py:5045-5071", V4_AND_V41, True, SGLANG_FLAG),
    SlotTarget("sglang-0.5.22-slots", "SGLang", "0.5.22", "models/deepseek_v4.py:4791-4817", V4_AND_V41, True, SGLANG_FLAG),
    SlotTarget(
        "sglang-0.5.23-slots", "SGLang", "0.5.23",
        "models/deepseek_v4.py:4864-4890, layers/moe/fused_moe_triton/layer.py:1043-1110", V4_AND_V41, True, SGLANG_FLAG,
    ),
    SlotTarget(
        "atom", "ATOM", "main (2026-08)", "atom/model_ops/topK.py:16-64, models/deepseek_v4.py",
        frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"}), False, "ROCm; ATOM_FUSE_SHARED_EXPERT not 0",
    ),
)  # fmt: skip


def slot_verdicts(description: Description, quantization: Quantization, target: SlotTarget) -> tuple[Verdict, ...]:
    """Judge every layer of a model; gates that look at the whole model give all layers the same answer."""
    if description.model_type not in target.model_types:
        message = f"the gate of {target.engine} {target.release} for model type {description.model_type!r} is not known here"
        return (Verdict(Outcome.UNKNOWN, (Reason("model-unsupported", message),)),) * len(description.layers)
    whole = _model_verdict(description, quantization, target)
    return tuple(whole or _layer_verdict(layer, target) for layer in description.layers)


def _model_verdict(description: Description, quantization: Quantization, target: SlotTarget) -> Verdict | None:
    if description.n_shared != 1:
        reason = Reason("slot-shared-count", f"exactly one shared expert per layer is fused, this model has {description.n_shared}")
        return Verdict(Outcome.ERROR if target.requantises else Outcome.UNFUSED, (reason,))
    if target.requantises and quantization.method == "quark" and any(_stored_apart(d) for d in description.layers):
        message = "Quark stores shared experts otherwise than routed ones in some layer, which turns fusion off for the model"
        return Verdict(Outcome.UNFUSED, (Reason("slot-quant-differs", message),))
    return None


def _stored_apart(layer: LayerDescription) -> bool:
    if layer.routed is None or layer.shared is None:
        return False
    return any(layer.routed.formats[role].same_storage != layer.shared.formats[role].same_storage for role in Role)


def _layer_verdict(layer: LayerDescription, target: SlotTarget) -> Verdict:
    if layer.problems:
        return Verdict(Outcome.UNKNOWN, tuple(Reason(p.code, p.message, p.hint) for p in layer.problems))
    if layer.shared is None or layer.routed is None:
        return Verdict(Outcome.UNFUSED, (Reason("no-shared-expert", "the layer has no shared expert"),))
    if layer.shared.width != layer.routed.width:
        message = f"the shared expert is {layer.shared.width} wide, a routed one {layer.routed.width}: it fits no slot"
        return Verdict(Outcome.UNFUSED, (Reason("slot-width", message),))
    if not _stored_apart(layer):
        return FUSED
    routed, shared = layer.routed.formats[Role.GATE], layer.shared.formats[Role.GATE]
    if target.requantises and routed.kind is Kind.MXFP4 and shared.kind is Kind.FP8_BLOCK:
        return FUSED
    message = f"routed experts are {layer.routed.label}, the shared expert is {layer.shared.label}: it fits no slot"
    return Verdict(Outcome.UNFUSED, (Reason("slot-format", message),))


def slot_notes(description: Description, target: SlotTarget, verdicts: tuple[Verdict, ...]) -> tuple[Reason, ...]:
    """Say where fusing changes numbers: FP8 requantised to MXFP4 while loading."""
    changed = [d for d, v in zip(description.layers, verdicts, strict=True) if v.fused and _stored_apart(d)]
    if not changed:
        return ()
    message = f"{target.engine} requantises the FP8 shared experts of {len(changed)} layers to MXFP4 while loading"
    return (Reason("slot-requantised", message, "the result is not that of the checkpoint's own weights"),)
