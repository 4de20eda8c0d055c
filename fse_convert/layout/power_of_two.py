"""Whether E8M0 can hold an F32 scale: only where it is a power of two; rounding one would change every weight of its block."""

from __future__ import annotations

from typing import Any

from fse_convert.layout.nan_and_one import E8M0_NAN


def is_power_of_two(bits: Any) -> Any:
    """Tell, of FP32 bits (an integer, or an int32 tensor of any shape), which are positive normal powers of two.

    Rule: DeepGEMM 2.8.x traps on ``bits & 0x807fffff`` (deep_gemm/include/deep_gemm/impls/smxx_layout.cuh).
    """
    exponent = (bits >> 23) & 0xFF
    return ((bits & ~0x7F800000) == 0) & (exponent != 0) & (exponent != E8M0_NAN)


def inexact(index: int, value: float) -> str:
    """Say which scale E8M0 cannot hold."""
    return f"scale {index} is {value!r}, not a power of two that E8M0 can hold"
