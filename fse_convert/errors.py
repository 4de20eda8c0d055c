"""Errors for people: what, where, and what to do. Each error has a stable code of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fse_convert.exit_codes import ERRORS, ExitCode

FEWER = "fewer --workers, or raise the limit: that of the shell (ulimit), of the container or of the job"
INSTALL_TORCH = "pip install torch (a CPU build is enough); inspect, targets, explain, card, doctor and --dry-run work without it"
SHOWN = 8
"""How many names of a long list a message spells out."""


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

    ``problems`` is never empty.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems

    @property
    def exit_code(self) -> ExitCode:
        """What the command line exits with."""
        return ERRORS.get(type(self).__name__, ExitCode.INVALID)

    def __reduce__(self) -> tuple[type[FseConvertError], tuple[Problem, ...]]:
        """Let it travel between processes whole."""
        return type(self), self.problems


class UsageError(FseConvertError):
    """The arguments do not fit together or name something that does not exist."""


class InvalidCheckpoint(FseConvertError):
    """The checkpoint is broken, incomplete, or of a kind that is refused."""


class NotConvertible(FseConvertError):
    """The checkpoint is whole, but some layer cannot be converted as asked."""


class EnvironmentFailure(FseConvertError):
    """The machine refused: space, permission, I/O."""


class ServerRefuses(FseConvertError):
    """The server that was named would not run what the conversion would write."""


class VerificationFailure(FseConvertError):
    """The output is not what the source demands; nothing was published."""


class Locked(FseConvertError):
    """Another run is writing the same output."""


class NotServable(FseConvertError):
    """The output does not fit the server that loads it; the message carries codes and hints, since a server shows nothing else."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.args = ("\n".join(f"{p} [{p.code}]" + (f"; {p.hint}" if p.hint else "") for p in problems),)


class Interrupted(FseConvertError):
    """A signal stopped the program; it exits with 128 and the signal's number."""


class Bug(FseConvertError):
    """Something that no input should lead to."""


@contextmanager
def environment(where: Path | str) -> Iterator[None]:
    """Turn what the machine refuses into an EnvironmentFailure that says what to do; ``where`` names it if the error does not."""
    try:
        with limits():
            yield
    except EOFError as e:
        message = f"a file became shorter while it was read: {e}"
        raise EnvironmentFailure(Problem("source-changed", message, str(where), "is something still writing it?")) from e
    except OSError as e:
        code, hint = ERRNO_HINTS.get(e.errno or 0, ("io-error", "see the system log; the source was not changed"))
        name = os.fsdecode(e.filename) if e.filename else str(where)
        raise EnvironmentFailure(Problem(code, e.strerror or str(e), name, hint)) from e


@contextmanager
def limits() -> Iterator[None]:
    """Turn running out of memory or threads, and a torch that cannot be loaded, into an EnvironmentFailure that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, MemoryError) or "can't allocate memory" in str(e):  # torch's way to say it
            raise EnvironmentFailure(Problem("out-of-memory", "this process may not take more memory", hint=FEWER)) from e
        if str(e) == "can't start new thread":
            raise EnvironmentFailure(Problem("too-many-threads", "this process may not start more threads", hint=FEWER)) from e
        raise
    except ImportError as e:
        if (e.name or "").startswith("fse_convert"):
            raise
        if e.name == "torch" and isinstance(e, ModuleNotFoundError):
            raise EnvironmentFailure(Problem("torch-missing", "torch is not installed", hint=INSTALL_TORCH)) from e
        message = f"a library cannot be loaded: {str(e).strip().splitlines()[-1]}"
        hint = "raise the limit of memory if there is one (ulimit -v), else install the library again"
        raise EnvironmentFailure(Problem("import-failed", message, e.name or "", hint)) from e


@contextmanager
def naming(file: Path | int) -> Iterator[None]:
    """Put a file's name, given by path or descriptor, into errors of calls that know the descriptor alone."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            with suppress(OSError):
                e.filename = str(Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else file)
        raise


ERRNO_HINTS = {
    errno.ENOSPC: ("no-space", "free some space, or write to another disk; the source was not changed"),
    errno.EDQUOT: ("no-space", "your quota is used up: free some space, or write to another disk"),
    errno.ENOENT: ("io-error", "this is not there, or not any more: check the path, and what removes it during a run"),
    errno.EACCES: ("permission", "check the permissions of this path"),
    errno.EPERM: ("permission", "check the permissions of this path"),
    errno.EROFS: ("permission", "the file system is read-only: write elsewhere"),
    errno.ENOMEM: ("out-of-memory", FEWER),
    errno.EMFILE: ("too-many-files", "raise the limit: ulimit -n"),
    errno.ENFILE: ("too-many-files", "the system has too many open files"),
    errno.ENAMETOOLONG: ("name-too-long", "choose a shorter output path"),
    errno.ENOLCK: ("no-locks", "the file system cannot lock files: write the output to one that can"),
    errno.EIO: ("io-error", "the disk reported an error: check it before trying again"),
    errno.EFBIG: (
        "file-too-large",
        "no file may be this large: raise the limit (ulimit -f), or write to another file system",
    ),
    errno.ESTALE: ("io-error", "another machine removed or replaced this on a network file system: see what does, then try again"),
    errno.ETIMEDOUT: ("io-error", "the network file system does not answer: try again when it does"),
    errno.EBUSY: ("io-error", "something uses it, a mount for one: unmount or stop that, then try again"),
}
"""Code and hint by errno."""


def some(names: Iterable[str]) -> str:
    """Spell out the first names of a list and count the rest."""
    listed = list(names)
    rest = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def counted(n: int, noun: str) -> str:
    """Return ``1 shard`` or ``1,200 shards``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(n: float) -> str:
    """Return bytes in words, in powers of 1024."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(round(n, digits)) < 1024:
            return f"{n:.{digits}f} {unit}"
        n /= 1024
    return f"{n:,.2f} TiB"


def printable(value: object) -> str:
    """Return a name, path or text with half characters, which file names and JSON can hold and no terminal can print, escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def folded(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Say once what is wrong in many places in the same way: the first place, and how many more there are."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for p in problems:
        places.setdefault((p.code, p.message, p.hint), []).append(p.where)
    return tuple(
        Problem(code, message, where[0] if len(where) == 1 else f"{where[0]}; the same in {len(where) - 1} more places", hint)
        for (code, message, hint), where in places.items()
    )
