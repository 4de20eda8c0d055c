"""The levels of the proof as one answer: for the report, for the manifest, and as the exit code of ``fse-convert verify``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure, environment
from fse_convert.exit_codes import ExitCode, of_proof
from fse_convert.plan.plan import Plan
from fse_convert.plan.source import Source, open_source
from fse_convert.progress import Observer, Phase, Work
from fse_convert.sidecar.manifest import NOT_ASKED, Manifest, ProofRecord
from fse_convert.verification.findings import NO_LAYERS, Level, StorageResult
from fse_convert.verification.manifest import OutputManifest, figure_mismatches, loss_record, numerics_record, storage_record
from fse_convert.verification.phases import computed_work
from fse_convert.verification.sample import Sample
from fse_convert.verification.storage import Output, damaged, prove_alone, prove_storage

if TYPE_CHECKING:
    from fse_convert.verification.layers import KernelSummary, NumericsSummary

SHOWN = 10
"""Mismatches that an error message lists."""


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
    def nothing_to_run_on(self) -> str:
        """Why the level that was asked for had nothing to run on, on any machine; empty if it had, or if it failed before."""
        if not self.storage.proved:
            return "no digests and no source"
        asked = self.kernel if self.level is Level.KERNEL else self.numerics if self.level is Level.NUMERICS else None
        return NO_LAYERS if asked is not None and not asked.coverage.of_layers else ""

    @property
    def unavailable(self) -> str:
        """Why this machine cannot run the level that was asked for; empty if it ran, or had nothing to run on."""
        asked = self.kernel if self.level is Level.KERNEL else None
        return asked.reason if asked is not None and asked.status == "not-run" and not self.nothing_to_run_on else ""

    @property
    def exit_code(self) -> ExitCode:
        """What ``verify`` exits with."""
        return of_proof(failed=self.failed, nothing_to_run_on=self.nothing_to_run_on, unavailable=self.unavailable)

    def record(self) -> ProofRecord:
        """Return a proof that did not fail for the manifest: nothing differs from machine to machine unless a GPU ran."""
        coverage, n = self.storage.coverage, self.numerics
        return ProofRecord(
            storage=storage_record(coverage.tensors, coverage.bytes, coverage.files),
            numerics=numerics_record(n.coverage.of_layers, n.limit, n.recoded, loss_record(n.losses)) if n else NOT_ASKED,
            kernel=_kernel_record(self.kernel) if self.kernel else NOT_ASKED,
        )


def _kernel_record(summary: KernelSummary) -> dict[str, Any]:
    if summary.status != "passed":
        return {"status": summary.status, "reason": summary.cause}
    return {
        "status": "passed",
        "layers": len(summary.layers),
        "relative_l2": summary.relative_l2,
        "device": summary.probe.device_name,
        "deep_gemm": summary.probe.version,
    }


def prove(plan: Plan, out: LocalFolder, draft: Manifest, level: Level, workers: int, observe: Observer) -> Proof:
    """Prove the output of a plan before its manifest is written, on the CPU; a level that fails is the last.

    ``workers``: files read at a time. Raises OSError, EOFError.
    """
    output = Output(out, OutputManifest(draft, draft.value()), workers=workers)
    return _prove(output, plan.source, plan, level, "cpu", observe)


def _prove(output: Output, source: Source, plan: Plan | None, level: Level, device: str, observe: Observer) -> Proof:
    """Prove an output against its source. ``plan``: None for an output that was published.

    Raises OSError, EOFError, and EnvironmentFailure for a device that is not there, before anything is read.
    """
    if level.rank < Level.NUMERICS.rank:
        return Proof(level, prove_storage(output, source, plan, observe)[0])
    from fse_convert.verification.layers import check_layers, run_kernel
    from fse_convert.verification.numerics import pick_device

    where = pick_device(device)
    storage, expected = prove_storage(output, source, plan, observe)
    if expected is None or (plan and not storage.passed):
        return Proof(level, storage)
    numerics = check_layers(expected, output.folder, sample=output.sample, device=where, observe=observe)
    if plan is None:
        storage.findings.add(*figure_mismatches(output.manifest, numerics.losses))
    if level is not Level.KERNEL or (plan and numerics.status == "failed"):
        return Proof(level, storage, numerics)
    return Proof(level, storage, numerics, run_kernel(expected, output.folder, sample=output.sample, observe=observe))


@dataclass(frozen=True, slots=True)
class Check:
    """A request to verify: the output, its source if there is one, and how far to go.

    ``level``: None for as far as there is something to run on, short of the kernel. ``sample``: look at a part only.
    ``device``: ``auto``, ``cpu`` or ``cuda``, for numerics. ``strict``: see `Output`.
    """

    out: Path
    source: Path | None
    level: Level | None = None
    sample: Sample | None = None
    device: str = "auto"
    strict: bool = False

    @property
    def wanted_level(self) -> Level:
        """How far to go, at most."""
        return (self.level or Level.NUMERICS) if self.source else Level.STORAGE

    def workload(self) -> list[Work]:
        """Return what is read and computed, phase by phase, for progress; of a sample only the phases are known."""
        out = LocalFolder(self.out)
        with environment(self.out):
            try:
                manifest = OutputManifest.read(out)
            except (InvalidCheckpoint, VerificationFailure):  # `verify` says what is wrong with it
                manifest = None
        layers = (len(manifest.content.kernel_prefixes), manifest.recoded) if manifest and not self.sample else (0, 0)
        named = manifest.content.files if manifest and manifest.content.files else out.files
        sizes = [] if self.sample else [size for name, size in out.files.items() if name != MANIFEST and name in named]
        return [Work(Phase.READ, "file", len(sizes), sum(sizes)), *computed_work(self.wanted_level, *layers)]


def verify(check: Check, observe: Observer) -> Proof:
    """Prove an output again, or check it against its own manifest when there is no source; see `Proof` for the answer.

    Raises InvalidCheckpoint when OUT is not an output or the source is broken, EnvironmentFailure.
    """
    folder, level = LocalFolder(check.out), check.wanted_level
    with environment(check.out):
        try:
            output = Output(folder, OutputManifest.read(folder), check.sample, strict=check.strict)
        except VerificationFailure as e:
            return Proof(level, damaged(e, "source" if check.source else "manifest"))
        if check.source is None:
            return Proof(level, prove_alone(output, observe))
        source = open_source(LocalFolder(check.source), output.manifest.content.model.family)
        proof = _prove(output, source, None, level, check.device, observe)
    return replace(proof, level=Level.STORAGE) if check.level is None and proof.nothing_to_run_on else proof


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
    message = f"what was written is not what the source demands: {count}"
    raise VerificationFailure(*problems, Problem("proof-failed", message, hint=hint))
