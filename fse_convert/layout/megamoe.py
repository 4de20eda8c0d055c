"""The kernel layout of MegaMoE's shared experts for 8-bit weights (mma types fp8xfp4 and fp8xfp8).

Names carry shapes: ``i`` rows of one half (gate or up), ``2i`` both halves, ``h`` hidden, ``k`` columns, ``g`` groups
of 32 columns, ``p`` packed words of 4 groups. All weights are uint8 views of FP8, all scales are UE8M0 bytes.
Everything is a permutation or a repetition of bytes, so everything has an inverse. What is written is made of rows as bytes,
without torch; the inverses take the tensors that servers have loaded.

Layout and rules: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py (``_interleave_weights``, ``_transpose_sf_for_utccp``,
``transform_weights_for_mega_moe``); the same maps in vLLM 0.33, model_executor/layers/fused_moe/deep_gemm_mega_moe.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from fse_convert.layout.sizes import GROUP

if TYPE_CHECKING:
    from torch import Tensor

Row = TypeVar("Row")
INTERLEAVE = 8
"""Rows of gate, then rows of up, that alternate in L1."""
UTCCP = 128
"""Rows that the tensor core's scale copy (UTCCP) takes at once, as 4 x 32 transposed to 32 x 4."""
GROUPS_PER_WORD = 4


def interleave(gate: Sequence[Row], up: Sequence[Row]) -> list[Row]:
    """Alternate 8 rows of gate with 8 rows of up: ``i`` rows each, ``i % 8 == 0``.

    Row ``r`` of gate goes to ``16 * (r // 8) + r % 8``, of up to ``16 * (r // 8) + 8 + r % 8``.
    """
    if len(up) != len(gate) or len(gate) % INTERLEAVE:
        raise ValueError(f"{len(gate)} rows of gate and {len(up)} of up must be equally many, in multiples of {INTERLEAVE}")
    return [row for i in range(0, len(gate), INTERLEAVE) for half in (gate, up) for row in half[i : i + INTERLEAVE]]


def deinterleave(w_2ik: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `interleave`: ``[2i, k] -> (gate [i, k], up [i, k])``."""
    n, k = w_2ik.shape
    halves = w_2ik.view(n // (2 * INTERLEAVE), 2, INTERLEAVE, k)
    return halves[:, 0].reshape(n // 2, k), halves[:, 1].reshape(n // 2, k)


def to_utccp(rows: Sequence[Row]) -> list[Row]:
    """Permute rows for the UTCCP copy: row ``128b + 32j + i`` goes to ``128b + 4i + j``; a multiple of 128 rows."""
    if len(rows) % UTCCP:
        raise ValueError(f"{len(rows)} scale rows are not a multiple of {UTCCP}")
    return [rows[b + 32 * j + i] for b in range(0, len(rows), UTCCP) for i in range(32) for j in range(4)]


def from_utccp(sf_ng: Tensor) -> Tensor:
    """Undo `to_utccp`."""
    n, g = sf_ng.shape
    return sf_ng.view(-1, 32, 4, g).transpose(1, 2).reshape(n, g)


def pack(rows: Sequence[bytes]) -> bytes:
    """Pack 4 consecutive K groups into one little-endian int32, MN-major as stored: ``n`` rows of ``g`` scales to ``[g / 4, n]``.

    The kernel reads the transposed view ``[n, g / 4]`` with strides ``(1, n)``; safetensors can only hold it contiguous.
    Byte ``g % 4`` of word ``(g // 4, n)`` is the scale of K elements ``32g .. 32g + 31`` of row ``n``.
    """
    g = len(rows[0])
    if g % GROUPS_PER_WORD:
        raise ValueError(f"K = {g * GROUP} is not a multiple of {GROUPS_PER_WORD * GROUP}")
    packed = memoryview(bytearray(len(rows) * g)).cast("I")
    for i, row in enumerate(rows):
        packed[i :: len(rows)] = memoryview(row).cast("I")
    return packed.tobytes()


def unpack(sf_pn: Tensor) -> Tensor:
    """Undo `pack`: ``int32 [g / 4, n] -> uint8 [n, g]``."""
    import torch

    p, n = sf_pn.shape
    return sf_pn.contiguous().view(torch.uint8).view(p, n, GROUPS_PER_WORD).transpose(0, 1).reshape(n, p * GROUPS_PER_WORD)


def l1_scale(gate: Sequence[bytes], up: Sequence[bytes]) -> bytes:
    """Return the scales of L1 (gate and up) as stored: ``i`` rows of ``h / 32`` scales each to int32 ``[h / 128, 2i]``."""
    return pack(to_utccp(interleave(gate, up)))


def l1_scale_inverse(sf_pn: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `l1_scale`: ``int32 [h / 128, 2i] -> (gate, up)``, uint8 ``[i, h / 32]`` each."""
    return deinterleave(from_utccp(unpack(sf_pn)))


def l2_scale(down: Sequence[bytes]) -> bytes:
    """Return the scales of L2 (down) as stored, int32 ``[i / 128, h]``; the L2 weight itself stays as is."""
    return pack(to_utccp(down))


def l2_scale_inverse(sf_pn: Tensor) -> Tensor:
    """Undo `l2_scale`: ``int32 [i / 128, h] -> uint8 [h, i / 32]``."""
    return from_utccp(unpack(sf_pn))
