"""Model families as data: how each names its experts, and which config keys hold their widths.

To add a family, add a row. Sources: vLLM 0.33 model files (named per row), transformers 5.24 model code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fse_convert.models.moe import Role

DEEPSEEK_NAMES = {"w1": Role.GATE, "w3": Role.UP, "w2": Role.DOWN}
PROJ_NAMES = {"gate_proj": Role.GATE, "up_proj": Role.UP, "down_proj": Role.DOWN}
MODEL_LAYERS = r"(?:language_model\.)?model\.(?:language_model\.)?layers"


@dataclass(frozen=True)
class Family:
    """One way of naming a MoE model's experts and of writing their sizes into config.json.

    ``layers`` and ``mtp`` are regular expressions for what stands before a layer's number. With ``mtp`` None, MTP
    layers are numbered on from ``num_hidden_layers`` (DeepSeek-V3). ``sections`` are the config's nested sections that
    may hold the keys, tried in order. ``shared_width_key`` None: the shared width is ``width_key`` times
    ``n_shared_key``. ``fixed_shared`` is the number of shared experts of families that have no key for it. ``latent``:
    routed experts work on a hidden size of their own.
    """

    name: str
    model_types: frozenset[str]
    source: str
    layers: str = MODEL_LAYERS
    mtp: str | None = None
    block: str = "mlp"
    shared: str = "shared_experts"
    routed_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    shared_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    width_key: str = "moe_intermediate_size"
    shared_width_key: str | None = None
    n_routed_key: str = "n_routed_experts"
    n_shared_key: str | None = "n_shared_experts"
    mtp_key: str = "num_nextn_predict_layers"
    fixed_shared: int | None = None
    shared_gate: str | None = None
    sections: tuple[str, ...] = ("", "text_config")
    latent: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches one tensor of an expert: groups layer, number, mtp, expert, shared, projection, suffix."""
        mtp = f"|(?P<mtp>{self.mtp})" if self.mtp else "(?P<mtp>(?!))?"
        names = "|".join(map(re.escape, dict.fromkeys([*self.routed_names, *self.shared_names])))
        return re.compile(
            rf"(?P<layer>(?:{self.layers}{mtp})\.(?P<number>\d+)\.{re.escape(self.block)})\."
            rf"(?:experts\.(?P<expert>\d+)|(?P<shared>{re.escape(self.shared)}))\.(?P<projection>{names})\.(?P<suffix>[^.]+)"
        )

    @cached_property
    def block_pattern(self) -> re.Pattern[str]:
        """Matches any tensor of a MoE block that belongs to experts; whatever `pattern` does not match of these is unknown."""
        mtp = f"|(?P<mtp>{self.mtp})" if self.mtp else "(?P<mtp>(?!))?"
        return re.compile(rf"(?P<layer>(?:{self.layers}{mtp})\.(?P<number>\d+)\.{re.escape(self.block)})\.(?P<rest>.*expert.*)")

    def section(self, config: Mapping[str, Any]) -> str:
        """Name of the config section that holds ``width_key``; empty for the top level."""
        for name in self.sections:
            inner = config.get(name) if name else config
            if isinstance(inner, Mapping) and self.width_key in inner:
                return name
        return ""

    def number(self, config: Mapping[str, Any], key: str | None) -> int | None:
        """Read an integer key from the section that holds the widths, else from the top level; None when absent or no integer."""
        if key is None:
            return None
        name = self.section(config)
        for place in (config.get(name, {}) if name else config, config):
            value = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


def _types(*names: str) -> frozenset[str]:
    return frozenset(names)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="DeepSeek-V4",
        model_types=_types("deepseek_v4", "deepseek_v41", "deepseek_v41_text"),
        source="vLLM 0.33 models/deepseek_v4/nvidia/model.py, models/deepseek_v41/nvidia/model.py",
        layers="layers",
        mtp="mtp",
        block="ffn",
        routed_names=DEEPSEEK_NAMES,
        shared_names=DEEPSEEK_NAMES,
    ),
    Family(
        name="DeepSeek-V3",
        model_types=_types("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"),
        source="vLLM 0.33 models/deepseek_v2.py",
    ),
    Family(
        name="GLM-4-MoE",
        model_types=_types("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa", "glm5_next"),
        source="vLLM 0.33 models/glm4_moe.py, models/glm5next",
    ),
)


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Find the family by ``model_type``, at the top level or in ``text_config``; None when no row has it."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for family in FAMILIES:
            if place.get("model_type") in family.model_types:
                return family
    return None
