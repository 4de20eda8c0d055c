"""What vLLM makes of routed experts in FP8 beyond its own checks: a model that it cannot serve so, scales that it changes."""

from __future__ import annotations

from fse_convert.model.formats import StorageKind
from fse_convert.servers.subject import Subject

LOW = 97
"""E8M0 byte of 2**-30: vLLM 0.33 clamps amax at 1e-4 (utils/deep_gemm.py:1027), which smaller values do not reach."""


def unserved(checkpoint: Subject) -> tuple[str, ...]:
    """Return the servers that cannot serve a model as it is stored, whatever its widths.

    DeepSeek-V4.1's routed experts in FP8: vLLM's own linear layers for it are taken with FP4 experts alone, and no other kernel has
    blocks of 32x32 (0.33 models/deepseek_v41/quant_config.py; layers/quantization/utils/marlin_utils_fp8.py:124 asserts).
    """
    v41 = checkpoint.description.model_type == "deepseek_v41"
    fp8 = any(d.routed and d.routed.gate.kind is StorageKind.FP8_BLOCK for d in checkpoint.description.layers)
    return ("vLLM",) if v41 and fp8 else ()
