"""Slot fusion: the shared expert loaded as one more routed expert, which the router always picks. As data, and one judge.

SGLang does this for DeepSeek-V4 when asked to (--enforce-shared-experts-fusion); it requantises an FP8 shared expert to
MXFP4 while loading. AMD's ATOM does it where both are stored alike. vLLM's form of it is `fse_convert.servers.aiter`. This is
another question than fusion inside NVIDIA's MegaMoE kernel (`fse_convert.servers.native`), where formats may differ and nothing
is requantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fse_convert.errors import counted
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.formats import StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.servers.sglang_quark import SglangQuark
from fse_convert.servers.subject import Subject, class_names
from fse_convert.servers.targets import TARGETS
from fse_convert.servers.verdict import FUSED, NO_SHARED_EXPERT, Outcome, Reason, Verdict, because, not_understood

SLOT_KINDS = frozenset({
    StorageKind.FP8_BLOCK, StorageKind.FP8_CHANNEL, StorageKind.FP8_TENSOR, StorageKind.MXFP4, StorageKind.NVFP4, StorageKind.PLAIN,
})  # fmt: skip
"""Formats of routed experts for which it was read what becomes of a shared expert in a slot, here and in vLLM on ROCm."""


@dataclass(frozen=True)
class SlotTarget:
    """One server release that can append the shared expert to the routed ones.

    ``requantises``: FP8 shared experts become MXFP4 beside MXFP4 routed ones, else both must be stored alike.
    ``model_types``: whose gate was read, and ``classes``: their model classes (empty: any). ``fp8_32``: slots
    of experts in `FP8_32` were run.
    """

    name: str
    engine: str
    release: str
    source: str
    started_with: str
    model_types: frozenset[str]
    classes: frozenset[str]
    requantises: bool
    fp8_32: bool = False


REQUANTISED_SCALES = ("F8_E8M0", "F32")
"""Scale dtypes of FP8 shared experts that SGLang turns into MXFP4 (0.5.23 layers/moe/fused_moe_triton/layer.py:1043-1110)."""
SGLANG_FLAG = "--enforce-shared-experts-fusion"
SGLANG_SLOTS = f"{SGLANG_FLAG}; under expert parallelism also DeepEP or MegaMoE"
FP8_32 = "FP8 32x32"
"""How the label of experts begins whose FP8 blocks are 32x32, as DeepSeek-V4.1's."""
SGLANG_FP8_32 = f"{SGLANG_FLAG}, --moe-a2a-backend none, CUDA, no expert parallelism"
"""What SGLang needs for those: kernels with blocks of the config's size (moe_runner/triton_utils/fused_moe_triton_config.py)."""
ATOM = SlotTarget(
    name="atom",
    engine="ATOM",
    release="main (2026-08)",
    source="atom/model_ops/topK.py:16-64, models/deepseek_v4.py",
    started_with="ROCm; ATOM_FUSE_SHARED_EXPERT not 0",
    model_types=frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"}),
    classes=frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"}),
    requantises=False,
)
SLOT_TARGETS: tuple[SlotTarget, ...] = (
    *(
        SlotTarget(
            name=f"{t.name}-slots",
            engine=t.engine,
            release=t.release,
            source=t.slots,
            started_with=SGLANG_SLOTS,
            model_types=t.model_types,
            classes=t.classes,
            requantises=True,
            fp8_32=t.slots_fp8_32,
        )
        for t in TARGETS
        if t.slots
    ),
    ATOM,
)
"""The rows of `TARGETS` that have slot fusion too, and ATOM."""


def slot_verdicts(checkpoint: Subject, target: SlotTarget) -> tuple[Verdict, ...]:
    """Judge every layer of a model; gates that look at a whole model or its drafter give all their layers the same answer."""
    description, names = checkpoint.description, set(class_names(checkpoint.config))
    known = description.model_type in target.model_types and (not names or not target.classes or bool(names & target.classes))
    if not known:
        what = f"model type {description.model_type!r}" + (f" and class {min(names)}" if names else "")
        message = f"the gate of {target.engine} {target.release} for {what} is not known here"
        return (because(Outcome.UNKNOWN, "model-unsupported", message),) * len(description.layers)
    gates = {kind: _gate_verdict(checkpoint, target, kind) for kind in LayerKind}
    return tuple(gates[layer.layer.kind] or _layer_verdict(layer, target, checkpoint) for layer in description.layers)


def _gate_verdict(checkpoint: Subject, target: SlotTarget, kind: LayerKind) -> Verdict | None:
    n_shared, quantization = checkpoint.description.n_shared, checkpoint.quantization
    if n_shared > 1:
        outcome = Outcome.ERROR if target.requantises else Outcome.UNFUSED
        message = f"exactly one shared expert per layer is fused, this model has {n_shared}"
        return because(outcome, "slot-shared-count", message)
    if not target.requantises or quantization.method != "quark":
        return None
    draft = kind is LayerKind.MTP
    if SglangQuark.of(quantization, checkpoint.config, target.release, draft=draft).may_fuse():
        return None
    whose = "the drafter" if draft else "the model"
    message = f"Quark's config gives shared experts another scheme than routed ones, which turns fusion off for {whose}"
    return because(Outcome.UNFUSED, "slot-quant-differs", message)


def _stored_apart(layer: LayerDescription) -> bool:
    return bool(layer.routed and layer.shared and not layer.routed.stored_like(layer.shared))


def _layer_verdict(layer: LayerDescription, target: SlotTarget, checkpoint: Subject) -> Verdict:
    """Judge one layer; what fits no slot is unsafe in SGLang, whose gate looks at no storage (0.5.23 deepseek_v4.py:4864-4890)."""
    if layer.problems:
        return not_understood(layer.problems)
    if layer.shared is None or layer.routed is None:
        return NO_SHARED_EXPERT
    unchecked, hint = (Outcome.UNSAFE, f"serve without {SGLANG_FLAG}") if target.requantises else (Outcome.UNFUSED, "")
    if layer.shared.width != layer.routed.width:
        message = f"the shared expert is {layer.shared.width} wide, a routed one {layer.routed.width}: it fits no slot"
        return because(unchecked, "slot-width", message, hint)
    if target.requantises and _in_small_blocks(layer.routed.label) and not target.fp8_32:
        ran = ", ".join(t.release for t in SLOT_TARGETS if t.fp8_32)
        message = f"slots with {FP8_32} experts were run in {target.engine} {ran} alone"
        return because(Outcome.UNKNOWN, "slot-format", message)
    routed, shared = layer.routed.gate, layer.shared.gate
    fp8 = shared.kind is StorageKind.FP8_BLOCK and shared.scale_dtype in REQUANTISED_SCALES
    requantised = target.requantises and routed.kind is StorageKind.MXFP4 and fp8
    unseen = target.requantises and checkpoint.quantization.method == "quark"  # the gate above read the config alone
    if requantised or unseen or not _stored_apart(layer):
        return FUSED
    message = f"routed experts are {layer.routed.label}, the shared expert is {layer.shared.label}: it fits no slot"
    if target.requantises and routed.kind is StorageKind.NVFP4:
        return because(Outcome.UNKNOWN, "slot-format", message)  # which of SGLang's classes loads it was not read
    return because(unchecked, "slot-format", message, hint)


def _in_small_blocks(label: str) -> bool:
    return label.split()[:2] == FP8_32.split()


def slot_needs(target: SlotTarget, routed: Iterable[str]) -> str:
    """Return the flags and hardware with which a server fuses a model. ``routed``: labels of its routed experts' formats."""
    return SGLANG_FP8_32 if target.requantises and any(map(_in_small_blocks, routed)) else target.started_with


def slot_notes(description: Description, target: SlotTarget, verdicts: tuple[Verdict, ...]) -> tuple[Reason, ...]:
    """Say where fusing changes numbers: FP8 requantised to MXFP4 while loading, or kernels that take blocks for larger ones.

    The latter: 0.5.20 layers/quantization/fp8.py:2956, 0.5.23:3454-3459; layers/moe/moe_runner/deep_gemm.py:312-334.
    """
    if slot_needs(target, [d.routed.label for d in description.layers if d.routed]) != target.started_with:
        where = "on HIP with AITER, and with DeepEP, Mooncake or NIXL"
        message = f"{target.engine} takes FP8 blocks of 32x32 for 128x128 {where}: wrong values"
        return (Reason("sglang-block-32", message, hint="serve on CUDA with --moe-a2a-backend none, as this row says"),)
    changed = [d for d, v in zip(description.layers, verdicts, strict=True) if v.fused and _stored_apart(d)]
    if not changed:
        return ()
    message = f"{target.engine} requantises the FP8 shared experts of {counted(len(changed), 'layer')} to MXFP4 while loading"
    return (Reason("slot-requantised", message, hint="the result is not that of the checkpoint's own weights"),)
