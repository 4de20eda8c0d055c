"""Headers and indexes of an output: every tensor once, in its shard, at its place, with its dtype and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from fse_convert.checkpoint.encoding import encode_header, encode_json
from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.header import LENGTH_BYTES, TensorInfo, header_length, parse_header
from fse_convert.checkpoint.names import INDEX, MANIFEST, SIDECAR, SUFFIX, natural_key
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.verification.findings import Findings, Mismatch
from fse_convert.verification.texts import bytes_mismatch, compare_text

SIDECAR_INDEX = f"{SIDECAR}/{INDEX}"
STAGED = "sidecar-foreign"


def refusals(problems: Iterable[Problem]) -> list[Mismatch]:
    """What makes a checkpoint or a file unreadable, as mismatches; that ``fse/`` has no manifest is so in staging."""
    wrong = [p for p in problems if p.code != STAGED]
    return [Mismatch(p.code, p.where, expected="a whole, consistent checkpoint", found=p.message) for p in wrong]


def file_mismatches(expected: AbstractSet[str], out: LocalFolder) -> list[Mismatch]:
    """Files that are missing or that nothing explains; the manifest may not be there yet."""
    missing = [Mismatch("file-missing", n, expected="a file", found="none") for n in sorted(expected - out.files.keys())]
    extra = sorted(out.files.keys() - expected - {MANIFEST}) + out.odd
    return missing + [Mismatch("file-unexpected", n, expected="no such file", found="it is there") for n in extra]


HUB_BOOKKEEPING = re.compile(r"\.cache/huggingface/(\.gitignore|CACHEDIR\.TAG|download/.+\.(metadata|lock))")
"""What the hub's client leaves in a folder that it downloaded to (huggingface_hub 0.23 and later, local_dir)."""


def hidden_mismatches(out: LocalFolder) -> list[Mismatch]:
    """What lies in folders that are no part of a checkpoint: a server may run it (``__pycache__``), so an output has none."""
    extra = [n for n in out.hidden if not HUB_BOOKKEEPING.fullmatch(n)]
    return [Mismatch("file-unexpected", n, expected="no such file", found="it is there") for n in extra]


def hidden_note(out: LocalFolder) -> str:
    """Say that bookkeeping of the hub's client is there; empty where it is not."""
    count = sum(HUB_BOOKKEEPING.fullmatch(n) is not None for n in out.hidden)
    return f"{count:,} files of the hub client's bookkeeping in .cache/huggingface were left out" if count else ""


def read_sidecar(out: Folder, findings: Findings) -> tuple[Shard, ...]:
    """Read the headers of all safetensors files in ``fse/``, and check them against their index in both directions."""
    names = sorted((n for n in out.files if n.startswith(f"{SIDECAR}/") and n.endswith(SUFFIX)), key=natural_key)
    shards = []
    for name in names:
        try:
            size = out.files[name]
            length = header_length(out.read(name, 0, 32), size, name)
            shards.append(Shard(name, size, parse_header(out.read(name, LENGTH_BYTES, length), size, name)))
        except InvalidCheckpoint as e:
            findings.add(*refusals(e.problems))
    if not names and SIDECAR_INDEX not in out.files:
        return ()
    weight_map = {t.name: s.name.removeprefix(f"{SIDECAR}/") for s in shards for t in s.header.tensors}
    total = sum(s.header.payload for s in shards)
    expected = encode_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    if SIDECAR_INDEX in out.files:
        findings.add(*compare_text(SIDECAR_INDEX, expected, out.read(SIDECAR_INDEX)))
    return tuple(shards)


def header_mismatches(out: Folder, shard: Shard, entries: Mapping[str, Any], metadata: Mapping[str, str] | None) -> list[Mismatch]:
    """Compare a header, byte for byte, with the encoding of these entries and this metadata."""
    found = out.read(shard.name, 0, shard.header.data_start)
    expected = encode_header(entries, metadata)
    if expected == found:
        return []
    unlike = [m for m in compare_text(shard.name, expected[LENGTH_BYTES:], found[LENGTH_BYTES:]) if m.offset is None]
    if unlike:
        return [Mismatch("header", shard.name, expected=m.expected, found=m.found) for m in unlike]
    return [bytes_mismatch("header", shard.name, expected, found)]


def tensor_mismatches(shards: Iterable[Shard], expected: Mapping[str, tuple[str, str, tuple[int, ...]]]) -> list[Mismatch]:
    """Compare the tensors of some shards with what they must be: (shard or "" for any, dtype, shape) by name."""
    found: list[Mismatch] = []
    seen: dict[str, str] = {}
    for shard in shards:
        for t in shard.header.tensors:
            if t.name in seen:
                found.append(Mismatch("tensor-duplicate", shard.name, t.name, None, f"only in {seen[t.name]}", "here too"))
            elif t.name not in expected:
                found.append(Mismatch("tensor-unexpected", shard.name, t.name, None, "no such tensor", _kind(t.dtype, t.shape)))
            else:
                found += _misplaced(t, shard.name, *expected[t.name])
            seen[t.name] = shard.name
    for name in expected.keys() - seen.keys():
        place, dtype, shape = expected[name]
        found.append(Mismatch("tensor-missing", place or SIDECAR, name, None, _kind(dtype, shape), "no such tensor"))
    return sorted(found, key=lambda m: (m.file, m.tensor, m.code))


def _misplaced(t: TensorInfo, shard: str, place: str, dtype: str, shape: tuple[int, ...]) -> list[Mismatch]:
    found = []
    if place and place != shard:
        found.append(Mismatch("tensor-misplaced", shard, t.name, None, f"in {place}", "here"))
    if (t.dtype, t.shape) != (dtype, shape):
        found.append(Mismatch("tensor-shape", shard, t.name, None, _kind(dtype, shape), _kind(t.dtype, t.shape)))
    return found


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def entries_of(shard: Shard) -> dict[str, Any]:
    """A shard's own entries, in offset order, for `header_mismatches` where no other order is prescribed."""
    return {t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.end]} for t in shard.header.tensors}


def raw_header(folder: Folder, shard: Shard) -> bytes:
    """A header as it lies in the file."""
    return folder.read(shard.name, 0, shard.header.data_start)
