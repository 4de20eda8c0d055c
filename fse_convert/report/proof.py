"""The report of a proof, and of a restoration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.report.common import SCHEMA_VERSION, console, size

if TYPE_CHECKING:
    from fse_convert.restore import Restored
    from fse_convert.verify.findings import Mismatch, StorageResult
    from fse_convert.verify.layers import KernelSummary, NumericsSummary
    from fse_convert.verify.proof import Proof

SHOWN = 20
"""Mismatches that are printed; JSON lists up to 100."""


def verify_json(proof: Proof, exit_code: int) -> dict[str, Any]:
    """What ``verify --json`` prints."""
    return {"schema_version": SCHEMA_VERSION, "ok": exit_code == 0, "exit_code": exit_code, **proof_json(proof)}


def proof_json(proof: Proof) -> dict[str, Any]:
    """A proof as JSON: what each level covered and found."""
    return {
        "level": proof.level.value,
        "against": proof.storage.against,
        "storage": _storage_json(proof.storage),
        "numerics": _numerics_json(proof.numerics) if proof.numerics else None,
        "kernel": _kernel_json(proof.kernel) if proof.kernel else None,
    }


def _storage_json(result: StorageResult) -> dict[str, Any]:
    return {
        "status": "passed" if result.passed else "failed",
        "tensors": result.coverage.tensors,
        "of_tensors": result.of_tensors,
        "sample": result.sample,
        "bytes": result.coverage.bytes,
        "files": result.coverage.files,
        "digests": result.digests,
        "mismatch_count": result.findings.count,
        "mismatches": [_mismatch_json(m) for m in result.findings.listed],
    }


def _mismatch_json(m: Mismatch) -> dict[str, Any]:
    return {
        "code": m.code,
        "file": m.file,
        "tensor": m.tensor or None,
        "offset": m.offset,
        "expected": m.expected,
        "found": m.found,
        "bytes": m.count or None,
    }


def _numerics_json(summary: NumericsSummary) -> dict[str, Any]:
    layers = [
        {
            "name": layer.name,
            "status": "passed" if layer.passed else "failed",
            "reason": layer.reason,
            "bit_equal": layer.result.bit_equal if layer.result else None,
            "relative_l2": layer.result.relative_l2 if layer.result else None,
            "bound": layer.result.bound if layer.result else None,
            "device": layer.result.device if layer.result else None,
        }
        for layer in summary.layers
    ]
    return {
        "status": summary.status,
        "of_layers": summary.of_layers,
        "tokens": summary.tokens,
        "seed": summary.seed,
        "swiglu_limit": summary.limit,
        "layers": layers,
    }


def _kernel_json(summary: KernelSummary) -> dict[str, Any]:
    return {
        "status": summary.status,
        "reason": summary.reason,
        "of_layers": summary.of_layers,
        "device": summary.found.device_name,
        "deep_gemm": summary.found.version,
        "layers": [{"name": n, "status": r.status, "reason": r.reason, "figures": r.figures} for n, r in summary.layers],
    }


def print_proof(proof: Proof, *, written: bool = False) -> None:
    """Print a line per level, and the mismatches below it. ``written``: the digests have just been made, not compared."""
    out = console()
    for line in (*_storage_lines(proof.storage, written=written), *_numerics_lines(proof.numerics), *_kernel_lines(proof.kernel)):
        out.print(line, markup=False, soft_wrap=True)


def _storage_lines(result: StorageResult, *, written: bool) -> Iterator[str]:
    c = result.coverage
    status = "passed" if result.passed else "FAILED"
    sampled = f"a sample of {result.sample}: " if result.sample is not None else ""
    sorts = ", ".join(f"{n:,} {k.replace('kernel', 'in kernel layout')}" for k, n in c.tensors.items() if n)
    if not result.reached:
        yield f"storage: {status}: nothing was compared"
    elif result.against == "source":
        what = f"{sampled}{c.compared:,} of {result.of_tensors:,} tensors against the source, byte for byte ({sorts or 'none'})"
        yield f"storage: {status}: {what}; {size(c.bytes)}, {c.files} files"
        if not result.digests and not written:
            yield "  the manifest holds no digests to compare"
    else:
        digests = "the manifest's digests" if result.digests else "headers and indexes only: the manifest holds no digests"
        kernel = c.tensors.get("kernel")
        within = f"; {kernel:,} tensors of the kernel layout against the standard layout" if kernel else ""
        read = len(result.tensors)
        yield f"storage: {status}: {sampled}{read:,} of {result.of_tensors:,} tensors in {c.files} files against {digests}{within}"
        yield "  the source was not compared: --source CHECKPOINT does that"
    for m in result.findings.listed[:SHOWN]:
        yield f"  mismatch[{m.code}]: {m}"
    if any(m.code == "source-differs" for m in result.findings.listed):
        yield "  by its headers or config this is not the checkpoint that the output was made from"
    if result.findings.count > SHOWN:
        yield f"  and {result.findings.count - SHOWN:,} more mismatches"


def _numerics_lines(summary: NumericsSummary | None) -> Iterator[str]:
    if summary is None:
        return
    if not summary.layers:
        yield "numerics: not run: no layer has the kernel layout"
        return
    status = "FAILED" if summary.status == "failed" else "passed"
    results = [layer.result for layer in summary.layers if layer.result]
    worst = max(results, key=lambda r: r.relative_l2, default=None)
    figures = f", relative L2 at most {worst.relative_l2:.3g} (bound {worst.bound:.3g}), on {worst.device}" if worst else ""
    equal = sum(layer.passed for layer in summary.layers)
    yield (
        f"numerics: {status}: {equal} of {summary.of_layers} layers bit-equal to the source{figures};"
        f" {summary.tokens} tokens, seed {summary.seed}"
    )
    wrong = [layer for layer in summary.layers if not layer.passed]
    for layer in wrong[:SHOWN]:
        yield f"  mismatch[numerics]: {layer.name}: {layer.reason}"


def _kernel_lines(summary: KernelSummary | None) -> Iterator[str]:
    if summary is not None:
        status = {"passed": "passed", "failed": "FAILED"}.get(summary.status, "not run")
        yield f"kernel: {status}: {summary.reason}"


def restored_json(done: Restored) -> dict[str, Any]:
    """What ``restore --json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "files": dict(sorted(done.files.items())),
        "bytes": done.bytes,
        "tensors": done.tensors,
        "unpadded": done.unpadded,
        "headers_identical": True,
        "digests": done.digests,
    }


def print_restored(done: Restored, original: Path) -> None:
    """Print what was restored, and how sure that is."""
    out = console()
    lines = [
        f"restored to {original}: {done.tensors:,} tensors, padding removed from {done.unpadded:,}; {size(done.bytes)}",
        "headers, config.json and index are the original's, byte for byte, by SHA-256",
        "every tensor that was read had the digest that the manifest states"
        if done.digests
        else "the manifest holds no digests: tensors were not checked on the way",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
