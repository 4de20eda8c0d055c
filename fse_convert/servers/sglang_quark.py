"""SGLang's reading of AMD Quark configs for DeepSeek-V4, as far as it decides fusion and loading.

0.5.20 to 0.5.23 layers/quantization/quark/quark.py (``_find_matched_config``, ``can_fuse_shared_expert``,
``apply_weight_name_mapper``), models/deepseek_v4.py and deepseek_v4_nextn.py (the names). vLLM's reading is in
`fse_convert.servers.aiter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fse_convert.model.quantization import Quantization
from fse_convert.servers.aiter.families import NO_RENAMES
from fse_convert.servers.aiter.patterns import Renames, specs
from fse_convert.servers.release_names import is_since

_NAMES = Renames(
    substrings=((".attn.", ".self_attn."), (".ffn.", ".mlp.")),
    prefixes=(("layers.", "model.layers."), ("mtp.", "model.mtp.")),
    suffixes=((".w1", ".gate_proj"), (".w2", ".down_proj"), (".w3", ".up_proj")),
)
_DRAFT_PREFIXES = (("mtp.0.e_proj", "model.e_proj"), ("mtp.0.h_proj", "model.h_proj"), ("mtp.0.", "model.decoder."))
_DRAFT_NAMES = replace(_NAMES, prefixes=(*_DRAFT_PREFIXES, *_NAMES.prefixes))
_FIRST_LAYER = ("model.layers.0", "model.language_model.layers.0")
_DRAFT = ("model.decoder",)
_PROJECTIONS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
RENAMED_SINCE = "0.5.22"
"""The first release that renames a config's modules to its own, and that looks at the draft's block."""


def is_fp4(spec: object) -> bool:
    """Tell whether a Quark scheme has FP4 weights."""
    weight = spec.get("weight") if isinstance(spec, Mapping) else None
    return isinstance(weight, Mapping) and weight.get("dtype") == "fp4"


@dataclass(frozen=True)
class SglangQuark:
    """One Quark config as one release reads it, for the model or (``draft``) for its NextN drafter."""

    raw: Mapping[str, Any]
    config: Mapping[str, Any]
    renames: bool
    draft: bool

    @classmethod
    def of(cls, quantization: Quantization, config: Mapping[str, Any], release: str, *, draft: bool) -> SglangQuark:
        """Take the config as a release reads it."""
        return cls(quantization.raw, config, renames=is_since(release, RENAMED_SINCE), draft=draft)

    @property
    def _names(self) -> Renames:
        return _DRAFT_NAMES if self.draft else _NAMES

    @property
    def _config_names(self) -> Renames:
        return self._names if self.renames else NO_RENAMES

    @cached_property
    def _specs(self) -> Mapping[str, Mapping[str, Any]]:
        return self._config_names.apply_keys(specs(self.raw.get("layer_quant_config")))

    @property
    def _exclude(self) -> tuple[str, ...]:
        entries = self.raw.get("exclude")
        return self._config_names.apply_all(e for e in entries if isinstance(e, str)) if isinstance(entries, list) else ()

    def spec(self, module: str) -> object:
        """Return the scheme of a module by its name in the server: the first pattern that fits, a child's, else the global."""
        found = self._specs
        fitting = (spec for pattern, spec in found.items() if fnmatchcase(module, pattern))
        children = (spec for name, spec in found.items() if name.startswith(f"{module}."))
        return next(fitting, None) or next(children, None) or self.raw.get("global_quant_config")

    def misread(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the checkpoint's FP8 modules that the server builds as FP4."""
        return tuple(module for module in modules if is_fp4(self.spec(self._names.apply(module))))

    def may_fuse(self) -> bool:
        """Tell whether the server believes the shared experts to be quantised as the routed ones are."""
        if any("shared_expert" in e and "shared_expert_gate" not in e and not self._is_drafts(e) for e in self._exclude):
            return False
        plural = self.renames and any(".shared_experts." in name for name in self._specs)
        shared = "shared_experts" if plural else "shared_expert"
        bases = (*_FIRST_LAYER, *_DRAFT) if self.renames else _FIRST_LAYER
        pairs = ((self.spec(f"{b}.mlp.experts"), self.spec(f"{b}.mlp.{shared}.{p}")) for b in bases for p in _PROJECTIONS)
        return all(routed == own for routed, own in pairs)

    def _is_drafts(self, entry: str) -> bool:
        first, count = self.config.get("num_hidden_layers"), self.config.get("num_nextn_predict_layers")
        later = range(first, first + count) if isinstance(first, int) and isinstance(count, int) else ()
        return entry.startswith(("mtp.", *(f"model.layers.{i}." for i in later)))
