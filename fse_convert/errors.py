"""Errors for people: what, where, and what to do. Each class has an exit code, each error a stable code of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SHOWN = 8
"""How many names of a long list a message spells out."""


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
    """The machine refused: space, permission, I/O."""

    exit_code = ExitCode.ENVIRONMENT


class ServerRefuses(FseConvertError):
    """The server that was named would not run what the conversion would write."""

    exit_code = ExitCode.NO


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


@contextmanager
def environment(where: Path | str) -> Iterator[None]:
    """Turn what the machine refuses into an EnvironmentFailure that says what to do; ``where`` names it if the error does not."""
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
"""Code and hint by errno."""


def some(names: Iterable[str]) -> str:
    """Spell out the first names of a list and count the rest."""
    listed = list(names)
    rest = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def folded(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Say once what is wrong in many places in the same way: the first place, and how many more there are."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for p in problems:
        places.setdefault((p.code, p.message, p.hint), []).append(p.where)
    return tuple(
        Problem(code, message, where[0] if len(where) == 1 else f"{where[0]}; the same in {len(where) - 1} more places", hint)
        for (code, message, hint), where in places.items()
    )
