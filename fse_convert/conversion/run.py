"""The whole conversion as one call: source -> description -> verdict -> plan -> shards -> proof -> output."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import MANIFEST, SUFFIX, open_checkpoint, some
from fse_convert.conversion.estimate import Needs, only
from fse_convert.conversion.estimate import needs as what_it_needs
from fse_convert.conversion.files import (
    Event,
    Observer,
    Written,
    fingerprint,
    output_jobs,
    small_files,
    write_beside,
    write_jobs,
    written,
)
from fse_convert.conversion.ray import reach, run_on_ray
from fse_convert.errors import EnvironmentFailure, Problem, UsageError, VerificationFailure
from fse_convert.model.describe import describe
from fse_convert.model.quantization import read_quantization
from fse_convert.output.copying import Link
from fse_convert.output.jobs import Job, write_job
from fse_convert.output.journal import differences
from fse_convert.output.parts import Share
from fse_convert.output.staging import MARGIN, TASKS, Staging, check_output, check_space, device, free_space, stage
from fse_convert.plan.contents import read_contents
from fse_convert.plan.manifest import finish, manifest
from fse_convert.plan.plan import Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.sidecar.claims import parse_claims
from fse_convert.sidecar.originals import encode_json
from fse_convert.verification.findings import Level

if TYPE_CHECKING:
    from fse_convert.restoration import Restored
    from fse_convert.verification.proof import Proof


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished conversion: what was planned, what was written, and the proof of it unless none was asked for."""

    plan: Plan
    written: Written
    proof: Proof | None


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion: where from, where to, and how.

    ``share``: write this part of the files only. ``ray``: address of the cluster that writes them.
    """

    source: Path
    out: Path
    options: Options
    link: Link = Link.AUTO
    overwrite: bool = False
    verify: Level = Level.NUMERICS
    workers: int = 2
    restart: bool = False
    share: Share | None = None
    ray: str | None = None


def plan_conversion(source: Path, options: Options) -> tuple[Plan, LocalFolder]:
    """Read a checkpoint's headers, its F32 scales and what stands beside config.json, and plan its conversion, without torch.

    Raises InvalidCheckpoint, NotConvertible, EnvironmentFailure.
    """
    with environment(source):
        folder = LocalFolder(source)
        checkpoint = open_checkpoint(folder)
        description = describe(checkpoint, read_quantization(checkpoint.config, checkpoint.quant_config))
        contents = read_contents(checkpoint, folder, description)
    plan = make_plan(checkpoint, description, options, contents)
    family = description.family.name if description.family else "no known family"
    logger.info(
        "planned: %s, %d tensors in %d shards, %d of them rewritten, width %d -> %d, %d of %d layers fit %s",
        family,
        len(checkpoint.tensors),
        len(plan.shards),
        sum(s.rewritten for s in plan.shards),
        plan.source_width,
        plan.width,
        plan.fused_layers,
        len(plan.verdicts),
        options.contract.name,
    )
    return plan, folder


@contextmanager
def environment(where: Path | str) -> Iterator[None]:
    """Turn what the machine refuses into an EnvironmentFailure that says what to do."""
    try:
        yield
    except EOFError as e:
        message = f"a file became shorter while it was read: {e}"
        raise EnvironmentFailure(Problem("source-changed", message, str(where), "is something still writing the source?")) from e
    except OSError as e:
        code, hint = ERRNO_HINTS.get(e.errno or 0, ("io-error", "see the system log; the source was not changed"))
        name = os.fsdecode(e.filename) if e.filename else str(where)
        raise EnvironmentFailure(Problem(code, e.strerror or str(e), name, hint)) from e


ERRNO_HINTS = {
    errno.ENOSPC: ("no-space", "free some space, or write to another disk; the source was not changed"),
    errno.EDQUOT: ("no-space", "your quota is used up: free some space, or write to another disk"),
    errno.EACCES: ("permission", "check the permissions of this path"),
    errno.EPERM: ("permission", "check the permissions of this path"),
    errno.EROFS: ("permission", "the file system is read-only: write elsewhere"),
    errno.EMFILE: ("too-many-files", "raise the limit: ulimit -n"),
    errno.ENFILE: ("too-many-files", "the system has too many open files"),
    errno.ENAMETOOLONG: ("name-too-long", "choose a shorter output path"),
    errno.ENOLCK: ("no-locks", "the file system cannot lock files: write the output to one that can"),
    errno.EIO: ("io-error", "the disk reported an error: check it before trying again"),
}


def convert(request: Request, observe: Observer) -> Outcome:
    """Convert a checkpoint; the output exists afterwards, complete and proved, or not at all.

    Raises FseConvertError of the kind that fits, and never leaves a half-made output.
    """
    check_output(request.source, request.out, overwrite=request.overwrite)
    plan, folder = plan_conversion(request.source, request.options)
    return run(request, plan, folder, observe)


def run(request: Request, plan: Plan, folder: LocalFolder, observe: Observer) -> Outcome:
    """Carry out a plan; see `convert`. With ``request.share``, write that part of the files and publish nothing."""
    share, out = request.share, request.out
    with environment(out):
        link = link_of(request, folder)
        if link is not request.link:
            logger.info("hard links cannot reach another file system: untouched shards are copied")
        jobs = output_jobs(plan, folder, link)
        jobs = share.of(jobs) if share else jobs
        check_space(out, needs(request, plan, folder).disk)
        if request.ray is not None:
            reach(request.ray)
        mark, part = fingerprint(plan, folder), str(share) if share else ""
        with (
            _resumable(out),
            stage(out, mark, restart=request.restart, part=part, replace=request.overwrite) as staging,
        ):
            done = _write(request, jobs, link, mark, staging, observe)
            if share:
                return Outcome(plan, done, None)
            staging.keep_only({job.name for job in jobs})
            write_beside(plan, folder, staging, done)
            proof, size = _prove(request, plan, folder, staging, observe)
            done.add(MANIFEST, "written", size)
            staging.publish()
    return Outcome(plan, done, proof)


def link_of(request: Request, folder: LocalFolder) -> Link:
    """How untouched shards can reach the output: no hard link leads to another file system. Raises OSError."""
    if request.link is not Link.HARD or not folder.files:
        return request.link
    shard = next((n for n in folder.files if n.endswith(SUFFIX)), next(iter(folder.files)))
    if os.stat(folder.path(shard)).st_dev == device(request.out):
        return Link.HARD
    return Link.AUTO


def _write(request: Request, jobs: list[Job], link: Link, mark: dict[str, Any], staging: Staging, observe: Observer) -> Written:
    """Write files here, or on a Ray cluster."""
    if request.ray is None:
        return write_jobs(jobs, staging, request.workers, observe)
    place = staging.root / f"{TASKS}{secrets.token_hex(8)}"
    place.mkdir()
    source, out = request.source.absolute(), request.out.absolute()
    order = Order(source, out, place.absolute(), request.options, link, json.dumps(mark))
    how = run_on_ray(jobs, staging, request.ray, partial(write_one, order), place, lambda *told: observe(Event(*told)))
    shutil.rmtree(place)
    return written(jobs, how)


@dataclass(frozen=True, slots=True)
class Order:
    """What a process elsewhere must know to write a file of a conversion.

    ``place``: the folder that it writes into, of this run alone. ``mark``: the run's fingerprint as JSON.
    """

    source: Path
    out: Path
    place: Path
    options: Options
    link: Link
    mark: str


def write_one(order: Order, name: str) -> dict[str, Any]:
    """Write one file of an output into the run's own folder, in any process that sees the same folders.

    Returns the file's line for the journal. A run that is dead has no folder any more, and its tasks write nothing.
    Raises EnvironmentFailure when source or version differ here, else as `convert`.
    """
    job, staging = _jobs_of(order)[name], Staging(order.out)
    staging.folder = order.place
    if not order.place.is_dir():
        raise EnvironmentFailure(Problem("run-over", "the run that asked for this file is over", str(order.place)))
    return write_job(job, staging, lambda _: None)


_planned: dict[tuple[Path, Link, str], dict[str, Job]] = {}
"""What a process elsewhere has planned, so that each plans once: by source, kind of link and fingerprint."""


def _jobs_of(order: Order) -> dict[str, Job]:
    """The files of an output by name."""
    key = (order.source, order.link, order.mark)
    if key not in _planned:
        plan, folder = plan_conversion(order.source, order.options)
        if changed := differences(json.loads(order.mark), json.loads(json.dumps(fingerprint(plan, folder)))):
            hint = "install the same version on every node, and let all of them see the same file system"
            raise EnvironmentFailure(
                Problem("node-differs", f"a node sees something else: {some(changed)}", str(order.source), hint)
            )
        _planned[key] = {job.name: job for job in output_jobs(plan, folder, order.link)}
    return _planned[key]


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Say where the finished part is when the machine stopped a conversion."""
    try:
        with environment(out):
            yield
    except EnvironmentFailure as e:
        staging = Staging(out)
        if not (staging.begun() and staging.folder.exists()):
            raise  # nothing was begun, or the output is there
        hint = "the same command goes on from there; --restart starts anew"
        kept = Problem("resumable", "what is finished is kept", str(staging.root), hint)
        raise type(e)(*e.problems, kept) from e


def _prove(request: Request, plan: Plan, folder: LocalFolder, staging: Staging, observe: Observer) -> tuple[Proof | None, int]:
    """Prove what is staged against the source, and write the manifest with the result.

    Returns the proof, and the manifest's size in bytes. Raises VerificationFailure.
    """
    from fse_convert.verification.expected import open_source
    from fse_convert.verification.proof import failure, manifest_json, prove

    draft = manifest(plan, folder, small_files(plan, folder))
    proof = None
    if request.verify is not Level.NONE:
        staged, source = LocalFolder(staging.folder), open_source(LocalFolder(folder.root))
        proof = prove(
            source,
            staged,
            parse_claims(draft),
            request.verify,
            workers=request.workers,
            progress=_events(observe),
            fail_fast=True,
        )
        if proof.failed:
            raise failure(proof)
        logger.info("proved up to %s", request.verify.value)
    files, tensors = (proof.storage.files, proof.storage.tensors) if proof else (None, None)
    raw = encode_json(finish(draft, manifest_json(proof), files, tensors))
    staging.write(MANIFEST, raw)
    return proof, len(raw)


def workload(plan: Plan, folder: LocalFolder, request: Request) -> tuple[int, int]:
    """Bytes that a conversion writes and reads back, and how often a file or a layer is finished: for progress."""
    with environment(request.out):
        jobs, level = output_jobs(plan, folder, link_of(request, folder)), request.verify
    if request.share:
        jobs, level = request.share.of(jobs), Level.NONE
    written = sum(job.size for job in jobs if not job.linked)
    if level is Level.NONE:
        return written, len(jobs)
    layers = sum(len(s.tensors) // 4 for s in plan.sidecar) * max(0, level.rank - 1)
    return written + sum(job.size for job in jobs), 2 * len(jobs) + layers


@dataclass(frozen=True, slots=True)
class Check:
    """A request to verify: the output, its source if there is one, and how far to go.

    ``level``: None for as far as there is something to run on, short of the kernel. ``sample``: look at so many tensors,
    chosen by ``seed``.
    """

    out: Path
    source: Path | None
    level: Level | None = None
    sample: int | None = None
    seed: int = 0
    device: str = "auto"


def reading(check: Check) -> tuple[int, int]:
    """Bytes of an output that `verify` or `restore` reads (0: not known), and how often a file is finished: for progress."""
    if check.sample:
        return 0, 0
    files = LocalFolder(check.out).files
    shards = [size for name, size in files.items() if name.endswith(SUFFIX)]
    return sum(shards), len(shards)


def verify(check: Check, observe: Observer) -> Proof:
    """Prove an output again, or check it against its own manifest when there is no source; see `Proof` for the answer.

    Raises InvalidCheckpoint when OUT is no output or the source is broken, EnvironmentFailure.
    """
    from fse_convert.sidecar.claims import read_claims
    from fse_convert.verification.expected import open_source
    from fse_convert.verification.proof import NoDevice, Proof, prove
    from fse_convert.verification.storage import damaged, prove_alone

    out, level = LocalFolder(check.out), (check.level or Level.NUMERICS) if check.source else Level.STORAGE
    sample, seed = check.sample, check.seed
    with environment(check.out):
        source = open_source(LocalFolder(check.source)) if check.source else None
        try:
            claims = read_claims(out)
        except VerificationFailure as e:
            return Proof(level, damaged(e, "source" if source else "manifest"))
        if source is None:
            return Proof(level, prove_alone(out, claims, sample=sample, seed=seed, progress=_events(observe)))
        try:
            told = _events(observe)
            proof = prove(source, out, claims, level, sample=sample, seed=seed, device=check.device, progress=told)
        except NoDevice as e:
            hint = "leave --device away: numerics run on the CPU too"
            raise EnvironmentFailure(Problem("no-cuda", str(e), "--device", hint)) from e
    return replace(proof, level=Level.STORAGE) if check.level is None and proof.empty else proof


def restore(out: Path, original: Path, link: Link, observe: Observer) -> Restored:
    """Take padding and ``fse/`` out of an output; the original exists afterwards, complete and bit for bit, or not at all.

    Raises InvalidCheckpoint when ``out`` is no output of this tool, VerificationFailure when it is damaged,
    UsageError when ``original`` exists, EnvironmentFailure.
    """
    from fse_convert.restoration import open_output, restored_size, write_original
    from fse_convert.sidecar.claims import read_claims

    check_output(out, original, overwrite=False, replaceable=False)
    folder = LocalFolder(out)
    with environment(original):
        claims, checkpoint = read_claims(folder), open_output(folder)
        check_space(original, restored_size(claims, checkpoint))
        with stage(original) as staging:
            done = write_original(folder, checkpoint, claims, staging, link, _events(observe))
            staging.publish()
    return done


def _events(observe: Observer) -> Callable[[str, int, bool], None]:
    """Turn what a proof or a restoration tells of its progress into events; what is no shard counts for nothing."""

    def tell(name: str, size: int, done: bool) -> None:
        if name.endswith(SUFFIX):
            observe(Event(name, size, done=done, how="read back"))
        else:
            observe(Event(name, done=done and " of " in name))

    return tell


def check_report(path: Path, checkpoint: str) -> None:
    """Refuse to write a report over a file that is no report, or into the checkpoint that it is about."""
    if (
        path.exists()
        and path.is_file()
        and path.stat().st_size
        and not path.read_bytes()[:15].lower().startswith(b"<!doctype html")
    ):
        raise UsageError(Problem("report-exists", "a file that is no HTML report is there already", str(path), "give another name"))
    if "://" not in checkpoint and Path(os.path.realpath(checkpoint)) in Path(os.path.realpath(path)).parents:
        hint = "the source is never written; write the report elsewhere"
        raise UsageError(Problem("report-in-source", "the report would lie in the checkpoint", str(path), hint))


def needs(request: Request, plan: Plan, folder: LocalFolder) -> Needs:
    """Tell what a request takes of the machine. Raises EnvironmentFailure."""
    with environment(request.out):
        free = free_space(request.out) - MARGIN
        link, staging = link_of(request, folder), Staging(request.out)
    linked = link is Link.HARD
    found = what_it_needs(plan, folder.files, request.verify, request.workers, linked=linked, free=free)
    if request.share is None:
        return replace(found, disk=max(0, found.disk - staging.held()))
    names = {job.name for job in request.share.of(output_jobs(plan, folder, link))}
    found = only(found, names, request.workers)
    return replace(found, disk=max(0, found.disk - staging.held(names)))
