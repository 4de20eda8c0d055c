"""Levels 2 and 3 over the layers of an output: what `numerics` and `kernel` check of one shared expert, for each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.model.moe import Role
from fse_convert.torch_threads import one_torch_thread
from fse_convert.verification.addresses import GROUP, ONE, BlockScales, KernelLayout, SourceLayout
from fse_convert.verification.demanded import Demand
from fse_convert.verification.expected import KernelExpert, swiglu_limit
from fse_convert.verification.findings import KERNEL_RAISED, NO_KERNEL, NO_LAYERS, SEED, TOKENS, Findings, Progress, ignore
from fse_convert.verification.headers import read_sidecar
from fse_convert.verification.kernel import KernelProbe, KernelResult, KernelSettings, check_kernel, probe
from fse_convert.verification.numerics import NumericsResult, check_numerics, fused_expert, sample_hidden_states
from fse_convert.verification.passes import choose
from fse_convert.verification.pieces import SourceTensors, block_scales
from fse_convert.verification.stream import InputFiles, input_files

Pair = tuple[KernelLayout, SourceLayout]
WORKERS = max(1, min(4, os.cpu_count() or 1))
"""Layers computed at a time, at most."""
BUDGET = 448 << 20
"""Bytes that all layers computed at a time may take."""
BYTES_PER_ELEMENT = 24
"""Bytes that one layer takes at its peak, per element of its down projection: weights of both sides, and sums in float64."""


@dataclass(frozen=True, slots=True)
class LayerNumerics:
    """Level 2's answer for one layer; without a ``result`` its tensors could not even be read as the kernel does."""

    name: str
    result: NumericsResult | None
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the layer was computed, and right."""
        return self.result is not None and self.result.passed


@dataclass(frozen=True, slots=True)
class NumericsSummary:
    """Level 2's answer: some or all of the ``of_layers`` layers that have the kernel layout.

    ``moe_layers``: all that the source has. ``left_out``: (name, reason) of those without the kernel layout. ``sample``:
    how many were asked for, None for all.
    """

    layers: tuple[LayerNumerics, ...]
    of_layers: int
    limit: float | None
    moe_layers: int
    left_out: tuple[tuple[str, str], ...] = ()
    sample: int | None = None
    tokens: int = TOKENS
    seed: int = SEED

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not-run``."""
        if not self.layers:
            return "not-run"
        return "passed" if all(layer.passed for layer in self.layers) else "failed"


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """Level 3's answer. ``passed`` only when the fused kernel itself ran for every layer that was looked at.

    ``reason``: for people. ``cause``: why it did not run, the same text on every machine with that cause; else empty.
    ``of_layers``, ``moe_layers``, ``left_out``, ``sample``: as in `NumericsSummary`.
    """

    status: str
    reason: str
    layers: tuple[tuple[str, KernelResult], ...]
    of_layers: int
    found: KernelProbe
    cause: str = ""
    moe_layers: int = 0
    left_out: tuple[tuple[str, str], ...] = ()
    sample: int | None = None

    @property
    def relative_l2(self) -> float | None:
        """The worst relative L2 that was measured."""
        found = [float(r.figures["relative_l2"]) for _, r in self.layers if "relative_l2" in r.figures]
        return max(found, default=None)


def check_layers(
    demanded: Demand,
    out: LocalFolder,
    *,
    sample: int | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Progress = ignore,
) -> NumericsSummary:
    """Run level 2 for every layer that must have the kernel layout, or for ``sample`` of them, chosen by ``seed``.

    Raises OSError, EOFError.
    """
    limit = swiglu_limit(demanded.source)
    chosen = _choose(demanded, sample, seed)

    def check(read: Callable[[], Pair | str]) -> NumericsResult | str:
        pair = read()
        if isinstance(pair, str):
            return pair
        try:
            return check_numerics(*pair, tokens=TOKENS, seed=SEED, limit=limit, device=device)
        except ValueError as e:
            return str(e)

    layers = []
    workers = 1 if device is not None and device.type != "cpu" else _workers(chosen)
    with _reading(demanded, out) as read, one_torch_thread(), ThreadPoolExecutor(workers) as pool:
        for expert, found in zip(chosen, pool.map(check, [partial(read, e) for e in chosen]), strict=True):
            result = None if isinstance(found, str) else found
            layers.append(LayerNumerics(expert.prefix, result, found if isinstance(found, str) else found.reason))
            progress(f"numerics of {expert.prefix}", 0, True)
    counts = (len(demanded.experts), limit, demanded.moe_layers, demanded.left_out, sample)
    return NumericsSummary(tuple(layers), *counts)


def _workers(experts: list[KernelExpert]) -> int:
    """As many layers at a time as the budget of memory allows."""
    largest = max((e.width * e.group.hidden for e in experts), default=1)
    return max(1, min(WORKERS, BUDGET // (BYTES_PER_ELEMENT * largest)))


def run_kernel(
    demanded: Demand,
    out: LocalFolder,
    *,
    sample: int | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Progress = ignore,
) -> KernelSummary:
    """Run level 3 for every layer that must have the kernel layout, where there is a kernel. Raises OSError, EOFError."""
    found = probe(device)
    chosen = _choose(demanded, sample, seed)
    results: list[tuple[str, KernelResult]] = []
    if found.status != "unavailable" and chosen:
        limit = swiglu_limit(demanded.source)
        with _reading(demanded, out) as read:
            for expert in chosen:
                results.append((expert.prefix, _run_one(read(expert), demanded, limit, device)))
                progress(f"kernel of {expert.prefix}", 0, True)
    status, reason, cause = _conclude(results, len(chosen), found)
    counts = (demanded.moe_layers, demanded.left_out, sample)
    return KernelSummary(status, reason, tuple(results), len(demanded.experts), found, cause, *counts)


def _run_one(pair: Pair | str, demanded: Demand, limit: float | None, device: torch.device | None) -> KernelResult:
    if isinstance(pair, str):
        return KernelResult("failed", pair, {})
    kernel, theirs = pair
    x = sample_hidden_states(TOKENS, kernel.hidden, SEED)
    settings = KernelSettings(shared_experts=demanded.plan.decision.n_shared, limit=limit, device=device)
    return check_kernel(kernel, x, fused_expert(x, theirs, limit), settings, source=theirs)


def _conclude(results: list[tuple[str, KernelResult]], wanted: int, found: KernelProbe) -> tuple[str, str, str]:
    """Status, reason and cause: a failure anywhere decides, then a layer that did not run."""
    if not wanted:
        return "not-run", NO_LAYERS, NO_LAYERS
    if not results:
        return "not-run", found.reason, NO_KERNEL
    for status in ("failed", "not-run"):
        named = next(((name, r) for name, r in results if r.status == status), None)
        if named:
            cause = "" if status == "failed" else KERNEL_RAISED if found.status == "ready" else NO_KERNEL
            return status, f"{named[0]}: {named[1].reason}", cause
    return "passed", "", ""


def _choose(demanded: Demand, sample: int | None, seed: int) -> list[KernelExpert]:
    if sample is None:
        return list(demanded.experts)
    names = choose(sample, {"kernel": [e.prefix for e in demanded.experts]}, seed)
    return [e for e in demanded.experts if e.prefix in names]


@contextmanager
def _reading(demanded: Demand, out: LocalFolder) -> Iterator[Callable[[KernelExpert], Pair | str]]:
    """A function that reads an expert as both sides hold it, or says why it cannot be read."""
    source = demanded.source
    places = {t.name: (s, t) for s in read_sidecar(out, Findings()) for t in s.header.tensors}
    with input_files(out.root) as ours, input_files(source.folder.root) as files:
        theirs = SourceTensors.of(source.checkpoint, files)

        def read(expert: KernelExpert) -> Pair | str:
            try:
                return _kernel(expert, places, ours), _source(expert, theirs)
            except KeyError as e:
                return f"no tensor {e.args[0]}"
            except ValueError as e:
                return str(e)

        yield read


def _kernel(expert: KernelExpert, places: Mapping[str, Any], files: InputFiles) -> KernelLayout:
    """Read the four tensors; raises KeyError for a missing one, ValueError for one of another dtype or shape, unread."""
    tensors = []
    for name, (dtype_name, shape) in expert.shapes.items():
        shard, info = places[name]
        if (info.dtype, info.shape) != (dtype_name, shape):
            raise ValueError(f"{name} is {info.dtype} {list(info.shape)}, expected {dtype_name} {list(shape)}")
        buffer = bytearray(info.nbytes)
        files.read(shard.name, shard.header.data_start + info.start, memoryview(buffer))
        dtype = torch.int32 if info.dtype == "I32" else torch.uint8
        tensors.append(torch.frombuffer(buffer, dtype=dtype).view(info.shape))
    return KernelLayout(*tensors)


def _source(expert: KernelExpert, source: SourceTensors) -> SourceLayout:
    weights = {r: source.whole(expert.tensor(r, scale=False)) for r in Role}
    scales = {r: block_scales(expert, r, source) for r in Role}
    blocks = {s.block for s in scales.values()}
    codes = {r: s.codes if len(blocks) == 1 else _per_group(s) for r, s in scales.items()}
    block = blocks.pop() if len(blocks) == 1 else (1, GROUP)
    gate, up, down = Role
    missing = -expert.group.width % GROUP
    if missing:
        full = expert.group.width + missing
        for role in Role:
            n, k = (weights[role].shape[0], full) if role is down else (full, weights[role].shape[1])
            weights[role] = _grown(weights[role], n, k, 0)
            codes[role] = _grown(codes[role], -(-n // block[0]), -(-k // block[1]), ONE)
    return SourceLayout(weights[gate], codes[gate], weights[up], codes[up], weights[down], codes[down], block)


def _grown(x: Tensor, rows: int, columns: int, fill: int) -> Tensor:
    """Complete a last, partial group of channels: the kernel scales activations 32 at a time, and a zero channel adds nothing."""
    out = torch.full((rows, columns), fill, dtype=torch.uint8)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _per_group(scales: BlockScales) -> Tensor:
    """Scales per row and 32 columns, for experts whose projections differ in their blocks."""
    n, k = scales.shape
    return scales.at(torch.arange(n), torch.arange(-(-k // GROUP))[None])[0]
