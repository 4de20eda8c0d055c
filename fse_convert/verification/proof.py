"""The levels of the proof as one answer, for the report and for the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.errors import Problem, VerificationFailure
from fse_convert.sidecar.claims import Claims
from fse_convert.verification.expected import Source
from fse_convert.verification.findings import BOUND, NO_LAYERS, NOT_ASKED, Level, Progress, StorageResult, ignore
from fse_convert.verification.storage import prove_storage

if TYPE_CHECKING:
    import torch

    from fse_convert.verification.layers import KernelSummary, NumericsSummary

SHOWN = 10
"""Mismatches that an error message lists."""


class NoDevice(Exception):
    """The device that was asked for is not there."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was asked for and what each level answered; None where a level was not asked for or not reached."""

    level: Level
    storage: StorageResult
    numerics: NumericsSummary | None = None
    kernel: KernelSummary | None = None

    @property
    def failed(self) -> bool:
        """Whether any level found something wrong; a level that did not run has found nothing."""
        rest = (self.numerics, self.kernel)
        return not self.storage.passed or any(r is not None and r.status == "failed" for r in rest)

    @property
    def empty(self) -> str:
        """Why the level that was asked for had nothing to run on, on any machine; empty if it had, or if it failed before."""
        if not self.storage.proved:
            return "no digests and no source"
        asked = self.kernel if self.level is Level.KERNEL else self.numerics if self.level is Level.NUMERICS else None
        return NO_LAYERS if asked is not None and not asked.of_layers else ""

    @property
    def missing(self) -> str:
        """Why the level that was asked for did not run on this machine; empty if it did, or had nothing to run on."""
        if self.level is Level.KERNEL and self.kernel is not None and self.kernel.status == "not-run" and not self.empty:
            return self.kernel.reason
        return ""


def prove(
    source: Source,
    out: LocalFolder,
    claims: Claims,
    level: Level,
    *,
    sample: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    workers: int | None = None,
    progress: Progress = ignore,
    fail_fast: bool = False,
) -> Proof:
    """Prove an output against its source, up to a level.

    ``device``: ``auto``, ``cpu`` or ``cuda``, for numerics. ``sample``: how many tensors, and layers, to look at; ``seed``
    chooses them. ``workers``: files read at a time. ``fail_fast``: no second level if the first one fails.
    Raises OSError, EOFError, and NoDevice when CUDA is asked for and missing, before anything is read.
    """
    where = _device(device) if level.rank >= Level.NUMERICS.rank else None
    storage = prove_storage(source, out, claims, sample=sample, seed=seed, workers=workers, progress=progress)
    if where is None or storage.demand is None or (fail_fast and not storage.passed):
        return Proof(level, storage)
    from fse_convert.verification.layers import check_layers, run_kernel

    numerics = check_layers(storage.demand, out, sample=sample, seed=seed, device=where, progress=progress)
    if level is not Level.KERNEL or (fail_fast and numerics.status == "failed"):
        return Proof(level, storage, numerics)
    return Proof(level, storage, numerics, run_kernel(storage.demand, out, sample=sample, seed=seed, progress=progress))


def _device(name: str) -> torch.device:
    from fse_convert.verification.reference import pick_device

    try:
        return pick_device(name)  # type: ignore[arg-type]
    except ValueError as e:
        raise NoDevice(str(e)) from e


def failure(proof: Proof) -> VerificationFailure:
    """A failed proof as the error that keeps an output from being published."""
    findings = proof.storage.findings
    problems = [Problem("storage-mismatch", str(m), "", "") for m in findings.listed[:SHOWN]]
    for layer in proof.numerics.layers if proof.numerics else ():
        if not layer.passed:
            problems.append(Problem("numerics-mismatch", layer.reason, layer.name))
    if proof.kernel and proof.kernel.status == "failed":
        problems.append(Problem("kernel-mismatch", proof.kernel.reason))
    hint = "nothing was published: run again; if it fails again, check the disk and report it"
    count = f"{findings.count} mismatches" if findings.count else "wrong numbers"
    return VerificationFailure(
        *problems, Problem("proof-failed", f"what was written is not what the source demands: {count}", hint=hint)
    )


def manifest_json(proof: Proof | None) -> dict[str, Any]:
    """A proof for the manifest: what was covered, and nothing that differs from machine to machine unless a GPU ran."""
    if proof is None:
        return {"storage": NOT_ASKED, "numerics": NOT_ASKED, "kernel": NOT_ASKED}
    return {"storage": _storage(proof.storage), "numerics": _numerics(proof.numerics), "kernel": _kernel(proof.kernel)}


def _storage(result: StorageResult) -> dict[str, Any]:
    return {
        "status": "passed" if result.passed else "failed",
        "tensors": dict(result.coverage.tensors),
        "bytes": result.coverage.bytes,
        "files": result.coverage.files,
    }


def _numerics(summary: NumericsSummary | None) -> Mapping[str, Any]:
    if summary is None:
        return NOT_ASKED
    if not summary.layers:
        return {"status": "not-run", "reason": NO_LAYERS}
    return {
        "status": summary.status,
        "layers": len(summary.layers),
        "tokens": summary.tokens,
        "seed": summary.seed,
        "swiglu_limit": summary.limit,
        "criterion": BOUND,
    }


def _kernel(summary: KernelSummary | None) -> Mapping[str, Any]:
    if summary is None:
        return NOT_ASKED
    if summary.status != "passed":
        return {"status": summary.status, "reason": summary.cause}
    return {
        "status": "passed",
        "layers": len(summary.layers),
        "relative_l2": summary.relative_l2,
        "device": summary.found.device_name,
        "deep_gemm": summary.found.version,
    }
