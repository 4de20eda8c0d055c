"""The family of a model: by its model type, or by the name that a user gave. All rows together are `FAMILIES`.

Sources: model files of vLLM 0.33, SGLang 0.5.23 and transformers 5.24, named per row; transformers' ``conversion_mapping.py`` says
how checkpoints spell names that its modules spell differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fse_convert.model.families.family import SECTIONS, Family, place
from fse_convert.model.families.routed_only import ROUTED_ONLY
from fse_convert.model.families.stacked_only import STACKED_ONLY
from fse_convert.model.families.with_shared import SHARED

FAMILIES: tuple[Family, ...] = (*SHARED, *ROUTED_ONLY, *STACKED_ONLY)
MTP_LAYERS = "|".join(dict.fromkeys(family.mtp for family in FAMILIES if family.mtp))
"""What stands before the number of an MTP layer in some family, as a regular expression."""
RUN = frozenset({
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl",
    "inkling2", "jamba", "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4", "mistral_large4", "mixtral", "muse_spark",
    "nemotron_h", "nemotron_h_omni", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_vl_moe", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "step3p7", "unlimited_ocr",
})  # fmt: skip
"""Model types of which transformers 5.24 has built source and padded output, with equal logits (tests/test_transformers.py).

Everything else in a row was read, in its ``source``.
"""


def find_family(config: Mapping[str, Any], named: str = "") -> Family | None:
    """Find the family by ``model_type``, in any section of config.json; where no row has it, by the name that a user gave.

    None when there is neither.
    """
    types = [str(place(config, name).get("model_type")) for name in SECTIONS]
    found = next((family for written in types for family in FAMILIES if written in family.model_types), None)
    return found or next((family for family in FAMILIES if family.name == named), None)
