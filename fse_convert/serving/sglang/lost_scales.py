"""Refuses checkpoints whose scales SGLang drops in silence, so that it would serve wrong numbers.

Both cases were run on SGLang's own loaders, 0.5.20 to 0.5.23: `fse_convert.servers.hazards` has the sources.
"""

from __future__ import annotations

import re
from pathlib import Path

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import Checkpoint, read_checkpoint
from fse_convert.errors import FseConvertError
from fse_convert.model.quantization import FP8_METHODS, read_quantization
from fse_convert.serving.sidecar import refuse

SHARED = re.compile(r".+\.shared_experts?\.[^.]+\.weight")
PACKED = ("I8", "U8")
"""Dtypes of packed MXFP4 codes."""
OFF = "SGLANG_PLUGINS without fse-convert, or FSE_CONVERT_SGLANG=off, loads it all the same"


def refuse_lost_scales(folder: Path) -> None:
    """Refuse a checkpoint with MXFP4 scales that SGLang never loads. Raises NotServable; an unreadable folder is left to SGLang."""
    try:
        checkpoint = read_checkpoint(LocalFolder(folder)).checkpoint
    except (FseConvertError, OSError):
        return
    method = read_quantization(checkpoint.config, checkpoint.quant_config).method
    if method in FP8_METHODS and (lost := _shared_mxfp4(checkpoint)):
        message = f"{lost} is MXFP4, and quant_method {method} has SGLang drop its scale without a word: its values would be wrong"
        refuse("slot-scale-lost", message, folder, OFF)
    if method == "quark" and (lost := _typed_scale(checkpoint)):
        message = f"{lost} is labelled F8_E8M0, and SGLang loads U8 alone: it would be skipped without a word"
        hint = f"relabel it: fse-convert CHECKPOINT OUT --target sglang-0.5.23-slots; {OFF}"
        refuse("quark-e8m0-typed", message, folder, hint)


def _shared_mxfp4(checkpoint: Checkpoint) -> str:
    """Name a shared expert's packed weight whose scale is called ``.scale``; empty if there is none."""
    found = (n for n, t in checkpoint.tensors.items() if t.dtype in PACKED and SHARED.fullmatch(n))
    return next((n for n in found if f"{n.removesuffix('weight')}scale" in checkpoint.tensors), "")


def _typed_scale(checkpoint: Checkpoint) -> str:
    """Name a scale of packed codes that is labelled F8_E8M0; empty if there is none."""
    packed = (n for n, t in checkpoint.tensors.items() if t.dtype in PACKED and n.endswith(".weight"))
    scales = (checkpoint.tensors.get(f"{n}_scale") for n in packed)
    return next((t.name for t in scales if t and t.dtype == "F8_E8M0"), "")
