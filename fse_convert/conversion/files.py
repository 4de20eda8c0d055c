"""The files of an output: shards and ``fse/`` as jobs, config.json and indexes as text, and what is copied beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import CONFIG, INDEX, SIDECAR_INDEX
from fse_convert.conversion.nan_scan import copied_scans, expert_codes, scans
from fse_convert.conversion.source_rows import open_reader
from fse_convert.conversion.writer import needs_torch, write_shard
from fse_convert.output.copying import SHARED, Link, carry
from fse_convert.output.digests import Scan
from fse_convert.output.parts import Job
from fse_convert.plan.changes.change import changed_config
from fse_convert.plan.manifest import added_elements
from fse_convert.plan.plan import Decision, Plan
from fse_convert.plan.tensors import OutputShard
from fse_convert.progress import Advance
from fse_convert.torch_threads import one_torch_thread


def shard_jobs(plan: Plan, link: Link, way: str) -> list[Job]:
    """List the files with tensors that make up an output, each as a job.

    ``link``: how shards that do not change shall reach it, ``way``: how they will.
    """
    codes = expert_codes(plan.source.description)
    # Copies first: torch, which some changes need, is still being imported.
    carried = [_carry(s, plan.source.folder, link, way, scans(s.source, codes)) for s in plan.shards if s.source and s.carried]
    written = (s for s in (*plan.shards, *plan.sidecar, *plan.originals) if not s.carried)
    return carried + [_write(s, plan, copied_scans(s, codes)) for s in written]


def _write(shard: OutputShard, plan: Plan, scanned: tuple[Scan, ...]) -> Job:
    def write(path: Path, advance: Advance) -> str:
        with (
            one_torch_thread() if needs_torch(shard) else nullcontext(),
            open_reader(plan.source.folder, plan.source.checkpoint.shards) as reader,
        ):
            write_shard(shard, reader, path, advance)
        return "rewritten" if shard.source else "kernel layout" if shard.kernel_tensors else "originals kept"

    return Job(name=shard.name, size=shard.size, room=shard.size, write=write, scans=scanned)


def _carry(shard: OutputShard, folder: LocalFolder, link: Link, way: str, scanned: tuple[Scan, ...]) -> Job:
    def bring(path: Path, advance: Advance) -> str:
        how = carry(folder.path(shard.name), path, link, advance)
        folder.check(shard.name)
        return how

    linked = folder.path(shard.name) if link is Link.HARD else None
    room = 0 if way in SHARED else shard.size
    return Job(name=shard.name, size=shard.size, room=room, write=bring, linked=linked, scans=scanned)


def json_texts(plan: Plan) -> dict[str, bytes]:
    """Return config.json and the indexes of the output, by name. Raises OSError."""
    folder = plan.source.folder
    texts = {CONFIG: edited_config(folder.read(CONFIG), plan.decision)}
    if INDEX in folder.files:
        metadata = _index_metadata(plan)
        same = not plan.rewritten and metadata == plan.source.checkpoint.index_metadata
        texts[INDEX] = folder.read(INDEX) if same else _index(metadata, plan.shards)
    if plan.sidecar:
        texts[SIDECAR_INDEX] = _index({"total_size": sum(s.payload for s in plan.sidecar)}, plan.sidecar)
    return texts


def edited_config(raw: bytes, decision: Decision) -> bytes:
    """Change keys of config.json: the same bytes when nothing changes, else the same keys in the same order."""
    changes = [change for c in decision.changes for change in c.config]
    if not decision.config_edits and not changes:
        return raw
    config = changed_config(json.loads(raw.decode("utf-8")), changes)
    for edit in decision.config_edits:
        (config[edit.section] if edit.section else config)[edit.key] = edit.new
    return encode_json(config)


def _index_metadata(plan: Plan) -> dict[str, Any]:
    """Return the index's metadata with true totals; transformers 5 counts parameters too, which grow with the tensors."""
    metadata = {**(plan.source.checkpoint.index_metadata or {}), "total_size": sum(s.payload for s in plan.shards)}
    if isinstance(metadata.get("total_parameters"), int):
        metadata["total_parameters"] += added_elements(plan)
    return metadata


def _index(metadata: Mapping[str, Any], shards: Iterable[OutputShard]) -> bytes:
    weight_map = {t.name: Path(s.name).name for s in shards for t in s.tensors}
    return encode_json({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
