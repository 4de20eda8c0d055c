"""What a run keeps of an earlier one that was cut off: files that a journal of the same conversion vouches for."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fse_convert.errors import Problem, UsageError, some
from fse_convert.output.digests import file_xxh3_128
from fse_convert.output.journal import JOURNAL, differences, read_journal
from fse_convert.output.parts import Job

logger = logging.getLogger(__name__)
Files = dict[str, dict[str, Any]]
"""What a journal says of finished files, by name."""


def read_journals(root: Path) -> dict[str, tuple[dict[str, Any], Files]]:
    """Return fingerprint and files of the journals that can be read, by name: that of a whole run, and those of parts."""
    read = {path.name: read_journal(path) for path in sorted(root.glob(f"{JOURNAL}*"))}
    return {name: journal for name, journal in read.items() if journal is not None}


def check_same_conversion(root: Path, fingerprints: Iterable[Mapping[str, Any]], ours: Mapping[str, Any]) -> None:
    """Refuse unfinished work of another source, of other arguments or of another version. Raises UsageError."""
    for theirs in fingerprints:
        if changed := differences(theirs, ours):
            message = f"an unfinished conversion lies here, made from something else: {some(changed)}"
            hint = "start anew with --restart and without --part, or give another output folder"
            raise UsageError(Problem("resume-differs", message, str(root), hint))


def finished_sizes(root: Path, fingerprint: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the files that runs of the same ``fingerprint`` finished, by name."""
    same = (files for theirs, files in read_journals(root).values() if not differences(theirs, fingerprint))
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
