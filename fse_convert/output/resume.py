"""What a run keeps of an earlier one that was cut off: files that a journal of the same conversion vouches for."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fse_convert
from fse_convert.checkpoint.folder import Stamp
from fse_convert.errors import Problem, UsageError, some
from fse_convert.output.digests import file_xxh3_128
from fse_convert.output.journal import JOURNAL, read_journal
from fse_convert.output.parts import Job

logger = logging.getLogger(__name__)
Files = dict[str, dict[str, Any]]
"""What a journal says of finished files, by name."""


def fingerprint_of(layout: Mapping[str, Any], arguments: Mapping[str, Any], source: Mapping[str, Stamp]) -> dict[str, Any]:
    """Return what must be the same for a run to resume another one: tool, layout, arguments, and the source's files."""
    stamps = {name: list(source[name]) for name in sorted(source)}
    return {"version": fse_convert.__version__, "layout": layout, "arguments": arguments, "source": stamps}


def read_journals(root: Path) -> dict[str, tuple[dict[str, Any], Files]]:
    """Return fingerprint and files of the journals that can be read, by name: that of a whole run, and those of parts."""
    read = {path.name: read_journal(path) for path in sorted(root.glob(f"{JOURNAL}*"))}
    return {name: journal for name, journal in read.items() if journal is not None}


def check_same_conversion(root: Path, fingerprints: Iterable[Mapping[str, Any]], ours: Mapping[str, Any]) -> None:
    """Refuse unfinished work of another source, of other arguments or of another version. Raises UsageError."""
    for theirs in fingerprints:
        if changed := _differences(theirs, ours):
            message = f"an unfinished conversion lies here, made from something else: {some(changed)}"
            hint = "start anew with --restart and without --part, or give another output folder"
            raise UsageError(Problem("resume-differs", message, str(root), hint))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say in which fields two fingerprints differ, dotted for nested ones; of words and numbers also what they were and are."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            told = f" was {a}, is {b}" if isinstance(a, str | int) and isinstance(b, str | int) else ""
            found.append(f"{prefix}{key}{told}")
    return found


def finished_sizes(root: Path, fingerprint: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the files that runs of the same ``fingerprint`` finished, by name."""
    same = (files for theirs, files in read_journals(root).values() if not _differences(theirs, fingerprint))
    return {name: int(record.get("size", 0)) for files in same for name, record in files.items()}


def how_finished(job: Job, folder: Path, record: Mapping[str, Any] | None, *, fresh: bool) -> str | None:
    """Return how a file came to be that a journal's ``record`` vouches for; None when it must be written.

    It is hashed again, unless it is ``fresh``: this very run had another process write it.
    """
    if record is None:
        return None
    path, hashed, how = folder / job.name, record.get("xxh3_128"), record.get("how")
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or not info.st_size == job.size == record.get("size") or not isinstance(how, str):
            return None
        if fresh:
            return how
        # Whether the source of a hard link is still the same, the fingerprint tells.
        same = file_xxh3_128(path) == hashed if hashed else job.linked is not None and path.samefile(job.linked)
    except OSError:
        return None
    state = "its hash agrees" if same else "but its content changed: written again"
    logger.info("%s: finished by an earlier run, %s", job.name, state)
    return how if same else None
