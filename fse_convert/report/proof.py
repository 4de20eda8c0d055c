"""The report of a proof, and of a restoration, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert.errors import counted, printable, size, some
from fse_convert.report.console import say
from fse_convert.verification.findings import SEED, TOKENS

if TYPE_CHECKING:
    from fse_convert.restoration.run import Restored
    from fse_convert.verification.findings import LayerCoverage, StorageResult
    from fse_convert.verification.layers import KernelSummary, NumericsSummary
    from fse_convert.verification.loss import ExpertLoss
    from fse_convert.verification.proof import Proof
    from fse_convert.verification.sample import Sample

SHOWN = 20
"""Mismatches that are printed; JSON lists up to 100."""


def print_proof(proof: Proof, *, written: bool = False) -> None:
    """Print a line per level, and the mismatches below it. ``written``: the digests have just been made, not compared."""
    say(_lines(proof, written=written))


def _lines(proof: Proof, *, written: bool) -> Iterator[str]:
    yield from _storage_lines(proof.storage, written=written)
    if proof.numerics:
        yield from _numerics_lines(proof.numerics)
    if proof.kernel:
        yield _kernel_line(proof.kernel)
    if proof.storage.kernel_in_manifest and (proof.kernel is None or proof.kernel.status == "not-run"):
        yield f"kernel: stated by the manifest, not checked here: {proof.storage.kernel_in_manifest}"


def _storage_lines(result: StorageResult, *, written: bool) -> Iterator[str]:
    yield f"storage: {_storage_line(result)}"
    if result.reached and result.against == "source" and not result.digests and not written:
        yield "  the manifest holds no digests to compare"
    if result.against != "source" and result.reached:
        yield "  the source was not compared: --source CHECKPOINT does that"
    if result.sample and result.reached:
        yield f"  the sample is another one every time; --seed {result.sample.seed} repeats this one"
    if result.layers and result.layers.left_out:
        total = result.layers.moe_layers
        yield f"  kernel layout: {total - len(result.layers.left_out)} of {total} MoE layers{_unfit(result.layers)}"
    yield from (f"  note: {note}" for note in result.notes)
    if any(m.code == "source-differs" for m in result.findings.listed):
        yield "  by its headers or config this is not the checkpoint that the output was made from"
    yield from (f"  mismatch[{m.code}]: {m}" for m in result.findings.listed[:SHOWN])
    if result.findings.count > SHOWN:
        yield f"  and {result.findings.count - SHOWN:,} more mismatches"


def _storage_line(result: StorageResult) -> str:
    """Return the level in one line; a level that failed has no success figures."""
    c, read = result.coverage, len(result.tensors)
    wrong = f"FAILED: {result.findings.count:,} mismatch{'es' if result.findings.count != 1 else ''}"
    sampled = _sampled(result.sample)
    kernel = c.tensors.get("kernel")
    if not result.reached:
        return f"{wrong}; nothing was compared"
    if result.status == "failed":
        return f"{wrong} among {sampled}{read:,} of {result.of_tensors:,} tensors that were read, in {counted(c.files, 'file')}"
    if result.against == "source":
        sorts = ", ".join(f"{n:,} {k.replace('kernel', 'in kernel layout')}" for k, n in c.tensors.items() if n)
        what = f"{sampled}{c.compared:,} of {result.of_tensors:,} tensors against the source, byte for byte ({sorts or 'none'})"
        return f"passed: {what}; {size(c.bytes)}, {counted(c.files, 'file')} beside the manifest"
    if result.status == "not-proved":
        compared = f"{kernel or 0:,} of {result.of_tensors:,} tensors compared"
        return f"not proved: no digests; headers and indexes agree; {sampled}{compared}, with the standard layout beside them"
    within = f"; {kernel:,} tensors of the kernel layout against the standard layout" if kernel else ""
    files = counted(c.files, "file")
    return f"passed: {sampled}{read:,} of {result.of_tensors:,} tensors in {files} against the manifest's digests{within}"


def _sampled(sample: Sample | None) -> str:
    return f"a sample of {sample.count}: " if sample else ""


def _unfit(coverage: LayerCoverage) -> str:
    """Say how many layers have no kernel layout, if any, and the first reason."""
    if not coverage.left_out:
        return ""
    (name, reason), count = coverage.left_out[0], len(coverage.left_out)
    others = "" if len({reason for _, reason in coverage.left_out}) == 1 else f" ({name}; others for other reasons)"
    return f"; {count} {'does' if count == 1 else 'do'} not fit: {reason}{others}"


def _of_layers(done: int, coverage: LayerCoverage) -> str:
    """Return ``2 of 3 layers``: of all MoE layers that the source has, in the kernel layout or not."""
    return f"{_sampled(coverage.sample)}{done} of {coverage.moe_layers} {'MoE ' if coverage.left_out else ''}layers"


def _numerics_lines(summary: NumericsSummary) -> Iterator[str]:
    if not summary.layers and not summary.losses:
        yield "numerics: not run: no layer has the kernel layout"
        return
    if summary.layers:
        yield _bit_equal_line(summary)
    if summary.losses:
        yield from _loss_lines(summary.losses)
    wrong = (f"  mismatch[numerics]: {layer.name}: {layer.reason}" for layer in summary.layers if not layer.passed)
    yield from islice(wrong, SHOWN)
    beyond = (layer for layer in summary.layers if layer.passed and layer.result and not layer.result.in_range)
    yield from islice((f"  note: {layer.name}: {layer.reason}" for layer in beyond), SHOWN)


def _bit_equal_line(summary: NumericsSummary) -> str:
    status = "FAILED" if summary.status == "failed" else "passed"
    results = [layer.result for layer in summary.layers if layer.result and layer.result.in_range]
    worst = max(results, key=lambda r: r.relative_l2, default=None)
    distance = f"; distance to the exact expert at most {worst.relative_l2:.3g} (allowed {worst.bound:.3g})" if worst else ""
    where = f"on {worst.device}, " if worst else ""
    equal = sum(layer.passed for layer in summary.layers)
    which, unfit = _of_layers(equal, summary.coverage), _unfit(summary.coverage)
    if summary.recoded:
        which = f"{_sampled(summary.coverage.sample)}{equal} of {counted(len(summary.layers), 'expert')} that were computed"
    return f"numerics: {status}: {which} bit-equal to the source{distance}; {where}{TOKENS} tokens, seed {SEED}{unfit}"


def _loss_lines(losses: Sequence[ExpertLoss]) -> Iterator[str]:
    """Say what rounding cost, at the worst, and name the matrices that it cost more than it does ordinary weights."""
    matrices = [m for loss in losses for m in loss.matrices.values()]
    norms = [m.norm_ratio for m in matrices]
    figures = (
        f"relative L2 of a matrix at most {max(m.relative_l2 for m in matrices):.4g}",
        f"norm {min(norms):.4g} to {max(norms):.4g} of the source's",
        f"projection at least {min(m.projection for m in matrices):.4g}",
        f"saturated at most {max(m.saturated for m in matrices):.2%}",
        f"flushed to zero at most {max(m.flushed for m in matrices):.2%}",
        f"relative L2 of an expert's output at most {max(loss.output for loss in losses):.4g}",
    )
    yield f"numerics: measured, not bit-equal: {counted(len(losses), 'expert')} rounded: {', '.join(figures)}"
    unusual = {name: found for loss in losses for name, found in loss.unusual.items()}
    for name, found in islice(unusual.items(), SHOWN):
        named = ", ".join(f"{figure.replace('_', ' ')} {value:.4g} ({_usual(figure)})" for figure, value in found.items())
        yield f"  note: {printable(name)} lost more than ordinary weights do: {named}"
    if len(unusual) > SHOWN:
        yield f"  note: and {len(unusual) - SHOWN:,} more matrices"


def _usual(figure: str) -> str:
    from fse_convert.verification.loss import GATES

    low, high = GATES[figure]
    return f"usual: {low:g} to {high:g}" if low and high < inf else f"usual: at least {low:g}" if low else f"usual: up to {high:g}"


def _kernel_line(summary: KernelSummary) -> str:
    if summary.status != "passed":
        return f"kernel: {'FAILED' if summary.status == 'failed' else 'not run'}: {summary.reason}"
    layers, on = _of_layers(len(summary.layers), summary.coverage), f"{summary.probe.device_name}{_unfit(summary.coverage)}"
    return f"kernel: passed: {layers}, relative L2 at most {summary.relative_l2:.3g}, on {on}"


def print_restored(done: Restored, original: Path) -> None:
    """Print what was restored, and how sure that is."""
    how, tensors = "restored" if done.digests else "restored, NOT proved:", counted(done.tensors, "tensor")
    undone = f"format of {done.recoded:,} restored" if done.recoded else f"padding removed from {done.unpadded:,}"
    lines = [
        f"{how} to {printable(original)}: {tensors}, {undone}; {size(done.bytes)}",
        "headers, config.json and index are the original's, byte for byte, by SHA-256",
        "every tensor that was read had the digest that the manifest states"
        if done.digests
        else "the manifest holds no digests: tensors were not checked on the way",
    ]
    if done.edited:
        lines.append(f"note: added, removed or edited since the conversion, so not the original's: {some(done.edited)}")
    say(lines)
