"""Files, headers and indexes of an output: every tensor once, in its shard, at its place, with its dtype and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.left_out import BOOKKEEPING, find_clutter, notes
from fse_convert.checkpoint.names import MANIFEST, SIDECAR, SIDECAR_INDEX
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import Problem, counted
from fse_convert.verification.expected import ExpectedFile, ExpectedOutput, ExpectedTensor, Holds, raw_header
from fse_convert.verification.findings import Findings, Mismatch, bytes_mismatch, text_mismatches

STAGED = "sidecar-foreign"
Places = Mapping[str, tuple[str, ExpectedTensor]]
"""Tensors by name, each with its file; ``""`` for any."""
Held = dict[str, dict[str, Holds]]
"""What tensors must hold whose place, dtype and shape are right: by file, by name."""


def refusals(problems: Iterable[Problem]) -> list[Mismatch]:
    """Return what makes a checkpoint or a file unreadable, as mismatches; that ``fse/`` has no manifest is so in staging."""
    wrong = [p for p in problems if p.code != STAGED]
    return [Mismatch(p.code, p.where, expected="a whole, consistent checkpoint", found=p.message) for p in wrong]


def check_files(expected: ExpectedOutput, out: LocalFolder, findings: Findings) -> set[str]:
    """Check which files there are, the manifest aside; return those that must be equal to the source's and have its size."""
    source, kernel = expected.source, expected.kernel.keys() - {""}
    names = source.checkpoint.files | kernel | expected.originals.keys() | ({SIDECAR_INDEX} if kernel else set())
    findings.add(*(Mismatch("file-missing", n, expected="a file", found="none") for n in sorted(names - out.files.keys())))
    findings.add(*_unexpected(sorted(out.files.keys() - names - {MANIFEST}) + out.odd))
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
    findings.add(*_unexpected(extra))


def _unexpected(names: Iterable[str]) -> Iterator[Mismatch]:
    return (Mismatch("file-unexpected", n, expected="no such file", found="it is there") for n in names)


def _is_harmless(name: str) -> bool:
    """Tell clutter of the file system or an editor, and a clone's ``.git``, from what a server could run or take for its own."""
    found = find_clutter(name)
    return name.startswith(".git/") or (found is not None and found[1] is not BOOKKEEPING)


def clutter_notes(out: LocalFolder, findings: Findings) -> Iterator[str]:
    """Say which clutter is there and was left out."""
    hub = [n for n in out.hidden if HUB_BOOKKEEPING.fullmatch(n)]
    if hub:
        yield f"left out: {counted(len(hub), 'file')} of the hub client's bookkeeping in .cache/huggingface"
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


def check_shards(
    expected: Mapping[str, ExpectedFile], source: Folder, out: Folder, shards: Iterable[Shard], findings: Findings
) -> Held:
    """Check the headers of an output's shards and where their tensors are; return what those must hold that are right.

    ``source``: the folder of the checkpoint that files are copied from.
    """
    for shard in shards:
        if shard.name in expected:
            file = expected[shard.name]
            findings.add(*header_mismatches(out, shard, file.header(source), as_is=file.as_is))
    return check_tensors({t.name: (name, t) for name, file in expected.items() for t in file.tensors}, shards, findings)


def check_tensors(places: Places, shards: Iterable[Shard], findings: Findings) -> Held:
    """Check that every tensor is once in its file, with its dtype and shape; return what those must hold that are."""
    mismatches = tensor_mismatches(shards, places)
    findings.add(*mismatches)
    wrong = {m.tensor for m in mismatches}
    right = {name: t.holds for name, (_, t) in places.items() if name not in wrong and t.holds}
    return {s.name: {t.name: right[t.name] for t in s.header.tensors if t.name in right} for s in shards}


def header_mismatches(out: Folder, shard: Shard, expected: bytes, *, as_is: bool = False) -> list[Mismatch]:
    """Compare a header with the bytes that it must have. ``as_is``: these are the source's."""
    actual = raw_header(out, shard)
    if expected == actual:
        return []
    texts = [] if as_is else text_mismatches(shard.name, expected[LENGTH_BYTES:], actual[LENGTH_BYTES:])
    unlike = [m for m in texts if m.offset is None]
    if unlike:
        return [Mismatch("header", shard.name, expected=m.expected, found=m.found) for m in unlike]
    return [bytes_mismatch("header", shard.name, expected, actual)]


def tensor_mismatches(shards: Iterable[Shard], expected: Places) -> list[Mismatch]:
    """Compare where the tensors of some shards are, their dtypes and shapes with what they must be."""
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
                place, want = expected[t.name]
                if place and place != shard.name:
                    mismatches.append(Mismatch("tensor-misplaced", shard.name, t.name, None, f"in {place}", "here"))
                if (t.dtype, t.shape) != (want.dtype, want.shape):
                    mismatches.append(Mismatch("tensor-shape", shard.name, t.name, None, _kind(want.dtype, want.shape), kind))
            seen[t.name] = shard.name
    for name in expected.keys() - seen.keys():
        place, want = expected[name]
        mismatches.append(Mismatch("tensor-missing", place or SIDECAR, name, None, _kind(want.dtype, want.shape), "no such tensor"))
    return sorted(mismatches, key=lambda m: (m.file, m.tensor, m.code))


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
