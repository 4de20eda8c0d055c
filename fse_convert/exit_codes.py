"""The exit codes of ``fse-convert``, and which one each error, answer and signal has; nothing else decides that."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """The documented exit codes; others come from signals and closed pipes."""

    OK = 0
    NO = 1
    USAGE = 2
    INVALID = 3
    ENVIRONMENT = 4
    LOCKED = 6
    BUG = 70


CLOSED_PIPE = 141
"""Of a program that SIGPIPE ended."""
HELP = """
\b
Exit codes:
  0  done, and every requirement met
  1  requirement not met: a required target does not fuse, or a verification found a mismatch
  2  wrong arguments
  3  the checkpoint is broken; of convert also: not understood, or not convertible as asked
  4  environment error: space, permission, I/O, no GPU for what was asked; what is finished is kept
  6  another run is writing the same output
  70  a bug in fse-convert: please report it
  141  whoever read the output closed the pipe
  130, 143, 129  stopped by SIGINT, SIGTERM, SIGHUP; what is finished is kept
"""
ERRORS: Mapping[str, ExitCode] = {
    "UsageError": ExitCode.USAGE,
    "EnvironmentFailure": ExitCode.ENVIRONMENT,
    "ServerRefuses": ExitCode.NO,
    "VerificationFailure": ExitCode.NO,
    "Locked": ExitCode.LOCKED,
    "Bug": ExitCode.BUG,
}
"""By the classes of `fse_convert.errors`; of all others `ExitCode.INVALID`."""


def of_inspection(*, broken: bool, required_fuse: bool) -> ExitCode:
    """Return what ``inspect`` ends with: 3 for a broken checkpoint, 1 unless every required target fuses every layer of it."""
    return ExitCode.INVALID if broken else ExitCode.OK if required_fuse else ExitCode.NO


def of_proof(*, failed: bool, nothing_to_run_on: str, unavailable: str) -> ExitCode:
    """Return what ``verify`` ends with: 1 when something is wrong or had nothing to run on, 4 when this machine cannot run it."""
    return ExitCode.NO if failed or nothing_to_run_on else ExitCode.ENVIRONMENT if unavailable else ExitCode.OK


def of_dry_run(*, fits: bool) -> ExitCode:
    """Return what ``--dry-run`` ends with: 4 where there is too little room."""
    return ExitCode.OK if fits else ExitCode.ENVIRONMENT


def of_signal(number: int) -> int:
    """Return what a signal ends a command with, as shells have it."""
    return 128 + number
