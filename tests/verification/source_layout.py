"""A shared expert in memory, as a checkpoint has it: what `StoredExpert` reads from files."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fse_convert.model.moe import Role
from fse_convert.verification.addresses import GROUP, Rows
from fse_convert.verification.experts import dequantize


@dataclass(frozen=True)
class SourceLayout:
    """The shared expert as the source checkpoint holds it.

    ``gate``, ``up`` uint8 ``[S, H]`` and ``down`` uint8 ``[H, S]`` are E4M3 codes; their scales are uint8 E8M0, one
    per block of ``block`` = (rows, columns), the last block of an axis being partial (``[ceil, ceil]``). Raises
    ValueError when the block's columns, ``H`` or ``S`` are not multiples of 32. Rule: vLLM 0.33,
    model_executor/layers/fused_moe/deep_gemm_mega_moe.py, ``_pack_scale``.
    """

    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    block: tuple[int, int]

    @property
    def hidden(self) -> int:
        """Return H."""
        return self.gate.shape[1]

    @property
    def width(self) -> int:
        """Return S: the shared width before padding."""
        return self.gate.shape[0]

    def to(self, device: torch.device) -> SourceLayout:
        """Move all six tensors."""
        names = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def rows(self, role: Role, start: int, stop: int) -> Rows:
        """Return rows of gate, up or down."""
        weight, scale = getattr(self, role.value), getattr(self, f"{role.value}_scale")
        rows = torch.arange(start, stop, device=weight.device) // self.block[0]
        columns = torch.arange(0, weight.shape[1], GROUP, device=weight.device) // self.block[1]
        return weight[start:stop], scale[rows[:, None], columns]

    def values(self, role: Role, start: int, stop: int) -> Tensor:
        """Return rows of gate, up or down as float64."""
        return dequantize(self.rows(role, start, stop))
