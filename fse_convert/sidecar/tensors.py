"""The tensors of ``OUT/fse`` (docs/format.md, "Tensors"): names, dtypes and shapes, for the writer and for every reader.

As vLLM 0.33 registers them (model_executor/layers/fused_moe/deep_gemm_mega_moe.py:410-448).
"""

from __future__ import annotations

from enum import Enum

from fse_convert.checkpoint.names import SIDECAR

LAYOUT = "megamoe-fp8-shared"
"""Name of the kernel layout."""
LAYOUT_VERSION = 1
MMA_TYPES = ("fp8xfp4", "fp8xfp8")
"""Kernels that read this layout."""
K_PER_WORD = 128
"""Columns of a weight that one int32 word of packed E8M0 scales covers: four groups of 32."""


class KernelTensorName(str, Enum):
    """The four kernel-layout tensors of a layer: weights and packed scales of gate and up (L1) and of down (L2)."""

    L1_WEIGHT = "shared_l1_weight"
    L1_SCALE = "shared_l1_weight_scale"
    L2_WEIGHT = "shared_l2_weight"
    L2_SCALE = "shared_l2_weight_scale"

    @property
    def is_scale(self) -> bool:
        """Whether it holds packed scales."""
        return self in (KernelTensorName.L1_SCALE, KernelTensorName.L2_SCALE)


def kernel_prefix(layer: str) -> str:
    """Return the prefix of a layer's kernel-layout tensors, such as ``layers.3.ffn.experts``."""
    return f"{layer}.experts"


def kernel_shapes(hidden: int, width: int) -> dict[KernelTensorName, tuple[str, tuple[int, int]]]:
    """Return dtype and stored shape of the four tensors, in file order.

    ``width``: of all shared experts of the layer together. Scales are stored transposed (MN-major): ``[K / 128, N]``.
    """
    return {
        KernelTensorName.L1_WEIGHT: ("F8_E4M3", (2 * width, hidden)),
        KernelTensorName.L1_SCALE: ("I32", (hidden // K_PER_WORD, 2 * width)),
        KernelTensorName.L2_WEIGHT: ("F8_E4M3", (hidden, width)),
        KernelTensorName.L2_SCALE: ("I32", (width // K_PER_WORD, hidden)),
    }


def shard_metadata(contract: str) -> dict[str, str]:
    """Return the metadata of every shard of ``fse/``; ``contract`` is the kernel contract's name."""
    return {"format": "pt", "fse_contract": contract, "fse_layout": LAYOUT, "fse_layout_version": str(LAYOUT_VERSION)}


ORIGINAL = "original"
"""How files and tensors of ``fse/`` begin that keep a source tensor as it was."""


def originals_file(shard: str) -> str:
    """Return the file of ``fse/`` that keeps tensors of a source shard as they were."""
    return f"{SIDECAR}/{ORIGINAL}-{shard}"


def original_name(tensor: str) -> str:
    """Return the name under which ``fse/`` keeps a source tensor: another than its own, which the output has too."""
    return f"{ORIGINAL}.{tensor}"


def is_originals_file(name: str) -> bool:
    """Tell files that keep source tensors as they were from those of the kernel layout."""
    return name.startswith(f"{SIDECAR}/{ORIGINAL}-")
