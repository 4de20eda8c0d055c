"""How users and installed packages name a server: a release is a version, and a patch release follows its minor release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Protocol, TypeVar

from packaging.version import InvalidVersion, Version

from fse_convert.errors import Problem, UsageError


class Named(Protocol):
    """A row that has a name, such as ``vllm-0.30-aiter``, an engine, and the release that the name contains."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def engine(self) -> str:
        """The server for people."""

    @property
    def release(self) -> str:
        """The release."""


Row = TypeVar("Row", bound=Named)


def find_named(name: str, rows: Iterable[Row], where: str = "--target") -> Row:
    """Find the row that a user means: ``vllm-0.30``, ``vllm-0.30.1-aiter``, ``vLLM==0.30.0``, or ``vllm`` for the newest row.

    ``where``: the option that it was given to. Raises UsageError, with the name that may be meant where there is one.
    """
    listed = list(rows)
    wanted = re.sub(r"[\s=@_]+", "-", name.strip().lower())
    found = next((row for row in listed if row.name == wanted), None) or _by_version(name, wanted, listed, where)
    if found:
        return found
    meant = _corrected(wanted, listed)
    hint = f"did you mean {meant.name}?" if meant else "see: fse-convert targets"
    raise UsageError(Problem("target-unknown", f"no target {name!r}", where, hint))


def for_version(engine: str, version: str, rows: Iterable[Row]) -> Row:
    """Find the row for an installed server: that of its release (``0.5.22rc1`` is of 0.5.22), else the engine's newest one."""
    mine = [row for row in rows if row.engine == engine]
    return _of_release(version, mine) or mine[-1]


def is_since(release: str, first: str) -> bool:
    """Tell whether a release is ``first`` or later; both are numbers with dots."""
    return _numbers(release) >= _numbers(first)


def _by_version(name: str, wanted: str, rows: Sequence[Row], where: str) -> Row | None:
    """Find the row of a release; None where the name is not that of a server. Raises UsageError for an unknown release."""
    for prefix, suffix in dict.fromkeys(_affixes(row) for row in rows if row.release in row.name):
        match = re.fullmatch(rf"{re.escape(prefix)}(?:-v?(?P<version>\d[^-]*))?{re.escape(suffix)}", wanted)
        if match is None:
            continue
        mine = [row for row in rows if row.release in row.name and _affixes(row) == (prefix, suffix)]
        version = match["version"]
        found = _of_release(version, mine) if version else mine[-1]
        if found is None:
            raise UsageError(_unknown_release(name, version, mine, where))
        return found
    return None


def _affixes(row: Named) -> tuple[str, str]:
    """Return what a row's name has before and after its release: ``vllm`` and ``-aiter``."""
    before, _, after = row.name.partition(f"-{row.release}")
    return before, after


def server_of(row: Named) -> str:
    """Return what the names of all releases of one server, started in one way, have in common."""
    return "".join(_affixes(row))


def _of_release(version: str, rows: Sequence[Row]) -> Row | None:
    asked = _numbers(version)
    return next((row for row in rows if asked and asked[: len(_numbers(row.release))] == _numbers(row.release)), None)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, empty where it is none; ``0.5.22rc1`` counts as 0.5.22."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def _unknown_release(name: str, version: str, rows: Sequence[Named], where: str) -> Problem:
    oldest, newest = rows[0], rows[-1]
    hint = "see: fse-convert targets"
    if _numbers(version) > _numbers(newest.release):
        message = f"{newest.engine} {version} is newer than the newest release known here, {newest.release}"
        hint = f"update fse-convert, or name the kernel contract that it has; {newest.name} is the nearest row"
    elif _numbers(version) and _numbers(version) < _numbers(oldest.release) and not _affixes(oldest)[1]:
        message = f"{oldest.engine} {version} is older than the oldest release known here, {oldest.release}"
    else:
        message = f"no target {name!r}: known releases of {newest.engine} are {', '.join(row.release for row in rows)}"
    return Problem("target-unknown", message, where, hint)


def _corrected(wanted: str, rows: Sequence[Row]) -> Row | None:
    """Return the row that is meant if only letters are wrong: another release is never proposed."""
    numbers = re.findall(r"\d+", wanted)
    by_name = {row.name: row for row in rows if re.findall(r"\d+", row.name) == numbers}
    return next((by_name[close] for close in get_close_matches(wanted, by_name, n=1)), None)
