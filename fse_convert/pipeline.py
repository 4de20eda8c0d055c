"""The whole conversion as one call: source -> description -> verdict -> plan -> shards -> proof -> output."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.ranges import Link
from fse_convert.checkpoint.source import MANIFEST, SUFFIX, open_checkpoint
from fse_convert.checkpoint.transaction import Staging, check_output, check_space, stage
from fse_convert.claims import parse_claims
from fse_convert.contents import read_contents
from fse_convert.errors import EnvironmentFailure, Problem, UsageError, VerificationFailure
from fse_convert.manifest import finish, manifest
from fse_convert.models.describe import describe
from fse_convert.originals import encode_json
from fse_convert.plan import Options, Plan
from fse_convert.planning import make_plan
from fse_convert.verify.findings import Level

if TYPE_CHECKING:
    from fse_convert.convert import Observer, Written
    from fse_convert.restore import Restored
    from fse_convert.verify.proof import Proof


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished conversion: what was planned, what was written, and the proof of it unless none was asked for."""

    plan: Plan
    written: Written
    proof: Proof | None


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion: where from, where to, and how."""

    source: Path
    out: Path
    options: Options
    link: Link = Link.AUTO
    overwrite: bool = False
    verify: Level = Level.NUMERICS
    workers: int = 2
    restart: bool = False


def plan_conversion(source: Path, options: Options) -> tuple[Plan, LocalFolder]:
    """Read a checkpoint's headers, its F32 scales and what stands beside config.json, and plan its conversion, without torch.

    Raises InvalidCheckpoint, NotConvertible, EnvironmentFailure.
    """
    with environment(source):
        folder = LocalFolder(source)
        checkpoint = open_checkpoint(folder)
        description = describe(checkpoint)
        contents = read_contents(checkpoint, folder, description)
    return make_plan(checkpoint, description, options, contents), folder


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
    """Carry out a plan; see `convert`."""
    from fse_convert.convert import fingerprint, write_output

    with environment(request.out):
        check_space(request.out, disk_needed(plan, folder, request.link) - Staging(request.out).held())
        with _resumable(request.out), stage(request.out, fingerprint(plan, folder), restart=request.restart) as staging:
            written = write_output(plan, folder, staging, request.link, request.workers, observe)
            proof, size = _prove(request, plan, folder, staging, observe)
            written.add(MANIFEST, "written", size)
            staging.publish()
    return Outcome(plan, written, proof)


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Say where the finished part is when the machine stopped a conversion."""
    try:
        with environment(out):
            yield
    except EnvironmentFailure as e:
        hint = "the same command goes on from there; --restart starts anew"
        kept = Problem("resumable", "what is finished is kept", str(Staging(out).root), hint)
        raise type(e)(*e.problems, kept) from e


def _prove(request: Request, plan: Plan, folder: LocalFolder, staging: Staging, observe: Observer) -> tuple[Proof | None, int]:
    """Prove what is staged against the source, and write the manifest with the result.

    Returns the proof, and the manifest's size in bytes. Raises VerificationFailure.
    """
    from fse_convert.convert import small_files
    from fse_convert.verify.expected import open_source
    from fse_convert.verify.proof import failure, manifest_json, prove

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
    files, tensors = (proof.storage.files, proof.storage.tensors) if proof else (None, None)
    raw = encode_json(finish(draft, manifest_json(proof), files, tensors))
    staging.write(MANIFEST, raw)
    return proof, len(raw)


def workload(plan: Plan, folder: LocalFolder, level: Level) -> tuple[int, int]:
    """Bytes that a conversion writes and reads back, and how often a file or a layer is finished: for progress."""
    written, sidecar = sum(s.size for s in plan.shards), sum(s.size for s in plan.sidecar)
    beside = sum(folder.files[n] for n in plan.checkpoint.others)
    files = len(plan.shards) + len(plan.sidecar)
    if level is Level.NONE:
        return written + sidecar, files
    layers = sum(len(s.tensors) // 4 for s in plan.sidecar) * max(0, level.rank - 1)
    return 2 * (written + sidecar) + beside, 2 * files + layers


@dataclass(frozen=True, slots=True)
class Check:
    """A request to verify: the output, its source if there is one, and how far to go."""

    out: Path
    source: Path | None
    level: Level = Level.NUMERICS
    sample: int | None = None
    device: str = "auto"


def reading(check: Check) -> tuple[int, int]:
    """Bytes of an output that `verify` or `restore` reads, and how often a file is finished: for progress."""
    files = LocalFolder(check.out).files
    return sum(files.values()), sum(n.endswith(SUFFIX) for n in files)


def verify(check: Check, observe: Observer) -> Proof:
    """Prove an output again, or check it against its own manifest when there is no source; see `Proof` for the answer.

    Raises InvalidCheckpoint when OUT is no output or the source is broken, EnvironmentFailure.
    """
    from fse_convert.claims import read_claims
    from fse_convert.verify.expected import open_source
    from fse_convert.verify.proof import NoDevice, Proof, prove
    from fse_convert.verify.storage import damaged, prove_alone

    out, level = LocalFolder(check.out), check.level if check.source else Level.STORAGE
    with environment(check.out):
        source = open_source(LocalFolder(check.source)) if check.source else None
        try:
            claims = read_claims(out)
        except VerificationFailure as e:
            return Proof(level, damaged(e, "source" if source else "manifest"))
        if source is None:
            return Proof(level, prove_alone(out, claims, sample=check.sample, progress=_events(observe)))
        try:
            return prove(source, out, claims, level, sample=check.sample, device=check.device, progress=_events(observe))
        except NoDevice as e:
            hint = "leave --device away: numerics run on the CPU too"
            raise EnvironmentFailure(Problem("no-cuda", str(e), "--device", hint)) from e


def restore(out: Path, original: Path, link: Link, observe: Observer) -> Restored:
    """Take padding and ``fse/`` out of an output; the original exists afterwards, complete and bit for bit, or not at all.

    Raises InvalidCheckpoint when ``out`` is no output of this tool, VerificationFailure when it is damaged,
    UsageError when ``original`` exists, EnvironmentFailure.
    """
    from fse_convert.claims import read_claims
    from fse_convert.restore import open_output, restored_size, write_original

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
    """Turn what a proof or a restoration tells of its progress into events; that a small file is finished is none."""
    from fse_convert.convert import Event

    def tell(name: str, size: int, done: bool) -> None:
        if name.endswith(SUFFIX):
            observe(Event(name, size, done=done, how="read back"))
        else:
            observe(Event(name, size, done=done and " of " in name))

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
    if "://" not in checkpoint and Path(checkpoint).resolve() in path.resolve().parents:
        hint = "the source is never written; write the report elsewhere"
        raise UsageError(Problem("report-in-source", "the report would lie in the checkpoint", str(path), hint))


def disk_needed(plan: Plan, folder: LocalFolder, link: Link) -> int:
    """Bytes that the output takes at most; hard links take none, a clone may fall back to a copy."""
    shards = sum(s.size for s in plan.shards if s.rewritten or link is not Link.HARD)
    return shards + sum(s.size for s in plan.sidecar) + sum(folder.files[n] for n in plan.checkpoint.others)
