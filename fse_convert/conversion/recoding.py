"""Matrices in another format, as bands of rows: whole blocks are read, coded by `fse_convert.layout`, and handed on.

A band has `CHUNK` bytes, or one row of blocks where that is more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fse_convert.checkpoint.header import element_bytes
from fse_convert.conversion.nan_scan import DAMAGED
from fse_convert.conversion.source_rows import CHUNK, SourceReader
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout import ue8m0
from fse_convert.layout.mxfp4 import Unencodable, refuse_where
from fse_convert.layout.mxfp4_to_fp8 import to_fp8
from fse_convert.layout.nan_and_one import E8M0_NAN
from fse_convert.layout.sizes import GROUP, ceil_div
from fse_convert.layout.to_mxfp4 import from_floats, from_fp8
from fse_convert.plan.tensors import Recoded, Rule, matrix

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
