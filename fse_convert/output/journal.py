"""The journal of a conversion: which files are finished. What a run resumes from it is decided in `fse_convert.output.resume`.

One JSON object a line. The first is the fingerprint of the run: what must be the same for its files to be of any use.
Each other line names a finished file with its digest, and is written after the file itself is on disk. A torn line counts as
missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fse_convert.output.copying import write_all

VERSION = 1
JOURNAL = "journal"
"""File name of a whole run's journal; a part's is followed by a dot and the part."""


class Journal:
    """An append-only record of finished files; `add` returns when the line is durable."""

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], done: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.done = dict(done)

    def create(self) -> None:
        """Start a file that holds the fingerprint alone."""
        self._append({"journal": VERSION, **self.fingerprint}, os.O_TRUNC)

    def resume(self) -> None:
        """Append to a file whose last line may be torn: what follows gets a line of its own."""
        raw = self.path.read_bytes()
        if raw and not raw.endswith(b"\n"):
            self._write(b"\n", os.O_APPEND)

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Record a finished file durably."""
        self._append({"file": name, **record}, os.O_APPEND)
        self.done[name] = dict(record)

    def _append(self, entry: Mapping[str, Any], flags: int) -> None:
        self._write(json.dumps(entry, sort_keys=True).encode("ascii") + b"\n", flags)

    def _write(self, data: bytes, flags: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)


def read_journal(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]] | None:
    """Read a journal's fingerprint and finished files; None when there is none that can be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    lines = [_parsed(line) for line in raw.split(b"\n")]
    if not lines or not lines[0]:
        return None
    entries = [line for line in lines if line]
    if entries[0].get("journal") != VERSION:
        return None
    fingerprint = {k: v for k, v in entries[0].items() if k != "journal"}
    done = {str(e["file"]): {k: v for k, v in e.items() if k != "file"} for e in entries[1:] if "file" in e}
    return fingerprint, done


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse one line; a torn one is empty."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
