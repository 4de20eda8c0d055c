"""Verdicts per layer and per target: each question apart, mixed models, drafters, and what is said beside a verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fse_convert.servers.f32_scales import Scales
from fse_convert.servers.judge import ALL_TARGETS, Answer, Question, judge, whole
from fse_convert.servers.subject import Subject
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict
from fse_convert.testing.memory import PROJ, Model, Tensors, expert, subject_of
from tests.model.families.releases import RELEASES, config_of, tensors_of

QUARK_FP4 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}, "input_tensors": {"dtype": "fp4"}}
DYNAMIC = {"activation_scheme": "dynamic"}
MTP_FP8 = {"re:mtp\\.0\\.ffn\\.shared_experts\\..*": {"weight": {"dtype": "fp8_e4m3"}}}
QUARK = {"quant_method": "quark", "global_quant_config": QUARK_FP4, "exclude": [], "export": {"kv_cache_group": []}}


def ask(about: Subject, name: str) -> Answer:
    return next(a for a in judge(about) if a.name == name)


def outcomes(answer: Answer) -> str:
    return "".join(v.outcome.value[0] for v in answer.layers)


def test_every_target_answers_every_layer_and_questions_stay_apart() -> None:
    answers = judge(Model().subject())
    assert [a.name for a in answers] == [t.name for t in ALL_TARGETS]
    assert {len(a.layers) for a in answers} == {3}
    for a in answers:
        native = a.question is Question.NATIVE
        assert native == (not a.name.endswith(("-aiter", "-aiter-mega", "-fhmoe", "-slots", "atom")))
        assert a.source
        assert a.started_with
    assert len({q.heading for q in Question}) == len(Question)


def test_an_official_v4_fuses_natively_and_not_by_aiter() -> None:
    about = Model(hidden=4096, width=2048, shared="fp8-128").subject()
    assert ask(about, "vllm-0.33").fused
    rocm = ask(about, "vllm-0.33-aiter")
    assert outcomes(rocm) == "uuu"
    assert [r.message for r in rocm.model.reasons] == ["DeepSeek-V4/V4.1 FSE is only implemented/tested with Quark MXFP4"]
    assert "expert parallelism must be off" in rocm.started_with
    assert rocm.notes == ()


def test_conditions_are_noted_where_the_decoder_layers_fuse_though_the_drafter_fails() -> None:
    rocm = ask(Model(shared="bf16", routed="bf16").subject(), "vllm-0.33-aiter")
    assert outcomes(rocm) == "ffu"
    assert rocm.model.outcome is Outcome.UNSAFE
    assert [n.code for n in rocm.notes] == ["aiter-conditions"]
    assert "expert parallelism must be off" in rocm.notes[0].message


def test_aiter_megamoe_fuses_an_official_v4_by_requantising_its_shared_experts() -> None:
    mega = ask(Model(hidden=4096, width=2048, shared="fp8-128").subject(), "vllm-0.33-aiter-mega")
    assert outcomes(mega) == "fff"
    assert [n.code for n in mega.notes] == ["aiter-requantised"]
    for flag in ("--moe-backend aiter_mega_moe", """--quantization-config.targets '{"*shared_experts*": "mxfp4"}'"""):
        assert flag in mega.started_with
    assert "expert parallelism must be off" not in mega.started_with


@pytest.mark.parametrize(
    ("model", "outcome", "code"),
    [
        pytest.param(Model(config={"model_type": "deepseek_v41", "architectures": []}), "refused", "model-unsupported", id="V4.1"),
        pytest.param(Model(shared="bf16", routed="bf16"), "error", "aiter-server-error", id="V4 in BF16"),
        pytest.param(
            Model(routed="fp8-128-f32-scale", config={"expert_dtype": "fp8"}), "error", "aiter-server-error", id="FP8 experts"
        ),
        pytest.param(Model(n_shared=2), "unfused", "aiter-shared-count", id="two shared experts"),
    ],
)
def test_aiter_megamoe_is_for_deepseek_v4_with_fp4_experts_alone(model: Model, outcome: str, code: str) -> None:
    mega = ask(model.subject(), "vllm-0.33-aiter-mega")
    assert (mega.model.outcome.value, {r.code for v in mega.layers for r in v.reasons}) == (outcome, {code})


def test_aiter_megamoe_is_not_for_glm() -> None:
    mega = ask(subject_of({"model_type": "glm4_moe", "num_hidden_layers": 2}, _v3_tensors()), "vllm-0.33-aiter-mega")
    assert outcomes(mega) == "rr"
    assert [r.code for r in mega.model.reasons] == ["model-unsupported"]


def test_aiter_megamoe_takes_routed_experts_in_mxfp4_only_whatever_the_config_says() -> None:
    mega = ask(Model(routed="nvfp4").subject(), "vllm-0.33-aiter-mega")
    assert (mega.model.outcome, [r.code for r in mega.model.reasons]) == (Outcome.UNSAFE, ["aiter-storage-differs"])
    assert mega.notes == ()


def test_a_drafter_that_differs_shows_in_its_own_cells() -> None:
    about = Model(routed="mxfp4-u8", shared="fp8-32", mtp_shared="bf16").subject()
    answer = ask(about, "vllm-0.33")
    assert outcomes(answer) == "ffu"
    assert answer.model.outcome is Outcome.UNFUSED
    assert [r.code for r in answer.model.reasons] == ["shared-format"]


def test_the_mixed_model_is_an_error_for_aiter_and_a_fact_for_the_kernel() -> None:
    """vLLM refuses to fuse some decoder layers and not others; the reason names how many (seed vllm-pr-51695)."""
    config = {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "expert_dtype": "fp8",
    }
    config["quantization_config"]["ignored_layers"] = ["layers.1.ffn.shared_experts.w1", "layers.1.ffn.shared_experts.w3"]
    about = Model(hidden=512, width=256, routed="fp8-128-f32-scale", shared="fp8-128-f32-scale", mtp=0, config=config).subject()
    answer = ask(about, "vllm-0.33-aiter")
    assert outcomes(answer)[0] == "f"
    assert answer.layers[1].outcome is not Outcome.FUSED
    assert not answer.fused


def test_model_wide_error_of_a_mixed_model() -> None:
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 0,
        "hidden_size": 512,
        "moe_intermediate_size": 256,
    }
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.1.mlp.shared_experts.gate_proj", "model.layers.1.mlp.shared_experts.up_proj",
                           "model.layers.1.mlp.shared_experts.down_proj"],
    }  # fmt: skip
    tensors: Tensors = {}
    for i in range(3):
        tensors |= expert(f"model.layers.{i}.mlp.experts.0", "fp8-128-f32", 256, 512, PROJ)
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "fp8-128-f32", 256, 512, PROJ)
    answer = ask(subject_of(config, tensors), "vllm-0.33-aiter")
    assert outcomes(answer) == "fuf"
    assert answer.model.outcome is Outcome.ERROR
    assert answer.model.reasons[0].code == "aiter-model-mixed"
    assert "found 2 enabled and 1 disabled" in answer.model.reasons[0].message


def test_aiter_judges_decoder_and_drafter_apart() -> None:
    config = {"quantization_config": {**QUARK, "layer_quant_config": MTP_FP8}, "architectures": ["DeepseekV4ForCausalLM"]}
    about = Model(routed="mxfp4-u8", shared="mxfp4-u8", config=config).subject()
    answer = ask(about, "vllm-0.29-aiter")
    assert outcomes(answer) == "ffu"
    assert answer.model.outcome is Outcome.UNFUSED
    assert "mtp.*.ffn.shared_experts" in answer.model.reasons[0].message


def test_where_the_config_calls_alike_what_is_stored_otherwise_that_is_said() -> None:
    config = {"quantization_config": QUARK, "architectures": ["DeepseekV4ForCausalLM"]}
    about = Model(routed="mxfp4-u8", shared="mxfp4-u8", mtp_shared="fp8-32-u8", config=config).subject()
    answer = ask(about, "vllm-0.29-aiter")
    assert outcomes(answer) == "ffu"
    assert [r.code for r in answer.layers[2].reasons] == ["aiter-drafter-slots"]


def test_a_model_class_that_is_not_known_gets_no_aiter_verdict() -> None:
    about = subject_of({"model_type": "ernie4_5_moe", "moe_num_shared_experts": 1}, _v3_tensors())
    answer = ask(about, "vllm-0.33-aiter")
    assert answer.model.outcome is Outcome.UNKNOWN
    assert [r.code for r in answer.model.reasons] == ["model-unsupported"]


def _v3_tensors(shared: str = "bf16") -> Tensors:
    found: Tensors = {}
    for i in range(2):
        found |= expert(f"model.layers.{i}.mlp.experts.0", "bf16", 128, 256, PROJ)
        if shared:
            found |= expert(f"model.layers.{i}.mlp.shared_experts", shared, 128, 256, PROJ)
    return found


def test_layers_without_a_shared_expert_and_models_without_experts() -> None:
    about = subject_of({"model_type": "deepseek_v3"}, _v3_tensors(shared=""))
    for name in ("megamoe-128", "vllm-0.33-aiter", "atom"):
        assert {r.code for v in ask(about, name).layers for r in v.reasons} == {"no-shared-expert"}
    dense = subject_of({"model_type": "deepseek_v3"}, {"model.layers.0.mlp.gate_proj.weight": ("BF16", (4, 4))})
    for answer in judge(dense):
        assert not answer.fused
        assert answer.layers == ()


@pytest.mark.parametrize(
    ("model", "sglang", "atom"),
    [
        (Model(shared="fp8-32"), "fused", "slot-format"),
        (Model(routed="mxfp4-u8", shared="mxfp4-u8", config={"quantization_config": {"quant_method": "mxfp4"}}), "fused", "fused"),
        (Model(routed="fp8-128", shared="fp8-128"), "fused", "fused"),
        (Model(shared="bf16"), "slot-format", "slot-format"),
        (Model(n_shared=2), "slot-shared-count", "slot-shared-count"),
        (Model(shared_width=512), "slot-width", "slot-width"),
        (Model(shared="gptq"), "format-unknown", "format-unknown"),
    ],
    ids=["FP8 beside MXFP4", "MXFP4 both", "FP8 both", "BF16 shared", "two shared", "wider shared", "GPTQ shared"],
)
def test_slots(model: Model, sglang: str, atom: str) -> None:
    about = model.subject()
    for name, expected in (("sglang-0.5.23-slots", sglang), ("atom", atom)):
        answer = ask(about, name)
        assert ("fused" if answer.fused else answer.model.reasons[0].code) == expected
    requantised = [n.code for n in ask(about, "sglang-0.5.23-slots").notes]
    assert requantised == (["slot-requantised"] if model == Model(shared="fp8-32") else [])


@pytest.mark.parametrize(
    ("read", "inexact", "contract", "server"),
    [
        ([], [], ("unknown", "scale-f32-unread"), ("unknown", "scale-f32-unread")),
        (["w1", "w2"], [], ("unknown", "scale-f32-unread"), ("unknown", "scale-f32-unread")),
        (["w1", "w2", "w3"], [], ("fused", ""), ("fused", "")),
        (["w1"], ["w1"], ("unfused", "scale-inexact"), ("unsafe", "scale-f32-rounded")),
    ],
    ids=["nobody read them", "one is unread", "powers of two", "one is none"],
)
def test_f32_scales_fuse_only_where_they_are_known_to_be_powers_of_two(
    read: list[str], inexact: list[str], contract: tuple[str, str], server: tuple[str, str]
) -> None:
    """SGLang rounds them while loading; the kernel's contract has no F32 scales; vLLM's loader takes none."""
    at = "layers.0.ffn.shared_experts.{}.weight_scale_inv"
    scales = Scales(frozenset(map(at.format, read)), {at.format(name): "0.3" for name in inexact})
    config = {"quantization_config": {"quant_method": "fp8", **DYNAMIC, "weight_block_size": [128, 128]}}
    about = replace(Model(shared="fp8-128-f32", layers=1, mtp=0, config=config).subject(), scales=scales)
    for name, expected in (("megamoe-128", contract), ("sglang-0.5.23", server)):
        answer = ask(about, name)
        assert (answer.model.outcome.value, "".join(r.code for r in answer.model.reasons)) == expected
        assert answer.notes == ()
    assert [r.code for r in ask(about, "vllm-0.33").model.reasons] == ["scale-dtype"]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", **DYNAMIC}, "fused"),
        ({"quant_method": "deepseek_v4_fp8", **DYNAMIC}, "fused"),
        (None, "unsafe quantization-unstated"),
        ({"weight_block_size": [32, 32]}, "unsafe quantization-unstated"),
        ({"quant_method": "quark", "exclude": [], "global_quant_config": {}, "export": {}}, "unknown native-method"),
        ({"quant_method": "modelopt", "ignore": []}, "unknown native-method"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "unknown native-method"),
        ({"quant_method": "fp8", **DYNAMIC, "ignored_layers": ["layers.0.ffn.shared_experts"]}, "fused"),
        ({"quant_method": "fp8", **DYNAMIC, "ignored_layers": ["head"]}, "fused"),
    ],
    ids=str,
)
def test_the_native_path_is_taken_for_fp8_configs(quantization: dict[str, Any] | None, expected: str) -> None:
    about = Model(shared="fp8-32", layers=1, mtp=0, config={"quantization_config": quantization}).subject()
    for name in ("vllm-0.33", "sglang-0.5.23"):
        answer = ask(about, name)
        assert " ".join([answer.model.outcome.value, *(r.code for r in answer.model.reasons)]) == expected
    assert ask(about, "megamoe-128").fused, "the kernel reads no config"


def test_the_whole_is_the_worst_of_its_layers_with_every_reason() -> None:
    one, two = Reason("a", "1"), Reason("b", "2")
    mixed = (FUSED, Verdict(Outcome.UNFUSED, (one,)), Verdict(Outcome.REFUSED, (two, one)))
    assert whole(mixed) == Verdict(Outcome.REFUSED, (one, two))
    assert whole((FUSED, FUSED)) is FUSED
    assert whole(()).reasons[0].code == "no-moe-layers"


def test_what_is_not_understood_is_unknown_and_a_dense_model_is_not() -> None:
    dense = {"model.layers.0.mlp.gate_proj.weight": ("BF16", (4, 4))}
    strays: Tensors = {f"odd.{name}": info for name, info in _v3_tensors().items()}
    for config, tensors, expected in (
        ({"model_type": "deepseek_v3"}, dense, (Outcome.UNFUSED, "no-moe-layers")),
        ({"model_type": "newcomer"}, _v3_tensors(), (Outcome.UNKNOWN, "family-unknown")),
        ({}, {}, (Outcome.UNKNOWN, "family-unknown")),
    ):
        assert {(a.model.outcome, a.model.reasons[0].code) for a in judge(subject_of(config, tensors))} == {expected}
    if subject_of({"model_type": "deepseek_v3"}, strays).description.outside:
        assert {a.model.outcome for a in judge(subject_of({"model_type": "deepseek_v3"}, strays))} == {Outcome.UNKNOWN}


def layers_in_quark(**scheme: Any) -> Subject:
    tensors: Tensors = {}
    for i in range(3):
        tensors |= expert(f"model.layers.{i}.mlp.experts.0", "mxfp4-u8", 256, 512, PROJ)
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "bf16", 256, 512, PROJ)
    config = {"model_type": "deepseek_v3", "n_shared_experts": 1, "architectures": ["DeepseekV3ForCausalLM"]}
    return subject_of({**config, "quantization_config": {**QUARK, **scheme}}, tensors)


@pytest.mark.parametrize(
    "scheme",
    [
        {"exclude": ["re:.*shared_experts.*"]},
        {"exclude": ["re:.*shared_experts.gate_proj"]},
        {"layer_quant_config": {"*shared_experts*": {"weight": {"dtype": "fp8_e4m3"}}}},
    ],
    ids=["excluded", "one of the fused projections excluded", "in another scheme"],
)
def test_a_reason_is_the_same_in_every_layer(scheme: dict[str, Any]) -> None:
    """vLLM's words name the layer: a page about 61 layers had 61 reasons."""
    reasons = [
        r
        for a in judge(layers_in_quark(**scheme))
        for r in {r for v in (a.model, *a.layers) for r in v.reasons}
        if "layers" in r.message
    ]
    assert reasons
    assert {r.message.count("layers.*.") for r in reasons} == {1}


@pytest.mark.parametrize("written", ["gelu", "silu", None, 5])
def test_another_activation_than_the_fused_path_computes_is_no_yes(written: object) -> None:
    """In vLLM and SGLang the model code raises for it, null as any other, and DeepGEMM knows none of that name."""
    about = Model(shared="fp8-128", config={"hidden_act": written}).subject()
    usual = {a.name for a in judge(Model(shared="fp8-128").subject()) if a.fused}
    found = judge(about)
    assert {a.name for a in found if a.fused} == (usual if written == "silu" else set())
    for a in (a for a in found if a.name in usual and not a.fused):
        assert (a.model.outcome, [r.code for r in a.model.reasons]) == (Outcome.REFUSED, ["config-unsupported"])


def test_the_kernel_computes_more_activations_than_the_servers_model_code() -> None:
    for written, kernel in (("swigluoai", True), ("situ", True), ("relu2", False)):
        about = Model(config={"hidden_act": written}).subject()
        assert (ask(about, "megamoe-128").fused, ask(about, "vllm-0.33").fused) == (kernel, False)


def test_minimax_m3_has_an_activation_of_its_own() -> None:
    (release,) = (r for r in RELEASES if r.model_type == "minimax_m3_vl")
    for written, fused in (({}, True), ({"hidden_act": "swigluoai"}, True), ({"hidden_act": "silu"}, False)):
        config = config_of(release)
        config["text_config"] |= written
        (answer,) = (a for a in judge(subject_of(config, tensors_of(release))) if a.name == "vllm-0.33-aiter")
        assert answer.fused is fused
