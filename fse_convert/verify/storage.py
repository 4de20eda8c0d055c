"""Level 1 of the proof: every byte of an output, mapped by address to the byte of the source that it must be.

An implementation of its own: it knows the kernel's addresses (`fse_convert.verify.addresses`) and derives shapes,
padding, config and headers from the source (`fse_convert.verify.expected`); it imports neither the planner nor the
writer nor their layout functions. One pass reads both sides once and makes the digests that the manifest keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.source import CONFIG, INDEX, MANIFEST, SIDECAR, Shard, read_checkpoint
from fse_convert.claims import Claims
from fse_convert.errors import VerificationFailure
from fse_convert.models.describe import describe
from fse_convert.models.moe import Role
from fse_convert.originals import encode_json
from fse_convert.plan import tripwire
from fse_convert.verify.claimed import claim_mismatches, digest_mismatches, identity_mismatches
from fse_convert.verify.expected import (
    KernelExpert,
    Padded,
    Source,
    config_edits,
    edited,
    header_entries,
    kernel_experts,
    padded_tensors,
    source_widths,
)
from fse_convert.verify.findings import Coverage, Findings, Mismatch, Progress, StorageResult, ignore
from fse_convert.verify.headers import (
    SIDECAR_INDEX,
    entries_of,
    file_mismatches,
    header_mismatches,
    raw_header,
    read_sidecar,
    refusals,
    tensor_mismatches,
)
from fse_convert.verify.passes import Comparison, read_back
from fse_convert.verify.pieces import SourceTensors, block_scales
from fse_convert.verify.stream import input_files
from fse_convert.verify.texts import bytes_mismatch, compare_text, short

GRANULARITY = 128
"""The kernel's widths are multiples of this under every contract."""
SIDECAR_METADATA = {"fse_layout": "megamoe-fp8-shared", "fse_layout_version": "1"}


def prove_storage(
    source: Source,
    out: LocalFolder,
    claims: Claims,
    *,
    sample: int | None = None,
    workers: int | None = None,
    progress: Progress = ignore,
) -> StorageResult:
    """Prove an output, published or still in staging, against its source.

    A checkpoint that is not the one that the manifest names, by its headers and config, is said to be another and not
    compared. Else: every tensor of the source occurs once, in the same shard, with the same dtype, unchanged or padded
    as its role demands and by exactly 0x00 (weights) or 1.0 (scales); the sidecar's tensors hold the source's bytes at
    the kernel's addresses; and headers, indexes, config, manifest and all other files say the same.

    ``sample``: compare the bytes of that many tensors only, chosen by the source's identity; everything that is no
    tensor is checked in any case. ``workers``: files read at a time. Raises OSError, EOFError; never for what the output holds.
    """
    findings = Findings()
    findings.add(*identity_mismatches(claims, source))
    if findings.count:
        return StorageResult("source", findings, Coverage(), sample, {}, {})
    if not _sensible(source, claims):
        actual = source_widths(source.description)
        stated = {"n_shared_experts": claims.n_shared, "width": list(claims.widths)}
        findings.add(Mismatch("manifest", MANIFEST, expected=f"widths that grow from {actual}", found=short(stated)))
        return StorageResult("source", findings, Coverage(), sample, {}, {})
    padded = padded_tensors(source.description, *claims.widths[:2])
    findings.add(*claim_mismatches(claims, source, padded))
    opened = read_checkpoint(out)
    findings.add(*refusals(opened.problems))
    shards, sidecar = opened.checkpoint.shards, read_sidecar(out, findings)
    compare = Comparison(
        source.checkpoint,
        source.folder.root,
        main=_check_main(source, out, shards, padded, findings),
        padded=padded,
        experts=_check_sidecar(source, out, claims, sidecar, findings),
        same=_check_files(source, out, sidecar, findings),
        sample=sample,
        workers=workers,
        seed=claims.source,
    )
    _check_texts(source, out, claims, padded, findings)
    result = read_back(compare, out, shards, sidecar, findings, progress)
    return _finish(result, claims, "source", (*shards, *sidecar))


def prove_alone(out: LocalFolder, claims: Claims, *, sample: int | None = None, progress: Progress = ignore) -> StorageResult:
    """Check an output without its source: headers, indexes and files against each other and against the manifest's digests.

    The kernel layout is compared, address by address, with the standard layout beside it, unless the source's width ends
    within a scale block: then padding rows have that block's scale here and 1.0 there. Raises OSError, EOFError.
    """
    findings = Findings()
    opened = read_checkpoint(out)
    findings.add(*refusals(opened.problems))
    source = Source(out, opened.checkpoint, describe(opened.checkpoint))
    shards, sidecar = opened.checkpoint.shards, read_sidecar(out, findings)
    found = _check_sidecar(source, out, claims, sidecar, findings)
    experts = {n: e for n, e in found.items() if _ends_with_block(e, claims.n_shared * claims.widths[0])}
    compare = Comparison(opened.checkpoint, out.root, experts=experts, sample=sample, seed=claims.source)
    result = read_back(compare, out, shards, sidecar, findings, progress)
    return _finish(result, claims, "manifest", (*shards, *sidecar))


def _ends_with_block(expert: KernelExpert, width: int) -> bool:
    """Whether a scale block ends where the source's width does, in all three projections."""
    blocks = {role: f.block or (1, 1) for role, f in expert.group.formats.items()}
    return all(width % (block[1] if role is Role.DOWN else block[0]) == 0 for role, block in blocks.items())


def damaged(error: VerificationFailure, against: str) -> StorageResult:
    """The answer when the manifest itself cannot be believed: nothing else was looked at."""
    findings = Findings()
    findings.add(*(Mismatch(p.code, MANIFEST, expected="the manifest as it was written", found=p.message) for p in error.problems))
    return StorageResult(against, findings, Coverage(), None, {}, {})


def _finish(result: StorageResult, claims: Claims, against: str, shards: Iterable[Shard]) -> StorageResult:
    result.findings.add(*digest_mismatches(claims, result))
    inside = f"{SIDECAR}/"
    tensors = sum(bool(t.nbytes) or not s.name.startswith(inside) for s in shards for t in s.header.tensors)
    return replace(result, against=against, of_tensors=tensors, digests=claims.tensors is not None)


def _sensible(source: Source, claims: Claims) -> bool:
    """Whether the stated widths can be padded widths of this source at all."""
    width, main, kernel = claims.widths
    return (
        source_widths(source.description) == (width, claims.n_shared) and width <= min(main, kernel) and kernel % GRANULARITY == 0
    )


def _check_main(
    source: Source, out: LocalFolder, shards: Iterable[Shard], padded: Mapping[str, Padded], findings: Findings
) -> set[str]:
    """Check the standard layout's headers; returns the tensors whose bytes can be compared."""
    expected = {
        t.name: (s.name, t.dtype, padded[t.name].shape if t.name in padded else t.shape)
        for s in source.checkpoint.shards
        for t in s.header.tensors
    }
    wrong = tensor_mismatches(shards, expected)
    findings.add(*wrong)
    known = {s.name: s for s in source.checkpoint.shards}
    for shard in shards:
        if shard.name in known:
            findings.add(*_main_header(source, out, known[shard.name], shard, padded))
    present = {t.name for s in shards for t in s.header.tensors}
    return (expected.keys() & present) - {m.tensor for m in wrong}


def _main_header(source: Source, out: LocalFolder, theirs: Shard, ours: Shard, padded: Mapping[str, Padded]) -> list[Mismatch]:
    """A shard that is carried over has the source's header; a rewritten one says ``format: pt`` and the new sizes."""
    if any(t.name in padded for t in theirs.header.tensors):
        return header_mismatches(out, ours, header_entries(theirs, padded), {"format": "pt", **theirs.header.metadata})
    expected, found = raw_header(source.folder, theirs), raw_header(out, ours)
    return [bytes_mismatch("header", ours.name, expected, found)] if expected != found else []


def _check_sidecar(
    source: Source, out: LocalFolder, claims: Claims, sidecar: Iterable[Shard], findings: Findings
) -> dict[str, KernelExpert]:
    """Check the headers in ``fse/``; returns whose tensor each comparable one is."""
    layers = kernel_experts(source.description, claims.layers, claims.n_shared * claims.widths[2])
    expected = {name: (e, dtype, shape) for e in layers for name, (dtype, shape) in e.shapes.items()}
    wire = tripwire(source.checkpoint)
    wired = {wire.name: (next((s.name for s in sidecar), ""), wire.dtype, (0,))} if expected else {}
    wrong = tensor_mismatches(sidecar, {n: ("", dtype, shape) for n, (_, dtype, shape) in expected.items()} | wired)
    findings.add(*wrong)
    for shard in sidecar:
        metadata = {"format": "pt", "fse_contract": claims.contract, **SIDECAR_METADATA}
        findings.add(*header_mismatches(out, shard, entries_of(shard), metadata))
    inexact = _inexact(source, layers)
    findings.add(*inexact)
    unusable = {m.tensor for m in (*wrong, *inexact)}
    present = {t.name for s in sidecar for t in s.header.tensors}
    return {n: e for n, (e, _, _) in expected.items() if n in present and n not in unusable and e.prefix not in unusable}


def _inexact(source: Source, layers: Iterable[KernelExpert]) -> list[Mismatch]:
    """Experts whose FP32 scales the kernel layout cannot hold, by prefix."""
    found = []
    with input_files(source.folder.root) as files:
        tensors = SourceTensors.of(source.checkpoint, files)
        for expert in layers:
            for role in Role:
                try:
                    if expert.group.formats[role].scale_dtype == "F32":
                        block_scales(expert, role, tensors)
                except ValueError as e:
                    shard = expert.tensor(role, scale=True).shard
                    found.append(Mismatch("scale-inexact", shard, expert.prefix, expected="powers of two", found=str(e)))
    return found


def _check_texts(source: Source, out: LocalFolder, claims: Claims, padded: Mapping[str, Padded], findings: Findings) -> None:
    """Check config.json and the index: the source's, with the edits that padding demands."""
    edits = config_edits(source, claims.n_shared, *claims.widths[:2])
    expected = {CONFIG: encode_json(edited(source.checkpoint.config, edits)) if edits else source.folder.read(CONFIG)}
    if INDEX in source.folder.files:
        expected[INDEX] = _index(source, padded)
    for name, text in expected.items():
        if name in out.files:
            findings.add(*compare_text(name, text, out.read(name)))


def _index(source: Source, padded: Mapping[str, Padded]) -> bytes:
    """The source's index where that is right as it is, else one with true totals."""
    checkpoint = source.checkpoint
    stated = checkpoint.index_metadata or {}
    grown = sum(p.new_rows * p.new_row_bytes - p.info.nbytes for p in padded.values())
    metadata = {**stated, "total_size": checkpoint.total_size + grown}
    if isinstance(stated.get("total_parameters"), int):
        metadata["total_parameters"] += sum(prod(p.shape) - prod(p.info.shape) for p in padded.values())
    if not padded and metadata == checkpoint.index_metadata:
        return source.folder.read(INDEX)
    return encode_json({"metadata": metadata, "weight_map": {n: checkpoint.tensors[n].shard for n in sorted(checkpoint.tensors)}})


def _check_files(source: Source, out: LocalFolder, sidecar: Iterable[Shard], findings: Findings) -> set[str]:
    """Check which files there are; returns those that must be equal to the source's and have its size."""
    own = {s.name for s in sidecar} | ({SIDECAR_INDEX} if any(sidecar) else set())
    findings.add(*file_mismatches(source.folder.files.keys() | own, out))
    same = []
    for name in source.checkpoint.others:
        if out.files.get(name) == source.folder.files[name]:
            same.append(name)
        elif name in out.files:
            want, got = (f"{size} bytes" for size in (source.folder.files[name], out.files[name]))
            findings.add(Mismatch("size", name, expected=want, found=got))
    return set(same)
