"""The whole conversion as one call: source -> description -> verdict -> plan -> shards -> proof -> output."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.ranges import Link
from fse_convert.checkpoint.source import open_checkpoint
from fse_convert.checkpoint.transaction import check_output, check_space, stage
from fse_convert.errors import EnvironmentFailure, Problem
from fse_convert.models.describe import describe
from fse_convert.plan import Options, Plan
from fse_convert.planning import f32_scales, make_plan

if TYPE_CHECKING:
    from fse_convert.convert import Observer, Written


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished conversion: what was planned and what was written."""

    plan: Plan
    written: Written


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion: where from, where to, and how."""

    source: Path
    out: Path
    options: Options
    link: Link = Link.AUTO
    overwrite: bool = False


def plan_conversion(source: Path, options: Options) -> tuple[Plan, LocalFolder]:
    """Read a checkpoint's headers and plan its conversion; torch is imported only if F32 scales must be looked at.

    Raises InvalidCheckpoint, NotConvertible, EnvironmentFailure.
    """
    folder = LocalFolder(source)
    with environment(source):
        checkpoint = open_checkpoint(folder)
        description = describe(checkpoint)
        inexact = {}
        if f32_scales(description) and not description.problems:
            from fse_convert.convert import inexact_scales

            inexact = inexact_scales(checkpoint, folder, description)
    return make_plan(checkpoint, description, options, inexact), folder


@contextmanager
def environment(where: Path) -> Iterator[None]:
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
    from fse_convert.convert import write_output

    with environment(request.out):
        check_space(request.out, disk_needed(plan, folder, request.link))
        with stage(request.out) as staging:
            written = write_output(plan, folder, staging, request.link, observe)
            staging.publish()
    return Outcome(plan, written)


def disk_needed(plan: Plan, folder: LocalFolder, link: Link) -> int:
    """Bytes that the output takes at most; hard links take none, a clone may fall back to a copy."""
    shards = sum(s.size for s in plan.shards if s.rewritten or link is not Link.HARD)
    return shards + sum(s.size for s in plan.sidecar) + sum(folder.files[n] for n in plan.checkpoint.others)
