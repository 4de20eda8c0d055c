"""Level 1 of the proof: every byte of an output, mapped by address to the byte of the source that it must be.

An implementation of its own: it knows the kernel's addresses (`fse_convert.verification.addresses`) and derives shapes,
padding, config and headers from the source (`fse_convert.verification.expected`); it imports neither the writer nor its layout
functions. One pass reads both sides once, several files at a time, and makes the digests that the manifest keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from fse_convert.checkpoint.editable_files import is_editable
from fse_convert.checkpoint.encoding import encode_header, header_entries
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import MANIFEST, SIDECAR
from fse_convert.checkpoint.reader import Checkpoint, Shard, read_checkpoint
from fse_convert.errors import VerificationFailure
from fse_convert.model.moe import Role
from fse_convert.plan.plan import Plan
from fse_convert.plan.source import Source, describe_source
from fse_convert.plan.tensors import Computed, SharedExpert
from fse_convert.progress import Event, Observer, ignore
from fse_convert.sidecar.manifest import FileDigest
from fse_convert.sidecar.reader import originals_names, read_shards, shard_names
from fse_convert.sidecar.tensors import K_PER_WORD, shard_metadata
from fse_convert.torch_threads import one_torch_thread
from fse_convert.verification.addresses import GROUP
from fse_convert.verification.compare import FileReport, InputFiles, Piece, SourceTensors, walk
from fse_convert.verification.expected import TORCH, ExpectedOutput, kernel_experts, kernel_tensors, wire
from fse_convert.verification.expected_bytes import Comparison, plain_pieces, shard_pieces
from fse_convert.verification.experts import StoredExpert
from fse_convert.verification.files import (
    Held,
    check_clutter,
    check_files,
    check_shards,
    check_tensors,
    clutter_notes,
    header_mismatches,
    index_mismatches,
    refusals,
)
from fse_convert.verification.findings import Coverage, Findings, Mismatch, StorageResult, text_mismatches
from fse_convert.verification.manifest import OutputManifest, digest_mismatches, expected_output, proof_mismatches
from fse_convert.verification.sample import Sample, choose

WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Files read at a time: each keeps one core busy with comparing and one with SHA-256."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output, published or still in staging, its manifest, and which part of it to read how.

    ``sample``: compare the bytes of some tensors only; everything else is checked in any case. ``workers``: files read at a time.
    ``strict``: model card, licences and pictures must be as they were converted, too, and nothing may lie beside.
    """

    folder: LocalFolder
    manifest: OutputManifest
    sample: Sample | None = None
    workers: int | None = None
    strict: bool = True


def prove_storage(
    output: Output, source: Source, plan: Plan | None = None, observe: Observer = ignore
) -> tuple[StorageResult, ExpectedOutput | None]:
    """Prove an output against its source; return what was found, and what the source asks for, if that can be told.

    A checkpoint whose headers or config are not those in the manifest is reported as `source-differs`, and nothing is
    compared. Else: every tensor of the source occurs once, in the same shard, unchanged, padded as its role demands and by
    exactly 0x00 (weights) or 1.0 (scales), or under the name and in the format that a change of format gives it; the sidecar's
    tensors hold the source's bytes at the kernel's addresses, and those that were kept are the source's; and headers, indexes,
    config, manifest and all other files say the same.

    Which layers must have the kernel layout follows from the source, whatever the manifest says of them: from the ``plan`` of
    the conversion that wrote the output, or from planning again. Raises OSError, EOFError; never for what the output holds.
    """
    out, manifest, findings = output.folder, output.manifest, Findings(strict=output.strict)
    nothing = StorageResult("source", findings, output.sample, kernel_in_manifest=manifest.kernel_note)
    expected = expected_output(manifest, source, plan, findings)
    if expected is None:
        return nothing, None
    checkpoint, sidecar, kept = _open(out, findings)
    parts = (expected.standard, checkpoint.shards), (expected.originals, kept), (expected.kernel, sidecar)
    holds: Held = {}
    for files, shards in parts:
        holds |= check_shards(files, source.folder, out, shards, findings)
    holds = _without(_inexact(source, expected.experts, findings), holds)
    comparison = Comparison(source.checkpoint, source.folder.root, holds, check_files(expected, out, findings))
    for name, text in expected.texts.items():
        if name in out.files:
            findings.add(*text_mismatches(name, text, out.read(name)))
    result = _read_back(output, comparison, (*checkpoint.shards, *sidecar, *kept), findings, observe, expected)
    findings.add(*digest_mismatches(manifest.content, result))
    if plan is None:
        tensors = {kind: len(names) for kind, names in comparison.kinds.items()}
        findings.add(*proof_mismatches(manifest, expected, result, tensors))
    return result, expected


def prove_alone(output: Output, observe: Observer = ignore) -> StorageResult:
    """Check an output without its source: headers, indexes and files against each other and against the manifest's digests.

    The kernel layout is compared, address by address, with the standard layout beside it, unless the source's width ends
    within a scale block: then padding rows have that block's scale here and 1.0 there. Which layers must have it only the
    manifest says, so this tells damage, and no editor who makes the digests again. Raises OSError, EOFError.
    """
    out, manifest, findings = output.folder, output.manifest.content, Findings(strict=output.strict)
    checkpoint, sidecar, kept = _open(out, findings)
    source = describe_source(checkpoint, manifest.model.family)
    verdicts = manifest.verdicts if manifest.contract else {}
    experts = kernel_experts(source.description, verdicts, manifest.model.shared_kernel_width)
    for shards, metadata in ((kept, TORCH), (sidecar, shard_metadata(manifest.contract_name))):
        for shard in shards:
            entries = header_entries((t.name, t.dtype, t.shape) for t in shard.header.tensors)
            findings.add(*header_mismatches(out, shard, encode_header(entries, metadata)))
    places = {t.name: ("", t) for e in experts for t in kernel_tensors(e)}
    if experts:
        first = wire(checkpoint)
        places[first.name] = next((s.name for s in sidecar), ""), first
    holds = check_tensors(places, sidecar, findings)
    undone = _inexact(source, experts, findings)
    for e in (e for e in experts if not _has_kernel_shape(e)):
        want, got = "shapes that the kernel takes", f"width {e.group.width} -> {e.width}, hidden size {e.group.hidden}"
        findings.add(Mismatch("manifest", MANIFEST, e.prefix, expected=want, found=got))
    width = manifest.model.shared_source_width
    undone |= {e.prefix for e in experts if not (_has_kernel_shape(e) and _ends_with_block(e, width))}
    check_clutter(out, findings)
    comparison = Comparison(checkpoint, out.root, _without(undone, holds))
    result = _read_back(output, comparison, (*checkpoint.shards, *sidecar, *kept), findings, observe)
    findings.add(*digest_mismatches(manifest, result))
    return result


def damaged(error: VerificationFailure, against: str) -> StorageResult:
    """Return the answer for a manifest that cannot be believed: nothing else was looked at."""
    findings = Findings()
    findings.add(*(Mismatch(p.code, MANIFEST, expected="the manifest as it was written", found=p.message) for p in error.problems))
    return StorageResult(against, findings)


def _open(out: LocalFolder, findings: Findings) -> tuple[Checkpoint, list[Shard], list[Shard]]:
    """Read an output's headers: of the standard layout, of the kernel layout in ``fse/``, and of what is kept there as it was."""
    opened = read_checkpoint(out)
    sidecar, problems = read_shards(out, shard_names(out))
    kept, more_problems = read_shards(out, originals_names(out))
    findings.add(*refusals((*opened.problems, *problems, *more_problems)), *index_mismatches(out, sidecar))
    return opened.checkpoint, sidecar, kept


def _inexact(source: Source, experts: Iterable[SharedExpert], findings: Findings) -> set[str]:
    """Name the experts whose FP32 scales the kernel layout cannot hold."""
    inexact = set()
    with InputFiles(source.folder.root) as opened:
        tensors = SourceTensors.of(source.checkpoint, opened)
        for expert, role in ((e, r) for e in experts for r in Role if e.group.formats[r].scale_dtype == "F32"):
            try:
                StoredExpert(expert.group, 0, tensors).scales(role, 0, expert.group.formats[role].shape[0])
            except ValueError as e:
                shard = expert.scale(role).shard
                findings.add(Mismatch("scale-inexact", shard, expert.prefix, expected="powers of two", found=str(e)))
                inexact.add(expert.prefix)
    return inexact


def _without(experts: Collection[str], holds: Held) -> Held:
    """Leave out the kernel layout of some experts, by prefix."""
    left_out = {n for held in holds.values() for n, c in held.items() if isinstance(c, Computed) and c.shared.prefix in experts}
    return {file: {n: c for n, c in held.items() if n not in left_out} for file, held in holds.items()} if left_out else holds


def _has_kernel_shape(expert: SharedExpert) -> bool:
    """Tell whether the layout is defined for a recorded width: in whole words of scales, and no narrower than what it holds."""
    whole = all(f.block and f.block[1] % GROUP == 0 for f in expert.group.formats.values())
    return whole and not expert.width % K_PER_WORD and not expert.group.hidden % K_PER_WORD and expert.group.width <= expert.width


def _ends_with_block(expert: SharedExpert, width: int) -> bool:
    """Tell whether a scale block ends where the source's width does, in all three projections."""
    blocks = {role: f.block or (1, 1) for role, f in expert.group.formats.items()}
    return all(width % (block[1] if role is Role.DOWN else block[0]) == 0 for role, block in blocks.items())


def _read_back(
    output: Output,
    comparison: Comparison,
    shards: tuple[Shard, ...],
    findings: Findings,
    observe: Observer,
    expected: ExpectedOutput | None = None,
) -> StorageResult:
    """Read every file of an output once (of a sample: the chosen tensors and all files that hold none), compare and hash.

    ``shards``: of the output, ``fse/`` last. What is wrong goes to ``findings``, file by file, in the order of the files
    whatever the number of workers. ``expected``: None without a source.
    """
    kinds, manifest, sample = comparison.kinds, output.manifest, output.sample
    chosen = None if sample is None else choose(sample, kinds)
    coverage = Coverage({kind: len(names if chosen is None else chosen.intersection(names)) for kind, names in kinds.items()})
    tensors: dict[str, str] = {}
    files: dict[str, FileDigest] = {}
    stated = manifest.content.files
    if stated is not None and not findings.strict:
        findings.edited.update(n for n in output.folder.files if n not in stated and is_editable(n))
    added = findings.edited if stated is None else findings.edited - stated.keys()
    jobs = {name: pieces for name, pieces in _jobs(output.folder, comparison, shards, chosen).items() if name not in added}
    for report in _run(jobs, output.folder.root, comparison, output.workers or WORKERS, observe):
        findings.add(*report.mismatches)
        coverage.bytes += report.compared
        coverage.files += 1
        tensors.update(report.tensors)
        if report.size == output.folder.files[report.name]:
            files[report.name] = FileDigest(size=report.size, sha256=report.sha256)
    held = (t for s in shards for t in s.header.tensors if t.nbytes or not s.name.startswith(f"{SIDECAR}/"))
    return StorageResult(
        against="source" if expected else "manifest",
        findings=findings,
        sample=sample,
        coverage=coverage,
        tensors=tensors,
        files=files,
        of_tensors=sum(1 for _ in held),
        digests=manifest.content.tensors is not None,
        layers=expected.coverage(sample) if expected else None,
        remarks=tuple(filter(None, (manifest.tool_note, *clutter_notes(output.folder, findings)))),
        kernel_in_manifest=manifest.kernel_note,
    )


Job = Callable[[SourceTensors], Iterator[Piece]]
"""Cuts one file, given the tensors to compare it with."""


def _jobs(out: LocalFolder, comparison: Comparison, shards: Iterable[Shard], chosen: set[str] | None) -> dict[str, Job]:
    """Return how to cut each file that is read. ``chosen``: a sample of tensors, or None."""
    jobs: dict[str, Job] = {s.name: partial(shard_pieces, comparison, s, chosen) for s in shards}
    for name, size in out.files.items():
        if name != MANIFEST:
            jobs.setdefault(name, partial(plain_pieces, comparison, name, size))
    unread = {s.name for s in shards if chosen is not None and not any(t.name in chosen for t in s.header.tensors)}
    return {name: job for name, job in jobs.items() if name not in unread}


def _run(jobs: Mapping[str, Job], out: Path, comparison: Comparison, workers: int, observe: Observer) -> Iterator[FileReport]:
    lock = Lock()

    def report(event: Event) -> None:
        with lock:
            observe(event)

    def run(name: str) -> FileReport:
        with InputFiles(out) as ours, InputFiles(comparison.root) as theirs:
            return walk(ours, name, jobs[name](SourceTensors.of(comparison.checkpoint, theirs)), report)

    with one_torch_thread():
        if workers == 1:
            yield from map(run, jobs)
            return
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(run, jobs)
