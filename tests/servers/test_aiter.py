"""vLLM's AITER rules, one case per rule; `tests/peers/test_aiter_vllm.py` holds them against vLLM's own code."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.model.quantization import read_quantization
from fse_convert.servers.aiter.all_or_nothing import judge_model
from fse_convert.servers.aiter.families import AITER_FAMILIES, AiterFamily, find_aiter_family
from fse_convert.servers.aiter.patterns import Renames, modelopt_entries
from fse_convert.servers.aiter.question import (
    AiterQuestion,
    AiterTarget,
    ask_aiter,
    judge,
    judge_block,
    judge_decoder_layer,
    judge_mtp_layer,
)
from fse_convert.servers.aiter.vllm_config import RELEASES
from fse_convert.servers.release_names import is_since
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP4_SPEC = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
MXFP4 = {"weight": FP4_SPEC, "input_tensors": {**FP4_SPEC, "is_dynamic": True}}
FP8_SCHEME = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": MXFP4,
    "exclude": [],
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "export": {"kv_cache_group": []},
}
INNER = {**FP8, **{key: value for key, value in QUARK.items() if key != "quant_method"}}
MXFP8 = {"quant_method": "mxfp8", "ignored_layers": []}
V3, V4, V41 = "deepseek_v3", "deepseek_v4", "deepseek_v41"
SHARED = "model.layers.3.mlp.shared_experts"
V4_SHARED = "model.layers.3.ffn.shared_experts"


def question_of(config: dict[str, Any], file: Any = None, release: str = "0.33", *, mega: bool = False) -> AiterQuestion | Verdict:
    return ask_aiter(config, file, read_quantization(config, file), AiterTarget("x", RELEASES[release], mega_moe=mega))


def ask(scheme: Any, model_type: str = V3, release: str = "0.33", file: Any = None, **more: Any) -> AiterQuestion:
    config: dict[str, Any] = {"model_type": model_type, "quantization_config": scheme, "num_hidden_layers": 43}
    if model_type == V41:
        config["text_config"] = {"num_hidden_layers": config.pop("num_hidden_layers")}
    config |= more.pop("config", {})
    question = question_of(config, file, release, **more)
    assert isinstance(question, AiterQuestion)
    return question


def verdict(scheme: Any, model_type: str = V3, release: str = "0.33", **more: Any) -> Verdict:
    return judge_decoder_layer(ask(scheme, model_type, release, **more), 3)


@pytest.mark.parametrize(
    ("scheme", "model_type", "more"),
    [
        (None, V3, {}),
        (FP8, V3, {}),
        (FP8, V4, {"config": {"expert_dtype": "fp8"}}),
        ({**FP8, "expert_dtype": "fp8"}, V41, {}),
        (QUARK, V4, {}),
        (FP8, V4, {"mega": True}),
        (QUARK, V4, {"mega": True}),
        ({**QUARK, "exclude": ["re:.*shared_experts.*"]}, V4, {"mega": True}),
        (INNER, V4, {}),
        (MXFP8, "minimax_m3", {}),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, "glm4_moe", {}),
    ],
    ids=[
        "no quantization",
        "block FP8",
        "V4 with FP8 experts",
        "V4.1 with FP8 experts",
        "V4 by Quark",
        "V4 on aiter_mega_moe",
        "V4 by Quark on aiter_mega_moe",
        "V4 by Quark on aiter_mega_moe, shared experts excluded",
        "V4, FP8 with Quark's keys",
        "MiniMax M3, MXFP8",
        "GLM-4 MoE, ModelOpt MXFP8",
    ],
)
def test_what_fuses(scheme: Any, model_type: str, more: dict[str, Any]) -> None:
    assert verdict(scheme, model_type, **more) == FUSED


MEGA = {"mega": True}
REFUSALS = [
    (
        {**FP8, "quant_method": "compressed-tensors"},
        V4,
        MEGA,
        "aiter-online-class",
        "online quantization FSE compatibility check is not implemented for CompressedTensorsConfig",
    ),
    (
        {**QUARK, "exclude": ["model.layers.3.ffn.experts"]},
        V4,
        MEGA,
        "aiter-online-routed-key",
        "online shared-expert quantization is not supported for routed expert weight key None",
    ),
    (
        {**QUARK, "global_quant_config": FP8_SCHEME},
        V4,
        MEGA,
        "aiter-online-routed-key",
        "online shared-expert quantization is not supported for routed expert weight key fp8_e4m3 per_block",
    ),
    (
        None,
        V4,
        {"config": {"compression_config": FP8}},
        "aiter-deepseek-no-quantization",
        "DeepSeek-V4/V4.1 has no quantization configuration",
    ),
    (FP8, V4, {}, "aiter-deepseek-not-quark-mxfp4", "DeepSeek-V4/V4.1 FSE is only implemented/tested with Quark MXFP4"),
    (
        {**INNER, "exclude": ["layers.3.ffn.shared_experts.w2"]},
        V4,
        {},
        "aiter-deepseek-excluded",
        "DeepSeek-V4/V4.1 excludes shared experts at layers.3.ffn.shared_experts",
    ),
    (
        {**INNER, "layer_quant_config": {r"re:layers\.\d+\.ffn\.shared_experts\.w1": FP8_SCHEME}},
        V4,
        {},
        "aiter-deepseek-shared-not-mxfp4",
        "DeepSeek-V4/V4.1 shared experts at layers.3.ffn.shared_experts are not MXFP4",
    ),
    ({**QUARK, "exclude": ["re:.*shared_experts.*"]}, V3, {}, "aiter-quark-excluded", f"Quark excludes shared experts at {SHARED}"),
    (
        {**QUARK, "layer_quant_config": {"*shared_experts*": FP8_SCHEME}},
        V3,
        {},
        "aiter-quark-configs-differ",
        f"Quark uses different quantization configurations for routed and shared experts at {SHARED}",
    ),
    (
        {**FP8, "store_dtype": "mxfp4"},
        V3,
        {},
        "aiter-fp8-store-dtype",
        f"FP8 stores routed experts as mxfp4, which is not supported for fused shared experts at {SHARED}",
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        V3,
        {},
        "aiter-fp8-not-block",
        "FP8 shared-expert FSE is only implemented for block-quantized checkpoints",
    ),
    (
        {**FP8, "ignored_layers": [f"{SHARED}.down_proj"]},
        V3,
        {},
        "aiter-fp8-ignored-differently",
        f"FP8 ignores routed and shared experts inconsistently at {SHARED}",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["*shared_experts*"]},
        V3,
        {},
        "aiter-mxfp8-excluded-differently",
        f"MXFP8 excludes routed and shared experts inconsistently at {SHARED}",
    ),
    (
        {"quant_method": "compressed-tensors"},
        V3,
        {},
        "aiter-quantization-unsupported",
        "shared-expert FSE quantization compatibility is not implemented for CompressedTensorsConfig",
    ),
]


@pytest.mark.parametrize(("scheme", "model_type", "more", "code", "message"), REFUSALS, ids=[row[3] for row in REFUSALS])
def test_what_does_not_fuse(scheme: Any, model_type: str, more: dict[str, Any], code: str, message: str) -> None:
    assert verdict(scheme, model_type, **more) == Verdict(Outcome.UNFUSED, (Reason(code, message),))


@pytest.mark.parametrize(
    ("scheme", "model_type", "code", "text"),
    [
        ({**FP8, "weight_block_size": [1]}, V3, "aiter-config-refused", "must have 2 dimensions"),
        ({**FP8, "ignored_layers": [f"{SHARED}.gate_proj"]}, V3, "aiter-shards-differ", f"not all shards of {SHARED}.gate_up_proj"),
        (
            {**QUARK, "exclude": [f"re:{SHARED}.up"]},
            V3,
            "aiter-shards-differ",
            "Found different quantization schemes for the shards of",
        ),
        ({**FP8, "expert_dtype": "int4"}, V41, "aiter-server-error", "Unsupported DeepSeek V4 expert_dtype='int4'"),
        ({key: QUARK[key] for key in QUARK if key != "exclude"}, V3, "aiter-quark-incomplete", "assert 'exclude' in"),
        ({**QUARK, "exclude": None}, V3, "aiter-server-error", "'NoneType' object is not iterable"),
        (
            {**INNER, "layer_quant_config": {"layers.3.ffn.shared_experts.w1": {"weight": [FP4_SPEC]}}},
            V4,
            "aiter-server-error",
            "'list'",
        ),
    ],
)
def test_what_stops_the_server(scheme: Any, model_type: str, code: str, text: str) -> None:
    found = verdict(scheme, model_type)
    assert (found.outcome, found.reasons[0].code) == (Outcome.ERROR, code)
    assert text in found.reasons[0].message


@pytest.mark.parametrize(
    ("scheme", "model_type"),
    [
        ({**QUARK, "exclude": ["re:("]}, V3),
        ({**QUARK, "exclude": "lm_head"}, V3),
        ({**QUARK, "layer_quant_config": [1]}, V3),
        ({**FP8, "ignored_layers": "lm_head"}, V3),
        ("fp8", V3),
    ],
)
def test_what_is_not_understood_is_unknown(scheme: Any, model_type: str) -> None:
    found = verdict(scheme, model_type)
    assert (found.outcome, found.reasons[0].code) == (Outcome.UNKNOWN, "aiter-config-unclear")


def test_a_regular_expression_need_not_match_to_the_end_for_quark() -> None:
    assert not verdict({**QUARK, "exclude": [f"re:{SHARED}"]}).fused
    assert verdict({**QUARK, "exclude": ["re:shared_experts"]}).fused
    assert verdict({**QUARK, "exclude": [f"{SHARED}*"]}).fused  # no shell patterns here
    assert verdict({**QUARK, "exclude": [SHARED]}).fused


def test_a_quark_scheme_applies_where_the_module_is_part_of_its_name() -> None:
    longer = {f"x.{SHARED}.gate_proj.y": FP8_SCHEME}
    assert not verdict({**QUARK, "layer_quant_config": longer}).fused
    assert verdict({**QUARK, "layer_quant_config": {SHARED: FP8_SCHEME}}).fused
    assert verdict({**QUARK, "layer_quant_config": {r"re:.*\.shared_experts\..*".replace("*", ""): FP8_SCHEME}}).fused


def test_fp8_lists_know_experts_in_the_plural_only() -> None:
    routed = {**FP8, "ignored_layers": ["model.layers.3.mlp.experts.7.up_proj"]}
    assert not verdict(routed).fused  # part of the entry: the routed experts count as ignored, the shared ones not
    assert not verdict({**FP8, "ignored_layers": [f"x.{SHARED}.down_proj"]}).fused
    assert verdict({**FP8, "ignored_layers": ["x.model.layers.3.mlp.shared_expert.down_proj"]}, "qwen3_next").fused


def test_deepseek_v4_names_are_those_of_the_checkpoint() -> None:
    named = {**QUARK, "exclude": [f"layers.3.ffn.shared_experts.{part}" for part in ("w1", "w2", "w3")]}
    assert verdict(named, V4).reasons[0].message == f"Quark excludes shared experts at {V4_SHARED}"
    assert not verdict(named, V41).fused
    assert judge_decoder_layer(ask(named, V4), 4) == FUSED


@pytest.mark.parametrize(("release", "fused"), [("0.32", True), ("0.33", False)])
def test_since_033_the_drafters_own_entries_are_read(release: str, fused: bool) -> None:
    question = ask({**QUARK, "exclude": [f"mtp.1.ffn.shared_experts.{part}" for part in ("w1", "w2", "w3")]}, V4, release)
    assert [judge_mtp_layer(question, k).fused for k in range(3)] == [True, fused, True]


def test_mtp_layers_keep_their_names_in_deepseeks_rule() -> None:
    question = ask({**INNER, "exclude": ["mtp.0.ffn.shared_experts"]}, V4)
    assert judge_mtp_layer(question, 0).reasons[0].message == "DeepSeek-V4/V4.1 excludes shared experts at mtp.0.ffn.shared_experts"
    assert judge_mtp_layer(question, 1) == FUSED


def test_mtp_layers_need_the_number_of_decoder_layers() -> None:
    found = judge_mtp_layer(ask(FP8, config={"num_hidden_layers": None}), 0)
    assert found.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("0.29", "DeepSeek-v4 FSE is only implemented/tested with Quark MXFP4"),
        ("0.30", None),
        ("0.31", None),
        ("0.32", None),
        ("0.33", "DeepSeek-V4/V4.1 FSE is only implemented/tested with Quark MXFP4"),
    ],
)
def test_the_official_deepseek_v4_by_release(release: str, message: str | None) -> None:
    """0.30 to 0.32 pick a class on ROCm that their check does not know, and let FP8 shared experts pass."""
    question = ask(FP8, V4, release, config={"expert_dtype": "fp4"})
    found = judge_decoder_layer(question, 3)
    assert [reason.message for reason in found.reasons] == ([message] if message else [])


@pytest.mark.parametrize("model_type", ["alice_ai", "glm5_next", V41])
def test_families_fuse_from_a_release_on(model_type: str) -> None:
    config = {"model_type": model_type, "quantization_config": QUARK, "num_hidden_layers": 43}
    asked = {name: question_of(config, None, name) for name in RELEASES}
    found = [name for name, q in asked.items() if isinstance(q, AiterQuestion) and judge_decoder_layer(q, 3).fused]
    first = {"alice_ai": "0.33", "glm5_next": "0.32", V41: "0.30"}[model_type]
    assert found == [name for name in RELEASES if is_since(name, first)]


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}, "0.29"),
        ({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vision_n_layers": 27}, "0.30"),
        ({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForConditionalGeneration"]}, "0.30"),
        ({"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}, "0.30"),
        ({"model_type": "alice_ai"}, "0.33"),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLMNextN"]}, None),
    ],
    ids=["V4", "V4 with a vision tower", "V4's vision class by name", "V4.1", "Alice AI", "a draft exported for SGLang"],
)
def test_a_release_without_the_class_refuses(config: dict[str, Any], first: str | None) -> None:
    """Registries of the releases: model_executor/models/registry.py."""
    found = {name: question_of({**config, "num_hidden_layers": 4}, None, name) for name in RELEASES}
    assert next((name for name, q in found.items() if isinstance(q, AiterQuestion)), None) == first
    refused = [q for q in found.values() if isinstance(q, Verdict)]
    assert all((q.outcome, q.reasons[0].code) == (Outcome.REFUSED, "model-unsupported") for q in refused)


@pytest.mark.parametrize("family", [f for f in AITER_FAMILIES if f.since and not f.flat], ids=lambda f: f.name)
def test_the_number_of_layers_may_stand_in_text_config(family: AiterFamily) -> None:
    base = {"architectures": sorted(family.architectures)[:1], "quantization_config": FP8, "model_type": "x"}
    flat, nested = (
        question_of({**base, "num_hidden_layers": 43}),
        question_of({**base, "text_config": {"num_hidden_layers": 43}}),
    )
    assert isinstance(flat, AiterQuestion)
    assert isinstance(nested, AiterQuestion)
    assert judge_mtp_layer(nested, 0) == judge_mtp_layer(flat, 0)
    assert judge_mtp_layer(nested, 0).outcome is not Outcome.UNKNOWN


def test_kimi_k3_never_fuses_this_way() -> None:
    question = ask(None, "kimi_k3")
    found = judge_decoder_layer(question, 3)
    assert (found.outcome, found.reasons[0].code) == (Outcome.UNFUSED, "aiter-family-unsupported")


def test_029_searches_for_a_word() -> None:
    scheme = {**QUARK, "exclude": ["model.layers.9.mlp.shared_expert_gate"]}
    assert verdict(scheme, release="0.29").reasons[0].message == f"Quark excludes shared experts at {SHARED}"
    assert verdict(scheme).fused


def test_rules_that_came_later() -> None:
    assert verdict(MXFP8, release="0.32").reasons[0].code == "aiter-quantization-unsupported"
    assert verdict(FP8, V4, "0.29", config={"expert_dtype": "fp8"}).reasons[0].message == "DeepSeek-V4 routed experts are not MXFP4"


def test_modelopts_own_file_is_the_quantisation_where_config_json_has_none() -> None:
    file = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert verdict(None, file=file).reasons[0].code == "aiter-fp8-not-block"
    assert verdict(None, V4, file=file).reasons[0].code == "aiter-deepseek-not-quark-mxfp4"


def test_a_whole_model_is_all_or_nothing() -> None:
    no = Verdict(Outcome.UNFUSED, (Reason("aiter-quark-excluded", "Quark excludes shared experts at x"),))
    stop = Verdict(Outcome.ERROR, (Reason("aiter-server-error", "x"),))
    unsure = Verdict(Outcome.UNKNOWN, (Reason("aiter-config-unclear", "x"),))
    assert judge_model([FUSED, FUSED]) == FUSED
    assert judge_model([no, no]) == no
    assert judge_model([]).outcome is Outcome.UNFUSED
    assert judge_model([FUSED, unsure, stop]) == stop
    assert judge_model([FUSED, unsure]) == unsure
    mixed = judge_model([FUSED, no, no])
    assert (mixed.outcome, mixed.reasons[0].code) == (Outcome.ERROR, "aiter-model-mixed")
    assert mixed.reasons[0].message == (
        "Fused shared experts must be enabled for all MoE layers; found 1 enabled and 2 disabled layers. "
        "Per-layer fused shared experts is not yet supported. Please open an issue."
    )


@pytest.mark.parametrize(
    ("model_type", "name"), [("kimi_k25", "KimiK25ForConditionalGeneration"), ("kimi_vl", "KimiVLForConditionalGeneration")]
)
@pytest.mark.parametrize("named", [True, False])
def test_kimi_with_a_vision_tower_runs_deepseeks_text_model(model_type: str, name: str, named: bool) -> None:
    text = {"model_type": "deepseek_v3", "n_shared_experts": 1, "num_hidden_layers": 2}
    config = {"model_type": model_type, "text_config": text, **({"architectures": [name]} if named else {})}
    family = find_aiter_family(config)
    assert family
    assert (name in family.architectures, family.block) == (True, "language_model.model.layers.{index}.mlp")


def test_families_are_found_by_class_then_by_type() -> None:
    names = [name for family in AITER_FAMILIES for name in family.architectures]
    types = [name for family in AITER_FAMILIES for name in family.model_types]
    assert len(names) == len(set(names))
    assert len(types) == len(set(types))
    nested = {"architectures": ["Other"], "text_config": {"model_type": "qwen3_5_moe_text"}}
    assert find_aiter_family(nested) is None
    assert getattr(find_aiter_family({**nested, "architectures": []}), "name", None) == "Qwen3.5"
    wins = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "deepseek_v3"}
    assert getattr(find_aiter_family(wins), "name", None) == "Qwen3.5 (vision)"
    assert find_aiter_family({"architectures": "x", "model_type": "llama"}) is None
    unknown = question_of({"model_type": "llama"})
    assert isinstance(unknown, Verdict)
    assert unknown.outcome is Outcome.UNKNOWN


def test_renames_are_tried_in_vllms_order() -> None:
    renames = Renames(
        regexes=((r"\.s$", ".scale"),),
        substrings=(("a.b", "c"),),
        prefixes=(("x.", "model.x."), ("model.", "top.")),
        suffixes=((".scale", ".z"),),
    )
    assert renames.apply("x.a.b.a.b.s") == "top.x.c.a.b.z"
    assert renames
    assert not Renames()


def test_modelopt_stars_stand_for_the_module_and_all_below() -> None:
    assert modelopt_entries(["a.b*", "a.*", "*", "c"]) == ["a.b", "a.b.*", "a.*", "*", "c"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["fp8", "fp4", "re:[", "re:.*", "*experts*", "x", "dynamic"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*INNER, "weight", "dtype", "ignore"]), inner, max_size=5)
    ),
    max_leaves=10,
)


@given(
    st.sampled_from([FP8, QUARK, INNER, MXFP8]),
    st.dictionaries(st.sampled_from([*INNER, "store_dtype"]), JSON, max_size=4),
    st.data(),
)
def test_judging_never_raises(scheme: dict[str, Any], changes: dict[str, Any], data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(AITER_FAMILIES))
    for release in RELEASES:
        config = {"architectures": list(family.architectures), "model_type": "x", "num_hidden_layers": 4}
        question = question_of(
            {**config, "quantization_config": {**scheme, **changes}}, None, release, mega=data.draw(st.booleans())
        )
        if isinstance(question, Verdict):
            assert question.outcome is Outcome.REFUSED
            continue
        for found in (judge_decoder_layer(question, 1), judge_mtp_layer(question, 0), judge_block(question, "no.number")):
            assert found.fused == (not found.reasons)
        assert judge(question, "a", "b").outcome in Outcome
