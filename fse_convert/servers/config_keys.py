"""What servers take for the keys of config.json from which they build routers, experts and activations, as one table.

A config class that transformers declares ``@strict`` raises for a value of another type, for null too where its type has no None; a
server's own class takes everything, and model code then raises for what is wrong or not there. Values that no server takes for any
model are found before (`fse_convert.model.values`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fse_convert.model.families.family import SECTIONS, place
from fse_convert.model.values import COUNT, NUMBER, SIZE, Values, one_of
from fse_convert.servers.release_names import Named, is_since
from fse_convert.servers.verdict import Reason

ABSENT = object()
"""What a key has that stands nowhere."""


def server_config_value(config: Mapping[str, Any], key: str) -> object:
    """Read a key where server configs take it from, null as it stands; `ABSENT` when it is nowhere.

    V4.1 nests its text model, and writes ``expert_dtype`` into ``quantization_config`` (vLLM 0.33
    transformers_utils/configs/deepseek_v41.py:11-50).
    """
    sections = (*SECTIONS, "quantization_config") if key == "expert_dtype" else SECTIONS
    return next((found[key] for name in sections if key in (found := place(config, name))), ABSENT)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The values with which releases of an engine load models of some types; with another one they raise or build something else.

    ``engine``: how the names of engines begin. ``stated``: the key has no default, or one that does not fit. ``native``: under
    MegaMoE. ``tensor``: how the name of a tensor ends without which the rule does not apply. ``since``, ``last``: the first and the
    last release, without them all.
    """

    engine: str
    model_types: frozenset[str]
    keys: tuple[str, ...]
    takes: Values
    source: str
    stated: bool = False
    native: bool = False
    tensor: str = ""
    since: str = ""
    last: str = ""

    def covers(self, target: Named, model_type: str, *, native: bool) -> bool:
        """Tell whether a target of this engine and release obeys the rule for a model type."""
        if native != self.native or model_type not in self.model_types or not target.engine.startswith(self.engine):
            return False
        return (not self.since or is_since(target.release, self.since)) and (not self.last or is_since(self.last, target.release))


V4, V41 = frozenset({"deepseek_v4"}), frozenset({"deepseek_v41"})
BOTH = V4 | V41
V2 = frozenset({"deepseek_v2"})
DEEPSEEK = V2 | frozenset({"deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"})
"""Types of vLLM's DeepseekV2MoE."""
FIRST_WITH_EXPERTS: Mapping[str, int | None] = {
    **dict.fromkeys(("deepseek_v2", "kimi_vl"), 0),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa"), 3),
    "glm4_moe": 1,
    "glm4_moe_lite": None,
}
"""Types in which vLLM reads ``first_k_dense_replace`` alone, and what their classes take where it is absent (5.20.2, run)."""
GROUPED = DEEPSEEK | {"glm4_moe", "glm4_moe_lite", "axk1"}
"""Types whose routers choose among groups of experts."""
FLAT = V4 | GROUPED | {"qwen3_next", "qwen3_5_moe_text"}
"""Types whose config class has no ``text_config``; only those that some server fuses."""
KIMI = frozenset({"kimi_k25", "kimi_vl"})
"""Types whose text model is DeepSeek-V3's or V2's."""
GLM5 = frozenset({"glm5_next", "glm5_next_text"})
QWEN4 = frozenset({"qwen4_exp", "qwen4_exp_text"})
NESTED = KIMI | GLM5 | QWEN4 | {"qwen3_5_moe", "minimax_m3_vl", "minimax_m3", "minimax_m3_text", "alice_ai"}
"""Types beside `FLAT` that vLLM fuses; most keep their text model's keys in ``text_config``."""
NORMED = GLM5 | QWEN4 | {"glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "qwen3_next"}
"""Types whose config class takes no null for ``norm_topk_prob``."""
ANY = Values("any value", lambda _: True)
FLAG = one_of(True, False)
NO_OBJECT = Values("null", lambda v: not isinstance(v, Mapping))
INTEGER = Values("an integer or null", lambda v: v is None or type(v) is int)
FLOAT = Values("a number with a decimal point", lambda v: type(v) is float)
NUMBER_OR_NULL = Values("a number or null", lambda v: v is None or NUMBER.fit(v))
COUNT_OR_NULL = Values("an integer of at least 0, or null", lambda v: v is None or COUNT.fit(v))
SCORES = one_of("softmax", "sigmoid", "sqrtsoftplus")
BIASES = (".gate.bias", ".gate.e_score_correction_bias")
HASHES = ".gate.tid2eid"
ROUTER_TENSORS = (*BIASES, HASHES)
"""How the names of a router's tensors end for which only some configs make room."""
MEGA_MOE = "DeepseekV4MoE.__init__: 0.29 models/deepseek_v4/nvidia/model.py:780-790, 0.33:253-266"
OWN_V4 = "transformers_utils/configs/deepseek_v4.py; models/deepseek_v4/nvidia/model.py, 0.29:774-801, 0.32:698-708, 1088"
OWN_V41 = "transformers_utils/configs/deepseek_v41.py; 0.33 models/deepseek_v41/nvidia/model.py:138, deepseek_v4:238-252"
STRICT_V4 = "transformers 5.19 to 5.24 deepseek_v4/configuration_deepseek_v4.py, run"
TEXT_CONFIG = "0.33 transformers_utils/config.py:1264, 0.29:1067 (a ValueError); SGLang 0.5.23 builds a model of defaults, run"
ROUTERS = "model_executor/layers/fused_moe/router"
NO_GROUPS = f"{ROUTERS}/router_factory.py, 0.29:145, 0.32:171: a ValueError for None"
V31 = "0.31 models/deepseek_v4/nvidia/model.py:839"
V2_KEYS = "transformers 5.24 deepseek_v2: 64, None"
STRICT = "transformers 5.20 and 5.24, the class of each type, run"
BARE = "0.33 models/glm5next/common/model.py:256, 312: an AttributeError without it; the config class has no such key"
STRICT_V3 = "0.5.22 utils/hf_transformers/common.py (V4 as transformers 5.19 DeepseekV3Config), configs/deepseek_v41.py, run"
FIRST = "0.33 model_executor/models/deepseek_v2.py:1295, glm4_moe_lite.py:170, 0.29:1283, 159: layer_idx >= first_k_dense_replace"
SCALING = (
    "without one, vLLM 0.31 1.0 (model.py:820), 0.33 1.5 (V4's class), SGLang 0.5.23 2.5 (V3's class): other numbers, silently"
)
ONE_SLOT = "0.33 models/glm5next/common/model.py:1339, 0.32:1337: a NotImplementedError"
SGLANG = "0.5.21 models/deepseek_v2.py:485, 627, 687; 0.5.23:519, 711, 775"

RULES: tuple[KeyRule, ...] = (
    KeyRule("vLLM", BOTH, ("scoring_func",), one_of("sqrtsoftplus"), MEGA_MOE, native=True),
    KeyRule("vLLM", BOTH, ("expert_dtype",), one_of("fp4"), MEGA_MOE, native=True),
    KeyRule("vLLM", BOTH, ("norm_topk_prob",), one_of(True), V31, native=True, since="0.31"),
    *(KeyRule(engine, BOTH, ("routed_scaling_factor",), NUMBER, SCALING, stated=True) for engine in ("vLLM", "SGLang")),
    *(KeyRule(engine, FLAT, ("text_config",), NO_OBJECT, TEXT_CONFIG) for engine in ("vLLM", "SGLang")),
    KeyRule("vLLM", V4, ("n_routed_experts", "num_experts_per_tok"), SIZE, OWN_V4, stated=True, last="0.32"),
    KeyRule("vLLM", V4, ("norm_topk_prob",), ANY, OWN_V4, stated=True, last="0.32"),
    KeyRule("vLLM", V4, ("swiglu_limit",), NUMBER_OR_NULL, OWN_V4, stated=True, last="0.32"),
    KeyRule("vLLM", V4, ("num_hash_layers",), COUNT, OWN_V4, stated=True, last="0.32"),
    KeyRule("vLLM", V41, ("n_routed_experts", "num_experts_per_tok"), SIZE, OWN_V41, stated=True),
    KeyRule("vLLM", V41, ("norm_topk_prob",), ANY, OWN_V41, stated=True),
    KeyRule("vLLM", V41, ("swiglu_limit",), NUMBER_OR_NULL, OWN_V41, stated=True),
    *(
        row
        for engine, since in (("vLLM", "0.33"), ("SGLang", "0.5.22"))
        for row in (
            KeyRule(engine, V4, ("n_routed_experts", "num_experts_per_tok"), SIZE, STRICT_V4, since=since),
            KeyRule(engine, V4, ("num_nextn_predict_layers",), COUNT, STRICT_V4, since=since),
            KeyRule(engine, V4, ("swiglu_limit", "routed_scaling_factor"), FLOAT, STRICT_V4, since=since),
            KeyRule(engine, V4, ("norm_topk_prob",), FLAG, STRICT_V4, since=since),
        )
    ),
    KeyRule("vLLM", V4, ("num_hash_layers",), COUNT_OR_NULL, STRICT_V4, since="0.33"),
    KeyRule("vLLM", BOTH, ("scoring_func",), SCORES, f"0.33 {ROUTERS}/fused_topk_bias_router.py:218-256"),
    KeyRule("SGLang", BOTH, ("scoring_func",), one_of("sigmoid", "sqrtsoftplus"), f"{SGLANG}, topk.py:1598", stated=True),
    KeyRule("SGLang", BOTH, ("num_experts_per_tok",), SIZE, f"{STRICT_V3}: without one, 8", stated=True),
    KeyRule("SGLang", BOTH, ("topk_method",), ANY, SGLANG, stated=True),
    KeyRule("SGLang", BOTH, ("swiglu_limit",), ANY, f"{SGLANG}: without one there is no clamp", stated=True),
    KeyRule("SGLang", V4, ("num_hash_layers",), COUNT, f"{SGLANG}: layer_id < num_hash_layers"),
    KeyRule("SGLang", V41, ("num_hash_layers",), one_of(0), f"{SGLANG}: V4.1 has no tid2eid"),
    KeyRule("SGLang", V4, ("num_hash_layers",), COUNT, f"{SGLANG}: without one, none", stated=True, tensor=HASHES),
    KeyRule("SGLang", BOTH, ("n_group", "topk_group"), INTEGER, STRICT_V3, since="0.5.22"),
    KeyRule("SGLang", V41, ("routed_scaling_factor",), FLOAT, STRICT_V3, since="0.5.22"),
    *(
        KeyRule(engine, types, ("topk_method",), one_of("noaux_tc"), "no other value makes a bias", stated=True, tensor=bias)
        for engine, types, bias in (
            ("vLLM", BOTH, BIASES[0]),
            ("SGLang", BOTH, BIASES[0]),
            ("vLLM", DEEPSEEK | KIMI | GLM5, BIASES[1]),
        )
    ),
    KeyRule("vLLM", GLM5, ("topk_method",), ANY, BARE, stated=True),
    KeyRule("vLLM", GLM5, ("scoring_func",), SCORES, BARE, stated=True),
    KeyRule("vLLM", GLM5, ("n_shared_experts",), one_of(1), ONE_SLOT),
    KeyRule("vLLM", GLM5, ("swiglu_limit",), FLOAT, STRICT, since="0.33"),
    KeyRule("vLLM", GROUPED | KIMI | GLM5, ("routed_scaling_factor",), FLOAT, STRICT, since="0.33"),
    KeyRule("vLLM", NORMED, ("norm_topk_prob",), FLAG, STRICT, since="0.33"),
    KeyRule("vLLM", frozenset({"qwen3_next"}), ("decoder_sparse_step",), SIZE, STRICT, since="0.33"),
    KeyRule("vLLM", DEEPSEEK | KIMI, ("scoring_func",), SCORES, f"0.33 {ROUTERS}/grouped_topk_router.py:113-118"),
    KeyRule("vLLM", GROUPED | KIMI | GLM5, ("n_group", "topk_group"), SIZE, NO_GROUPS),
    KeyRule("vLLM", V2 | KIMI | {"kimi_k2"}, ("n_group", "topk_group"), SIZE, NO_GROUPS + "; V3's class: 8, 4", stated=True),
    KeyRule("vLLM", FLAT | NESTED, ("num_experts_per_tok",), SIZE, "FusedMoE computes with it: a TypeError for None"),
    KeyRule("vLLM", frozenset(FIRST_WITH_EXPERTS), ("first_k_dense_replace",), COUNT, FIRST),
    KeyRule("vLLM", frozenset({"glm4_moe_lite"}), ("first_k_dense_replace",), COUNT, FIRST, stated=True),
    KeyRule("vLLM", V2 | {"kimi_vl"}, ("n_routed_experts", "num_experts_per_tok"), SIZE, V2_KEYS, stated=True),
)  # fmt: skip


def key_refusals(
    config: Mapping[str, Any], target: Named, tensors: Iterable[str] = (), *, native: bool = False
) -> Iterator[Reason]:
    """Find keys with which a server does not load a model, or builds another one. ``tensors``: those of `ROUTER_TENSORS` it has."""
    server, ends, model_type = f"{target.engine} {target.release}", set(tensors), str(config.get("model_type", ""))
    for rule in RULES:
        if not rule.covers(target, model_type, native=native) or (rule.tensor and rule.tensor not in ends):
            continue
        for key in rule.keys:
            value = server_config_value(config, key)
            message = f"{key} is {value!r}: {server} raises for anything but {rule.takes.what}{' under MegaMoE' * native}"
            if value is ABSENT and rule.stated:
                message = f"there is no {key}: {server} raises, or takes a default that does not fit"
            elif value is ABSENT or rule.takes.fit(value):
                continue
            yield Reason("config-unsupported", message)
