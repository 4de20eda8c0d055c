"""``fse/manifest.json``: what the output is, for loaders, for `verify` and for `restore`.

The same bytes on every machine: no clock time, no absolute path. The format is described in docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import fse_convert
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.reader import CONFIG, INDEX, Checkpoint
from fse_convert.plan.plan import LAYOUT, LAYOUT_VERSION, Plan
from fse_convert.sidecar.originals import config_candidates, encode_json, header_candidates, index_candidates, pick, sha256

FORMAT = "fse-convert"
FORMAT_VERSION = 1
DIGEST = "manifest_sha256"
"""The last key: SHA-256 of the manifest without it, encoded as the manifest is."""


def manifest(plan: Plan, folder: Folder, small_files: Mapping[str, bytes]) -> dict[str, Any]:
    """Describe a planned output; `finish` adds proof and digests. ``small_files``: the output's config and index."""
    description, options = plan.description, plan.options
    family = description.family
    contract = options.contract
    return {
        "format": FORMAT,
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
        "server": _server(plan),
        "padded": {t.source.name: list(t.source.shape) for s in plan.shards if s.rewritten for t in s.tensors if t.growth},
        "source": {**source_identity(plan.checkpoint, folder), "originals": _originals(plan, folder, small_files)},
    }


def finish(
    draft: Mapping[str, Any],
    proof: Mapping[str, Any],
    files: Mapping[str, tuple[int, str]] | None,
    tensors: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Add to a draft what was found out by reading the output back, and the manifest's own digest.

    ``files``: size in bytes and SHA-256 of every file but the manifest. ``tensors``: XXH3-128 of every tensor, as hex.
    Both None when nothing was read back.
    """
    full = {
        **draft,
        "proof": proof,
        "files": {n: {"size": size, "sha256": digest} for n, (size, digest) in sorted(files.items())} if files else None,
        "tensors": dict(sorted(tensors.items())) if tensors else None,
    }
    return {**full, DIGEST: own_digest(full)}


def own_digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest, its own digest left out."""
    return sha256(encode_json({k: v for k, v in value.items() if k != DIGEST}))


def source_identity(checkpoint: Checkpoint, folder: Folder) -> dict[str, Any]:
    """Digests of config and index, and size and header digest per shard: tells one source from another without its weights."""
    small = {n: sha256(folder.read(n)) for n in (CONFIG, INDEX) if n in folder.files}
    shards = {
        s.name: {"size": s.size, "header_sha256": sha256(folder.read(s.name, 0, s.header.data_start))} for s in checkpoint.shards
    }
    return {"files": small, "shards": shards}


def _originals(plan: Plan, folder: Folder, small_files: Mapping[str, bytes]) -> dict[str, str]:
    """Text of the source's config, index and headers, where `fse_convert.sidecar.originals` does not find it again by itself."""
    found: list[tuple[str, bytes, Iterable[bytes]]] = []
    if plan.config_edits:
        edits = [(e.section, e.key, e.old) for e in plan.config_edits]
        found.append((CONFIG, folder.read(CONFIG), config_candidates(json.loads(small_files[CONFIG]), edits)))
    if INDEX in folder.files and (raw := folder.read(INDEX)) != small_files[INDEX]:
        grown = sum(prod(t.shape) - prod(t.source.shape) for s in plan.shards for t in s.tensors if t.growth)
        candidates = index_candidates(json.loads(small_files[INDEX]), plan.checkpoint.total_size, grown)
        found.append((INDEX, raw, candidates))
    for shard in plan.shards:
        if shard.rewritten:
            header = shard.source.header
            tensors = [(t.name, t.dtype, t.shape) for t in header.tensors]
            candidates = header_candidates(tensors, {"format": "pt", **header.metadata})
            found.append((shard.name, folder.read(shard.name, 0, header.data_start), candidates))
    kept = {name: raw for name, raw, candidates in found if pick(candidates, sha256(raw)) is None}
    return {name: raw[0 if name in (CONFIG, INDEX) else LENGTH_BYTES :].decode("utf-8") for name, raw in kept.items()}


def _server(plan: Plan) -> Mapping[str, Any] | None:
    """What the server that was converted for makes of the standard layout; None for a bare contract.

    Apart from the layers' verdicts, which say whether a layer fits the kernel contract and is in ``fse/``.
    """
    target, verdict = plan.options.target, plan.server
    if target.is_contract:
        return None
    return {
        "target": target.name,
        "engine": target.engine,
        "release": target.release,
        "verdict": verdict.outcome.value,
        "reasons": [{"code": r.code, "message": r.message} for r in verdict.reasons],
        "layers": {v.layer.layer.name: v.server.outcome.value for v in plan.verdicts},
    }


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
