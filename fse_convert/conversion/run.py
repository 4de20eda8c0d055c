"""One conversion: plan -> files -> proof -> published, each computed once, for the command line, the Python API and Ray alike."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import CONFIG, MANIFEST, SUFFIX
from fse_convert.conversion.estimate import Estimate, estimate
from fse_convert.conversion.files import json_texts, shard_jobs
from fse_convert.conversion.writer import needs_torch
from fse_convert.errors import EnvironmentFailure, Problem, ServerRefuses, UsageError, environment, size
from fse_convert.output.copying import Link, carry, way
from fse_convert.output.free_space import MARGIN, check_space, existing_home, free_space
from fse_convert.output.lock import staging_root
from fse_convert.output.overwrite import check_output
from fse_convert.output.parts import Job, Part
from fse_convert.output.resume import fingerprint_of, finished_sizes
from fse_convert.output.staging import Staging, check_staged, reading, stage
from fse_convert.output.workers import run_jobs
from fse_convert.plan.advice import told_family
from fse_convert.plan.manifest import arguments_record, draft_manifest
from fse_convert.plan.notes import notes, refusal
from fse_convert.plan.plan import Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import open_source
from fse_convert.plan.tensors import Recoded
from fse_convert.progress import Event, Observer, Phase, Work, ignore
from fse_convert.sidecar.manifest import Manifest, sealed
from fse_convert.sidecar.tensors import LAYOUT, LAYOUT_VERSION
from fse_convert.torch_threads import has_torch, import_beside, need_torch
from fse_convert.verification.findings import Level
from fse_convert.verification.phases import computed_work

if TYPE_CHECKING:
    from fse_convert.verification.proof import Proof

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion: where from, where to, and how.

    ``verify``: how far the output is proved before it appears. ``workers``: files written at a time. ``part``: write this part
    of the files and publish nothing. ``ray``: address of the cluster that writes the files.
    ``family``: its name, for a model type that is not known.
    """

    source: Path
    out: Path
    options: Options
    link: Link = Link.AUTO
    overwrite: bool = False
    verify: Level = Level.NUMERICS
    workers: int = 2
    restart: bool = False
    part: Part | None = None
    ray: str | None = None
    family: str = ""


@dataclass(slots=True)
class ConversionResult:
    """A finished conversion.

    ``files``: how each file came to be; ``bytes``: per way. ``proof``: None where none was asked for, and of a part.
    """

    plan: Plan
    files: dict[str, str]
    bytes: dict[str, int]
    proof: Proof | None = None

    def add(self, name: str, how: str, size: int) -> None:
        """Record one file."""
        self.files[name] = how
        self.bytes[how] = self.bytes.get(how, 0) + size


class Conversion:
    """A conversion that can run: its output place is free, its source is opened, and its plan is made.

    Raises UsageError for an output that cannot be, InvalidCheckpoint, NotConvertible, EnvironmentFailure, and ServerRefuses unless
    unfused layers may pass.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        with environment(request.out):
            check_output(request.source, request.out, overwrite=request.overwrite)
        with environment(request.source):
            self.folder = LocalFolder(request.source)
            source = open_source(self.folder, request.family)
        self.plan = make_plan(source, request.options)
        refused = None if request.options.allow_unfused else refusal(self.plan)
        if refused:
            raise ServerRefuses(refused)
        self._log_plan()

    def _log_plan(self) -> None:
        plan, decision, checkpoint = self.plan, self.plan.decision, self.plan.source.checkpoint
        rewritten = sum(not s.carried for s in plan.shards)
        logger.info(
            f"planned: {told_family(plan.source.description) or 'no known family'}, {len(checkpoint.tensors)} tensors in "
            f"{len(plan.shards)} shards, {rewritten} of them rewritten, width {decision.source_width} -> {decision.width}, "
            f"{decision.fused_layers} of {len(decision.verdicts)} layers fit {plan.options.goal}"
        )

    @cached_property
    def way(self) -> str:
        """How untouched shards will reach the output. Raises OSError."""
        shard = next((n for n in self.folder.files if n.endswith(SUFFIX)), CONFIG)
        return way(self.folder.path(shard), existing_home(self.request.out), self.request.link)

    @cached_property
    def link(self) -> Link:
        """How untouched shards can reach the output: a hard link does not lead to another mount. Raises OSError."""
        if self.request.link is not Link.HARD or self.way.startswith("hard link"):
            return self.request.link
        logger.info("hard links cannot reach another file system or mount: untouched shards are copied")
        return Link.AUTO

    @cached_property
    def all_jobs(self) -> list[Job]:
        """The files with tensors of the whole output."""
        return shard_jobs(self.plan, self.link, self.way)

    @property
    def jobs(self) -> list[Job]:
        """Those of them that this run writes."""
        return self.request.part.of(self.all_jobs) if self.request.part else self.all_jobs

    @property
    def needs_torch(self) -> bool:
        """Whether this run proves, or writes what is more than bytes in another place."""
        proves = self.request.verify is not Level.NONE and not self.request.part
        return proves or any(needs_torch(s) for s in (*self.plan.shards, *self.plan.sidecar))

    @cached_property
    def texts(self) -> dict[str, bytes]:
        """config.json and the indexes of the output, by name."""
        return json_texts(self.plan)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to resume another one."""
        layout, arguments = {"name": LAYOUT, "version": LAYOUT_VERSION}, arguments_record(self.plan.options)
        stamps = {name: self.folder.stamps[name] for name in self.plan.source.checkpoint.files}
        return fingerprint_of(layout, msgspec.to_builtins(arguments), stamps)

    @cached_property
    def notes(self) -> tuple[Problem, ...]:
        """What to know before any work; where formats change, also what the scales alone tell of whether they can.

        A part does not look at scales, nor does a machine without torch.

        Raises InvalidCheckpoint for a scale that the other format cannot hold, EnvironmentFailure.
        """
        found = notes(self.plan)
        recodes = any(isinstance(t.change, Recoded) for shard in self.plan.shards for t in shard.tensors)
        if recodes and has_torch() and not self.request.part:
            from fse_convert.conversion.recoding import fit_note

            with environment(self.request.source):
                fits = fit_note(self.plan)
            found += [fits] if fits else []
        return tuple(found)

    def kept(self) -> str:
        """Say which of this run's shards are finished: ``6 of 13 shards (1.20 GiB)``; empty where none is."""
        with environment(self.request.out):
            done = finished_sizes(staging_root(self.request.out), self.fingerprint)
        mine = [done[job.name] for job in self.jobs if job.name in done]
        return f"{len(mine)} of {len(self.jobs)} shards ({size(sum(mine))})" if mine else ""

    def estimate(self) -> Estimate:
        """Estimate what is left to do of this run. Raises EnvironmentFailure."""
        request = self.request
        with environment(request.out):
            part = {job.name for job in self.jobs} if request.part else None
            whole = estimate(self.plan, request.verify, request.workers, way=self.way, part=part)
            held = Staging(request.out).held([f.name for f in whole.files if f.written])
            return replace(whole, free=free_space(request.out) - MARGIN, disk=max(0, whole.disk - held))

    def workload(self) -> list[Work]:
        """Return what `run` writes, reads back and computes, phase by phase: for progress."""
        with environment(self.request.out):
            jobs, level = self.jobs, self.request.verify
            write = Work(Phase.WRITE, "shard", len(jobs), sum(job.size for job in jobs if not job.linked))
            if self.request.part or level is Level.NONE:
                return [write]
            sizes = [job.size for job in jobs] + [self.folder.files[name] for name in self.plan.source.checkpoint.others]
            sizes += [len(text) for text in self.texts.values()]
        recoded = 0
        if self.plan.decision.changes and level.rank >= Level.NUMERICS.rank:
            from fse_convert.verification.expected import ExpectedOutput

            recoded = len(tuple(ExpectedOutput.of(self.plan).recoded))
        read = Work(Phase.READ, "file", len(sizes), sum(sizes))
        return [write, read, *computed_work(level, self.plan.kernel_layers, recoded)]

    def run(self, observe: Observer) -> ConversionResult:
        """Write, prove and publish: the output exists afterwards, complete and proved, or not at all; of a part, write its files.

        Raises InvalidCheckpoint when the data holds what headers could not show, VerificationFailure, EnvironmentFailure, Locked.
        """
        request = self.request
        with environment(request.out):
            if self.needs_torch:
                need_torch()
            check_space(request.out, self.estimate().disk)
            fresh = self._write_on_ray(observe) if request.ray is not None else ()
            place = self._staged(restart=request.restart and request.ray is None)
            with _resumable(request.out), place as staging, reading(self.folder):
                result = self._write(staging, observe, fresh)
                if not request.part:
                    draft = draft_manifest(self.plan, self.texts)
                    staged = staging.look()
                    check_staged(staged, staged.files, self._sizes())
                    logger.info("%d files are staged", len(staged.files))  # from here on, none may change
                    result.proof = self._prove(draft, staged, observe)
                    result.add(MANIFEST, "other files", self._write_manifest(draft, result.proof, staging))
                    stamps = {**staged.stamps, MANIFEST: staging.stamp(MANIFEST)}
                    staging.publish(lambda: staging.check(self.folder, stamps))
        return result

    def _staged(self, *, restart: bool) -> AbstractContextManager[Staging]:
        part = str(self.request.part) if self.request.part else ""
        return stage(self.request.out, self.fingerprint, restart=restart, part=part, replace=self.request.overwrite)

    def _write_on_ray(self, observe: Observer) -> Collection[str]:
        """Write every file with tensors on the cluster, as parts; return their names."""
        from fse_convert.conversion.ray import reach, run_parts

        request, address, sizes = self.request, self.request.ray or "", {job.name: job.size for job in self.all_jobs}
        reach(address)
        source, out = request.source.absolute(), request.out.absolute()
        order = pickle.dumps(replace(request, source=source, out=out, ray=None, restart=False, workers=1))
        with _resumable(request.out):
            with self._staged(restart=request.restart):  # what cannot be resumed is refused before any node begins
                logger.info("the cluster at %s writes the shards", address)
            for files in run_parts(write_part, order, len(sizes), address):
                for name, how in files.items():
                    observe(Event(name, sizes[name]))
                    observe(Event(name, done=True, how=how))
        return sizes.keys()

    def _write(self, staging: Staging, observe: Observer, fresh: Collection[str]) -> ConversionResult:
        """Write files into the staging folder, or find that they are there; all but the manifest, unless it is a part."""
        if self.needs_torch and not fresh:
            import_beside("torch")
        how = run_jobs(self.jobs, staging, self.request.workers, ignore if fresh else observe, fresh)
        result = ConversionResult(plan=self.plan, files={}, bytes={})
        for job in self.jobs:
            result.add(job.name, how[job.name], job.size)
        if not self.request.part:
            staging.keep_only({job.name for job in self.jobs})
            self._write_beside(staging, result)
        return result

    def _write_beside(self, staging: Staging, result: ConversionResult) -> None:
        """Write what holds no tensors, after the weights: config, indexes, and every other file of the source."""
        for name in self.plan.source.checkpoint.others:
            carry(self.folder.path(name), staging.path(name), Link.AUTO if self.link is Link.HARD else self.link)
            self.folder.check(name)
            result.add(name, "other files", self.folder.files[name])
        for name, text in self.texts.items():
            staging.write(name, text)
            result.add(name, "other files", len(text))

    def _prove(self, draft: Manifest, staged: LocalFolder, observe: Observer) -> Proof | None:
        """Prove what is staged against the source. Raises VerificationFailure."""
        if self.request.verify is Level.NONE:
            return None
        from fse_convert.verification.proof import prove, refuse_failed

        proof = prove(self.plan, staged, draft, self.request.verify, self.request.workers, observe)
        refuse_failed(proof)
        logger.info("proved up to %s", self.request.verify.value)
        return proof

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of every file of the output, but for the manifest."""
        sizes = {job.name: job.size for job in self.jobs} | {n: len(text) for n, text in self.texts.items()}
        return sizes | {name: self.folder.files[name] for name in self.plan.source.checkpoint.others}

    def _write_manifest(self, draft: Manifest, proof: Proof | None, staging: Staging) -> int:
        """Write the manifest with what the proof found; return its size in bytes."""
        manifest = draft
        if proof:
            files = dict(sorted(proof.storage.files.items()))
            tensors = dict(sorted(proof.storage.tensors.items()))
            manifest = msgspec.structs.replace(draft, proof=proof.record(), files=files, tensors=tensors)
        raw = sealed(manifest)
        staging.write(MANIFEST, raw)
        return len(raw)


def write_part(order: bytes, part: Part) -> dict[str, str]:
    """Write one part of the pickled `Request` that ``order`` is; return how each of its files came to be."""
    conversion = _ordered(order)
    conversion.request = replace(conversion.request, part=part)
    try:
        return conversion.run(ignore).files
    except UsageError as e:
        first = e.problems[0]
        if first.code != "resume-differs":
            raise
        hint = "install the same version on every node, and let all of them see the same file system"
        message = f"a node sees something else: {first.message.rpartition(': ')[2]}"
        raise EnvironmentFailure(Problem("node-differs", message, str(conversion.request.source), hint)) from None


@lru_cache(maxsize=1)
def _ordered(order: bytes) -> Conversion:
    """Plan once per process: it writes many parts of one conversion."""
    return Conversion(pickle.loads(order))  # noqa: S301 - Ray itself pickled it on the way here


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
        hint = "the same command resumes from there; --restart starts anew"
        if any(p.code == "source-changed" for p in e.problems):
            hint = "start anew with --restart and without --part"
        kept = Problem("resumable", "what is finished is kept", str(staging.root), hint)
        raise type(e)(*e.problems, kept) from e
