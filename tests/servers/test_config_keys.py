"""Keys of config.json with which releases do not load a model: each value in each release, as their own code was run with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from fse_convert.servers.config_keys import ABSENT, FLAT, RULES
from fse_convert.servers.judge import ALL_TARGETS, judge
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.memory import PROJ, Model, Tensors, expert, subject_of
from tests.releases import AITER, MEGA, SGLANG, SLOTS, VLLM

V4 = Model(hidden=512, width=512, shared="fp8-128", layers=1, mtp=0)
V41 = replace(V4, config={"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]})
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V3_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": 1, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 0,
    "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "quantization_config": FP8,
}  # fmt: skip
GLM_CONFIG = V3_CONFIG | {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
GLM_LITE_CONFIG = V3_CONFIG | {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
V2_CONFIG = V3_CONFIG | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
BIAS: Tensors = {"layers.0.ffn.gate.bias": ("F32", (2,))}
V3_BIAS: Tensors = {"model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (2,))}
HASH: Tensors = {"layers.0.ffn.gate.tid2eid": ("I64", (8, 1))}

NATIVE = tuple(VLLM)
OLD, NEW = NATIVE[:4], (*NATIVE[4:], *MEGA)
"""vLLM with a config class of its own for DeepSeek-V4, and with that of transformers; AITER MegaMoE came with the latter."""
SGLANG_ALL = (*SGLANG, *SLOTS)
STRICT = tuple(n for n in SGLANG_ALL if not n.startswith(("sglang-0.5.20", "sglang-0.5.21")))
"""Those whose transformers was read."""
EVERY = (*OLD, *NEW, *SGLANG_ALL)

V4_KEYS: list[tuple[str, Any, Tensors, Iterable[str]]] = [
    ("expert_dtype", None, {}, (*NATIVE, *MEGA)),
    ("expert_dtype", ABSENT, {}, ()),
    ("scoring_func", None, {}, EVERY),
    ("scoring_func", ABSENT, {}, SGLANG_ALL),
    ("scoring_func", "softmax", {}, (*NATIVE, *SGLANG_ALL)),
    ("scoring_func", "other", {}, EVERY),
    ("topk_method", ABSENT, {}, SGLANG_ALL),
    ("topk_method", "greedy", {}, ()),
    ("topk_method", "greedy", BIAS, EVERY),
    ("topk_method", None, BIAS, EVERY),
    ("topk_method", ABSENT, BIAS, EVERY),
    ("swiglu_limit", 10, {}, (*NEW, *STRICT)),
    ("swiglu_limit", None, {}, (*NEW, *STRICT)),
    ("swiglu_limit", ABSENT, {}, (*OLD, *SGLANG_ALL)),
    ("num_hash_layers", ABSENT, {}, OLD),
    ("num_hash_layers", ABSENT, HASH, (*OLD, *SGLANG_ALL)),
    ("num_hash_layers", None, {}, (*OLD, *SGLANG_ALL)),
    ("num_experts_per_tok", ABSENT, {}, (*OLD, *SGLANG_ALL)),
    ("num_experts_per_tok", None, {}, EVERY),
    ("norm_topk_prob", None, {}, (*NATIVE[2:4], *NEW, *STRICT)),
    ("norm_topk_prob", ABSENT, {}, OLD),
    ("routed_scaling_factor", 2, {}, (*NEW, *STRICT)),
    ("num_nextn_predict_layers", None, {}, (*NEW, *STRICT)),
    ("n_group", "x", {}, STRICT),
    ("n_group", None, {}, ()),
    ("n_group", 7, {}, ()),
    ("topk_group", [1], {}, STRICT),
    ("text_config", {}, {}, EVERY),
    ("text_config", {"quantization_config": FP8}, {}, EVERY),
    ("text_config", None, {}, ()),
]
V41_KEYS: list[tuple[str, Any, Tensors, Iterable[str]]] = [
    ("expert_dtype", None, {}, NATIVE),
    ("scoring_func", None, {}, EVERY),
    ("scoring_func", ABSENT, {}, SGLANG_ALL),
    ("topk_method", ABSENT, BIAS, EVERY),
    ("swiglu_limit", 10, {}, ()),
    ("swiglu_limit", ABSENT, {}, EVERY),
    ("num_experts_per_tok", ABSENT, {}, EVERY),
    ("num_experts_per_tok", None, {}, EVERY),
    ("norm_topk_prob", ABSENT, {}, NATIVE),
    ("num_hash_layers", ABSENT, {}, ()),
    ("num_hash_layers", 3, {}, SGLANG_ALL),
    ("routed_scaling_factor", 2, {}, STRICT),
    ("n_group", "x", {}, STRICT),
    ("text_config", {}, {}, ()),
    ("text_config", {"n_group": "x"}, {}, STRICT),
]
"""Key, value, tensors beside the experts, and the targets that fuse the model with the right value and not with this one."""


def fusing(config: dict[str, Any], tensors: Tensors) -> set[str]:
    """Name the servers that fuse a model; those that do not for its config say so."""
    answers = [a for a in judge(subject_of(config, tensors)) if a.name in {*EVERY, *AITER}]
    refused = [a.model for a in answers if any(r.code == "config-unsupported" for r in a.model.reasons)]
    assert {verdict.outcome for verdict in refused} <= {Outcome.REFUSED}
    return {a.name for a in answers if a.fused}


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in (config | {key: value}).items() if v is not ABSENT}


@pytest.mark.parametrize(
    ("model", "key", "value", "beside", "lost"), [(V4, *row) for row in V4_KEYS] + [(V41, *r) for r in V41_KEYS]
)
def test_each_value_in_each_release(model: Model, key: str, value: Any, beside: Tensors, lost: Iterable[str]) -> None:
    config, tensors = model.full_config(), model.tensors()
    usual = fusing(config, tensors)
    assert usual.issuperset((*VLLM[2:], *SLOTS[1:]))
    assert fusing(changed(config, key, value), tensors | beside) == usual - set(lost)


@pytest.mark.parametrize(
    ("config", "key", "value", "beside", "lost"),
    [
        (V3_CONFIG, "n_group", None, {}, AITER),
        (V3_CONFIG, "topk_group", None, {}, AITER),
        (V3_CONFIG, "scoring_func", None, {}, AITER),
        (V3_CONFIG, "scoring_func", "softmax", {}, ()),
        (V3_CONFIG, "topk_method", "greedy", {}, ()),
        (V3_CONFIG, "topk_method", "greedy", V3_BIAS, AITER),
        (V3_CONFIG, "topk_method", ABSENT, V3_BIAS, AITER),
        (V3_CONFIG, "num_experts_per_tok", None, {}, AITER),
        (V3_CONFIG, "num_experts_per_tok", ABSENT, {}, ()),
        (V3_CONFIG, "text_config", {}, {}, AITER),
        (V2_CONFIG, "num_experts_per_tok", ABSENT, {}, AITER),
        (V3_CONFIG, "first_k_dense_replace", None, {}, AITER),
        (GLM_LITE_CONFIG, "first_k_dense_replace", ABSENT, {}, AITER),
        (GLM_LITE_CONFIG, "n_group", ABSENT, {}, ()),
        (GLM_CONFIG, "n_group", None, {}, AITER),
        (GLM_CONFIG, "topk_method", ABSENT, V3_BIAS, ()),
        (GLM_CONFIG, "text_config", {}, {}, AITER),
    ],
)
def test_families_beside_v4(config: dict[str, Any], key: str, value: Any, beside: Tensors, lost: Iterable[str]) -> None:
    block = "model.layers.0.mlp"
    tensors = {
        n: i
        for e in ("experts.0", "experts.1", "shared_experts")
        for n, i in expert(f"{block}.{e}", "fp8-128-f32-scale", 256, 512, PROJ).items()
    }
    assert fusing(config, tensors) == set(AITER)
    assert fusing(changed(config, key, value), tensors | beside) == set(AITER) - set(lost)


def test_another_name_of_the_number_of_experts_is_read_by_transformers_classes_alone() -> None:
    for model, lost in ((V4, {*OLD}), (V41, {*NATIVE})):
        config, tensors = model.full_config(), model.tensors()
        renamed = changed(config, "n_routed_experts", ABSENT) | {"num_local_experts": model.experts}
        assert fusing(renamed, tensors) == fusing(config, tensors) - lost
        found = subject_of(config | {"num_local_experts": 8}, tensors).description.conflicts
        assert [c.message for c in found] == ["num_local_experts is 8, the tensors show 2 routed experts per decoder layer"]
    v2 = {k: v for k, v in V2_CONFIG.items() if k != "n_routed_experts"} | {"num_local_experts": 2}
    assert fusing(v2, V4.tensors()) == set()


def test_every_rule_has_a_source_and_a_target() -> None:
    for rule in RULES:
        assert rule.source
        assert any(rule.covers(t, kind, native=rule.native) for t in ALL_TARGETS for kind in rule.model_types), rule


def test_flat_types_have_a_class_that_knows_no_text_config() -> None:
    transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")
    known = [transformers.CONFIG_MAPPING[t] for t in sorted(FLAT - {"kimi_k2"})]
    assert [cls.__name__ for cls in known if "text_config" in cls.sub_configs] == []


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("swiglu_limit", 10.0, (10, None, "10")),
        ("routed_scaling_factor", 1.5, (2, None)),
        ("norm_topk_prob", True, (None, "x")),
        ("num_experts_per_tok", 6, (None, "6")),
        ("num_nextn_predict_layers", 1, (None, 1.0)),
        ("scoring_func", "sqrtsoftplus", (None, 5)),
        ("n_group", "x", ()),
    ],
)
def test_transformers_own_class_of_v4(key: str, right: Any, wrong: tuple[Any, ...]) -> None:
    """The class is the judge of the rows that say so."""
    transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")
    transformers.DeepseekV4Config(**{key: right})
    for value in wrong:
        with pytest.raises(Exception, match=key):
            transformers.DeepseekV4Config(**{key: value})
