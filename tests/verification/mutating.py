"""Single changes of a finished output, how to carry them out and undo them, and whether the proof still passes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.errors import InvalidCheckpoint, VerificationFailure
from fse_convert.plan.source import Source
from fse_convert.sidecar.manifest import DIGEST, Manifest, own_digest
from fse_convert.testing.patch import read_header
from fse_convert.verification.manifest import OutputManifest
from fse_convert.verification.storage import Output, prove_alone, prove_storage

SEEDS = range(int(os.environ.get("FSE_MUTATION_SEEDS", "1")))
"""How often every way to damage an output is tried, each time elsewhere; `make mutations` sets it."""
NO_CHANGE = {("tool", "version"), ("arguments", "allow_unfused"), ("arguments", "tp")}
"""Places of a manifest that may differ: another version is noted, unfused layers may pass where there are none, and two ranks need
the widths that one does, so that the same output is stated in another way.
"""


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


def sealed_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Config, index and manifest edited where they are JSON; of a manifest the digest is made again."""
    for name, count in (("config.json", 40), ("model.safetensors.index.json", 12), ("fse/manifest.json", 60)):
        value = json.loads((c.out / name).read_text())
        if name.startswith("fse"):
            value = {key: held for key, held in value.items() if key not in ("files", "tensors", DIGEST)}
        for path, edited in islice(json_edits(value, rng), count):
            whole = resealed(c, edited) if name.startswith("fse") else encode_json(edited)
            yield Mutation(f"entry of {name}", name, 0, whole, whole=True, what=path)


def resealed(c: Converted, edited: dict[str, Any]) -> bytes:
    value = json.loads((c.out / "fse/manifest.json").read_text())
    full = {**edited, "files": value["files"], "tensors": value["tensors"]}
    return encode_json({**full, DIGEST: own_digest(full)})


def json_edits(value: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """The same JSON with one thing changed, and where: a key or an entry left out, a number, a text or a truth changed."""

    def places(at: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        items = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, inner in items:
            yield (*path, key)
            yield from places(inner, (*path, key))

    every = [path for path in places(value, ()) if path not in NO_CHANGE and not is_figure(path)]
    for path in rng.sample(every, len(every)):
        edited = deepcopy(value)
        place = edited
        for key in path[:-1]:
            place = place[key]
        found = place[path[-1]]
        if isinstance(found, bool):
            place[path[-1]] = not found
        elif isinstance(found, int | float):
            place[path[-1]] = found + 1
        elif isinstance(found, str) and rng.random() < 0.5:
            place[path[-1]] = found + "x"
        else:
            del place[path[-1]]
        yield ".".join(map(str, path)), edited


def is_figure(path: tuple[Any, ...]) -> bool:
    """Tell figures of what was rounded, which level 2 measures again."""
    return path[:2] == ("proof", "numerics") and (path[2:3], len(path)) in ((("matrices",), 5), (("outputs",), 4))
