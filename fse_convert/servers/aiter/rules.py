"""vLLM's rules for AITER fused shared experts, for one MoE block: see `fusion.aiter`, which asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fse_convert.servers.aiter.families import NO_RENAMES, AiterFamily
from fse_convert.servers.aiter.online import MXFP4, MXFP4_DYNAMIC, OnlineQuantization, online_weight_key, quark_routed_keys
from fse_convert.servers.aiter.patterns import (
    Packed,
    PatternUnclearError,
    Renames,
    ServerError,
    fp8_skipped,
    is_regex,
    layer_index,
    listed,
    modelopt_entries,
    modelopt_excluded,
    quark_layer_config,
    shards,
)
from fse_convert.servers.aiter.vllm_config import NEWEST, Kind, VllmQuant, VllmRelease, as_mapping, is_quark_mxfp4, is_since
from fse_convert.servers.verdict import Reason

MEGA_MOE = "aiter_mega_moe"
EXPERT_DTYPES = ("fp4", "fp8")
DEFAULT = object()


@dataclass(frozen=True, slots=True)
class AiterQuestion:
    """One checkpoint and one way of serving it.

    ``config`` is config.json. ``moe_backend`` is the value of ``--moe-backend``; only ``aiter_mega_moe`` makes a difference.
    ``online`` is ``--quantization-config``.
    """

    config: Mapping[str, Any]
    family: AiterFamily
    quant: VllmQuant
    release: VllmRelease = NEWEST
    moe_backend: str | None = None
    online: OnlineQuantization | None = None

    @property
    def packed(self) -> Packed:
        """Fused projections of the server's model class."""
        return self.family.packed if is_since(self.release.name, self.family.names_since) else {}

    @property
    def renames(self) -> Renames:
        """Renaming of checkpoint modules by the server's model class."""
        return self.family.renames if is_since(self.release.name, self.family.names_since) else NO_RENAMES

    def read(self, key: str, default: Any = DEFAULT) -> Any:
        """Read an attribute of the server's config object, where V4.1's ``text_config`` is laid flat.

        vllm/transformers_utils/configs/deepseek_v41.py; it also takes ``expert_dtype`` out of ``quantization_config``.
        """
        text = self.config.get("text_config")
        places = [self.config]
        if self.family.flat and isinstance(text, Mapping):
            places.append(text)
        if self.family.flat and key == "expert_dtype":
            places.append(self.read("quantization_config", None) or {})
        for place in places:
            if key in place:
                return place[key]
        if default is DEFAULT:
            raise PatternUnclearError(f"config.json has no {key}")
        return default


class NotFusedError(Exception):
    """A rule says no."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.reason = Reason(code, message, hint)


@dataclass(frozen=True, slots=True)
class AiterRules:
    """vLLM's rules for one block, one method per class of quantisation; each raises where the block is not fused."""

    question: AiterQuestion
    experts: str
    shared: str
    projections: tuple[str, ...]

    @property
    def _names(self) -> list[str]:
        return [f"{self.shared}.{projection}" for projection in self.projections]

    def run(self) -> None:
        """Apply the rules in vLLM's order; raises NotFusedError, or ServerError where vLLM raises."""
        quant, release = self.question.quant, self.question.release
        if quant.kind is Kind.NONE:
            return
        if release.online and self.question.online is not None and self._online(self.question.online):
            return
        if release.moe_backend and self.question.moe_backend == MEGA_MOE:
            raise NotFusedError(
                "aiter-mega-moe-needs-mxfp4",
                "AITER MegaMoE fuses the shared experts only when they are requantized to MXFP4, e.g. with "
                '--quantization-config.targets \'{"*shared_experts*": "mxfp4"}\'',
            )
        if quant.kind is Kind.DEEPSEEK_V4 and (self._expert_dtype() == "fp4" or release.fp4_only):
            self._deepseek()
        elif quant.kind is Kind.QUARK:
            self._quark()
        elif quant.kind in (Kind.DEEPSEEK_V4, Kind.FP8):
            self._fp8()
        elif quant.kind is Kind.MXFP8:
            self._mxfp8()
        else:
            name = quant.class_name
            message = f"shared-expert FSE quantization compatibility is not implemented for {name}"
            raise NotFusedError("aiter-quantization-unsupported", message)

    def _expert_dtype(self) -> str:
        value = self.question.read("expert_dtype", "fp4")
        if value not in EXPERT_DTYPES:
            text = f"Unsupported DeepSeek V4 expert_dtype={value!r}; expected one of {EXPERT_DTYPES}."
            raise ServerError("ValueError", text)
        return str(value)

    def _online(self, online: OnlineQuantization) -> bool:
        """Judge shared experts that are quantised while loading; False where none of them is."""
        question, packed = self.question, self.question.packed
        keys = [online_weight_key(online, name, packed) for name in self._names]
        if not any(keys):
            return False
        quant, mega = question.quant, question.release.moe_backend and question.moe_backend == MEGA_MOE
        if quant.kind is Kind.QUARK:
            exclude, configs, row_scales = self._quark_exclude(), self._quark_configs(), question.release.mxfp8
            routed = quark_routed_keys(quant.quark, exclude, configs, self.experts, packed, row_scales=row_scales)
        elif quant.kind is Kind.DEEPSEEK_V4 and mega and self._expert_dtype() == "fp4":
            routed = MXFP4, None
        else:
            message = f"online quantization FSE compatibility check is not implemented for {quant.class_name}"
            raise NotFusedError("aiter-online-class", message)
        if routed[0] != MXFP4:
            message = f"online shared-expert quantization is not supported for routed expert weight key {routed[0]}"
            raise NotFusedError("aiter-online-routed-key", message)
        for key in keys:
            if key is None:
                message = f"online quantization targets only part of the shared expert at {self.shared}"
                raise NotFusedError("aiter-online-partial", message)
            if key != MXFP4 or not (mega or routed[1] == MXFP4_DYNAMIC):
                message = "online shared-expert quantization keys do not match the routed expert keys"
                raise NotFusedError("aiter-online-key-mismatch", message)
        return True

    def _deepseek(self) -> None:
        question, label = self.question, self.question.release.label
        if self._expert_dtype() != "fp4":
            raise NotFusedError("aiter-deepseek-routed-not-mxfp4", f"{label} routed experts are not MXFP4")
        raw = question.read("quantization_config", None)
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
            raise ServerError("AttributeError", f"'{type(weight).__name__}' object has no attribute 'get'")
        if weight.get("dtype") != "fp4":
            raise NotFusedError("aiter-deepseek-shared-not-mxfp4", f"{label} shared experts at {prefix} are not MXFP4")

    def _checkpoint_prefix(self) -> str:
        """Return the shared expert's name in a DeepSeek-V4 checkpoint; layers after the last decoder layer are MTP's."""
        index, layers = layer_index(self.shared), self.question.read("num_hidden_layers")
        layer = f"mtp.{index - layers}" if index >= layers else f"layers.{index}"
        return f"{layer}.ffn.shared_experts"

    @staticmethod
    def _deepseek_scheme(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return a module's Quark scheme as the DeepSeek rule looks it up: its name, else the first ``re:`` entry, else global."""
        configs = as_mapping(raw.get("layer_quant_config") or {}, "layer_quant_config")
        found = configs.get(name)
        if found is None:
            patterns = (key for key in configs if key.startswith("re:") and is_regex(key[3:], name))
            found = configs.get(next(patterns, ""))
        return as_mapping(found or raw.get("global_quant_config") or {}, "a Quark scheme")

    def _quark_exclude(self) -> Sequence[str]:
        """Return Quark's excluded modules as the server renames them."""
        exclude = self.question.quant.quark.get("exclude")
        if exclude is None:
            raise ServerError("TypeError", "'NoneType' object is not iterable")
        if not isinstance(exclude, list):
            raise PatternUnclearError(f"exclude must be a list, found {type(exclude).__name__}")
        if all(isinstance(entry, str) for entry in exclude):
            return self.question.renames.apply_all(exclude)
        raise PatternUnclearError("exclude has entries that are no strings")

    def _quark_configs(self) -> Mapping[str, Any]:
        """Return Quark's schemes of single modules as the server renames them."""
        configs = as_mapping(self.question.quant.quark.get("layer_quant_config") or {}, "layer_quant_config")
        return self.question.renames.apply_keys(configs)

    def _quark(self) -> None:
        question, quark = self.question, self.question.quant.quark
        for key in ("exclude", "global_quant_config"):
            if key not in quark:
                raise ServerError("AssertionError", f"assert {key!r} in quant_config.quant_config", "aiter-quark-incomplete")
        if self._quark_excludes():
            raise NotFusedError("aiter-quark-excluded", f"Quark excludes shared experts at {self.shared}")
        configs = self._quark_configs()
        parts = [part for name in self._names for part in shards(name, question.packed) or [name]]
        general = quark["global_quant_config"]
        routed, *own = (quark_layer_config(name, configs) or general for name in (self.experts, *parts))
        if any(scheme != routed for scheme in own):
            message = f"Quark uses different quantization configurations for routed and shared experts at {self.shared}"
            raise NotFusedError("aiter-quark-configs-differ", message)

    def _quark_excludes(self) -> bool:
        exclude = self._quark_exclude()
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
