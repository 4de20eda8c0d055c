"""What stored elements mean: E4M3 and MXFP4 codes, E8M0 scales, and matrices in any format as float64 values, all of it exactly.

Shapes in names: ``n`` rows, ``k`` columns, ``p`` bytes of two MXFP4 codes, ``g`` groups of 32 columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.verification.addresses import GROUP
from fse_convert.verification.compare import Memory, SourceTensors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of MXFP4's codes 0 to 7; bit 3 is the sign. OCP Microscaling Formats 1.0, section 5.3.3."""
FLOATS: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@functools.cache
def _scale_table(device: torch.device) -> Tensor:
    values = torch.pow(2.0, torch.arange(-127, 129, dtype=torch.float64))
    values[0xFF] = math.nan
    return values.to(device)


@functools.cache
def _mxfp4_pairs() -> Tensor:
    """Return the two values of a byte of MXFP4 codes, the even column's first: float32 ``[256, 2]``, as int64 for one look-up."""
    values = torch.tensor((*E2M1, *(-m for m in E2M1)))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int64).flatten()


@functools.cache
def _code_table(device: torch.device) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double().to(device)  # a cast of each code is slower


@functools.cache
def _code_pairs() -> Tensor:
    """Return the values of two E4M3 codes by the word that they make: float32 ``[65536, 2]``, as int64."""
    values = _code_table(torch.device("cpu")).float()
    return torch.stack((values.expand(256, -1), values[:, None].expand(-1, 256)), 2).view(torch.int64).flatten()


def decode_codes(codes: Tensor) -> Tensor:
    """Decode E4M3 codes (uint8, any shape) to float64, exactly; 0x7F and 0xFF give NaN."""
    return _code_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def decode_scales(scale: Tensor) -> Tensor:
    """Decode UE8M0 bytes (uint8, any shape) to float64, exactly: ``2 ** (byte - 127)``; 0xFF gives NaN."""
    return _scale_table(scale.device)[scale.int()]


def decode_mxfp4(w_np: Tensor) -> Tensor:
    """Decode bytes of two MXFP4 codes to float32 ``[n, 2 p]``, without their groups' scales; zeros keep their sign."""
    return _looked_up(_mxfp4_pairs(), w_np)


def _looked_up(pairs: Tensor, words: Tensor) -> Tensor:
    """Return the values, float32 ``[n, 2 p]``, of words ``[n, p]`` that stand for two each."""
    return pairs.index_select(0, words.flatten().int()).view(torch.float32).view(words.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stored matrix ``[n, k]`` whose values are read some rows at a time.

    ``block``: rows and columns that share a scale; None for floats, which have no ``scale``.
    """

    weight: TensorInfo
    scale: TensorInfo | None
    shape: tuple[int, int]
    block: tuple[int, int] | None
    tensors: SourceTensors
    memory: Memory = field(default_factory=Memory)

    def values(self, start: int, stop: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return rows ``[start, stop)``, exactly if ``dtype`` holds them; what is NaN or infinite in the file is so here."""
        rows = self.tensors.rows(self.weight, start, stop, self.memory, "weight")
        if self.scale is None or self.block is None:
            return rows.view(FLOATS[self.weight.dtype]).to(dtype)
        codes = _looked_up(_code_pairs(), rows.view(torch.uint16)) if self.weight.dtype == "F8_E4M3" else decode_mxfp4(rows)
        values = codes.to(dtype)
        return values.view(len(rows), -1, GROUP).mul_(self.scales(start, stop).to(dtype)[:, :, None]).view(values.shape)

    def scales(self, start: int, stop: int) -> Tensor:
        """Return the scale of every group of rows ``[start, stop)``: float64 ``[n, g]``."""
        if self.scale is None or self.block is None:
            raise ValueError(f"{self.weight.name} has no scales")
        (bm, bk), first = self.block, start // self.block[0]
        stored = self.tensors.rows(self.scale, first, -(-stop // bm), self.memory, "scale")
        dtype = self.scale.dtype
        values = stored.view(FLOATS[dtype]).double() if dtype in FLOATS else decode_scales(stored)
        row, group = torch.arange(start, stop) // bm - first, torch.arange(0, self.shape[1], GROUP) // bk
        return values.index_select(1, group).index_select(0, row)
