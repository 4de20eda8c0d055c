"""The levels of the proof as one answer, for the report and for the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.errors import EnvironmentFailure, ExitCode, Problem, VerificationFailure, environment
from fse_convert.plan.plan import Plan
from fse_convert.plan.source import Source, open_source
from fse_convert.progress import Event, Observer
from fse_convert.sidecar.claims import Claims, parse_claims, read_claims
from fse_convert.sidecar.manifest import Manifest, ProofRecord
from fse_convert.verification.demanded import FINISHED
from fse_convert.verification.findings import BOUND, NO_LAYERS, NOT_ASKED, Level, Progress, StorageResult
from fse_convert.verification.storage import damaged, prove_alone, prove_storage

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

    @property
    def exit_code(self) -> ExitCode:
        """1 when something is wrong or the level had nothing to run on, 4 when this machine cannot run it, else 0."""
        if self.failed or self.empty:
            return ExitCode.NO
        return ExitCode.ENVIRONMENT if self.missing else ExitCode.OK

    def record(self) -> ProofRecord:
        """Return the proof for the manifest: nothing that differs from machine to machine unless a GPU ran."""
        numerics, kernel = dict(_numerics(self.numerics)), dict(_kernel(self.kernel))
        return ProofRecord(storage=_storage(self.storage), numerics=numerics, kernel=kernel)


@dataclass(frozen=True, slots=True)
class ProofOptions:
    """How to prove. ``sample``: how many tensors, and layers, to look at, chosen by ``seed``; None for all.

    ``device``: ``auto``, ``cpu`` or ``cuda``, for numerics. ``workers``: files read at a time. ``fail_fast``: no second level
    if the first one fails.
    """

    level: Level
    sample: int | None = None
    seed: int = 0
    device: str = "cpu"
    workers: int | None = None
    fail_fast: bool = False


def prove(plan: Plan, out: LocalFolder, manifest: Manifest, options: ProofOptions, observe: Observer) -> Proof:
    """Prove an output of a plan, up to a level; see `_prove`."""
    value = manifest.value()
    raw = value if manifest.manifest_sha256 else {k: v for k, v in value.items() if k not in FINISHED}
    return _prove(plan.source, plan, out, parse_claims(raw), options, observe)


def _prove(source: Source, plan: Plan | None, out: LocalFolder, claims: Claims, options: ProofOptions, observe: Observer) -> Proof:
    """Prove an output against its source. Raises OSError, EOFError, and NoDevice before anything is read."""
    level, sample, seed = options.level, options.sample, options.seed
    progress = _events(observe)
    where = _device(options.device) if level.rank >= Level.NUMERICS.rank else None
    storage = prove_storage(source, plan, out, claims, sample=sample, seed=seed, workers=options.workers, progress=progress)
    if where is None or storage.demand is None or (options.fail_fast and not storage.passed):
        return Proof(level, storage)
    from fse_convert.verification.layers import check_layers, run_kernel

    numerics = check_layers(storage.demand, out, sample=sample, seed=seed, device=where, progress=progress)
    if level is not Level.KERNEL or (options.fail_fast and numerics.status == "failed"):
        return Proof(level, storage, numerics)
    return Proof(level, storage, numerics, run_kernel(storage.demand, out, sample=sample, seed=seed, progress=progress))


@dataclass(frozen=True, slots=True)
class Check:
    """A request to verify: the output, its source if there is one, and how far to go.

    ``level``: None for as far as there is something to run on, short of the kernel. ``sample``: look at so many tensors,
    chosen by ``seed``.
    """

    out: Path
    source: Path | None
    level: Level | None = None
    sample: int | None = None
    seed: int = 0
    device: str = "auto"

    def workload(self) -> tuple[int, int]:
        """Return the bytes that are read (0: not known), and how often a file is finished: for progress."""
        files = LocalFolder(self.out).files
        return (0, 0) if self.sample else (sum(files.values()), len(files))


def verify(check: Check, observe: Observer) -> Proof:
    """Prove an output again, or check it against its own manifest when there is no source; see `Proof` for the answer.

    Raises InvalidCheckpoint when OUT is not an output or the source is broken, EnvironmentFailure.
    """
    out, level = LocalFolder(check.out), (check.level or Level.NUMERICS) if check.source else Level.STORAGE
    with environment(check.out):
        source = open_source(LocalFolder(check.source)) if check.source else None
        try:
            claims = read_claims(out)
        except VerificationFailure as e:
            return Proof(level, damaged(e, "source" if source else "manifest"))
        if source is None:
            alone = prove_alone(out, claims, sample=check.sample, seed=check.seed, progress=_events(observe))
            return Proof(level, alone)
        options = ProofOptions(level=level, sample=check.sample, seed=check.seed, device=check.device)
        try:
            proof = _prove(source, None, out, claims, options, observe)
        except NoDevice as e:
            hint = "leave --device away: numerics run on the CPU too"
            raise EnvironmentFailure(Problem("no-cuda", str(e), "--device", hint)) from e
    return replace(proof, level=Level.STORAGE) if check.level is None and proof.empty else proof


def _events(observe: Observer) -> Progress:
    def report(name: str, size: int, done: bool) -> None:
        observe(Event(name, size, done=done, how="read back"))

    return report


def _device(name: str) -> torch.device:
    from fse_convert.verification.numerics import pick_device

    try:
        return pick_device(name)  # type: ignore[arg-type]
    except ValueError as e:
        raise NoDevice(str(e)) from e


def refuse_failed(proof: Proof) -> None:
    """Keep an output that failed its proof from being published. Raises VerificationFailure."""
    if not proof.failed:
        return
    findings = proof.storage.findings
    problems = [Problem("storage-mismatch", str(m), "", "") for m in findings.listed[:SHOWN]]
    for layer in proof.numerics.layers if proof.numerics else ():
        if not layer.passed:
            problems.append(Problem("numerics-mismatch", layer.reason, layer.name))
    if proof.kernel and proof.kernel.status == "failed":
        problems.append(Problem("kernel-mismatch", proof.kernel.reason))
    hint = "nothing was published: run again; if it fails again, check the disk and report it"
    count = f"{findings.count} mismatches" if findings.count else "wrong numbers"
    raise VerificationFailure(
        *problems, Problem("proof-failed", f"what was written is not what the source demands: {count}", hint=hint)
    )


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
