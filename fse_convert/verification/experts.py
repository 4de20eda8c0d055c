"""Two readers of one shared expert: by the kernel's addresses, and by the source checkpoint's blocks.

They share no code with the writer (`fse_convert.layout`) and none with each other, so that a mistake on one side shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

GROUP = 32
"""K elements under one scale (recipe (1, 1, 32))."""
Rows = tuple[Tensor, Tensor]
"""Weight codes uint8 ``[n, k]`` and their scales uint8 ``[n, k / 32]``, rows in logical order."""


class ExpertWeights(Protocol):
    """What a computation needs of a layout: rows of gate and up ``[width, hidden]`` and of down ``[hidden, width]``."""

    @property
    def hidden(self) -> int:
        """H."""
        ...

    @property
    def width(self) -> int:
        """S."""
        ...

    def gate_rows(self, start: int, stop: int) -> Rows:
        """Rows of gate."""
        ...

    def up_rows(self, start: int, stop: int) -> Rows:
        """Rows of up."""
        ...

    def down_rows(self, start: int, stop: int) -> Rows:
        """Rows of down."""
        ...


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected contiguous {dtype} {shape}")


@dataclass(frozen=True)
class KernelLayout:
    """The shared expert as MegaMoE reads it, every byte found by the kernel's own address.

    ``l1_weight`` uint8 ``[2S, H]``, ``l1_scale`` int32 as stored ``[H / 128, 2S]``, ``l2_weight`` uint8 ``[H, S]``,
    ``l2_scale`` int32 as stored ``[S / 128, H]``; contiguous, on one device. Raises ValueError on any other dtype or
    shape and on an ``H`` or ``S`` that is no multiple of 128.

    Addresses (``/`` floors): row ``r`` of gate is physical row ``16 (r / 8) + r % 8`` of L1, of up 8 further; its
    scale row is ``p = 128 (r / 64) + 64 ((r / 8) % 2) + 32 half + 4 (r % 8) + (r % 64) / 16``; row ``n`` of down keeps
    its place, its scale row is ``p = 128 (n / 128) + 4 (n % 32) + (n % 128) / 32``. The scale of row ``p`` of ``N``
    and K group ``g`` is byte ``4 ((g / 4) N + p) + g % 4``. Source: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py
    and deep_gemm/include/deep_gemm/impls/smxx_layout.cuh, composed into offsets.
    """

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor

    def __post_init__(self) -> None:
        if self.l2_weight.dim() != 2 or self.hidden % 128 or self.width % 128:
            raise ValueError(f"l2_weight {tuple(self.l2_weight.shape)} is not [hidden, width] in multiples of 128")
        hidden, width = self.hidden, self.width
        _require("l1_weight", self.l1_weight, torch.uint8, (2 * width, hidden))
        _require("l1_scale", self.l1_scale, torch.int32, (hidden // 128, 2 * width))
        _require("l2_weight", self.l2_weight, torch.uint8, (hidden, width))
        _require("l2_scale", self.l2_scale, torch.int32, (width // 128, hidden))

    @property
    def hidden(self) -> int:
        """H."""
        return self.l2_weight.shape[0]

    @property
    def width(self) -> int:
        """S: the shared width, padding included."""
        return self.l2_weight.shape[1]

    def to(self, device: torch.device) -> KernelLayout:
        """Move all four tensors."""
        return KernelLayout(*(t.to(device) for t in (self.l1_weight, self.l1_scale, self.l2_weight, self.l2_scale)))

    def gate_rows(self, start: int, stop: int) -> Rows:
        """Rows of gate."""
        return self._l1_rows(start, stop, 0)

    def up_rows(self, start: int, stop: int) -> Rows:
        """Rows of up."""
        return self._l1_rows(start, stop, 1)

    def down_rows(self, start: int, stop: int) -> Rows:
        """Rows of down."""
        n = torch.arange(start, stop, device=self.l2_weight.device)
        p = 128 * (n // 128) + 4 * (n % 32) + (n % 128) // 32
        return _codes_at(self.l2_weight, n), _scales_at(self.l2_scale, p, self.width // GROUP)

    def _l1_rows(self, start: int, stop: int, half: int) -> Rows:
        r = torch.arange(start, stop, device=self.l1_weight.device)
        p = 128 * (r // 64) + 64 * ((r // 8) % 2) + 32 * half + 4 * (r % 8) + (r % 64) // 16
        codes = _codes_at(self.l1_weight, 16 * (r // 8) + 8 * half + r % 8)
        return codes, _scales_at(self.l1_scale, p, self.hidden // GROUP)


def _codes_at(weight: Tensor, row: Tensor) -> Tensor:
    return weight[row]  # K is contiguous


def _scales_at(stored: Tensor, row: Tensor, groups: int) -> Tensor:
    g = torch.arange(groups, device=row.device)
    offset = 4 * ((g // 4) * stored.shape[1] + row[:, None]) + g % 4
    return stored.view(-1).view(torch.uint8)[offset]


@dataclass(frozen=True)
class SourceLayout:
    """The shared expert as the source checkpoint holds it.

    ``gate``, ``up`` uint8 ``[S, H]`` and ``down`` uint8 ``[H, S]`` are E4M3 codes; their scales are uint8 E8M0, one
    per block of ``block`` = (rows, columns), the last block of an axis being partial (``[ceil, ceil]``). Raises
    ValueError on any other dtype or shape, and when the block's columns, ``H`` or ``S`` are no multiple of 32. Rule:
    vLLM 0.33, model_executor/layers/fused_moe/deep_gemm_mega_moe.py, ``_pack_scale``.
    """

    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.block) < 1 or self.block[1] % GROUP:
            raise ValueError(f"blocks of {self.block}: their columns come in multiples of {GROUP}")
        if self.gate.dim() != 2 or self.width % GROUP or self.hidden % GROUP:
            raise ValueError(f"gate {tuple(self.gate.shape)} is not [width, hidden] in multiples of {GROUP}")
        shapes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        for name, (n, k) in shapes.items():
            _require(name, getattr(self, name), torch.uint8, (n, k))
            blocks = (-(-n // self.block[0]), -(-k // self.block[1]))
            _require(f"{name}_scale", getattr(self, f"{name}_scale"), torch.uint8, blocks)

    @property
    def hidden(self) -> int:
        """H."""
        return self.gate.shape[1]

    @property
    def width(self) -> int:
        """S: the shared width before padding."""
        return self.gate.shape[0]

    def to(self, device: torch.device) -> SourceLayout:
        """Move all six tensors."""
        names = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def gate_rows(self, start: int, stop: int) -> Rows:
        """Rows of gate."""
        return self._rows(self.gate, self.gate_scale, start, stop)

    def up_rows(self, start: int, stop: int) -> Rows:
        """Rows of up."""
        return self._rows(self.up, self.up_scale, start, stop)

    def down_rows(self, start: int, stop: int) -> Rows:
        """Rows of down."""
        return self._rows(self.down, self.down_scale, start, stop)

    def _rows(self, weight: Tensor, scale: Tensor, start: int, stop: int) -> Rows:
        rows = torch.arange(start, stop, device=weight.device) // self.block[0]
        columns = torch.arange(0, weight.shape[1], GROUP, device=weight.device) // self.block[1]
        return weight[start:stop], scale[rows[:, None], columns]
