"""Errors for people: what, where, and what to do. Each class has an exit code, each error a stable code of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The documented exit codes of ``fse-convert``; others come from signals and closed pipes."""

    OK = 0
    NO = 1
    USAGE = 2
    INVALID = 3
    ENVIRONMENT = 4
    LOCKED = 6
    BUG = 70


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: a stable code, a sentence, where it is, and a hint.

    ``code`` is kebab-case and stable over releases. ``where`` names the shard, the tensor or the file.
    """

    code: str
    message: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class FseConvertError(Exception):
    """Base of all errors that a user can cause; carries one or more problems.

    ``problems`` is never empty. ``exit_code`` is what the command line exits with.
    """

    exit_code = ExitCode.INVALID

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[FseConvertError], tuple[Problem, ...]]:
        """Let it travel between processes whole."""
        return type(self), self.problems


class UsageError(FseConvertError):
    """The arguments do not fit together or name something that does not exist."""

    exit_code = ExitCode.USAGE


class InvalidCheckpoint(FseConvertError):
    """The checkpoint is broken, incomplete, or of a kind that is refused."""


class NotConvertible(FseConvertError):
    """The checkpoint is whole, but some layer cannot be converted as asked."""


class EnvironmentFailure(FseConvertError):
    """The machine said no: space, permission, I/O."""

    exit_code = ExitCode.ENVIRONMENT


class VerificationFailure(FseConvertError):
    """The output is not what the source demands; nothing was published."""

    exit_code = ExitCode.NO


class Locked(FseConvertError):
    """Another run is writing the same output."""

    exit_code = ExitCode.LOCKED


class NotServable(FseConvertError):
    """The output does not fit the server that loads it; the message carries codes and hints, since a server shows nothing else."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.args = ("\n".join(f"{p} [{p.code}]" + (f"; {p.hint}" if p.hint else "") for p in problems),)


class Interrupted(FseConvertError):
    """A signal stopped the program; it exits with 128 and the signal's number."""


class Bug(FseConvertError):
    """Something that no input should lead to."""

    exit_code = ExitCode.BUG
