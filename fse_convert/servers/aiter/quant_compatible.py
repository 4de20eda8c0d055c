"""vLLM's rules for AITER fused shared experts, for one MoE block; `fse_convert.servers.aiter.question` asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fse_convert.model.families.family import SECTIONS, place
from fse_convert.servers.aiter.families import NO_RENAMES, AiterFamily
from fse_convert.servers.aiter.patterns import (
    NotFusedError,
    Packed,
    Renames,
    ServerError,
    UnclearError,
    fp8_skipped,
    is_regex,
    layer_index,
    listed,
    modelopt_entries,
    modelopt_excluded,
    quark_layer_config,
    shards,
    specs,
)
from fse_convert.servers.aiter.vllm_config import (
    VllmQuant,
    VllmQuantKind,
    VllmRelease,
    as_mapping,
    is_mxfp4,
    is_quark_mxfp4,
)
from fse_convert.servers.release_names import is_since

PROJECTIONS = ("gate_up_proj", "down_proj")
EXPERT_DTYPES = ("fp4", "fp8")


@dataclass(frozen=True)
class AiterQuestion:
    """One checkpoint and one way of serving it.

    ``config`` is config.json. ``mega_moe``: served with ``--moe-backend aiter_mega_moe``, and shared experts requantised to MXFP4
    while loading. ``heterogeneous``: by the kernel of `fse_convert.servers.aiter.heterogeneous`; ``passed_over``: why the server
    does not take it.
    """

    config: Mapping[str, Any]
    family: AiterFamily
    quant: VllmQuant
    release: VllmRelease
    mega_moe: bool = False
    heterogeneous: bool = False
    passed_over: tuple[str, ...] = ()

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the model class asks outside the checkpoint."""
        return () if self.mega_moe or self.heterogeneous else self.family.needs

    @property
    def decoder_layers(self) -> int | None:
        """The number of decoder layers, which models inside of others write into ``text_config``; None where it stands nowhere."""
        written = (place(self.config, name).get("num_hidden_layers") for name in SECTIONS)
        return next((value for value in written if isinstance(value, int)), None)

    @property
    def packed(self) -> Packed:
        """Fused projections of the server's model class."""
        return self.family.packed if is_since(self.release.name, self.family.names_since) else {}

    @property
    def renames(self) -> Renames:
        """Renaming of checkpoint modules by the server's model class."""
        return self.family.renames if is_since(self.release.name, self.family.names_since) else NO_RENAMES

    @cached_property
    def quark_exclude(self) -> Sequence[str]:
        """Quark's excluded modules as the server renames them."""
        exclude = self.quant.quark.get("exclude")
        if exclude is None:
            raise ServerError("'NoneType' object is not iterable")
        if not isinstance(exclude, list):
            raise UnclearError(f"exclude must be a list, found {type(exclude).__name__}")
        if all(isinstance(entry, str) for entry in exclude):
            return self.renames.apply_all(exclude)
        raise UnclearError("exclude has entries that are not strings")

    @cached_property
    def quark_configs(self) -> Mapping[str, Any]:
        """Quark's schemes of single modules, of which there may be thousands, as the server renames them."""
        return self.renames.apply_keys(as_mapping(self.quant.quark.get("layer_quant_config") or {}, "layer_quant_config"))

    @cached_property
    def quark_specs(self) -> Mapping[str, Any]:
        """Those of them that are objects; none where they are something else."""
        return self.renames.apply_keys(specs(self.quant.quark.get("layer_quant_config")))

    def read(self, key: str, default: Any = None) -> Any:
        """Read an attribute of the server's config object, where V4.1's ``text_config`` is laid flat.

        vllm/transformers_utils/configs/deepseek_v41.py; it also takes ``expert_dtype`` out of ``quantization_config``.
        """
        places = [self.config]
        if self.family.flat:
            places.append(place(self.config, "text_config"))
        if self.family.flat and key == "expert_dtype":
            places.append(self.read("quantization_config") or {})
        return next((found[key] for found in places if key in found), default)


@dataclass(frozen=True, slots=True)
class AiterRules:
    """vLLM's rules for one block, one method per class of quantisation; each raises where the block is not fused."""

    question: AiterQuestion
    experts: str
    shared: str

    @property
    def _names(self) -> list[str]:
        return [f"{self.shared}.{projection}" for projection in PROJECTIONS]

    def run(self) -> None:
        """Apply the rules in vLLM's order; raises NotFusedError, or ServerError where vLLM raises."""
        quant, release = self.question.quant, self.question.release
        if quant.kind is VllmQuantKind.NONE:
            return
        if self.question.mega_moe:
            self._mega_moe()
        elif quant.kind is VllmQuantKind.DEEPSEEK_V4 and (self._expert_dtype() == "fp4" or release.fp4_only):
            self._deepseek()
        elif quant.kind is VllmQuantKind.QUARK:
            self._quark()
        elif quant.kind in (VllmQuantKind.DEEPSEEK_V4, VllmQuantKind.FP8):
            self._fp8()
        elif quant.kind is VllmQuantKind.MXFP8:
            self._mxfp8()
        else:
            message = f"shared-expert FSE quantization compatibility is not implemented for {quant.class_name}"
            raise NotFusedError("aiter-quantization-unsupported", message)

    def _expert_dtype(self) -> str:
        value = self.question.read("expert_dtype", "fp4")
        if value not in EXPERT_DTYPES:
            text = f"Unsupported DeepSeek V4 expert_dtype={value!r}; expected one of {EXPERT_DTYPES}."
            raise ServerError(text)
        return str(value)

    def _mega_moe(self) -> None:
        """Judge shared experts that are requantised while loading, which fit routed experts in MXFP4 only."""
        quant = self.question.quant
        if quant.kind is VllmQuantKind.DEEPSEEK_V4 and self._expert_dtype() == "fp4":
            return
        if quant.kind is not VllmQuantKind.QUARK:
            message = f"online quantization FSE compatibility check is not implemented for {quant.class_name}"
            raise NotFusedError("aiter-online-class", message)
        scheme = self._quark_routed()
        if scheme != "mxfp4":
            message = f"online shared-expert quantization is not supported for routed expert weight key {scheme}"
            raise NotFusedError("aiter-online-routed-key", message)

    def _quark_routed(self) -> str | None:
        """Name the weights of the routed experts of a Quark checkpoint; None where they are not quantised.

        ``get_quant_method_target`` of quantization/quark/quark.py for RoutedExperts, where one excluded expert excludes all. Of
        the schemes only MXFP4 is recognised; others are spelled out.
        """
        quark, exclude, configs = self.question.quant.quark, self.question.quark_exclude, self.question.quark_configs
        children = (entry for entry in exclude if not entry.startswith("re:"))
        if any(entry == self.experts or entry.startswith(f"{self.experts}.") for entry in children):
            return None
        if listed(self.experts, exclude, self.question.packed):
            return None
        scheme = quark_layer_config(self.experts, configs) or quark.get("global_quant_config")
        if scheme is None or quark.get("layer_type_quant_config") is None:
            raise ServerError("'NoneType' object has no attribute 'get'")
        scheme = as_mapping(scheme, "a Quark scheme")
        if scheme.get("output_tensors") or scheme.get("bias"):
            raise ServerError("Currently, Quark models with output_tensors and bias quantized are not supported")
        weight = as_mapping(scheme.get("weight"), "a Quark scheme of one step")
        if is_mxfp4(weight) and weight.get("scale_format") == "e8m0":
            return "mxfp4"
        return f"{weight.get('dtype')} {weight.get('qscheme')}"

    def _deepseek(self) -> None:
        question, label = self.question, self.question.release.label
        if self._expert_dtype() != "fp4":
            raise NotFusedError("aiter-deepseek-routed-not-mxfp4", f"{label} routed experts are not MXFP4")
        raw = question.read("quantization_config")
        if raw is None:
            raise NotFusedError("aiter-deepseek-no-quantization", f"{label} has no quantization configuration")
        if not is_quark_mxfp4(raw):
            name = label if question.release.v41_class_checked else "DeepSeek-v4"
            message = f"{name} FSE is only implemented/tested with Quark MXFP4"
            raise NotFusedError("aiter-deepseek-not-quark-mxfp4", message)
        prefix = self._checkpoint_prefix()
        if any(entry.startswith(prefix) for entry in raw.get("exclude") or [] if isinstance(entry, str)):
            raise NotFusedError("aiter-deepseek-excluded", f"{label} excludes shared experts at {prefix}")
        weight = self._deepseek_scheme(raw, f"{prefix}.w1").get("weight") or {}
        if not isinstance(weight, Mapping):
            raise ServerError(f"'{type(weight).__name__}' object has no attribute 'get'")
        if weight.get("dtype") != "fp4":
            raise NotFusedError("aiter-deepseek-shared-not-mxfp4", f"{label} shared experts at {prefix} are not MXFP4")

    def _checkpoint_prefix(self) -> str:
        """Return the shared expert's name in a DeepSeek-V4 checkpoint; layers after the last decoder layer are MTP's."""
        index, layers = layer_index(self.shared), self.question.decoder_layers
        if layers is None:
            raise UnclearError("config.json has no num_hidden_layers")
        layer = f"mtp.{index - layers}" if index >= layers else f"layers.{index}"
        return f"{layer}.ffn.shared_experts"

    @staticmethod
    def _deepseek_scheme(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return a module's Quark scheme as the DeepSeek rule looks it up: its name, else the first ``re:`` entry, else global."""
        configs = as_mapping(raw.get("layer_quant_config") or {}, "layer_quant_config")
        scheme = configs.get(name)
        if scheme is None:
            patterns = (key for key in configs if key.startswith("re:") and is_regex(key[3:], name))
            scheme = configs.get(next(patterns, ""))
        return as_mapping(scheme or raw.get("global_quant_config") or {}, "a Quark scheme")

    def _quark(self) -> None:
        question, quark = self.question, self.question.quant.quark
        for key in ("exclude", "global_quant_config"):
            if key not in quark:
                raise ServerError(f"assert {key!r} in quant_config.quant_config", "aiter-quark-incomplete")
        if self._quark_excludes():
            raise NotFusedError("aiter-quark-excluded", f"Quark excludes shared experts at {self.shared}")
        configs = self.question.quark_configs
        parts = [part for name in self._names for part in shards(name, question.packed) or [name]]
        general = quark["global_quant_config"]
        routed, *own = (quark_layer_config(name, configs) or general for name in (self.experts, *parts))
        if any(scheme != routed for scheme in own):
            message = f"Quark uses different quantization configurations for routed and shared experts at {self.shared}"
            raise NotFusedError("aiter-quark-configs-differ", message)

    def _quark_excludes(self) -> bool:
        exclude = self.question.quark_exclude
        if self.question.release.exclude_by_name:
            return any("shared_expert" in entry for entry in exclude)
        return any(listed(name, exclude, self.question.packed) for name in self._names)

    def _fp8(self) -> None:
        quant, packed = self.question.quant, self.question.packed
        if quant.store_dtype is not None:
            message = (
                f"FP8 stores routed experts as {quant.store_dtype}, which is not supported for fused shared experts at "
                f"{self.shared}"
            )
            raise NotFusedError("aiter-fp8-store-dtype", message)
        if quant.block is None:
            message = "FP8 shared-expert FSE is only implemented for block-quantized checkpoints"
            raise NotFusedError("aiter-fp8-not-block", message)
        ignored = self.question.renames.apply_all(quant.ignored)
        routed = fp8_skipped(self.experts, ignored, packed)
        if any(fp8_skipped(name, ignored, packed) != routed for name in self._names):
            message = f"FP8 ignores routed and shared experts inconsistently at {self.shared}"
            raise NotFusedError("aiter-fp8-ignored-differently", message)

    def _mxfp8(self) -> None:
        packed, renames, excluded = self.question.packed, self.question.renames, self.question.quant.ignored
        if renames:
            excluded = renames.apply_all(modelopt_entries(excluded))
        routed = modelopt_excluded(self.experts, excluded, packed)
        if any(modelopt_excluded(name, excluded, packed) != routed for name in self._names):
            message = f"MXFP8 excludes routed and shared experts inconsistently at {self.shared}"
            raise NotFusedError("aiter-mxfp8-excluded-differently", message)
