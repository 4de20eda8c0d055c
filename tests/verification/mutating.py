"""Single changes of a finished output, how to carry them out and undo them, and whether the proof still passes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.errors import InvalidCheckpoint, VerificationFailure
from fse_convert.plan.source import Source
from fse_convert.sidecar.manifest import Manifest
from fse_convert.testing.patch import read_header
from fse_convert.verification.manifest import OutputManifest
from fse_convert.verification.storage import Output, prove_alone, prove_storage

SEEDS = range(int(os.environ.get("FSE_MUTATION_SEEDS", "1")))
"""How often every way to damage an output is tried, each time elsewhere; `make mutations` sets it."""


@dataclass(frozen=True)
class Mutation:
    """A change of one file: bytes at an offset, or its whole content (None: the file is removed). ``what``: more about it."""

    region: str
    file: str
    offset: int
    data: bytes | None
    changes_numbers: bool = False
    whole: bool = False
    what: str = ""


@dataclass(frozen=True)
class Converted:
    source: Source
    out: Path
    manifest: Manifest

    def entries(self, name: str) -> tuple[dict[str, dict], int]:
        """Entries of a shard without its metadata, and the offset of its payload."""
        entries, start = read_header(self.out / name)
        return {n: e for n, e in entries.items() if n != "__metadata__"}, start


def level_1(c: Converted) -> bool:
    """Whether the output passes level 1 as ``verify --source`` decides it, the manifest's digests aside: they catch anything."""
    try:
        folder = LocalFolder(c.out)
        manifest = OutputManifest.read(folder)
        bare = replace(manifest, content=msgspec.structs.replace(manifest.content, files=None, tensors=None))
        return prove_storage(Output(folder, bare), c.source)[0].passed
    except (VerificationFailure, InvalidCheckpoint):  # a damaged manifest, or none
        return False


def alone(c: Converted) -> bool:
    """Whether the output passes ``verify`` without a source, by the manifest's digests."""
    try:
        folder = LocalFolder(c.out)
        return prove_alone(Output(folder, OutputManifest.read(folder))).passed
    except (VerificationFailure, InvalidCheckpoint):
        return False


def flipped(raw: bytes, at: int, rng: random.Random) -> bytes:
    return bytes([raw[at] ^ (1 << rng.randrange(8))])


def apply(c: Converted, m: Mutation) -> Callable[[], None]:
    """Carry out a mutation; returns how to undo it."""
    path = c.out / m.file
    if not path.exists():
        made = not path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(m.data or b"")
        return lambda: shutil.rmtree(path.parent) if made else path.unlink()
    before = path.read_bytes()
    if m.data is None:
        path.unlink()
    elif m.whole:
        path.write_bytes(m.data)
    else:
        after = before[: m.offset] + m.data + before[m.offset + len(m.data) :]
        assert after != before, m
        path.write_bytes(after)
    return lambda: path.write_bytes(before) and None
