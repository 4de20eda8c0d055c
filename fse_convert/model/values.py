"""What config.json may hold in the keys that experts, their layers and their quantisation are built from, as one table.

An absent key and null are left to the loader, which takes a default of its own (`fse_convert.servers.config_keys` has those that
stop a server). Types are those of transformers' config classes, which check them (5.24 models/*/configuration_*.py, ``@strict``),
and of what vLLM 0.33 and SGLang 0.5.23 compute with them: layers/quantization/fp8.py of both for a quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from fse_convert.errors import Problem
from fse_convert.model.families.family import EVERY_LAYER, Family
from fse_convert.model.families.width_keys import Share

TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
"""The names that families have for the number of routed experts that a token passes; the last is of DeepSeek-V4's drafter."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values that servers take for a key: in words that follow "expected", and as a test."""

    what: str
    fit: Callable[[Any], bool]

    def refusal(self, key: str, value: object, where: str = "config.json") -> Problem:
        """Return the problem that another value is."""
        return unexpected(key, value, self.what, where)


def unexpected(key: str, value: object, what: str, where: str = "config.json") -> Problem:
    """Return the problem that the value of a key is; ``what``: words that follow "expected"."""
    hint = "servers compute with it: write what belongs to these weights"
    return Problem("config-value", f"{key} is {shortened(value)}, expected {what}", where, hint)


def _integer(least: int) -> Values:
    return Values(f"an integer of at least {least}", lambda v: type(v) is int and v >= least)


def _each(one: Values, what: str, least: int = 1) -> Values:
    return Values(what, lambda v: isinstance(v, list) and len(v) >= least and all(map(one.fit, v)))


def one_of(*values: object) -> Values:
    """Take these values alone."""
    return Values(" or ".join(map(repr, values)), lambda v: any(type(v) is type(x) and v == x for x in values))


def _either(one: Values, other: Values) -> Values:
    return Values(f"{one.what}, or {other.what}", lambda v: one.fit(v) or other.fit(v))


SIZE, COUNT, LAYER = _integer(1), _integer(0), _integer(-1)
SIZES = _either(SIZE, _each(SIZE, "a list of integers of at least 1"))
COUNTS = _either(COUNT, _each(COUNT, "a list of integers of at least 0"))
LAYERS = _either(LAYER, _each(LAYER, "a list of integers of at least -1"))
NUMBERS = _each(COUNT, "a list of numbers of layers", least=0)
FLAGS = _each(Values("0 or 1", lambda v: v in (0, 1)), "a list of 0 and 1, one per layer")
WORD = Values("a string", lambda v: isinstance(v, str))
WORDS = _either(WORD, _each(WORD, "a list of strings", least=0))
NUMBER = Values("a number", lambda v: type(v) in (int, float))
OBJECT = Values("an object", lambda v: isinstance(v, Mapping))
DYNAMIC = Values('"dynamic"', lambda v: v == "dynamic")
"""How activations are scaled beside weights in blocks (vLLM 0.33 layers/quantization/fp8.py, SGLang 0.5.23 alike)."""
QUANTIZATION: Mapping[str, Values] = {
    **dict.fromkeys(("quant_method", "quant_algo", "moe_quant_algo", "scale_fmt", "store_dtype"), WORD),
    "activation_scheme": _either(DYNAMIC, Values('"static"', lambda v: v == "static")),
    **dict.fromkeys(("config_groups", "global_quant_config", "layer_quant_config", "export"), OBJECT),
}
"""Keys of a quantisation; its block, its lists of modules and ``expert_dtype`` are compared where they are read."""


GROUPED = frozenset({
    "DeepSeek-V3", "Kimi-K2", "GLM-4-MoE", "GLM-5", "AXK1", "dots", "dots3-note", "Hunyuan-V4", "Sarvam", "Nemotron-H",
    "EXAONE-MoE", "Mistral 4", "Mistral Large 4", "Solar Open", "MiMo-V2",
})  # fmt: skip
"""Families whose routers choose among groups of experts."""
ROUTERS: tuple[tuple[Values, tuple[str, ...], frozenset[str]], ...] = (
    (SIZE, ("n_group", "topk_group"), GROUPED),
    (WORD, ("scoring_func", "topk_method"), GROUPED | {"DeepSeek-V4", "MiniMax-M3"}),
    (NUMBER, ("routed_scaling_factor",), GROUPED | {"DeepSeek-V4", "MiniMax-M3"}),
    (NUMBER, ("swiglu_limit",), frozenset({"DeepSeek-V4", "GLM-5", "Hunyuan-V4", "MiniMax-M3", "gpt-oss"})),
    (COUNT, ("num_hash_layers",), frozenset({"DeepSeek-V4"})),
)
"""Keys of routers and activations, with the families whose loaders read them."""


def allowed(family: Family) -> Mapping[str, Values]:
    """Return the values that each key of a family may have: sizes, numbers of experts, which layers have experts."""
    rule = family.sparse or EVERY_LAYER
    size, count, layer = (SIZES, COUNTS, LAYERS) if family.lists else (SIZE, COUNT, LAYER)
    widths = (*family.widths, *family.readings)
    rows: tuple[tuple[Values, Iterable[str | None]], ...] = (
        (SIZE, (family.hidden_key, *family.depth_keys)),
        (count, (*TOP_K, *family.n_routed_keys, *family.n_shared_keys, *(w.key for w in widths if w.share is not Share.ROUTED))),
        (size, (w.key for w in widths if w.share is Share.ROUTED)),
        (COUNT, (*family.mtp_keys, family.mtp_routed_key)),
        (count, (rule.first,)),
        (layer, (rule.last,)),
        (_either(SIZE, FLAGS) if rule.flags else SIZE, (rule.step,)),
        (NUMBERS, (rule.dense, rule.listed)),
        (WORDS, rule.words),
        *((values, keys) for values, keys, names in ROUTERS if family.name in names),
    )
    return {key: values for values, keys in rows for key in keys if key}


def misstated(family: Family, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Find values of a type, or outside of a range, that no server takes, wherever in config.json they stand."""
    for key, values in allowed(family).items():
        yield from (values.refusal(s.path, s.value) for s in family.stated(config, key) if not values.fit(s.value))
