"""``fse/manifest.json``: what the output is, for loaders, for `verify` and for `restore`.

The same bytes on every machine: no clock time, no absolute path. The format is described in docs/format.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import fse_convert
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.source import CONFIG, INDEX, Checkpoint
from fse_convert.plan import LAYOUT, LAYOUT_VERSION, Plan

FORMAT_VERSION = 1


def manifest(plan: Plan, folder: Folder) -> dict[str, Any]:
    """Describe a planned output; proof and digests are added by whoever makes them."""
    description, options = plan.description, plan.options
    family = description.family
    contract = options.contract
    return {
        "format": "fse-convert",
        "format_version": FORMAT_VERSION,
        "tool": {"name": "fse-convert", "version": fse_convert.__version__},
        "arguments": {
            "target": options.target.name,
            "experts": options.experts.value,
            "tp": options.tp,
            "allow_unfused": options.allow_unfused,
        },
        "contract": {
            "name": contract.name,
            "width_multiple": contract.width_multiple,
            "hidden_multiple": contract.hidden_multiple,
        },
        "layout": {"name": LAYOUT, "version": LAYOUT_VERSION, "mma_types": ["fp8xfp4", "fp8xfp8"]},
        "model": {
            "family": family.name if family else "",
            "model_type": description.model_type,
            "n_shared_experts": plan.n_shared,
            "width": {"source": plan.source_width, "main": plan.main_width, "kernel": plan.width},
        },
        "config_edits": [{"section": e.section, "key": e.key, "from": e.old, "to": e.new} for e in plan.config_edits],
        "layers": [_layer(plan, i) for i in range(len(plan.verdicts))],
        "padded": {t.source.name: list(t.source.shape) for s in plan.shards if s.rewritten for t in s.tensors if t.growth},
        "source": source_identity(plan.checkpoint, folder),
    }


def source_identity(checkpoint: Checkpoint, folder: Folder) -> dict[str, Any]:
    """Digests of config and index, and size and header digest per shard: tells one source from another without its weights."""
    small = {n: _sha256(folder.read(n)) for n in (CONFIG, INDEX) if n in folder.files}
    shards = {
        s.name: {"size": s.size, "header_sha256": _sha256(folder.read(s.name, 0, s.header.data_start))} for s in checkpoint.shards
    }
    return {"files": small, "shards": shards}


def _layer(plan: Plan, number: int) -> Mapping[str, Any]:
    judged = plan.verdicts[number]
    layer, verdict = judged.layer, judged.verdict
    return {
        "name": layer.layer.name,
        "kind": layer.layer.kind.value,
        "verdict": verdict.outcome.value,
        "reasons": [{"code": r.code, "message": r.message} for r in verdict.reasons],
        "routed": {"count": len(layer.layer.routed), "format": layer.routed.label} if layer.routed else None,
        "shared": {"width": layer.shared.width, "format": layer.shared.label} if layer.shared else None,
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
