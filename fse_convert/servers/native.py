"""The native rules, by which DeepGEMM's MegaMoE kernel runs a layer's shared expert in the routed experts' launch.

Rules: DeepGEMM 2.8.2 csrc/apis/mega_moe.hpp:88-92 and 204-227 (shapes, FP8 weight, int32 scales, shared width a
multiple of the routed width); vLLM 0.33 model_executor/layers/fused_moe/deep_gemm_mega_moe.py:214-245 and 338-386
(dtypes, scale geometry); SGLang 0.5.23 layers/moe/mega_moe.py:196-207.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fse_convert.checkpoint.header import E8M0_DTYPES
from fse_convert.layout.sizes import GROUP
from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.model.quantization import FP8_METHODS, Quantization
from fse_convert.servers.config_keys import ABSENT, key_refusals, server_config_value
from fse_convert.servers.load_padding import padded_routed
from fse_convert.servers.subject import class_names, vllm_class_names
from fse_convert.servers.targets import Contract, Pairings, Target
from fse_convert.servers.verdict import FUSED, NO_SHARED_EXPERT, Outcome, Reason, Verdict, because, not_understood

WIDTHS = frozenset({"width-alignment", "width-ratio"})
"""Reasons that a conversion does away with."""
SILU = "silu"
KERNEL = (SILU, "situ", "swigluoai")
"""Values of ``hidden_act`` that DeepGEMM computes inside the launch (vLLM 0.33 fused_moe/deep_gemm_mega_moe.py:47-60)."""


@dataclass(frozen=True, slots=True)
class LaunchWidths:
    """Widths that a layer has, or would have in the launch: of one routed expert, and of the whole shared MLP (elements)."""

    routed: int
    shared: int


def kernel_verdict(layer: LayerDescription, contract: Contract, pairings: Pairings, widths: LaunchWidths | None = None) -> Verdict:
    """Judge a layer by the kernel alone, at its own widths or at those that padding would give it.

    F32 scales pass here: whether each is an exact power of two is known only from the data, and is checked where the data is read.
    """
    groups = _launch_groups(layer)
    if isinstance(groups, Verdict):
        return groups
    routed, shared = groups
    at = widths or LaunchWidths(routed.width, shared.width)
    return _verdict(*_shape_reasons(routed, shared, contract, at), *_format_reasons(routed, shared, pairings))


def native_verdict(
    layer: LayerDescription, target: Target, config: Mapping[str, Any], widths: LaunchWidths | None = None
) -> Verdict:
    """Judge a layer by a server release: the kernel's rules, and what the server's loader and model code add.

    ``config``: config.json. ``widths``: those that padding would give the layer; its own without them.
    """
    server, model_type = f"{target.engine} {target.release}", str(config.get("model_type", ""))
    if model_type in target.beside:
        return because(Outcome.UNFUSED, "server-no-fusion", f"{server} keeps this model's shared expert beside MegaMoE")
    if target.model_types and model_type not in target.model_types:
        return because(Outcome.REFUSED, "model-unsupported", f"{server} has no MegaMoE path for model type {model_type!r}")
    names = vllm_class_names(config) if target.engine == "vLLM" else class_names(config)
    if names and target.classes and not target.classes.intersection(names):  # without names the model type decides
        message = f"{server} has no model class {names[0]} with a MegaMoE path"
        return because(Outcome.REFUSED, "model-unsupported", message)
    groups = _launch_groups(layer)
    if isinstance(groups, Verdict):
        return groups
    routed, shared = groups
    at = widths or LaunchWidths(routed.width, shared.width)
    at = LaunchWidths(padded_routed(at.routed, target), at.shared)
    if routed.gate.kind in target.passed_over:
        message = f"{server} runs {routed.label} experts without MegaMoE, the shared expert beside them, and says nothing of it"
        return because(Outcome.UNFUSED, "format-passed-over", message)
    refused = (*key_refusals(config, target, native=True), *_server_refusals(routed, at, target))
    if refused:
        return Verdict(Outcome.REFUSED, _hinted(refused))
    if not target.fuses:
        return because(Outcome.UNFUSED, "server-no-fusion", f"{server} runs the shared expert beside MegaMoE, never inside")
    return _verdict(
        *_shape_reasons(routed, shared, target.contract, at),
        *_format_reasons(routed, shared, target.pairings),
        *_loader_reasons(shared, at, target),
    )


def config_verdict(verdict: Verdict, server: str, quantization: Quantization) -> Verdict:
    """Take a yes back where the config has the server build experts in another method than FP8, which its path was read for.

    SGLang builds MegaMoE weights in its FP8 method alone (0.5.23 layers/quantization/fp8.py:1898, 2235); vLLM fuses FP8 linears
    (0.33 model_executor/layers/fused_moe/deep_gemm_mega_moe.py:338-384).
    """
    if verdict.fused and quantization.method not in (None, *FP8_METHODS):
        message = f"how {server} runs quant_method {quantization.method!r} with MegaMoE is not known: its path was read for fp8"
        return because(Outcome.UNKNOWN, "native-method", message)
    return verdict


def _verdict(*reasons: Reason) -> Verdict:
    """Give one reason per code, the first of each; fused without any."""
    first: dict[str, Reason] = {}
    for reason in reasons:
        first.setdefault(reason.code, reason)
    return Verdict(Outcome.UNFUSED, _hinted(first.values())) if first else FUSED


def _hinted(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Keep a hint only where it would mend all: a reason that stands alone, or one of widths, which one conversion changes."""
    found = tuple(reasons)
    return found if {r.code for r in found} <= WIDTHS else tuple(replace(r, hint="") for r in found)


def _launch_groups(layer: LayerDescription) -> tuple[ExpertGroup, ExpertGroup] | Verdict:
    """Return the routed and the shared experts that could share a launch, or why there are none."""
    if layer.problems:
        return not_understood(layer.problems)
    if layer.shared is None:
        return NO_SHARED_EXPERT
    if layer.routed is None:
        return because(Outcome.UNFUSED, "no-routed-experts", "the layer has no routed experts to fuse into")
    if not (layer.routed.gated and layer.shared.gated):
        message = "the experts have no gate projection; the kernel multiplies gate and up"
        return because(Outcome.UNFUSED, "experts-ungated", message)
    if layer.layer.gate_tensor:
        message = "the shared expert has a gate of its own that scales its output; the kernel adds it with weight 1"
        return because(Outcome.UNFUSED, "shared-gated", message)
    if layer.shared.stacked:
        message = "gate and up of the shared expert are one matrix; the kernel layout is made of two"
        return because(Outcome.UNFUSED, "shared-one-matrix", message)
    return layer.routed, layer.shared


def with_activation(config: Mapping[str, Any], verdict: Verdict, computed: tuple[str, ...]) -> Verdict:
    """Take a yes back where config.json names another activation than the fused path computes; ``computed``: those that it does.

    Model code raises for any but silu: vLLM 0.33 models/deepseek_v4/nvidia/model.py:170, amd/model.py:132,
    model_executor/models/deepseek_v2.py:278; SGLang 0.5.23 models/deepseek_v2.py:330, 720; 0.5.21 and vLLM 0.30 alike.
    """
    written = server_config_value(config, "hidden_act")
    if not verdict.fused or written is ABSENT or written in computed:
        return verdict
    message = f"hidden_act is {written!r}: fused experts compute {' or '.join(computed)} alone"
    return because(Outcome.REFUSED, "config-unsupported", message)


def _server_refusals(routed: ExpertGroup, at: LaunchWidths, target: Target) -> Iterator[Reason]:
    kind = routed.gate.kind
    hidden_multiple = max(target.hidden_multiple, target.contract.hidden_multiple)
    multiple, hidden_multiple = target.multiples.get(kind, (target.contract.width_multiple, hidden_multiple))
    if at.routed % multiple:
        hint = f"convert with --target {target.name}"
        yield Reason("width-alignment", f"routed width {at.routed} is no multiple of {multiple}: MegaMoE is refused", hint=hint)
    if routed.hidden % hidden_multiple:
        yield Reason("hidden-alignment", f"hidden size {routed.hidden} is no multiple of {hidden_multiple}")
    if kind not in target.pairings:
        allowed = ", ".join(k.value for k in target.pairings)
        yield Reason("routed-format", f"routed experts are {routed.label}; {target.engine}'s MegaMoE takes {allowed} there")


def _shape_reasons(routed: ExpertGroup, shared: ExpertGroup, contract: Contract, at: LaunchWidths) -> Iterator[Reason]:
    if routed.hidden != shared.hidden:
        message = f"routed experts work on hidden size {routed.hidden}, the shared expert on {shared.hidden}"
        yield Reason("hidden-differs", message)
    if shared.hidden % contract.hidden_multiple:
        yield Reason("hidden-alignment", f"hidden size {shared.hidden} is no multiple of {contract.hidden_multiple}")
    if at.routed % contract.width_multiple:
        hint = f"convert with --target {contract.name}"
        yield Reason("width-alignment", f"width {at.routed} is no multiple of {contract.width_multiple}", hint=hint)
    if at.shared % at.routed:
        hint = "pad routed and shared experts to one width: --experts all"
        yield Reason("width-ratio", f"shared width {at.shared} is no multiple of the routed width {at.routed}", hint=hint)


def _format_reasons(routed: ExpertGroup, shared: ExpertGroup, pairings: Pairings) -> Iterator[Reason]:
    kinds = {f.kind for f in routed.formats.values()}
    if not kinds <= set(pairings) or not all(_kernel_scales(f) for f in routed.formats.values()):
        allowed = ", ".join(k.value for k in pairings)
        yield Reason("routed-format", f"routed experts are {routed.label}; the launch takes {allowed} with E8M0 scales")
        return
    allowed_shared = pairings[routed.gate.kind]
    if not allowed_shared:
        yield Reason("shared-format", f"beside {routed.label} experts the launch takes no shared expert")
        return
    for f in shared.formats.values():
        if f.kind not in allowed_shared:
            allowed = ", ".join(k.value for k in allowed_shared)
            message = f"the shared expert is {f.label}; beside {routed.label} experts the launch takes {allowed} with E8M0 scales"
            yield Reason("shared-format", message)
        elif f.block and f.block[1] % GROUP:
            message = f"the shared expert has a scale per {f.block[1]} columns, no multiple of {GROUP}"
            yield Reason("scale-block", message)
        elif not _kernel_scales(f):
            yield Reason("scale-dtype", f"the shared expert has {f.scale_dtype} scales, the kernel takes E8M0")


def _kernel_scales(f: Format) -> bool:
    return f.kind is not StorageKind.FP8_BLOCK or f.scale_dtype in (*E8M0_DTYPES, "F32")


def _loader_reasons(shared: ExpertGroup, at: LaunchWidths, target: Target) -> Iterator[Reason]:
    """Give what the servers' loaders object to in the checkpoint's own tensors, beyond the kernel."""
    for role, f in shared.formats.items():
        if f.kind is not StorageKind.FP8_BLOCK or f.block is None:
            continue
        rows, cols = f.block
        if f.scale_dtype not in target.scale_dtypes:
            allowed = " or ".join(target.scale_dtypes)
            yield Reason("scale-dtype", f"the shared expert has {f.scale_dtype} scales; {target.engine} fuses {allowed}")
        n, k = (shared.hidden, at.shared) if role is Role.DOWN else (at.shared, shared.hidden)
        if n % rows or k % cols:
            yield Reason("scale-partial", f"the shared expert, {n}x{k}, ends in a partial {rows}x{cols} block")
        if target.shared_blocks is not None and f.block not in target.shared_blocks:
            blocks = ", ".join(f"{a}x{b}" for a, b in target.shared_blocks)
            message = f"the shared expert has {rows}x{cols} scales; {target.engine} {target.release} fuses {blocks}"
            yield Reason("scale-block", message)
