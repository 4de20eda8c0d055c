"""Defects of AMD Quark's checkpoints that only config.json has, or the labels of tensors, mended where the headers prove them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.exclusion_lists import is_pattern, means, names_exactly, with_plain_gates, without
from fse_convert.model.formats import PLAIN_WEIGHTS, StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.plan.changes.change import ConfigChange, FormatChange
from fse_convert.plan.changes.config_places import QUANTIZATION, name_list
from fse_convert.plan.changes.modules import (
    Tensors,
    every_matrix,
    experts_module,
    is_all,
    linears,
    relabelled,
    unquantised,
)
from fse_convert.plan.changes.quark import decoder_layers, twin
from fse_convert.servers.aiter.patterns import specs
from fse_convert.servers.aiter.vllm_config import is_mxfp4
from fse_convert.servers.sglang_quark import is_fp4
from fse_convert.servers.subject import Subject

KV_SCALES = (".k_scale", ".v_scale", ".output_scale")
"""Ends of the names of tensors that a quantised KV cache needs."""
HISTORY: Mapping[str, frozenset[str]] = {
    "weight": frozenset({"observer_cls", "round_method", "scale_calculation_mode"}),
    "input_tensors": frozenset({"observer_cls"}),
}
"""Keys of a scheme that say how it came to be: neither stored bytes nor a server's arithmetic depend on them."""


def export(subject: Subject) -> FormatChange | None:
    """Write the ``export`` that vLLM reads, of a checkpoint without a quantised KV cache; without it vLLM raises."""
    written = subject.quantization.raw.get("export")
    known: Mapping[str, Any] = written if isinstance(written, Mapping) else {}
    if known.get("kv_cache_group") is not None or any(name.endswith(KV_SCALES) for name in subject.tensors):
        return None
    does = "writes that the KV cache is not quantised, which vLLM asks for"
    return _edit(subject, "heal-quark-export", does, "export", {**known, "kv_cache_group": []})


def exclude(subject: Subject) -> FormatChange | None:
    """Write the list of unquantised modules where there is none: those that are stored so; without it vLLM raises."""
    if subject.quantization.raw.get("exclude") is not None:
        return None
    does = "lists the modules that are stored unquantised, which vLLM asks for"
    return _edit(subject, "heal-quark-exclude", does, "exclude", with_plain_gates(unquantised(subject)))


def experts_pattern(subject: Subject) -> FormatChange | None:
    """Widen patterns such as ``*.mlp.experts.*`` so that they match the module of the routed experts itself, ``*.mlp.experts``.

    vLLM looks that module up and finds the global scheme instead (0.33 quantization/quark/quark.py:724-762).
    """
    schemes = subject.quantization.raw.get("layer_quant_config")
    if not isinstance(schemes, Mapping):
        return None
    modules = [experts_module(d) for d in subject.description.layers if d.routed and is_all(d.routed, StorageKind.MXFP4)]
    general = subject.quantization.raw.get("global_quant_config")
    fp4 = [entry for entry, found in specs(schemes).items() if is_fp4(found) and found != general]
    narrow = [entry for entry in fp4 if entry.endswith(".experts.*") and any(means(entry[:-2], module) for module in modules)]
    renamed = {f"{entry[:-2]}*" if entry in narrow else entry: found for entry, found in schemes.items()}
    if len(renamed) < len(schemes) or any(means(entry, module) for entry in schemes for module in modules):
        return None
    does = "widens the pattern for routed experts, which vLLM does not apply to them"
    return _edit(subject, "heal-quark-experts-pattern", does, "layer_quant_config", renamed)


def scheme(subject: Subject) -> FormatChange | None:
    """Give routed and shared experts one spelling of their scheme where both are MXFP4 and differ in its history alone.

    vLLM compares whole schemes (0.29 to 0.33 quantization/utils/config_utils.py, the rule for QuarkConfig).
    """
    raw = subject.quantization.raw
    schemes, general = specs(raw.get("layer_quant_config")), raw.get("global_quant_config")
    layers = [d for d in _mxfp4_layers(subject) if d.shared and is_all(d.shared, StorageKind.MXFP4)]
    routed = [experts_module(d) for d in layers]
    shared = [name for d in layers if d.shared for name in d.shared.modules]
    own = {entry: found for entry, found in schemes.items() if any(means(entry, module) for module in (*routed, *shared))}
    first = next((found for entry, found in own.items() if any(means(entry, module) for module in routed)), general)
    model = general if _effect(general) == _effect(first) else first
    odd = {entry for entry, found in own.items() if found != model and _effect(found) == _effect(model)}
    if not odd:
        return None
    does = "spells the scheme of shared experts as that of routed ones, which are stored in the same way"
    edited = {entry: model if entry in odd else found for entry, found in raw["layer_quant_config"].items()}
    return _edit(subject, "heal-quark-scheme", does, "layer_quant_config", edited)


def module_names(subject: Subject) -> FormatChange | None:
    """Name FP8 modules exactly, those of MTP layers twice, where servers would not find their scheme and build them as MXFP4.

    vLLM reads no ``re:`` entries of ``layer_quant_config``, and 0.31 and 0.32 look modules of an MTP layer up as those of a layer
    after the last one.
    """
    layers, schemes = decoder_layers(subject), specs(subject.quantization.raw.get("layer_quant_config"))
    fp8 = {entry: scheme for entry, scheme in schemes.items() if not is_fp4(scheme)}
    if layers is None:
        return None
    missing: dict[str, Any] = {}
    for projection, f in linears(subject):
        names = {projection.name: None, twin(projection.name, layers): None}
        if f.kind is not StorageKind.FP8_BLOCK or _is_found(names, fp8):
            continue
        found = [scheme for entry, scheme in fp8.items() if any(means(entry, name) for name in names)]
        if not found:
            return None
        missing |= {name: found[0] for name in names if name not in fp8}
    if not missing:
        return None
    does = "names the FP8 modules exactly, those of MTP layers twice, as every vLLM since 0.31 finds them"
    edited = {**missing, **subject.quantization.raw["layer_quant_config"]}
    return _edit(subject, "heal-quark-names", does, "layer_quant_config", edited)


def shared_excluded(subject: Subject) -> FormatChange | None:
    """Take shared experts off the list of unquantised modules where they are stored in MXFP4, by a scheme that says so."""
    entries = name_list(subject.quantization.raw.get("exclude"))
    freed = _shared_names(subject, StorageKind.MXFP4)
    if entries is None or not freed:
        return None
    does = "takes MXFP4 shared experts off the list of modules that are not quantised"
    return _edit(subject, "heal-shared-excluded", does, "exclude", without(entries, freed, unquantised(subject)))


def shared_unlisted(subject: Subject) -> FormatChange | None:
    """List shared experts that are stored as floats beside quantised routed ones, where no entry that servers read names them.

    Some projections of an expert listed and others not: vLLM raises. None, or by a shell pattern alone: it takes them for MXFP4.
    """
    entries = name_list(subject.quantization.raw.get("exclude"))
    if entries is None:
        return None
    plain = _shared_names(subject, StorageKind.PLAIN)
    unlisted = [name for name in plain if not any(names_exactly(entry, name) for entry in entries)]
    does = "lists the shared experts that are stored unquantised"
    return _edit(subject, "heal-shared-unlisted", does, "exclude", [*entries, *unlisted])


def gates(subject: Subject) -> FormatChange | None:
    """Spell the entries of shared experts' gates so that vLLM 0.29 does not take them for entries of the experts."""
    entries = name_list(subject.quantization.raw.get("exclude"))
    layers = [d for d in subject.description.layers if d.layer.kind is LayerKind.DECODER]
    plain = all(subject.tensors[d.layer.gate_tensor].dtype in PLAIN_WEIGHTS for d in layers if d.layer.gate_tensor)
    if entries is None or not plain or not all(d.shared and is_all(d.shared, StorageKind.MXFP4) for d in layers):
        return None
    spelled = with_plain_gates(entries)
    if any("shared_expert" in entry for entry in spelled):
        return None
    does = "spells the exclusion of the shared experts' gates so that vLLM 0.29 does not take it for one of the experts"
    return _edit(subject, "heal-shared-gate", does, "exclude", spelled)


def scale_labels(subject: Subject) -> FormatChange | None:
    """Label MXFP4 scales U8: SGLang loads none that are typed F8_E8M0, and says nothing (0.5.21 to 0.5.23)."""
    tensors: Tensors = {}
    for projection, f in every_matrix(subject):
        if f.kind is StorageKind.MXFP4 and f.scale:
            scale = projection.parts[f.scale]
            tensors |= relabelled(scale, scale.name, "U8")
    does = "labels MXFP4 scales as U8, their bytes as they are"
    return FormatChange(name="heal-quark-scale-labels", does=does, tensors=tensors) if tensors else None


def weight_labels(subject: Subject) -> FormatChange | None:
    """Label packed MXFP4 weights U8, as Quark writes them."""
    tensors: Tensors = {}
    for projection, f in every_matrix(subject):
        if f.kind is StorageKind.MXFP4:
            weight = projection.parts[f.weight]
            tensors |= relabelled(weight, weight.name, "U8")
    does = "labels packed MXFP4 weights as U8, their bytes as they are"
    return FormatChange(name="heal-quark-weight-labels", does=does, tensors=tensors) if tensors else None


def _edit(subject: Subject, name: str, does: str, key: str, value: Any) -> FormatChange | None:
    """Return the change of one key of Quark's config; None where it is so already."""
    if subject.quantization.raw.get(key) == value:
        return None
    section = QUANTIZATION[subject.quantization.source]
    return FormatChange(name=name, does=does, config=(ConfigChange((*section, key), value),))


def _mxfp4_layers(subject: Subject) -> list[LayerDescription]:
    return [d for d in subject.description.layers if d.routed and is_all(d.routed, StorageKind.MXFP4)]


def _shared_names(subject: Subject, kind: StorageKind) -> list[str]:
    """Name the shared experts' matrices in one format, beside MXFP4 routed ones, that the config's schemes call MXFP4."""
    groups: list[ExpertGroup] = [d.shared for d in _mxfp4_layers(subject) if d.shared and is_all(d.shared, kind)]
    return [name for group in groups for name in group.modules if _is_mxfp4_by(subject.quantization.raw, name)]


def _is_mxfp4_by(raw: Mapping[str, Any], module: str) -> bool:
    """Tell whether every scheme that a config may have for a module is MXFP4."""
    own: list[object] = [found for entry, found in specs(raw.get("layer_quant_config")).items() if means(entry, module)]
    return all(_is_mxfp4(found) for found in own or [raw.get("global_quant_config")])


def _is_mxfp4(found: object) -> bool:
    weight = found.get("weight") if isinstance(found, Mapping) else None
    return isinstance(weight, Mapping) and is_mxfp4(weight)


def _is_found(names: Mapping[str, None], fp8: Mapping[str, object]) -> bool:
    """Tell whether servers find a scheme of FP8: by every name of a module, or of one with a single name by a shell pattern."""
    if all(name in fp8 for name in names):
        return True
    patterns = (entry for entry in fp8 if is_pattern(entry) and not entry.startswith("re:"))
    return len(names) == 1 and any(means(entry, name) for entry in patterns for name in names)


def _effect(found: object) -> object:
    """Return a scheme without its history, and without what is null."""
    if not isinstance(found, Mapping):
        return found
    parts = {key: _stated(key, value) for key, value in found.items() if key != "target_device"}
    return {key: value for key, value in parts.items() if value is not None}


def _stated(part: str, spec: object) -> object:
    if not isinstance(spec, Mapping):
        return spec
    return {key: value for key, value in spec.items() if value is not None and key not in HISTORY.get(part, ())}
