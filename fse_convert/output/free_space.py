"""Room on the disk of an output: how much is free, and how much must stay so."""

from __future__ import annotations

import shutil
from pathlib import Path

from fse_convert.errors import EnvironmentFailure, Problem, size

MARGIN = 64 << 20
"""Bytes that must stay free beyond what the plan needs."""


def free_space(out: Path) -> int:
    """Return the bytes that are free where ``out`` will be."""
    return shutil.disk_usage(existing_home(out)).free


def check_space(out: Path, needed: int) -> None:
    """Refuse to go on when the file system of ``out`` has less room than is still needed plus a margin (bytes)."""
    free = free_space(out)
    if free < needed + MARGIN:
        message = f"needs {size(needed)} and a margin of {size(MARGIN)}, {size(free)} are free"
        hint = "free some space, or write to another disk"
        raise EnvironmentFailure(Problem("no-space", message, str(existing_home(out)), hint))


def existing_home(out: Path) -> Path:
    """Return the folder that is there already in which ``out``, or a folder around it, will be made."""
    return next(f for f in (out.parent, *out.parent.absolute().parents) if f.exists())
