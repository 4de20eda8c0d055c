"""An inspection as one JSON object; reasons are said once per target, with the layers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fse_convert.errors import ExitCode, Problem
from fse_convert.inspection import Inspection
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.plan.costs import Costs
from fse_convert.report.common import SCHEMA_VERSION
from fse_convert.servers.judge import Answer
from fse_convert.servers.verdict import Reason


def inspection_json(found: Inspection, required: Sequence[str], exit_code: ExitCode) -> dict[str, Any]:
    """Everything that was found; ``ok`` is false when the checkpoint is broken or a required target does not fuse."""
    checkpoint, description = found.checkpoint, found.description
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": exit_code is ExitCode.OK,
        "exit_code": int(exit_code),
        "checkpoint": {
            "label": checkpoint.folder.label,
            "shards": len(checkpoint.shards),
            "tensors": len(checkpoint.tensors),
            "bytes": checkpoint.total_size,
            "converted": found.converted,
        },
        "model_type": description.model_type,
        "family": description.family.name if description.family else None,
        "quantization": _quantization(found),
        "n_shared_experts": description.n_shared,
        "layers": [_layer(d) for d in description.layers],
        "seen": [
            {"pattern": s.pattern, "count": s.count, "dtype": s.example.dtype, "shape": s.example.shape} for s in description.seen
        ],
        "targets": [_answer(a, description) for a in found.answers],
        "required": [{"target": a.name, "fused": a.fused, "passed": a.safe} for a in found.answers if a.name in required],
        "costs": _costs(found.costs),
        "advice": {"sentences": found.advice.sentences, "command": found.advice.command or None},
        "problems": _problems(found.problems),
        "unsupported": _problems(found.unsupported),
        "conflicts": _problems(found.conflicts),
        "notes": _problems(found.notes),
    }


def _quantization(found: Inspection) -> dict[str, Any] | None:
    q = found.subject.quantization
    if not q.quantized:
        return None
    return {
        "source": q.source,
        "method": q.method,
        "quant_algo": q.quant_algo,
        "moe_quant_algo": q.moe_quant_algo,
        "weight_block_size": q.block,
        "expert_dtype": q.expert_dtype,
        "ignore": q.ignore,
    }


def _layer(d: LayerDescription) -> dict[str, Any]:
    return {
        "name": d.layer.name,
        "kind": d.layer.kind.value,
        "index": d.layer.index,
        "routed": _group(d.routed, len(d.layer.routed)),
        "shared": _group(d.shared, 1),
        "gated": d.layer.gate_tensor is not None,
        "stacked": [t.name for t in d.layer.stacked],
        "problems": [p.code for p in d.problems],
    }


def _group(group: ExpertGroup | None, count: int) -> dict[str, Any] | None:
    if group is None:
        return None
    return {"count": count, "width": group.width, "hidden": group.hidden, "format": group.label}


def _answer(a: Answer, description: Description) -> dict[str, Any]:
    names = [d.layer.name for d in description.layers]
    reasons: dict[Reason, list[str]] = {}
    for name, verdict in zip(names, a.layers, strict=True):
        for reason in verdict.reasons:
            reasons.setdefault(reason, []).append(name)
    outcomes: dict[str, list[str]] = {}
    for name, verdict in zip(names, a.layers, strict=True):
        outcomes.setdefault(verdict.outcome.value, []).append(name)
    return {
        "target": a.name,
        "question": a.question.value,
        "engine": a.engine,
        "release": a.release,
        "needs": a.started_with,
        "source": a.source,
        "verdict": a.model.outcome.value,
        "fused": a.fused,
        "layers": outcomes,
        "reasons": [{**_reason(r), "layers": where} for r, where in reasons.items()]
        + [{**_reason(r), "layers": []} for r in a.model.reasons if r not in reasons],
        "notes": [_reason(n) for n in a.notes],
    }


def _reason(r: Reason) -> dict[str, str]:
    return {"code": r.code, "message": r.message, "hint": r.hint}


def _costs(c: Costs | None) -> dict[str, Any] | None:
    if c is None:
        return None
    stored = {kind: {"routed": s.routed, "shared": s.shared} for kind, s in (("decoder", c.decoder), ("mtp", c.mtp))}
    return {
        "serving": asdict(c.serving),
        "stored": {**stored, "per_rank": round(c.decoder.per_rank(c.serving) + c.mtp.per_rank(c.serving))},
        "shared_per_rank": {
            "once": c.shared_kernel,
            "twice": 2 * c.shared_kernel,
            "sharded": round(c.shared_sharded),
        },
        "padding": {
            contract: {
                "width": p.width,
                "new_width": p.new_width,
                "disk": p.disk,
                "per_rank": round(p.per_rank(c.serving)),
                "decoder": asdict(p.decoder),
                "mtp": asdict(p.mtp),
                "work": round(p.work, 4),
            }
            for contract, p in c.paddings.items()
        },
        # seed: the second, padded copy that vllm-project/vllm#56568 made, in no release; a key that this schema has
        "duplicates_per_rank": {"seed": round(c.shared_kernel * max((p.work for p in c.paddings.values()), default=1))}
        | {key: round(value) for key, value in asdict(c.duplicates).items()},
    }


def _problems(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"code": p.code, "message": p.message, "where": p.where, "hint": p.hint} for p in problems]
