"""Matrices in another format, as bands of rows: whole blocks are read, coded by `fse_convert.layout`, and handed on.

A band has `CHUNK` bytes, or one row of blocks where that is more.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fse_convert.checkpoint.header import element_bytes
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.conversion.source_rows import CHUNK, SourceReader, open_reader
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import ue8m0
from fse_convert.layout.mxfp4 import Unencodable, refuse_where
from fse_convert.layout.mxfp4_to_fp8 import certainly_fits, to_fp8
from fse_convert.layout.nan_and_one import E8M0_NAN, NaN
from fse_convert.layout.sizes import GROUP, ceil_div
from fse_convert.layout.to_mxfp4 import from_floats, from_fp8
from fse_convert.plan.plan import Plan
from fse_convert.plan.tensors import Recoded, Rule, matrix
from fse_convert.servers.routed_fp8 import LOW

Band = Mapping[bool, Tensor]
"""Rows of the output, by `Recoded.is_scale`."""
FLOATS: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
HINTS: Mapping[str, str] = {
    "nan": DAMAGED,
    "scale-range": "quantise this tensor again from its original",
    "tile-span": "keep the experts in MXFP4, or quantise them again from their original",
}


def recoded_bands(change: Recoded, reader: SourceReader) -> Iterator[Band]:
    """Yield the two tensors of a matrix, or scales alone, in another format: bands in the order of rows.

    Raises InvalidCheckpoint for a value that the other format cannot hold, with the tensor, row and columns.
    """
    n, unit, row_bytes = _extent(change)
    step = max(1, CHUNK // (unit * row_bytes)) * unit
    for first in range(0, n, step):
        try:
            band = CODERS[change.rule](change, reader, first, min(step, n - first))
        except Unencodable as e:
            info = change.sources[0]
            where = f"{info.shard}: {info.name}"
            raise InvalidCheckpoint(Problem(e.code, e.sentence(first), where, HINTS[e.code])) from e
        yield {is_scale: rows.view(torch.uint8) for is_scale, rows in band.items()}


def as_bytes(rows: Tensor) -> memoryview:
    """Return a tensor's memory as a buffer, without numpy."""
    flat = rows.contiguous().flatten()
    array = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    array._keep = flat.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _extent(change: Recoded) -> tuple[int, int, int]:
    """Return rows, how many of them belong together, and the bytes that one has at its widest; bits of floats are BF16's."""
    info = change.sources[0]
    if change.rule is Rule.F32:
        rows, row_bytes = matrix(info)
        return rows, 1, element_bytes("F32") * row_bytes
    rows, columns = change.shape
    return rows, _block(change)[0], columns * element_bytes("F8_E4M3" if change.rule is Rule.FP8 else "BF16")


def _block(change: Recoded) -> tuple[int, int]:
    """Return the rows and columns that share a scale; floats have none, and are coded group by group."""
    return change.block or (1, GROUP)


def _fp8(change: Recoded, reader: SourceReader, first: int, count: int) -> Band:
    weight, scale = change.sources
    w_np, sf_ng = (reader.tensor(info, first, count, None, slot) for slot, info in enumerate((weight, scale)))
    codes, tiles = to_fp8(w_np, sf_ng, _block(change))
    return {False: codes, True: ue8m0.to_fp32(tiles)}


def _mxfp4(change: Recoded, reader: SourceReader, first: int, count: int) -> Band:
    weight, *scales = change.sources
    rows = reader.tensor(weight, first, count, None)
    if scales:
        block = _block(change)
        stored = reader.tensor(scales[0], first // block[0], ceil_div(count, block[0]), None, 1)
        if scales[0].dtype in FLOATS:
            stored = stored.view(FLOATS[scales[0].dtype])
        codes, groups = from_fp8(rows, ue8m0.expand(stored, count, change.shape[1], *block))
    else:
        codes, groups = from_floats(rows.view(FLOATS[weight.dtype]))
    return {False: codes, True: groups}


def _f32(change: Recoded, reader: SourceReader, first: int, count: int) -> Band:
    rows = reader.tensor(change.sources[0], first, count, None)
    refuse_where(rows == E8M0_NAN, "nan", "the scale is a NaN (0xFF)", 1)
    refuse_where(rows == 0, "scale-range", "the scale is 2**-127, which is subnormal in F32, so that servers take it for 0,", 1)
    return {True: ue8m0.to_fp32(rows)}


CODERS: Mapping[Rule, Callable[[Recoded, SourceReader, int, int], Band]] = {Rule.FP8: _fp8, Rule.MXFP4: _mxfp4, Rule.F32: _f32}


def fit_note(plan: Plan) -> Problem | None:
    """Say how many MXFP4 weights their group scales, a few percent of the bytes, prove exact in FP8: before any work.

    Of the others the elements decide. None where nothing becomes FP8.
    Raises InvalidCheckpoint for a scale that the other format cannot hold, OSError, EOFError.
    """
    weights = list(_scales_by(Rule.FP8, plan))
    unproved: list[Recoded] = []
    low: list[Recoded] = []
    with open_reader(plan.source.folder, plan.source.checkpoint.shards) as reader:
        for change in _scales_by(Rule.F32, plan):
            deque(recoded_bands(change, reader), maxlen=0)  # raises for what F32 cannot hold
        for change in weights:
            sf_ng = reader.tensor(change.sources[1], 0, change.shape[0], NaN.E8M0)
            if not certainly_fits(sf_ng, _block(change)):
                unproved.append(change)
            if (sf_ng < LOW).any():
                low.append(change)
    return _note(weights, unproved, low) if weights else None


def _note(weights: Sequence[Recoded], unproved: Sequence[Recoded], low: Sequence[Recoded]) -> Problem:
    if low:
        message = f"{len(low):,} weights have group scales below 2**-30: vLLM's requantisation for DeepGEMM changes their values"
        return Problem("fp8-low", message, low[0].sources[0].name, "serve with VLLM_USE_DEEP_GEMM_E8M0=0")
    if not unproved:
        return Problem("fp8-fits", f"the scales of all {len(weights):,} weights show that they are exact in FP8")
    of = f"{len(unproved):,} of {len(weights):,} weights"
    message = f"the scales of {of} leave open whether they are exact in FP8; their elements decide"
    return Problem("fp8-open", message, unproved[0].sources[0].name, "the conversion refuses what is not, and names the place")


def _scales_by(rule: Rule, plan: Plan) -> Iterator[Recoded]:
    """Yield the scales that are coded again by a rule; by `Rule.FP8` every weight has some."""
    changes = (t.change for shard in plan.shards for t in shard.tensors)
    return (c for c in changes if isinstance(c, Recoded) and c.rule is rule and c.is_scale)
