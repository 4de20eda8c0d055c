"""Levels 2 and 3 over the layers of an output: what `reference` and `kernel` check of one shared expert, for each of them."""

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
from fse_convert.claims import Claims
from fse_convert.models.moe import Role
from fse_convert.threads import one_torch_thread
from fse_convert.verify.addresses import GROUP, ONE, BlockScales
from fse_convert.verify.expected import KernelExpert, Source, kernel_experts
from fse_convert.verify.experts import KernelLayout, SourceLayout
from fse_convert.verify.findings import Findings, Progress, ignore
from fse_convert.verify.headers import read_sidecar
from fse_convert.verify.kernel import KernelProbe, KernelResult, check_kernel, probe
from fse_convert.verify.passes import choose
from fse_convert.verify.pieces import SourceTensors, block_scales
from fse_convert.verify.reference import NumericsResult, check_numerics, fused_expert, sample_hidden_states
from fse_convert.verify.stream import InputFiles, input_files

TOKENS = 16
SEED = 0
BOUND = "bit-equal, and relative L2 <= hypot(2^-4, noise / norm) + 2^-9 against the exact expert"
NO_LAYERS = "no layer has the kernel layout"
Pair = tuple[KernelLayout, SourceLayout]
WORKERS = max(1, min(4, os.cpu_count() or 1))
"""Layers computed at a time, at most."""
BUDGET = 448 << 20
"""Bytes that all layers computed at a time may take."""
BYTES_PER_ELEMENT = 24
"""Bytes that one layer takes at its peak, per element of its down projection: weights of both sides, and sums in float64."""
PARTS = ("shared_l1_weight", "shared_l1_weight_scale", "shared_l2_weight", "shared_l2_weight_scale")


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
    """Level 2's answer: some or all of the ``of_layers`` layers that have the kernel layout."""

    layers: tuple[LayerNumerics, ...]
    of_layers: int
    limit: float | None
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
    """Level 3's answer. ``passed`` only when the fused kernel itself ran for every layer that was looked at."""

    status: str
    reason: str
    layers: tuple[tuple[str, KernelResult], ...]
    of_layers: int
    found: KernelProbe


def check_layers(
    source: Source,
    out: LocalFolder,
    claims: Claims,
    *,
    sample: int | None = None,
    device: torch.device | None = None,
    progress: Progress = ignore,
) -> NumericsSummary:
    """Run level 2 for every layer that has the kernel layout, or for ``sample`` of them. Raises OSError, EOFError."""
    limit = swiglu_limit(source)
    chosen, total = _choose(source, claims, sample)

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
    with _reading(source, out) as read, one_torch_thread(), ThreadPoolExecutor(workers) as pool:
        for expert, found in zip(chosen, pool.map(check, [partial(read, e) for e in chosen]), strict=True):
            result = None if isinstance(found, str) else found
            layers.append(LayerNumerics(expert.prefix, result, found if isinstance(found, str) else found.reason))
            progress(f"numerics of {expert.prefix}", 0, True)
    return NumericsSummary(tuple(layers), total, limit)


def _workers(experts: list[KernelExpert]) -> int:
    """As many layers at a time as the budget of memory allows."""
    largest = max((e.width * e.group.hidden for e in experts), default=1)
    return max(1, min(WORKERS, BUDGET // (BYTES_PER_ELEMENT * largest)))


def run_kernel(
    source: Source,
    out: LocalFolder,
    claims: Claims,
    *,
    sample: int | None = None,
    device: torch.device | None = None,
    progress: Progress = ignore,
) -> KernelSummary:
    """Run level 3 for every layer that has the kernel layout, where there is a kernel. Raises OSError, EOFError."""
    found = probe(device)
    chosen, total = _choose(source, claims, sample)
    if found.status == "unavailable" or not chosen:
        return KernelSummary("not-run", NO_LAYERS if not chosen else found.reason, (), total, found)
    limit = swiglu_limit(source)
    results = []
    with _reading(source, out) as read:
        for expert in chosen:
            pair = read(expert)
            if isinstance(pair, str):
                results.append((expert.prefix, KernelResult("failed", pair, {}, found)))
                continue
            kernel, theirs = pair
            x = sample_hidden_states(TOKENS, kernel.hidden, SEED)
            reference = fused_expert(x, theirs, limit)
            result = check_kernel(kernel, x, reference, source=theirs, shared_experts=claims.n_shared, limit=limit, device=device)
            results.append((expert.prefix, result))
            progress(f"kernel of {expert.prefix}", 0, True)
    return _conclude(tuple(results), total, found)


def _conclude(results: tuple[tuple[str, KernelResult], ...], total: int, found: KernelProbe) -> KernelSummary:
    """A failure anywhere decides, then a layer that did not run."""
    for status in ("failed", "not-run", "passed"):
        named = next(((name, r) for name, r in results if r.status == status), None)
        if named:
            return KernelSummary(status, f"{named[0]}: {named[1].reason}", results, total, found)
    return KernelSummary("not-run", NO_LAYERS, results, total, found)


def swiglu_limit(source: Source) -> float | None:
    """The model's clamp of gate and up, from the config section that holds the widths; None for none."""
    config, section = source.checkpoint.config, source.description.section
    place = config.get(section) if section else config
    value = place.get("swiglu_limit") if isinstance(place, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _choose(source: Source, claims: Claims, sample: int | None) -> tuple[list[KernelExpert], int]:
    experts = kernel_experts(source.description, claims.layers, claims.n_shared * claims.widths[2])
    if sample is None:
        return experts, len(experts)
    names = choose(sample, {"layers": [e.prefix for e in experts]}, claims.source)
    return [e for e in experts if e.prefix in names], len(experts)


@contextmanager
def _reading(source: Source, out: LocalFolder) -> Iterator[Callable[[KernelExpert], Pair | str]]:
    """A function that reads an expert as both sides hold it, or says why it cannot be read."""
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
    tensors = []
    for part in PARTS:
        shard, info = places[f"{expert.prefix}.{part}"]
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
