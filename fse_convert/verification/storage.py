"""Level 1 of the proof: every byte of an output, mapped by address to the byte of the source that it must be.

An implementation of its own: it knows the kernel's addresses (`fse_convert.verification.addresses`) and derives shapes,
padding, config and headers from the source (`fse_convert.verification.expected`); it imports neither the writer nor its layout
functions. Verdicts, widths and the manifest are planned again (`fse_convert.verification.demanded`). One pass reads both sides
once and makes the digests that the manifest keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import CONFIG, INDEX, MANIFEST, SIDECAR, Shard, read_checkpoint
from fse_convert.errors import VerificationFailure
from fse_convert.model.describe import describe
from fse_convert.model.moe import Role
from fse_convert.model.quantization import read_quantization
from fse_convert.plan.plan import tripwire
from fse_convert.sidecar.claims import Claims
from fse_convert.sidecar.originals import encode_json
from fse_convert.verification.claimed import claim_mismatches, digest_mismatches, identity_mismatches
from fse_convert.verification.demanded import Demand, demand, manifest_mismatches, model_mismatches, tool_note
from fse_convert.verification.expected import (
    PACKED,
    KernelExpert,
    Padded,
    Source,
    config_edits,
    edited,
    header_entries,
    kernel_entries,
    kernel_experts,
    padded_tensors,
    swiglu_limit,
)
from fse_convert.verification.findings import Coverage, Findings, Mismatch, Progress, StorageResult, ignore
from fse_convert.verification.headers import (
    SIDECAR_INDEX,
    entries_of,
    file_mismatches,
    header_mismatches,
    hidden_mismatches,
    hidden_note,
    raw_header,
    read_sidecar,
    refusals,
    tensor_mismatches,
)
from fse_convert.verification.passes import Comparison, read_back
from fse_convert.verification.pieces import SourceTensors, block_scales
from fse_convert.verification.stated import kernel_statement, proof_mismatches
from fse_convert.verification.stream import input_files
from fse_convert.verification.texts import bytes_mismatch, compare_text

SIDECAR_METADATA = {"fse_layout": "megamoe-fp8-shared", "fse_layout_version": "1"}


def prove_storage(
    source: Source,
    out: LocalFolder,
    claims: Claims,
    *,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress = ignore,
) -> StorageResult:
    """Prove an output, published or still in staging, against its source.

    A checkpoint that is not the one that the manifest names, by its headers and config, is said to be another and not
    compared. Else: every tensor of the source occurs once, in the same shard, with the same dtype, unchanged or padded
    as its role demands and by exactly 0x00 (weights) or 1.0 (scales); the sidecar's tensors hold the source's bytes at
    the kernel's addresses; and headers, indexes, config, manifest and all other files say the same.

    Which layers must have the kernel layout follows from the source, whatever the manifest says of them.

    ``sample``: compare the bytes of that many tensors only, chosen by ``seed``; everything that is no tensor is checked
    in any case. ``workers``: files read at a time. Raises OSError, EOFError; never for what the output holds.
    """
    findings = Findings()
    nothing = StorageResult("source", findings, Coverage(), sample, {}, {}, seed=seed, kernel_stated=kernel_statement(claims))
    findings.add(*identity_mismatches(claims, source))
    if findings.count:
        return nothing
    demanded = demand(source, claims)
    findings.add(*([demanded] if isinstance(demanded, Mismatch) else model_mismatches(claims, demanded)))
    if isinstance(demanded, Mismatch) or findings.listed:
        return nothing
    padded = padded_tensors(source.description, *demanded.widths[:2])
    texts = _texts(source, demanded, padded)
    found = [*claim_mismatches(claims, source, padded), *manifest_mismatches(claims, demanded, texts)]
    findings.add(*dict.fromkeys(found))
    opened = read_checkpoint(out)
    findings.add(*refusals(opened.problems))
    shards, sidecar = opened.checkpoint.shards, read_sidecar(out, findings)
    compare = Comparison(
        source.checkpoint,
        source.folder.root,
        main=_check_main(source, out, shards, padded, findings),
        padded=padded,
        experts=_check_sidecar(source, out, demanded, sidecar, findings),
        same=_check_files(source, out, demanded, findings),
        sample=sample,
        workers=workers,
        seed=seed,
    )
    for name, text in texts.items():
        if name in out.files:
            findings.add(*compare_text(name, text, out.read(name)))
    result = read_back(compare, out, shards, sidecar, findings, progress)
    counts = {sort: len(names) for sort, names in compare.sorts.items()}
    findings.add(*digest_mismatches(claims, result))
    findings.add(*proof_mismatches(claims, result, counts, len(demanded.experts), swiglu_limit(source)))
    return _finish(result, claims, "source", out, (*shards, *sidecar), demanded)


def prove_alone(
    out: LocalFolder, claims: Claims, *, sample: int | None = None, seed: int = 0, progress: Progress = ignore
) -> StorageResult:
    """Check an output without its source: headers, indexes and files against each other and against the manifest's digests.

    The kernel layout is compared, address by address, with the standard layout beside it, unless the source's width ends
    within a scale block: then padding rows have that block's scale here and 1.0 there. Which layers must have it only the
    manifest says, so this tells damage, and no editor who makes the digests again. Raises OSError, EOFError.
    """
    findings = Findings()
    opened = read_checkpoint(out)
    findings.add(*refusals(opened.problems))
    quantization = read_quantization(opened.checkpoint.config, opened.checkpoint.quant_config)
    source = Source(out, opened.checkpoint, describe(opened.checkpoint, quantization))
    shards, sidecar = opened.checkpoint.shards, read_sidecar(out, findings)
    layers = kernel_experts(source.description, claims.layers, claims.n_shared * claims.widths[2])
    for shard in sidecar:
        findings.add(*header_mismatches(out, shard, entries_of(shard), _metadata(claims.contract)))
    found = _comparable(source, layers, {}, sidecar, findings)
    for e in (e for e in layers if not _has_kernel_shape(e)):
        want, got = "shapes that the kernel takes", f"width {e.group.width} -> {e.width}, hidden size {e.group.hidden}"
        findings.add(Mismatch("manifest", MANIFEST, e.prefix, expected=want, found=got))
    width = claims.n_shared * claims.widths[0]
    experts = {n: e for n, e in found.items() if _has_kernel_shape(e) and _ends_with_block(e, width)}
    findings.add(*hidden_mismatches(out))
    compare = Comparison(opened.checkpoint, out.root, experts=experts, sample=sample, seed=seed)
    result = read_back(compare, out, shards, sidecar, findings, progress)
    findings.add(*digest_mismatches(claims, result))
    return _finish(result, claims, "manifest", out, (*shards, *sidecar), None)


def _has_kernel_shape(expert: KernelExpert) -> bool:
    """Whether the layout is defined for a stated width: in whole words of scales, and no narrower than what it holds."""
    return expert.width % PACKED == 0 and expert.group.hidden % PACKED == 0 and expert.group.width <= expert.width


def _ends_with_block(expert: KernelExpert, width: int) -> bool:
    """Whether a scale block ends where the source's width does, in all three projections."""
    blocks = {role: f.block or (1, 1) for role, f in expert.group.formats.items()}
    return all(width % (block[1] if role is Role.DOWN else block[0]) == 0 for role, block in blocks.items())


def damaged(error: VerificationFailure, against: str) -> StorageResult:
    """The answer when the manifest itself cannot be believed: nothing else was looked at."""
    findings = Findings()
    findings.add(*(Mismatch(p.code, MANIFEST, expected="the manifest as it was written", found=p.message) for p in error.problems))
    return StorageResult(against, findings, Coverage(), None, {}, {})


def _finish(
    result: StorageResult, claims: Claims, against: str, out: LocalFolder, shards: Iterable[Shard], demanded: Demand | None
) -> StorageResult:
    return replace(
        result,
        against=against,
        of_tensors=sum(bool(t.nbytes) or not s.name.startswith(f"{SIDECAR}/") for s in shards for t in s.header.tensors),
        digests=claims.tensors is not None,
        demand=demanded,
        notes=tuple(filter(None, (tool_note(claims), hidden_note(out)))),
        kernel_stated=kernel_statement(claims),
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
    source: Source, out: LocalFolder, demanded: Demand, sidecar: Iterable[Shard], findings: Findings
) -> dict[str, KernelExpert]:
    """Check the headers in ``fse/``: file by file, tensor by tensor, in the order in which a conversion writes them."""
    files = demanded.files()
    places = {name: file for file, experts in files.items() for e in experts for name in e.shapes}
    found = _comparable(source, demanded.experts, places, sidecar, findings)
    for shard in sidecar:
        if shard.name in files:
            entries = kernel_entries(files[shard.name])
            if shard.name == next(iter(files)):
                wire = tripwire(source.checkpoint)
                entries = {wire.name: wire.entry, **entries}
            findings.add(*header_mismatches(out, shard, entries, _metadata(demanded.plan.options.contract.name)))
    return found


def _metadata(contract: str) -> dict[str, str]:
    return {"format": "pt", "fse_contract": contract, **SIDECAR_METADATA}


def _comparable(
    source: Source,
    layers: Iterable[KernelExpert],
    places: Mapping[str, str],
    sidecar: Iterable[Shard],
    findings: Findings,
) -> dict[str, KernelExpert]:
    """Check names, dtypes, shapes and (where ``places`` says) files in ``fse/``; returns whose tensor each comparable one is."""
    layers = tuple(layers)
    expected = {name: (e, dtype, shape) for e in layers for name, (dtype, shape) in e.shapes.items()}
    demanded = {n: (places.get(n, ""), dtype, shape) for n, (_, dtype, shape) in expected.items()}
    if expected:
        wire = tripwire(source.checkpoint)
        demanded[wire.name] = (next((s.name for s in sidecar), ""), wire.dtype, (0,))
    wrong = tensor_mismatches(sidecar, demanded)
    findings.add(*wrong)
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


def _texts(source: Source, demanded: Demand, padded: Mapping[str, Padded]) -> dict[str, bytes]:
    """config.json and the index as they must be: the source's, with the edits that padding demands."""
    edits = config_edits(source, demanded.plan.n_shared, *demanded.widths[:2])
    expected = {CONFIG: encode_json(edited(source.checkpoint.config, edits)) if edits else source.folder.read(CONFIG)}
    if INDEX in source.folder.files:
        expected[INDEX] = _index(source, padded)
    return expected


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


def _check_files(source: Source, out: LocalFolder, demanded: Demand, findings: Findings) -> set[str]:
    """Check which files there are; returns those that must be equal to the source's and have its size."""
    own = demanded.files().keys() | ({SIDECAR_INDEX} if demanded.places else set())
    findings.add(*file_mismatches(source.folder.files.keys() | own, out), *hidden_mismatches(out))
    same = []
    for name in source.checkpoint.others:
        if out.files.get(name) == source.folder.files[name]:
            same.append(name)
        elif name in out.files:
            want, got = (f"{size} bytes" for size in (source.folder.files[name], out.files[name]))
            findings.add(Mismatch("size", name, expected=want, found=got))
    return set(same)
