"""Scales as UE8M0 bytes: ``value = 2 ** (byte - 127)``, 0x7F is 1.0, 0xFF is NaN; there is no zero and no sign.

Scales never pass through floating point here: 2**-127 is subnormal in FP32 and would be flushed or refused on the way.
Source of the encoding: DeepGEMM 2.8.2, docs/scaling-factor-format.md section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fse_convert.layout.nan_and_one import E8M0_NAN
from fse_convert.layout.power_of_two import inexact, is_power_of_two
from fse_convert.layout.sizes import GROUP, ceil_div

if TYPE_CHECKING:
    from torch import Tensor


def from_fp32(scale: Tensor) -> Tensor:
    """Turn FP32 scales that are exact powers of two into UE8M0 bytes of the same shape, losslessly.

    ``scale``: float32 or bfloat16, any shape. Returns uint8. Raises ValueError with the flat index of the first value that is no
    positive normal power of two, since rounding a scale would change every weight in its block.
    """
    import torch

    bits = scale.float().contiguous().view(torch.int32)
    exact = is_power_of_two(bits)
    if not exact.all():
        index = int((~exact).flatten().nonzero()[0])
        raise ValueError(inexact(index, float(scale.flatten()[index])))
    return (bits >> 23).to(torch.uint8)


def to_fp32(scale: Tensor) -> Tensor:
    """Turn UE8M0 bytes into their FP32 values, exactly; byte 0 gives the subnormal 2**-127 and 0xFF gives NaN."""
    import torch

    byte = scale.view(torch.uint8).to(torch.int32)
    bits = byte << 23
    bits = torch.where(byte == 0, torch.full_like(bits, 1 << 22), bits)
    return torch.where(byte == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def expand(scale: Tensor, n: int, k: int, block_n: int, block_k: int) -> Tensor:
    """Repeat block scales to one byte per row and 32 columns; a last group may be partial.

    ``scale``: uint8 (or any other dtype) ``[ceil(n / block_n), ceil(k / block_k)]``. Returns ``[n, ceil(k / 32)]`` of that dtype.
    Raises ValueError when ``block_k`` is not a multiple of 32 or the shape does not tile ``[n, k]``.
    Rule: vLLM 0.33 model_executor/layers/fused_moe/deep_gemm_mega_moe.py, ``_pack_scale``.
    """
    if block_k % GROUP:
        raise ValueError(f"block of {block_k} columns over K = {k}: the kernel scales 32 columns at a time")
    expected = (-(-n // block_n), -(-k // block_k))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale shape {tuple(scale.shape)} does not tile [{n}, {k}] in {block_n}x{block_k} blocks: expected {expected}"
        )
    rows = scale.repeat_interleave(block_n, 0)[:n]
    return rows.repeat_interleave(block_k // GROUP, 1)[:, : ceil_div(k, GROUP)].contiguous()
