"""Which mount a path lies on: two paths of one file system may lie on two, and nothing is linked or renamed between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc/self")


class Mount(NamedTuple):
    """A mount: its number, the file system's type and number."""

    number: int
    kind: str
    device: int


def mount_of(path: Path) -> Mount:
    """Return the mount that a path leads to; without /proc the file system's number alone. Raises OSError."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        device = os.fstat(fd).st_dev
        facts = dict(line.split(":", 1) for line in _lines(PROC / f"fdinfo/{fd}"))
    finally:
        os.close(fd)
    number = int(facts.get("mnt_id", 0))
    fields = next((f for f in map(str.split, _lines(PROC / "mountinfo")) if f[0] == str(number)), None)
    return Mount(number=number, kind=fields[fields.index("-") + 1] if fields else "", device=device)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
