"""The layers of a model together: vLLM on ROCm fuses the shared experts of all of them or of none.

``is_model_fused_shared_expert_compatible`` of fused_moe/utils.py, 0.29 to 0.33.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fse_convert.model.description import LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.servers.aiter.question import SWITCH
from fse_convert.servers.verdict import FUSED, Outcome, Verdict, because, whole


def judge_whole(layers: Sequence[LayerDescription], verdicts: Sequence[Verdict]) -> Verdict:
    """Judge decoder layers and the drafter apart, as vLLM does, each all or nothing; both must fuse for a whole answer."""
    by_kind = (tuple(v for d, v in zip(layers, verdicts, strict=True) if d.layer.kind is kind) for kind in LayerKind)
    parts = [judge_model(part) for part in by_kind if part]
    error = next((p for p in parts if p.outcome is Outcome.ERROR), None)
    return error or next((p for p in parts if not p.fused), whole(tuple(verdicts)))


def judge_model(layers: Iterable[Verdict]) -> Verdict:
    """Judge the MoE layers of one model together; a drafter (MTP) is a model of its own."""
    verdicts = list(layers)
    for outcome in (Outcome.ERROR, Outcome.REFUSED, Outcome.UNKNOWN):
        stopped = [verdict for verdict in verdicts if verdict.outcome is outcome]
        if stopped:
            return stopped[0]
    enabled = sum(verdict.fused for verdict in verdicts)
    disabled = len(verdicts) - enabled
    if enabled and disabled:
        message = (
            f"Fused shared experts must be enabled for all MoE layers; found {enabled} enabled and {disabled} disabled "
            "layers. Per-layer fused shared experts is not yet supported. Please open an issue."
        )
        return because(Outcome.ERROR, "aiter-model-mixed", message, f"serve with {SWITCH}=0")
    if enabled:
        return FUSED
    return Verdict(Outcome.UNFUSED, tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)))
