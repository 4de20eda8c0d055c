"""Defects of FP8 checkpoints that only config.json has, or the labels of their scales, mended where the headers prove them."""

from __future__ import annotations

from fse_convert.checkpoint.header import E8M0_DTYPES
from fse_convert.model.exclusion_lists import without
from fse_convert.model.formats import StorageKind
from fse_convert.model.quantization import FP8_METHODS, READ_BY
from fse_convert.plan.changes.change import ConfigChange, FormatChange
from fse_convert.plan.changes.config_places import EXPERT_DTYPE, QUANTIZATION, expert_dtype_edits, name_list
from fse_convert.plan.changes.modules import Tensors, f32_scales, is_all, matrices, stored_alike, unquantised
from fse_convert.servers.subject import Subject


def ignored(subject: Subject) -> FormatChange | None:
    """Take shared experts off the lists of unquantised modules where they are stored in FP8 blocks with scales.

    vLLM 0.29 to 0.33 then do not fuse them, and build them as unquantised (quantization/utils/config_utils.py, the rule for FP8).
    """
    section, raw = QUANTIZATION.get(subject.quantization.source), subject.quantization.raw
    if subject.quantization.method not in FP8_METHODS or section is None:
        return None
    lists = {key: entries for key in READ_BY["fp8"] if (entries := name_list(raw.get(key)))}
    if not lists:
        return None
    shared = [d.shared for d in subject.description.layers if d.shared and is_all(d.shared, StorageKind.FP8_BLOCK)]
    freed, kept = [name for group in shared for name in group.modules], unquantised(subject)
    new = {key: without(entries, freed, kept) for key, entries in lists.items()}
    edits = tuple(ConfigChange((*section, key), entries) for key, entries in new.items() if entries != lists[key])
    does = "takes FP8 shared experts off the lists of modules that are not quantised"
    return FormatChange(name="heal-fp8-ignored", does=does, config=edits) if edits else None


def expert_dtype(subject: Subject) -> FormatChange | None:
    """Write ``expert_dtype`` of DeepSeek-V4 and V4.1 where it is read.

    Without it vLLM builds MXFP4 experts, which is wrong for FP8 ones, and does not take its heterogeneous kernel for MXFP4 ones
    (`fse_convert.servers.aiter.heterogeneous`).
    """
    stored = "fp8" if _has_fp8_experts(subject) else "fp4" if _is_native(subject, StorageKind.MXFP4) else ""
    edits = expert_dtype_edits(subject.config, subject.description.model_type, stored) if stored else ()
    if stored == "fp4" and all(edit.value != stored for edit in edits):
        return None  # it stands where servers read it, and elsewhere too
    does = f"writes expert_dtype {stored} in the place where servers read it"
    return FormatChange(name="heal-expert-dtype", does=does, config=edits) if edits else None


def scales(subject: Subject) -> FormatChange | None:
    """Store E8M0 scales of FP8 experts as F32, which every release reads rightly.

    vLLM 0.29 to 0.33 copy them as plain numbers and say nothing (vllm-project/vllm#51946), on AMD the shared expert's alone too.
    """
    if not _has_fp8_experts(subject):
        return None
    tensors: Tensors = {}
    for layer in subject.description.layers:
        for group in layer.groups:
            tensors |= f32_scales(matrices(group))
    does = "stores the E8M0 scales of FP8 experts as F32, the same powers of two"
    return FormatChange(name="heal-fp8-scales", does=does, tensors=tensors) if tensors else None


def _has_fp8_experts(subject: Subject) -> bool:
    dtypes = {d.routed.gate.scale_dtype for d in subject.description.layers if d.routed}
    return _is_native(subject, StorageKind.FP8_BLOCK) and dtypes <= {"F32", *E8M0_DTYPES}


def _is_native(subject: Subject, kind: StorageKind) -> bool:
    """Tell whether this is DeepSeek-V4 or V4.1 in its own FP8, all routed experts stored in one format."""
    native = subject.description.model_type in EXPERT_DTYPE and subject.quantization.method in FP8_METHODS
    return native and stored_alike(subject.description.layers, kind)
