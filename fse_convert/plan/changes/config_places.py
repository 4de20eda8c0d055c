"""Where config.json holds what changes of format edit: the quantisation, and how the routed experts of DeepSeek-V4 are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fse_convert.model.families.family import place
from fse_convert.model.quantization import Quantization
from fse_convert.plan.changes.change import REMOVED, ConfigChange

QUANTIZATION: Mapping[str, tuple[str, ...]] = {
    "config.json": ("quantization_config",),
    "config.json:text_config": ("text_config", "quantization_config"),
}
"""By `Quantization.source`: the path of a quantisation that config.json describes."""

EXPERT_DTYPE: Mapping[str, tuple[str, ...]] = {
    "deepseek_v4": ("expert_dtype",),
    "deepseek_v41": ("quantization_config", "expert_dtype"),
}
"""By model type, the place in which every server that reads ``expert_dtype`` finds it.

vLLM 0.29 to 0.33 read V4's at the top level alone, and V4.1's in ``text_config``, then at the top level, then in
``quantization_config`` (0.33 models/deepseek_v4/quant_config.py:85-105). SGLang reads the dtype of a routed expert's tensor.
"""
_EXPERT_DTYPES = tuple((*section, "expert_dtype") for section in ((), ("text_config",), ("quantization_config",)))


def expert_dtype_edits(config: Mapping[str, Any], model_type: str, stored: str) -> tuple[ConfigChange, ...]:
    """Return what makes config.json say how the routed experts are stored, in the one place and in no other.

    ``model_type``: a key of `EXPERT_DTYPE`. Empty where config.json says just that.
    """
    right = EXPERT_DTYPE[model_type]
    edits = [ConfigChange(path, REMOVED) for path in _EXPERT_DTYPES if path != right and _value(config, path) is not None]
    if _value(config, right) != stored:
        edits.append(ConfigChange(right, stored))
    return tuple(edits)


def _value(config: Mapping[str, Any], path: tuple[str, ...]) -> object:
    return place(config, "".join(path[:-1])).get(path[-1])


def quark_section(quantization: Quantization) -> tuple[str, ...] | None:
    """Return the path of the quantisation that AMD Quark wrote into config.json; None where there is none."""
    return QUANTIZATION.get(quantization.source) if quantization.method == "quark" else None


def name_list(value: object) -> list[str] | None:
    """Return a list of module names; None where a value is something else."""
    return list(value) if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else None
