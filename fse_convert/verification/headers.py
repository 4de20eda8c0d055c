"""Files, headers, indexes and config of an output: every tensor once, in its shard, at its place, with its dtype and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from fse_convert.checkpoint.encoding import encode_header, encode_json, header_entries, header_entry
from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.left_out import BOOKKEEPING, find_clutter, notes
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, SIDECAR, SIDECAR_INDEX
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import Problem
from fse_convert.plan.planner import tripwire
from fse_convert.plan.source import Source
from fse_convert.sidecar.tensors import shard_metadata
from fse_convert.verification.expected import ExpectedOutput, ExpectedTensor, Holds, KernelExpert, Padded, edited
from fse_convert.verification.findings import Findings, Mismatch, bytes_mismatch, text_mismatches

STAGED = "sidecar-foreign"
ORIGINALS_METADATA = {"format": "pt"}
"""Metadata of the files of ``fse/`` that keep source tensors as they were."""


def refusals(problems: Iterable[Problem]) -> list[Mismatch]:
    """Return what makes a checkpoint or a file unreadable, as mismatches; that ``fse/`` has no manifest is so in staging."""
    wrong = [p for p in problems if p.code != STAGED]
    return [Mismatch(p.code, p.where, expected="a whole, consistent checkpoint", found=p.message) for p in wrong]


def check_files(expected: ExpectedOutput, out: LocalFolder, findings: Findings) -> set[str]:
    """Check which files there are, the manifest aside; return those that must be equal to the source's and have its size."""
    source, kernel = expected.source, expected.files
    names = source.checkpoint.files | kernel.keys() | expected.originals.keys() | ({SIDECAR_INDEX} if kernel else set())
    findings.add(*(Mismatch("file-missing", n, expected="a file", found="none") for n in sorted(names - out.files.keys())))
    extra = sorted(out.files.keys() - names - {MANIFEST}) + out.odd
    findings.add(*(Mismatch("file-unexpected", n, expected="no such file", found="it is there") for n in extra))
    check_clutter(out, findings)
    same = set()
    for name in source.checkpoint.others:
        want, got = source.folder.files[name], out.files.get(name)
        if want == got:
            same.add(name)
        elif got is not None:
            findings.add(Mismatch("size", name, expected=f"{want} bytes", found=f"{got} bytes"))
    return same


HUB_BOOKKEEPING = re.compile(r"\.cache/huggingface/(\.gitignore|CACHEDIR\.TAG|(?:download|upload)/.+\.(metadata|lock))")
"""What the hub's client leaves in a folder that it downloaded to (huggingface_hub 0.23 and later, local_dir)."""


def check_clutter(out: LocalFolder, findings: Findings) -> None:
    """Find what is not part of a checkpoint and still there: a server may run some of it (``__pycache__``)."""
    extra = [n for n in out.hidden if not HUB_BOOKKEEPING.fullmatch(n) and (findings.strict or not _is_harmless(n))]
    findings.add(*(Mismatch("file-unexpected", n, expected="no such file", found="it is there") for n in extra))


def _is_harmless(name: str) -> bool:
    """Tell clutter of the file system or an editor, and a clone's ``.git``, from what a server could run or take for its own."""
    found = find_clutter(name)
    return name.startswith(".git/") or (found is not None and found[1] is not BOOKKEEPING)


def clutter_notes(out: LocalFolder, findings: Findings) -> Iterator[str]:
    """Say which clutter is there and was left out."""
    hub = [n for n in out.hidden if HUB_BOOKKEEPING.fullmatch(n)]
    if hub:
        yield f"{len(hub):,} files of the hub client's bookkeeping in .cache/huggingface were left out"
    if not findings.strict:
        yield from (n.message for n in notes({n: kind for n, kind in out.clutter.items() if _is_harmless(n)}, ""))


def index_mismatches(out: Folder, sidecar: Iterable[Shard]) -> list[Mismatch]:
    """Compare the index of ``fse/`` with the headers of all safetensors files there, in both directions."""
    if SIDECAR_INDEX not in out.files:
        return []
    weight_map = {t.name: s.name.removeprefix(f"{SIDECAR}/") for s in sidecar for t in s.header.tensors}
    total = sum(s.header.payload for s in sidecar)
    expected = encode_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return text_mismatches(SIDECAR_INDEX, expected, out.read(SIDECAR_INDEX))


def header_mismatches(out: Folder, shard: Shard, entries: Mapping[str, Any], metadata: Mapping[str, str] | None) -> list[Mismatch]:
    """Compare a header, byte for byte, with the encoding of these entries and this metadata."""
    actual = raw_header(out, shard)
    expected = encode_header(entries, metadata)
    if expected == actual:
        return []
    unlike = [m for m in text_mismatches(shard.name, expected[LENGTH_BYTES:], actual[LENGTH_BYTES:]) if m.offset is None]
    if unlike:
        return [Mismatch("header", shard.name, expected=m.expected, found=m.found) for m in unlike]
    return [bytes_mismatch("header", shard.name, expected, actual)]


def tensor_mismatches(shards: Iterable[Shard], expected: Mapping[str, tuple[str, str, tuple[int, ...]]]) -> list[Mismatch]:
    """Compare the tensors of some shards with what they must be: (shard or "" for any, dtype, shape) by name."""
    mismatches: list[Mismatch] = []
    seen: dict[str, str] = {}
    for shard in shards:
        for t in shard.header.tensors:
            kind = _kind(t.dtype, t.shape)
            if t.name in seen:
                mismatches.append(Mismatch("tensor-duplicate", shard.name, t.name, None, f"only in {seen[t.name]}", "here too"))
            elif t.name not in expected:
                mismatches.append(Mismatch("tensor-unexpected", shard.name, t.name, None, "no such tensor", kind))
            else:
                place, dtype, shape = expected[t.name]
                if place and place != shard.name:
                    mismatches.append(Mismatch("tensor-misplaced", shard.name, t.name, None, f"in {place}", "here"))
                if (t.dtype, t.shape) != (dtype, shape):
                    mismatches.append(Mismatch("tensor-shape", shard.name, t.name, None, _kind(dtype, shape), kind))
            seen[t.name] = shard.name
    for name in expected.keys() - seen.keys():
        place, dtype, shape = expected[name]
        mismatches.append(Mismatch("tensor-missing", place or SIDECAR, name, None, _kind(dtype, shape), "no such tensor"))
    return sorted(mismatches, key=lambda m: (m.file, m.tensor, m.code))


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def entries_of(shard: Shard) -> dict[str, Any]:
    """Return a shard's own entries, in offset order, for `header_mismatches` where no other order is prescribed."""
    return {t.name: header_entry(t.dtype, t.shape, t.start, t.end) for t in shard.header.tensors}


def raw_header(folder: Folder, shard: Shard) -> bytes:
    """Return a header as it lies in the file."""
    return folder.read(shard.name, 0, shard.header.data_start)


def check_standard_layout(
    expected: ExpectedOutput, out: LocalFolder, shards: Iterable[Shard], findings: Findings
) -> dict[str, Holds]:
    """Check the headers of the standard layout; return what each tensor must hold whose bytes can be compared."""
    known = {s.name: s for s in expected.source.checkpoint.shards}
    for shard in shards:
        tensors = expected.shards.get(shard.name, ())
        if not all(t.as_is for t in tensors):  # a shard that is rewritten says `format: pt`
            metadata = {"format": "pt", **known[shard.name].header.metadata}
            findings.add(*header_mismatches(out, shard, _entries(tensors), metadata))
        elif shard.name in known:
            want, got = raw_header(expected.source.folder, known[shard.name]), raw_header(out, shard)
            findings.add(*([bytes_mismatch("header", shard.name, want, got)] if want != got else []))
    return _comparable(expected.shards, shards, findings)


def check_originals(expected: ExpectedOutput, out: LocalFolder, shards: Iterable[Shard], findings: Findings) -> dict[str, Holds]:
    """Check the headers of the files of ``fse/`` that keep source tensors; return what `check_standard_layout` does."""
    for shard in shards:
        if shard.name in expected.originals:
            findings.add(*header_mismatches(out, shard, _entries(expected.originals[shard.name]), ORIGINALS_METADATA))
    return _comparable(expected.originals, shards, findings)


def _entries(tensors: Iterable[ExpectedTensor]) -> dict[str, Any]:
    return header_entries((t.name, t.dtype, t.shape) for t in tensors)


def _comparable(
    expected: Mapping[str, tuple[ExpectedTensor, ...]], shards: Iterable[Shard], findings: Findings
) -> dict[str, Holds]:
    """Check that every tensor is once in its file, with its dtype and shape; return what those must hold that are."""
    tensors = {t.name: (file, t.dtype, t.shape) for file, held in expected.items() for t in held}
    wrong = tensor_mismatches(shards, tensors)
    findings.add(*wrong)
    right = {t.name for s in shards for t in s.header.tensors} - {m.tensor for m in wrong}
    return {t.name: t.holds for held in expected.values() for t in held if t.name in right}


def check_kernel_headers(expected: ExpectedOutput, out: LocalFolder, sidecar: Iterable[Shard], findings: Findings) -> None:
    """Check the headers in ``fse/``: file by file, tensor by tensor, in the order in which a conversion writes them."""
    files = expected.files
    for shard in sidecar:
        if shard.name in files:
            tensors = [(name, *kind) for e in files[shard.name] for name, kind in e.shapes.items()]
            if shard.name == next(iter(files)):
                wire = tripwire(expected.source.checkpoint)
                tensors.insert(0, (wire.name, wire.dtype, (0,)))
            metadata = shard_metadata(expected.plan.options.goal)
            findings.add(*header_mismatches(out, shard, header_entries(tensors), metadata))


def check_kernel_tensors(
    source: Source,
    experts: Iterable[KernelExpert],
    files: Mapping[str, Iterable[KernelExpert]],
    sidecar: Iterable[Shard],
    findings: Findings,
) -> dict[str, KernelExpert]:
    """Check names, dtypes, shapes and (where ``files`` says) places in ``fse/``; return whose tensor each right one is."""
    places = {name: file for file, held in files.items() for e in held for name in e.shapes}
    owners = {name: e for e in experts for name in e.shapes}
    tensors = {name: (places.get(name, ""), *e.shapes[name]) for name, e in owners.items()}
    if owners:
        wire = tripwire(source.checkpoint)
        tensors[wire.name] = (next((s.name for s in sidecar), ""), wire.dtype, (0,))
    wrong = tensor_mismatches(sidecar, tensors)
    findings.add(*wrong)
    right = {t.name for s in sidecar for t in s.header.tensors} - {m.tensor for m in wrong}
    return {name: e for name, e in owners.items() if name in right}


def expected_texts(expected: ExpectedOutput) -> dict[str, bytes]:
    """Return config.json and the index as they must be: the source's, edited as changes of format and padding ask."""
    source, edits = expected.source, expected.config_edits
    changes = [change for c in expected.plan.decision.changes for change in c.config]
    untouched = not edits and not changes
    texts = {CONFIG: source.folder.read(CONFIG) if untouched else encode_json(edited(source.checkpoint.config, changes, edits))}
    if INDEX in source.folder.files:
        texts[INDEX] = _index(expected)
    return texts


def _index(expected: ExpectedOutput) -> bytes:
    """Return the source's index where that is right as it is, else one with the output's names and true totals."""
    source, tensors = expected.source, list(expected.tensors)
    kept = source.checkpoint.index_metadata or {}
    metadata = {**kept, "total_size": sum(t.nbytes for t in tensors)}
    if isinstance(kept.get("total_parameters"), int):
        padded = ((t.shape, t.holds.info.shape) for t in tensors if isinstance(t.holds, Padded))
        metadata["total_parameters"] += sum(prod(new) - prod(old) for new, old in padded)
    if all(t.as_is for t in tensors) and metadata == source.checkpoint.index_metadata:
        return source.folder.read(INDEX)
    places = {t.name: file for file, held in expected.shards.items() for t in held}
    return encode_json({"metadata": metadata, "weight_map": dict(sorted(places.items()))})
