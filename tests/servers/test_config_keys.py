"""Keys of config.json with which releases do not load a model: each value in each release, as their own code was run with it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from fse_convert.servers.config_keys import ABSENT, FLAT, RULES, KeyRule
from fse_convert.servers.config_keys import STRICT as STRICT_CLASSES
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
DSA_CONFIG = V3_CONFIG | {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}
K2_CONFIG = V3_CONFIG | {"model_type": "kimi_k2"}
BIAS: Tensors = {"layers.0.ffn.gate.bias": ("F32", (2,))}
V3_BIAS: Tensors = {"model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (2,))}
HASH: Tensors = {"layers.0.ffn.gate.tid2eid": ("I64", (8, 1))}

NATIVE = tuple(VLLM)
OLD, NEW = NATIVE[:4], (*NATIVE[4:], *MEGA)
"""vLLM with a config class of its own for DeepSeek-V4, and with that of transformers; AITER MegaMoE came with the latter."""
SGLANG_ALL = (*SGLANG, *SLOTS)
STRICT = tuple(n for n in SGLANG_ALL if not n.startswith(("sglang-0.5.20", "sglang-0.5.21")))
"""Those whose transformers was read."""
V33 = tuple(n for n in AITER if n.startswith("vllm-0.33"))
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
    ("routed_scaling_factor", ABSENT, {}, EVERY),
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
    ("routed_scaling_factor", ABSENT, {}, EVERY),
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
        *((V3_CONFIG, "routed_scaling_factor", value, {}, V33) for value in (None, 1)),
        *((c, "routed_scaling_factor", None, {}, V33) for c in (GLM_CONFIG, DSA_CONFIG)),
        (V3_CONFIG, "routed_scaling_factor", 1.0, {}, ()),
        (V3_CONFIG, "norm_topk_prob", None, {}, ()),
        *((c, "norm_topk_prob", None, {}, V33) for c in (GLM_CONFIG, DSA_CONFIG)),
        *((c, key, ABSENT, {}, AITER) for c in (K2_CONFIG, V2_CONFIG) for key in ("n_group", "topk_group")),
        (V3_CONFIG, "n_group", ABSENT, {}, ()),
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


QWEN = {
    "num_experts": 2, "shared_expert_intermediate_size": 256, "moe_intermediate_size": 256, "hidden_size": 512,
    "num_hidden_layers": 1, "num_experts_per_tok": 1,
}  # fmt: skip
GLM5 = {k: v for k, v in V3_CONFIG.items() if k not in ("model_type", "architectures", "quantization_config")}
GLM5_TARGETS = ("vllm-0.32-aiter", "vllm-0.33-aiter")
QWEN_NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **QWEN}
NESTED: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN, "shared_expert"),
    ("glm5_next", "Glm5NextForConditionalGeneration", GLM5, "shared_experts"),
)


def whole_of(layer: str, shared: str) -> Tensors:
    """Two routed experts and a shared one in FP8."""
    modules = ("experts.0", "experts.1", shared)
    gate: Tensors = {f"{layer}.shared_expert_gate.weight": ("BF16", (1, 512))} if shared == "shared_expert" else {}
    return gate | {n: i for m in modules for n, i in expert(f"{layer}.{m}", "fp8-128-f32-scale", 256, 512, PROJ).items()}


@pytest.mark.parametrize(
    ("model_type", "key", "value", "lost"),
    [
        ("qwen3_5_moe", "num_experts_per_tok", None, AITER),
        ("qwen3_5_moe", "num_experts_per_tok", ABSENT, ()),
        ("glm5_next", "num_experts_per_tok", None, AITER),
        ("glm5_next", "topk_method", ABSENT, AITER),
        ("glm5_next", "scoring_func", ABSENT, AITER),
        ("glm5_next", "n_group", None, AITER),
        ("glm5_next", "norm_topk_prob", None, V33),
        ("glm5_next", "routed_scaling_factor", 1, V33),
        ("glm5_next", "swiglu_limit", None, V33),
    ],
)
def test_types_that_nest_their_text_model(model_type: str, key: str, value: Any, lost: Iterable[str]) -> None:
    _, architecture, text, shared = next(row for row in NESTED if row[0] == model_type)
    tensors = whole_of("model.language_model.layers.0.mlp", shared)
    about = {"model_type": model_type, "architectures": [architecture], "quantization_config": FP8}
    usual = fusing({**about, "text_config": text}, tensors)
    assert usual == set(AITER if model_type == "qwen3_5_moe" else GLM5_TARGETS)
    assert fusing({**about, "text_config": changed(text, key, value)}, tensors) == usual - set(lost)


def test_two_shared_experts_of_glm5_next_are_no_slots() -> None:
    block = "model.language_model.layers.0.mlp"
    tensors = {**whole_of(block, "shared_experts"), **expert(f"{block}.shared_experts", "fp8-128-f32-scale", 512, 512, PROJ)}
    about = {"model_type": "glm5_next", "architectures": [NESTED[1][1]], "quantization_config": FP8}
    config = {**about, "text_config": {**GLM5, "n_shared_experts": 2}}
    assert fusing(config, tensors) == set()
    answers = judge(subject_of(config, tensors))
    reasons = {a.name: [r.message for r in a.model.reasons] for a in answers if a.name in GLM5_TARGETS}
    assert reasons == {
        f"vllm-{n}-aiter": [f"n_shared_experts is 2: vLLM ROCm {n} raises for anything but 1"] for n in ("0.32", "0.33")
    }


@pytest.mark.parametrize(
    ("key", "value", "lost"),
    [("norm_topk_prob", None, V33), ("decoder_sparse_step", None, V33), ("decoder_sparse_step", 1, ()), ("n_group", None, ())],
)
def test_keys_of_qwen3_next(key: str, value: Any, lost: Iterable[str]) -> None:
    tensors, config = whole_of("model.layers.0.mlp", "shared_expert"), {**QWEN_NEXT, "quantization_config": FP8}
    assert fusing(config, tensors) == set(AITER)
    assert fusing(changed(config, key, value), tensors) == set(AITER) - set(lost)


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


@pytest.mark.parametrize("rule", [r for r in RULES if r.source == STRICT_CLASSES], ids=lambda r: r.keys[0])
def test_transformers_own_classes_of_other_types(rule: KeyRule) -> None:
    transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")
    known = [t for t in sorted(rule.model_types) if t in transformers.CONFIG_MAPPING and t not in ("kimi_vl", "kimi_k2")]
    assert known
    for model_type in known:
        cls = transformers.CONFIG_MAPPING[model_type]
        for value, right in ((None, False), ("x", False), (1.0, rule.takes.fit(1.0)), (1, rule.takes.fit(1))):
            keys = {rule.keys[0]: value}
            arguments = {"text_config": keys} if "text_config" in cls.sub_configs else keys
            with nullcontext() if right else pytest.raises(Exception, match=rule.keys[0]):
                cls(**arguments)
