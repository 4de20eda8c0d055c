"""Shared experts from FP8 or floats to MXFP4, as the routed ones are: servers on AMD then fuse them. The values are rounded.

Two forms of checkpoint: DeepSeek-V4 as published, which takes Quark's form as a whole, and what AMD Quark wrote with shared experts
left out, where only these and their entries change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fse_convert.errors import Problem
from fse_convert.layout.sizes import GROUP
from fse_convert.model.description import LayerDescription
from fse_convert.model.exclusion_lists import means, with_plain_gates, without
from fse_convert.model.families.with_shared import DEEPSEEK_V4
from fse_convert.model.formats import StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.model.quantization import FP8_METHODS
from fse_convert.plan.changes.change import ConfigChange, FormatChange, Result
from fse_convert.plan.changes.config_places import name_list, quark_section
from fse_convert.plan.changes.modules import Matrix, Tensors, experts_module, is_all, linears, matrices, unquantised
from fse_convert.plan.changes.quark import quark_config, quark_obstacle, quark_tensors
from fse_convert.plan.tensors import Recoded, Rule, TensorSpec
from fse_convert.servers.aiter.patterns import specs
from fse_convert.servers.aiter.vllm_config import is_mxfp4
from fse_convert.servers.subject import Subject

NAME = "shared-mxfp4"


def shared_mxfp4(subject: Subject) -> Result:
    """Return the change, or why it does not fit the checkpoint.

    The drafter of DeepSeek-V4 keeps its shared experts: vLLM 0.30 to 0.33 put none into a slot there and raise a KeyError where
    they are stored as the routed ones (models/deepseek_v4/amd/mtp.py). Of other models all layers with MXFP4 routed experts change.
    """
    layers = _changed_layers(subject)
    changed = [matrix for layer in layers if layer.shared for matrix in matrices(layer.shared)]
    names = frozenset(projection.name for projection, _ in changed)
    edit = None if _is_native(subject) else _QuarkEdit(subject, layers, names)
    obstacle = _storage_obstacle(subject, layers, changed) or (edit.obstacle() if edit else quark_obstacle(subject, names))
    if obstacle:
        return Problem("shared-mxfp4-unfit", obstacle)
    tensors: Tensors = {} if edit else quark_tensors(subject, names)
    for matrix in changed:
        tensors |= _mxfp4(matrix)
    return FormatChange(
        name=NAME,
        does=f"codes the shared experts of {len(layers)} layer{'s' if len(layers) > 1 else ''} as MXFP4, which rounds their values",
        lossless=False,
        tensors=tensors,
        config=edit.config() if edit else (ConfigChange(("quantization_config",), quark_config(subject, names)),),
        originals=frozenset(info.name for projection, _ in changed for info in projection.parts.values()),
    )


def _is_native(subject: Subject) -> bool:
    quantization = subject.quantization
    return _is_v4(subject) and quantization.method in FP8_METHODS and quantization.source == "config.json"


def _is_v4(subject: Subject) -> bool:
    family = subject.description.family
    return family is not None and family.name == DEEPSEEK_V4.name


def _changed_layers(subject: Subject) -> list[LayerDescription]:
    """Return the layers with shared experts that are not MXFP4 yet and are to become so."""
    drafter = [d for d in subject.description.layers if d.layer.kind is LayerKind.MTP and not _is_v4(subject)]
    layers = [*_decoder(subject), *(d for d in drafter if d.routed and is_all(d.routed, StorageKind.MXFP4))]
    return [d for d in layers if d.layer.shared and not (d.shared and is_all(d.shared, StorageKind.MXFP4))]


def _decoder(subject: Subject) -> list[LayerDescription]:
    return [d for d in subject.description.layers if d.layer.kind is LayerKind.DECODER]


def _storage_obstacle(subject: Subject, layers: Sequence[LayerDescription], changed: Sequence[Matrix]) -> str:
    """Say what of the tensors keeps the shared experts from becoming MXFP4 beside MXFP4; empty if nothing does."""
    odd = next((d for d in _decoder(subject) if d.problems or not (d.routed and is_all(d.routed, StorageKind.MXFP4))), None)
    if odd:
        return f"the routed experts of {odd.layer.name} are not MXFP4, so MXFP4 shared experts would not fit beside them"
    fused = next((stack for d in layers if d.shared for stack in d.shared.stacked), None)
    if fused:
        return f"gate and up of the shared experts are one matrix, {fused.module}; only matrices of their own can become MXFP4"
    if not changed:
        return "there are no shared experts that are not MXFP4 already"
    for projection, f in changed:
        if f.kind not in (StorageKind.FP8_BLOCK, StorageKind.PLAIN):
            return f"{projection.name} is stored as {f.label}; FP8 blocks and floats can become MXFP4"
        if f.shape[1] % GROUP:
            return f"{projection.name} has {f.shape[1]} columns, which is not a multiple of {GROUP}"
    return ""


def _mxfp4(matrix: Matrix) -> Tensors:
    """Return a matrix ``[n, k]`` as Quark's two tensors, U8 ``[n, k/2]`` and U8 ``[n, k/32]``, in place of its own."""
    projection, f = matrix
    weight, scale = projection.parts[f.weight], projection.parts[f.scale] if f.scale else None
    codes = Recoded(rule=Rule.MXFP4, weight=weight, scale=scale, shape=f.shape, block=f.block, is_scale=False)
    scales = Recoded(rule=Rule.MXFP4, weight=weight, scale=scale, shape=f.shape, block=f.block, is_scale=True)
    n, k = f.shape
    of_weight = TensorSpec(f"{projection.name}.weight", "U8", (n, k // 2), codes)
    of_scale = TensorSpec(f"{projection.name}.weight_scale", "U8", (n, k // GROUP), scales)
    gone: Tensors = {info.name: () for info in projection.parts.values()}
    if scale is None:
        return {**gone, weight.name: (of_weight, of_scale)}
    return {**gone, weight.name: (of_weight,), scale.name: (of_scale,)}


class _QuarkEdit:
    """The keys that change where Quark wrote the checkpoint: lists and schemes that name the shared experts of some layers."""

    def __init__(self, subject: Subject, layers: Sequence[LayerDescription], names: frozenset[str]) -> None:
        self.layers, self.names, self.raw = layers, names, subject.quantization.raw
        self.section = quark_section(subject.quantization)
        self.others = [p.name for p, _ in linears(subject) if p.name not in names]
        self.unquantised = [module for module in unquantised(subject) if module not in names]
        self.schemes = specs(self.raw.get("layer_quant_config"))
        self.general = self.raw.get("global_quant_config")

    def obstacle(self) -> str:
        """Say why Quark's config would not make the shared experts MXFP4; empty where it would."""
        if self.section is None:
            return "the checkpoint is neither DeepSeek-V4 in its own FP8 nor by AMD Quark with a quantization_config"
        weight = self.general.get("weight") if isinstance(self.general, dict) else None
        if not (isinstance(weight, dict) and is_mxfp4(weight)):
            return "global_quant_config is not MXFP4 in groups of 32, so the shared experts would not become MXFP4 by it"
        for entry, scheme in self.schemes.items():
            if scheme != self.general and self._means_routed(entry):
                return f"layer_quant_config gives routed experts another scheme than the global one: {entry}"
            if self._is_stale(entry, scheme) and self._means_others(entry):
                return f"an entry of layer_quant_config means shared experts and other modules: {entry}"
        return ""

    def config(self) -> tuple[ConfigChange, ...]:
        """Return the edits: entries that mean the shared experts go, those of anything else stay."""
        edits: dict[str, Any] = {}
        exclude = name_list(self.raw.get("exclude"))
        if exclude is not None:
            edits["exclude"] = with_plain_gates(without(exclude, self.names, self.unquantised))
        schemes = self.raw.get("layer_quant_config")
        if isinstance(schemes, dict):
            edits["layer_quant_config"] = {k: v for k, v in schemes.items() if not (k in self.schemes and self._is_stale(k, v))}
        section = self.section or ()
        return tuple(ConfigChange((*section, key), value) for key, value in edits.items() if value != self.raw.get(key))

    def _is_stale(self, entry: str, scheme: object) -> bool:
        return scheme != self.general and any(means(entry, name) for name in self.names)

    def _means_others(self, entry: str) -> bool:
        return any(means(entry, module) for module in self.others)

    def _means_routed(self, entry: str) -> bool:
        routed = (e for d in self.layers if d.routed for e in d.routed.experts[:1])
        modules = [experts_module(d) for d in self.layers] + [p.name for e in routed for p in e.projections.values()]
        return any(means(entry, module) for module in modules)
