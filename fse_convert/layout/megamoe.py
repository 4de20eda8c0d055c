"""The kernel layout of MegaMoE's shared experts for 8-bit weights (mma types fp8xfp4 and fp8xfp8).

Names carry shapes: ``i`` rows of one half (gate or up), ``2i`` both halves, ``h`` hidden, ``k`` columns, ``g`` groups
of 32 columns, ``p`` packed words of 4 groups. All weights are uint8 views of FP8, all scales are UE8M0 bytes.
Everything is a permutation or a repetition of bytes, so everything has an inverse.

Layout and rules: sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py (``_interleave_weights``, ``_transpose_sf_for_utccp``,
``transform_weights_for_mega_moe``); the same maps in vLLM 0.33, model_executor/layers/fused_moe/deep_gemm_mega_moe.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fse_convert.layout.sizes import GROUP

if TYPE_CHECKING:
    from torch import Tensor

INTERLEAVE = 8
"""Rows of gate, then rows of up, that alternate in L1."""
UTCCP = 128
"""Rows that the tensor core's scale copy (UTCCP) takes at once, as 4 x 32 transposed to 32 x 4."""
GROUPS_PER_WORD = 4


def interleave(gate_ik: Tensor, up_ik: Tensor) -> Tensor:
    """Alternate 8 rows of gate with 8 rows of up: ``[i, k], [i, k] -> [2i, k]``; ``i % 8 == 0``.

    Row ``r`` of gate goes to ``16 * (r // 8) + r % 8``, of up to ``16 * (r // 8) + 8 + r % 8``.
    """
    i, k = gate_ik.shape
    if up_ik.shape != gate_ik.shape or i % INTERLEAVE:
        raise ValueError(
            f"gate {tuple(gate_ik.shape)} and up {tuple(up_ik.shape)} must be equal, in multiples of {INTERLEAVE} rows"
        )
    halves = torch.stack((gate_ik.view(-1, INTERLEAVE, k), up_ik.view(-1, INTERLEAVE, k)), dim=1)
    return halves.view(2 * i, k)


def deinterleave(w_2ik: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `interleave`: ``[2i, k] -> (gate [i, k], up [i, k])``."""
    n, k = w_2ik.shape
    halves = w_2ik.view(n // (2 * INTERLEAVE), 2, INTERLEAVE, k)
    return halves[:, 0].reshape(n // 2, k), halves[:, 1].reshape(n // 2, k)


def to_utccp(sf_ng: Tensor) -> Tensor:
    """Permute rows for the UTCCP copy: row ``128b + 32j + i`` goes to ``128b + 4i + j``; ``n % 128 == 0``."""
    n, g = sf_ng.shape
    if n % UTCCP:
        raise ValueError(f"{n} scale rows are not a multiple of {UTCCP}")
    return sf_ng.view(-1, 4, 32, g).transpose(1, 2).reshape(n, g)


def from_utccp(sf_ng: Tensor) -> Tensor:
    """Undo `to_utccp`."""
    n, g = sf_ng.shape
    return sf_ng.view(-1, 32, 4, g).transpose(1, 2).reshape(n, g)


def pack(sf_ng: Tensor) -> Tensor:
    """Pack 4 consecutive K groups into one little-endian int32, MN-major as stored: ``uint8 [n, g] -> int32 [g / 4, n]``.

    The kernel reads the transposed view ``[n, g / 4]`` with strides ``(1, n)``; safetensors can only hold it contiguous.
    Byte ``g % 4`` of word ``(g // 4, n)`` is the scale of K elements ``32g .. 32g + 31`` of row ``n``.
    """
    n, g = sf_ng.shape
    if g % GROUPS_PER_WORD:
        raise ValueError(f"K = {g * GROUP} is not a multiple of {GROUPS_PER_WORD * GROUP}")
    words = sf_ng.view(n, g // GROUPS_PER_WORD, GROUPS_PER_WORD).transpose(0, 1).contiguous()
    return words.view(torch.int32).view(g // GROUPS_PER_WORD, n)


def unpack(sf_pn: Tensor) -> Tensor:
    """Undo `pack`: ``int32 [g / 4, n] -> uint8 [n, g]``."""
    p, n = sf_pn.shape
    return sf_pn.contiguous().view(torch.uint8).view(p, n, GROUPS_PER_WORD).transpose(0, 1).reshape(n, p * GROUPS_PER_WORD)


def l1_scale(gate_ig: Tensor, up_ig: Tensor) -> Tensor:
    """Return the scales of L1 (gate and up) as stored: ``uint8 [i, h / 32] x 2 -> int32 [h / 128, 2i]``."""
    return pack(to_utccp(interleave(gate_ig, up_ig)))


def l1_scale_inverse(sf_pn: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `l1_scale`: ``int32 [h / 128, 2i] -> (gate, up)``, uint8 ``[i, h / 32]`` each."""
    return deinterleave(from_utccp(unpack(sf_pn)))


def l2_scale(down_hg: Tensor) -> Tensor:
    """Return the scales of L2 (down) as stored: ``uint8 [h, i / 32] -> int32 [i / 128, h]``; the L2 weight itself stays as is."""
    return pack(to_utccp(down_hg))


def l2_scale_inverse(sf_pn: Tensor) -> Tensor:
    """Undo `l2_scale`: ``int32 [i / 128, h] -> uint8 [h, i / 32]``."""
    return from_utccp(unpack(sf_pn))
