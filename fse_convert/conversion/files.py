"""Runs a conversion: checks the data that decides, plans, stages, writes, and lets the output appear."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import fse_convert
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import CONFIG, INDEX, SIDECAR
from fse_convert.conversion.nan_scan import expert_codes, scans
from fse_convert.output.copying import Link, carry
from fse_convert.output.jobs import Job, run_jobs
from fse_convert.output.staging import Staging
from fse_convert.plan.plan import LAYOUT, LAYOUT_VERSION, ConfigEdit, Plan, ShardPlan, SidecarPlan
from fse_convert.sidecar.originals import encode_json
from fse_convert.torch_threads import import_beside, one_torch_thread


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of a conversion: bytes written so far for the current file, or a file that is finished."""

    file: str
    bytes: int = 0
    done: bool = False
    how: str = ""


@dataclass(slots=True)
class Written:
    """What a conversion wrote: how each file came to be, and bytes per way."""

    files: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, how: str, size: int) -> None:
        """Record one file."""
        self.files[name] = how
        self.bytes[how] = self.bytes.get(how, 0) + size


Observer = Callable[[Event], None]


def output_jobs(plan: Plan, folder: LocalFolder, link: Link) -> list[Job]:
    """The files with tensors that make up an output, each as a job: shards that are carried over, rewritten ones, ``fse/``."""
    codes = expert_codes(plan.description)
    # Copies first: torch, which rewriting needs, is still being imported.
    shards = sorted(plan.shards, key=lambda s: s.rewritten)
    main = [_main_job(plan, shard, folder, link, codes) for shard in shards]
    return main + [_sidecar_job(plan, sidecar, folder) for sidecar in plan.sidecar]


def write_jobs(jobs: Sequence[Job], staging: Staging, workers: int, observe: Observer) -> Written:
    """Write files into the staging folder, or find that they are there already.

    ``workers``: files written at a time. Raises InvalidCheckpoint when the data holds what the headers could not show,
    EnvironmentFailure, OSError.
    """
    import_beside("fse_convert.conversion.writer")
    return written(jobs, run_jobs(jobs, staging, workers, lambda *told: observe(Event(*told))))


def written(jobs: Sequence[Job], how: Mapping[str, str]) -> Written:
    """What jobs wrote, from how each came to be."""
    done = Written()
    for job in jobs:
        done.add(job.name, how[job.name], job.size)
    return done


def write_beside(plan: Plan, folder: LocalFolder, staging: Staging, done: Written) -> None:
    """Write what holds no tensors, after the weights: config, indexes, and every other file of the source. Raises OSError."""
    for name in plan.checkpoint.others:
        carry(folder.path(name), staging.path(name), Link.AUTO)
        folder.check(name)
        done.add(name, "copied beside", folder.files[name])
    for name, data in small_files(plan, folder).items():
        staging.write(name, data)
        done.add(name, "written", len(data))


def fingerprint(plan: Plan, folder: LocalFolder) -> dict[str, Any]:
    """What must be the same for a run to go on where another one stopped: tool, arguments, layout, and the source's files."""
    options = plan.options
    return {
        "version": fse_convert.__version__,
        "layout": {"name": LAYOUT, "version": LAYOUT_VERSION},
        "arguments": {
            "target": options.target.name,
            "experts": options.experts.value,
            "tp": options.tp,
            "allow_unfused": options.allow_unfused,
        },
        "source": {name: list(stamp) for name, stamp in folder.stamps.items()},
    }


def _main_job(plan: Plan, shard: ShardPlan, folder: LocalFolder, link: Link, codes: Mapping[str, tuple[int, ...]]) -> Job:
    def rewrite(path: Path, progress: Callable[[int], None]) -> str:
        from fse_convert.conversion.writer import reading, write_shard

        with one_torch_thread(), reading(folder, plan.checkpoint.shards) as reader:
            write_shard(shard, reader, path, progress)
        return "rewritten"

    def bring(path: Path, progress: Callable[[int], None]) -> str:
        how = carry(folder.path(shard.name), path, link, progress)
        folder.check(shard.name)
        return how

    if shard.rewritten:
        return Job(shard.name, shard.size, rewrite)
    linked = folder.path(shard.name) if link is Link.HARD else None
    return Job(shard.name, shard.size, bring, linked, scans(shard.source, codes))


def _sidecar_job(plan: Plan, sidecar: SidecarPlan, folder: LocalFolder) -> Job:
    def write(path: Path, progress: Callable[[int], None]) -> str:
        from fse_convert.conversion.writer import reading, write_sidecar

        with one_torch_thread(), reading(folder, plan.checkpoint.shards) as reader:
            write_sidecar(sidecar, reader, path, progress)
        return "kernel layout"

    return Job(sidecar.name, sidecar.size, write)


def small_files(plan: Plan, folder: LocalFolder) -> dict[str, bytes]:
    """Config and indexes of the output, by name."""
    files: dict[str, bytes] = {}
    files[CONFIG] = edited_config(folder.read(CONFIG), plan.config_edits)
    if INDEX in folder.files:
        weight_map = {t.source.name: s.name for s in plan.shards for t in s.tensors}
        metadata = _index_metadata(plan)
        same = not plan.padded and metadata == plan.checkpoint.index_metadata
        files[INDEX] = folder.read(INDEX) if same else _index(metadata, weight_map)
    kernel_map = {t.name: Path(s.name).name for s in plan.sidecar for t in s.tensors}
    kernel_map |= {s.tripwire.name: Path(s.name).name for s in plan.sidecar if s.tripwire}
    if kernel_map:
        files[f"{SIDECAR}/{INDEX}"] = _index({"total_size": sum(s.payload for s in plan.sidecar)}, kernel_map)
    return files


def edited_config(raw: bytes, edits: tuple[ConfigEdit, ...]) -> bytes:
    """config.json with some integers changed; the same bytes when nothing changes, else the same keys in the same order."""
    if not edits:
        return raw
    config = json.loads(raw.decode("utf-8"))
    for edit in edits:
        (config[edit.section] if edit.section else config)[edit.key] = edit.new
    return encode_json(config)


def _index_metadata(plan: Plan) -> dict[str, Any]:
    """The index's metadata with true totals; transformers 5 counts parameters too, which grow with the tensors."""
    metadata = {**(plan.checkpoint.index_metadata or {}), "total_size": sum(s.payload for s in plan.shards)}
    if isinstance(metadata.get("total_parameters"), int):
        metadata["total_parameters"] += sum(prod(t.shape) - prod(t.source.shape) for s in plan.shards for t in s.tensors)
    return metadata


def _index(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    return encode_json({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
