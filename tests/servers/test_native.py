"""The native rules, each row against what its server's code says (consumers.md 2.1 to 2.6, checkpoints.md 0.1)."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.servers.config_keys import ABSENT, server_config_value
from fse_convert.servers.native import LaunchWidths, kernel_verdict, native_verdict
from fse_convert.servers.targets import CONTRACTS, FP8_SHARED, find_target
from fse_convert.servers.verdict import Outcome, Verdict
from fse_convert.testing.memory import Model, expert, subject_of
from tests.model.test_stacked import headers
from tests.releases import SGLANG, VLLM
from tests.stacked import CASES

V41 = {"model_type": "deepseek_v41"}
FLASH = Model(hidden=4096, width=2048, shared="fp8-128", layers=1, mtp=0)
V41_FLASH = Model(hidden=5120, width=2304, shared="fp8-32", layers=1, mtp=0, config=V41)
V41_PADDED = Model(hidden=5120, width=2560, shared="fp8-32", layers=1, mtp=0, config=V41)


def native(model: Model, name: str, widths: LaunchWidths | None = None) -> Verdict:
    target = find_target(name)
    assert target is not None
    about = model.subject()
    return native_verdict(about.description.layers[0], target, about.config, widths)


def answer(model: Model, name: str) -> str:
    verdict = native(model, name)
    return "fused" if verdict.fused else f"{verdict.outcome.value}: {', '.join(r.code for r in verdict.reasons)}"


@pytest.mark.parametrize(
    ("name", "v4_flash", "v41", "padded"),
    [
        ("vllm-0.29", "fused", "refused: model-unsupported", "refused: model-unsupported"),
        ("vllm-0.30", "fused", "unfused: width-ratio", "fused"),
        ("vllm-0.31", "fused", "fused", "fused"),
        ("vllm-0.32", "fused", "fused", "fused"),
        ("vllm-0.33", "fused", "fused", "fused"),
        ("sglang-0.5.20", "unfused: server-no-fusion", "refused: model-unsupported", "refused: model-unsupported"),
        ("sglang-0.5.21", "unfused: server-no-fusion", "refused: width-alignment", "unfused: server-no-fusion"),
        ("sglang-0.5.22", "fused", "unfused: scale-block", "unfused: scale-block"),
        ("sglang-0.5.23", "fused", "fused", "fused"),
        ("tensorrt-llm", "unfused: server-no-fusion", "refused: width-alignment", "unfused: server-no-fusion"),
    ],
)
def test_the_official_checkpoints_on_every_server(name: str, v4_flash: str, v41: str, padded: str) -> None:
    assert answer(FLASH, name) == v4_flash
    assert answer(V41_FLASH, name) == v41
    assert answer(V41_PADDED, name) == padded


@pytest.mark.parametrize("name", ["vllm-0.30", "sglang-0.5.21", "tensorrt-llm"])
def test_judging_at_padded_widths_is_judging_the_padded_checkpoint(name: str) -> None:
    assert native(V41_FLASH, name, LaunchWidths(2560, 2560)) == native(V41_PADDED, name)


@pytest.mark.parametrize("name", VLLM)
@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"scoring_func": "sigmoid"}, "config-unsupported"),
        ({"expert_dtype": "fp8"}, "config-unsupported"),
        ({"norm_topk_prob": False}, "config-unsupported"),
        ({"scoring_func": None}, "config-unsupported"),
        ({"expert_dtype": None}, "config-unsupported"),
    ],
)
def test_what_vllms_model_code_raises_for(name: str, config: dict[str, Any], code: str) -> None:
    model = Model(hidden=4096, width=2048, shared="fp8-128", layers=1, mtp=0, config=config)
    if "norm_topk_prob" in config and name in ("vllm-0.29", "vllm-0.30"):
        assert answer(model, name) == "fused"
    else:
        assert answer(model, name) == f"refused: {code}"


def test_v41s_keys_are_found_where_v41_writes_them() -> None:
    config = {"text_config": {"scoring_func": "a"}, "quantization_config": {"expert_dtype": "fp4", "scoring_func": "b"}}
    assert server_config_value(config, "scoring_func") == "a"
    assert server_config_value(config, "expert_dtype") == "fp4"
    assert server_config_value(config, "norm_topk_prob") is ABSENT
    assert server_config_value({"expert_dtype": "fp8", **config}, "expert_dtype") == "fp8"
    assert server_config_value({"expert_dtype": None, **config}, "expert_dtype") is None


@pytest.mark.parametrize(
    ("change", "vllm", "sglang"),
    [
        ({"routed": "nvfp4"}, "refused: routed-format", "unfused: shared-format"),
        ({"routed": "bf16"}, "refused: routed-format", "refused: routed-format"),
        ({"routed": "fp8-128"}, "refused: routed-format", "unfused: format-passed-over"),
        ({"shared": "bf16"}, "unfused: shared-format", "unfused: shared-format"),
        ({"shared": "mxfp4"}, "unfused: shared-format", "unfused: shared-format"),
        ({"shared": "fp8-tensor"}, "unfused: shared-format", "unfused: shared-format"),
        ({"shared": "fp8-channel"}, "unfused: shared-format", "unfused: shared-format"),
        ({"shared": "fp8-128-f32"}, "unfused: scale-dtype", "fused"),
        ({"shared": "fp8-128-bf16"}, "unfused: scale-dtype", "unfused: scale-dtype"),
        ({"shared": "mxfp8"}, "fused", "fused"),
        ({"shared": "mxfp8-u8"}, "fused", "fused"),
        ({"shared": "fp8-32-u8"}, "fused", "fused"),
        ({"shared": "fp8-16"}, "unfused: scale-block", "unfused: scale-block"),
        ({"shared": "fp8-1x16"}, "unfused: scale-block", "unfused: scale-block"),
        ({"shared": ""}, "unfused: no-shared-expert", "unfused: no-shared-expert"),
        ({"n_shared": 2}, "fused", "fused"),
        ({"shared_width": 3072}, "unfused: width-ratio", "unfused: width-ratio"),
        ({"width": 2176}, "fused", "fused"),
        ({"width": 2208}, "refused: width-alignment", "refused: width-alignment"),
        ({"hidden": 4224}, "refused: hidden-alignment", "refused: hidden-alignment"),
        ({"hidden": 4352}, "fused", "refused: hidden-alignment"),
    ],
)
def test_the_newest_servers_on_variants_of_v4_flash(change: dict[str, Any], vllm: str, sglang: str) -> None:
    model = Model(**{"hidden": 4096, "width": 2048, "shared": "fp8-32", "layers": 1, "mtp": 0, **change})
    assert answer(model, "vllm-0.33") == vllm
    assert answer(model, "sglang-0.5.23") == sglang


@pytest.mark.parametrize("name", SGLANG[1:])
def test_sglang_has_a_rule_of_its_own_for_nvfp4(name: str) -> None:
    fits = Model(hidden=4096 + 256, width=2304, routed="nvfp4", layers=1, mtp=0)
    assert answer(fits, name).startswith("unfused")
    assert answer(Model(hidden=4096, width=2304 + 128, routed="nvfp4", layers=1, mtp=0), name) == "refused: width-alignment"


def test_a_partial_last_block_is_not_fused_and_padding_can_complete_it() -> None:
    model = Model(hidden=4096, width=2048 + 128, shared="fp8-32", layers=1, mtp=0)
    partial = Model(hidden=4096, width=2048, n_shared=1, shared="fp8-128", shared_width=2048 + 64, layers=1, mtp=0)
    assert "scale-partial" in answer(partial, "vllm-0.33")
    assert answer(model, "vllm-0.33") == "fused"
    assert native(partial, "vllm-0.33", LaunchWidths(2176, 2176)).fused


@pytest.mark.parametrize("name", VLLM)
def test_models_whose_shared_expert_never_joins(name: str) -> None:
    config = {"model_type": "kimi_k3"}
    model = Model(hidden=4096, width=2048, layers=1, mtp=0)
    target = find_target(name)
    assert target is not None
    layer = model.subject().description.layers[0]
    verdict = native_verdict(layer, target, config)
    assert (verdict.outcome, [r.code for r in verdict.reasons]) == (Outcome.UNFUSED, ["server-no-fusion"])
    assert native_verdict(layer, target, {"model_type": "step5"}).outcome is (
        Outcome.REFUSED if name in VLLM[: VLLM.index("vllm-0.33")] else Outcome.UNFUSED
    )
    assert native_verdict(layer, target, {"model_type": "glm4_moe"}).outcome is Outcome.REFUSED


def test_a_gated_shared_expert_and_a_latent_hidden_size_do_not_join() -> None:
    tensors = Model(layers=1, mtp=0).tensors() | {"layers.0.ffn.shared_experts_gate.weight": ("BF16", (1, 512))}
    gated = subject_of(Model().full_config(), tensors).description.layers[0]
    contract = CONTRACTS["megamoe-128"]
    assert [r.code for r in kernel_verdict(gated, contract, FP8_SHARED).reasons] == ["shared-gated"]
    plain = Model(layers=1, mtp=0, hidden=512).tensors()
    latent = {n: i for n, i in Model(layers=1, mtp=0, hidden=256).tensors().items() if ".experts." in n}
    layer = subject_of(Model().full_config(), plain | latent).description.layers[0]
    assert [r.code for r in kernel_verdict(layer, contract, FP8_SHARED).reasons] == ["hidden-differs"]


def test_experts_without_a_gate_projection_do_not_join() -> None:
    names = ("", "up_proj", "down_proj")
    tensors = expert("backbone.layers.0.mixer.experts.0", "fp8-32", 512, 512, names)
    tensors |= expert("backbone.layers.0.mixer.shared_experts", "fp8-32", 512, 512, names)
    description = subject_of({"model_type": "nemotron_h"}, tensors).description
    assert description.problems == ()
    verdict = kernel_verdict(description.layers[0], CONTRACTS["megamoe-128"], FP8_SHARED)
    assert (verdict.outcome, [r.code for r in verdict.reasons]) == (Outcome.UNFUSED, ["experts-ungated"])


def test_a_layer_that_is_not_understood_gets_no_verdict() -> None:
    tensors = Model(layers=1, mtp=0).tensors()
    del tensors["layers.0.ffn.experts.0.w1.scale"]
    layer = subject_of(Model().full_config(), tensors).description.layers[0]
    for verdict in (
        kernel_verdict(layer, CONTRACTS["megamoe-128"], FP8_SHARED),
        native(Model(shared="gptq", layers=1, mtp=0), "vllm-0.33"),
    ):
        assert verdict.outcome is Outcome.UNKNOWN
    routed_only = Model(layers=1, mtp=0).tensors()
    layer = subject_of(Model().full_config(), {n: i for n, i in routed_only.items() if ".experts." not in n}).description.layers[0]
    assert [r.code for r in kernel_verdict(layer, CONTRACTS["megamoe-128"], FP8_SHARED).reasons] == ["no-routed-experts"]


@pytest.mark.parametrize(
    ("contract", "width", "code"),
    [
        ("megamoe-128", 2304, ""),
        ("megamoe-512", 2304, "width-alignment"),
        ("megamoe-512", 2560, ""),
        ("megamoe-128", 2240, "width-alignment"),
    ],
)
def test_contracts(contract: str, width: int, code: str) -> None:
    layer = Model(hidden=5120, width=width, layers=1, mtp=0).subject().description.layers[0]
    verdict = kernel_verdict(layer, CONTRACTS[contract], FP8_SHARED)
    assert [r.code for r in verdict.reasons] == ([code] if code else [])


@pytest.mark.parametrize(
    ("routed", "shared", "fused"),
    [
        ("mxfp4", "mxfp8", True),
        ("mxfp4", "bf16", False),
        ("mxfp8", "mxfp8", True),
        ("fp8-32", "fp8-128", True),
        ("nvfp4", "fp8-32", False),
        ("bf16", "bf16", False),
    ],
)
def test_the_kernels_pairs_of_formats(routed: str, shared: str, fused: bool) -> None:
    layer = Model(hidden=512, width=256, routed=routed, shared=shared, layers=1, mtp=0).subject().description.layers[0]
    assert kernel_verdict(layer, CONTRACTS["megamoe-128"], FP8_SHARED).fused is fused


def test_a_fused_shared_mlp_has_a_reason_of_its_own() -> None:
    case = next(c for c in CASES if c.name == "L1 MiniMax-M3 FP8 E8M0")
    for d in subject_of(case.config_of(case.width), headers(case, case.width)).description.layers:
        verdict = kernel_verdict(d, CONTRACTS["megamoe-128"], FP8_SHARED)
        assert [r.code for r in verdict.reasons] == ["shared-one-matrix"]
