"""Levels 2 and 3 over the layers of an output: what `numerics` and `kernel` check of one expert, for each of them.

Experts in the kernel layout, and those whose format changed. An MXFP4 value is an E4M3 value under a scale for 32 columns, so one
computation takes both sides of a lossless change; what was rounded is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.plan.tensors import SharedExpert
from fse_convert.progress import Event, Observer, Phase, ignore
from fse_convert.torch_threads import one_torch_thread
from fse_convert.verification.expected import ExpectedOutput, RecodedExpert, swiglu_limit
from fse_convert.verification.experts import CPU, BothSides
from fse_convert.verification.findings import KERNEL_RAISED, NO_KERNEL, NO_LAYERS, SEED, TOKENS, LayerCoverage
from fse_convert.verification.gpu_kernel import KernelProbe, KernelResult, check_kernel, probe
from fse_convert.verification.loss import ExpertLoss, measure_expert
from fse_convert.verification.numerics import NumericsResult, check_numerics, sample_hidden_states
from fse_convert.verification.sample import Sample, choose

if TYPE_CHECKING:
    import torch

AnyExpert = SharedExpert | RecodedExpert
SomeExpert = TypeVar("SomeExpert", SharedExpert, RecodedExpert, AnyExpert)
WORKERS = max(1, min(4, os.cpu_count() or 1))
"""Layers computed at a time, at most."""
BUDGET = 448 << 20
"""Bytes that all layers computed at a time may take."""
BYTES_PER_ELEMENT = 24
"""Bytes that one layer takes at its peak, per element of its down projection: weights of both sides, and sums in float64."""


@dataclass(frozen=True, slots=True)
class LayerNumerics:
    """Level 2's answer for one expert; without a ``result`` its tensors could not even be read as the kernel does."""

    name: str
    result: NumericsResult | None
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the layer was computed, and right."""
        return self.result is not None and self.result.passed


@dataclass(frozen=True, slots=True)
class NumericsSummary:
    """Level 2's answer: each expert that was looked at, and which layers there are. ``limit``: the model's clamp of gate and up.

    ``layers``: of experts that must compute the same bits. ``losses``: of those that were rounded. ``recoded``: how many of both
    were looked at because their format changed.
    """

    layers: tuple[LayerNumerics, ...]
    losses: tuple[ExpertLoss, ...]
    recoded: int
    coverage: LayerCoverage
    limit: float | None

    @property
    def status(self) -> str:
        """``passed``, ``failed``, ``measured`` where something was rounded, or ``not-run``."""
        if not all(layer.passed for layer in self.layers):
            return "failed"
        return "measured" if self.losses else "passed" if self.layers else "not-run"


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """Level 3's answer. ``passed`` only when the fused kernel itself ran for every layer that was looked at.

    ``reason``: for people. ``cause``: why it did not run, the same text on every machine with that cause; else empty.
    """

    status: str
    reason: str
    cause: str
    layers: tuple[tuple[str, KernelResult], ...]
    coverage: LayerCoverage
    probe: KernelProbe

    @property
    def relative_l2(self) -> float | None:
        """The worst relative L2 that was measured."""
        return max((float(r.figures["relative_l2"]) for _, r in self.layers if "relative_l2" in r.figures), default=None)


def check_layers(
    expected: ExpectedOutput,
    out: LocalFolder,
    *,
    sample: Sample | None = None,
    device: torch.device = CPU,
    observe: Observer = ignore,
) -> NumericsSummary:
    """Run level 2 for every shared expert that must have the kernel layout, and for those whose format changed, or for a sample.

    Raises OSError, EOFError.
    """
    limit = swiglu_limit(expected.source)
    every: tuple[AnyExpert, ...] = (*expected.experts, *expected.recoded)
    experts = _choose(every, sample)
    largest = max((e.width * e.group.hidden for e in experts), default=1)
    workers = max(1, min(WORKERS, BUDGET // (BYTES_PER_ELEMENT * largest))) if device.type == "cpu" else 1
    found: list[LayerNumerics | ExpertLoss] = []
    with BothSides.open(expected, out) as sides:

        def check(expert: AnyExpert) -> LayerNumerics | ExpertLoss:
            x = sample_hidden_states(TOKENS, expert.group.hidden, SEED).to(device)
            try:
                if isinstance(expert, SharedExpert):
                    result = check_numerics(*sides.kernel(expert), x, limit)
                elif expert.lossless:
                    result = check_numerics(*sides.stored(expert), x, limit)
                else:
                    return measure_expert(expert.prefix, sides.stored(expert), x, limit)
            except ValueError as e:
                return LayerNumerics(expert.prefix, None, str(e))
            return LayerNumerics(expert.prefix, result, result.reason)

        with one_torch_thread(), ThreadPoolExecutor(workers) as pool:
            for answer in pool.map(check, experts):
                found.append(answer)
                observe(Event(answer.name, done=True, phase=Phase.NUMERICS))
    layers = tuple(answer for answer in found if isinstance(answer, LayerNumerics))
    losses = tuple(answer for answer in found if isinstance(answer, ExpertLoss))
    coverage = replace(expected.coverage(sample), of_layers=expected.computed_layers)
    recoded = sum(isinstance(expert, RecodedExpert) for expert in experts)
    return NumericsSummary(layers, losses, recoded, coverage, limit)


def run_kernel(
    expected: ExpectedOutput, out: LocalFolder, *, sample: Sample | None = None, observe: Observer = ignore
) -> KernelSummary:
    """Run level 3 for every layer that must have the kernel layout, where there is a kernel. Raises OSError, EOFError."""
    found = probe()
    experts = _choose(expected.experts, sample)
    results: list[tuple[str, KernelResult]] = []
    if found.status != "unavailable" and experts:
        limit, shared = swiglu_limit(expected.source), expected.plan.decision.n_shared
        with BothSides.open(expected, out) as sides:
            for expert in experts:
                try:
                    x = sample_hidden_states(TOKENS, expert.group.hidden, SEED)
                    result = check_kernel(*sides.kernel(expert), x, shared=shared, limit=limit)
                except ValueError as e:
                    result = KernelResult("failed", str(e), {})
                results.append((expert.prefix, result))
                observe(Event(expert.prefix, done=True, phase=Phase.KERNEL))
    status, reason, cause = _conclude(results, len(experts), found)
    return KernelSummary(status, reason, cause, tuple(results), expected.coverage(sample), found)


def _conclude(results: list[tuple[str, KernelResult]], wanted: int, found: KernelProbe) -> tuple[str, str, str]:
    """Return status, reason and cause: a failure anywhere decides, then a layer that did not run."""
    if not wanted:
        return "not-run", NO_LAYERS, NO_LAYERS
    if not results:
        return "not-run", found.reason, NO_KERNEL
    for status in ("failed", "not-run"):
        named = next(((name, r) for name, r in results if r.status == status), None)
        if named:
            return status, f"{named[0]}: {named[1].reason}", "" if status == "failed" else KERNEL_RAISED
    return "passed", "", ""


def _choose(experts: Sequence[SomeExpert], sample: Sample | None) -> list[SomeExpert]:
    names = choose(sample, {"": [e.prefix for e in experts]}) if sample else None
    return [e for e in experts if names is None or e.prefix in names]
