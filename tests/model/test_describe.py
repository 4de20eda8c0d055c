"""What a checkpoint's headers show, what they contradict, and what is said of names and shapes that are not understood."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.model.config_against_tensors import LOAD_CONFLICTS
from fse_convert.model.describe import KERNEL_TENSOR
from fse_convert.model.description import NOT_UNDERSTOOD, Description
from fse_convert.model.moe import LayerKind
from fse_convert.testing.memory import PROJ, Model, Tensors, description_of, expert


def describe(model: Model, *, drop: str = "", add: Tensors | None = None) -> Description:
    tensors = {name: info for name, info in model.tensors().items() if not (drop and drop in name)}
    return description_of(model.full_config(), tensors | (add or {}))


def codes(found: Description) -> list[str]:
    return [p.code for p in found.problems]


def test_layers_come_from_names_and_the_drafter_is_apart() -> None:
    found = describe(Model(layers=11, mtp=3))
    kinds = [(d.layer.kind, d.layer.index) for d in found.layers]
    assert kinds == [(LayerKind.DECODER, i) for i in range(11)] + [(LayerKind.MTP, i) for i in range(3)]
    assert found.problems == found.conflicts == found.seen == ()
    assert found.widths == (256,)


def test_experts_are_in_numeric_order() -> None:
    found = describe(Model(experts=12, layers=1, mtp=0))
    assert [e.name for e in found.layers[0].layer.routed] == [f"layers.0.ffn.experts.{e}" for e in range(12)]


def test_layers_may_differ_in_their_number_of_experts() -> None:
    model = Model(layers=2, mtp=1, experts=4)
    tensors = {n: i for n, i in model.tensors().items() if not n.startswith(("mtp.0.ffn.experts.2.", "mtp.0.ffn.experts.3."))}
    found = description_of({**model.full_config(), "dspark_n_routed_experts": 2}, tensors)
    assert [len(d.layer.routed) for d in found.layers] == [4, 4, 2]
    assert found.problems == found.conflicts == ()


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        ("layers.0.ffn.experts.1.w1.", ["projection-missing"]),
        ("layers.0.ffn.experts.0.", ["expert-missing"]),
        ("layers.0.ffn.experts.1.w2.scale", ["scale-missing"]),
        ("layers.1.ffn.shared_experts.w3.weight", ["weight-missing"]),
        (".w2.scale", ["scale-missing"] * 6),
    ],
)
def test_what_is_missing_is_named_in_every_layer(drop: str, expected: list[str]) -> None:
    found = describe(Model(), drop=drop)
    assert codes(found) == expected
    assert not set(codes(found)) & NOT_UNDERSTOOD


def test_equal_problems_of_one_layer_are_counted_together() -> None:
    found = describe(Model(experts=9, layers=1, mtp=0), drop=".w2.scale")
    routed, shared = found.problems
    assert routed.where == "layers.0.ffn.experts.0.w2.weight and 8 more"
    assert shared.where == "layers.0.ffn.shared_experts.w2.weight"


def test_all_problems_of_a_layer_are_found_not_the_first_expert_only() -> None:
    model = Model(experts=4, layers=1, mtp=0)
    tensors = model.tensors()
    del tensors["layers.0.ffn.experts.0.w1.weight"]
    tensors["layers.0.ffn.experts.2.w2.weight"] = ("I32", (512, 32))
    tensors |= expert("layers.0.ffn.experts.3", "mxfp4", 128, 512)
    found = description_of(model.full_config(), tensors)
    assert codes(found) == ["weight-missing", "matrix-odd", "experts-differ"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("layers.0.ffn.experts.0.w1.lora_A.weight", "expert-unknown"),
        ("layers.0.ffn.experts.0.w9.weight", "expert-unknown"),
        ("layers.0.ffn.experts.00.w1.weight", "expert-unknown"),
        ("layers.0.ffn.shared_experts.0.w1.weight", "expert-unknown"),
        ("layers.0.ffn.experts.gate_up_proj", "experts-stacked"),
        ("layers.0.ffn.experts.w13_weight", "experts-stacked"),
        ("layers.0.mlp.experts.0.w1.weight", "expert-outside"),
        ("layers.0.ffn.switch_mlp.up_proj.weight", "experts-stacked"),
        ("layers.0.ffn.all_experts_together", "experts-stacked"),
        ("layers.0.ffn.gate.weight", "router-shape"),
        ("layers.0.ffn.router", "router-shape"),
        ("layers.0.ffn.experts.gate.weight", "experts-stacked"),
        ("layers.0.mlp.switch_mlp.up_proj.weight", "expert-outside"),
        ("adapter.layers.0.ffn.shared_experts.w1.weight", "expert-outside"),
        ("other.experts.bias", "expert-outside"),
    ],
)
def test_an_expert_tensor_that_no_rule_explains_is_reported(name: str, code: str) -> None:
    found = describe(Model(), add={name: ("BF16", (3, 4, 4))})
    assert codes(found) == [code]
    assert code in NOT_UNDERSTOOD
    assert name in found.problems[0].where


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.gate.bias",
        "layers.0.ffn.expert_bias",
        "layers.0.ffn.experts.e_score_correction_bias",
        "layers.0.ffn.routed_expert_norm.weight",
        "layers.0.ffn.routed_expert_down_proj.weight",
        "layers.0.attn.wq_a.weight",
        "vision.layers.0.ffn.shared_experts.w1.weight",
        "vision_encoder.blocks.3.mlp.experts.0.fc1.weight",
        "model.audio_tower.experts.bias",
    ],
)
def test_routers_latent_projections_and_other_towers_are_no_experts_of_the_model(name: str) -> None:
    assert describe(Model(), add={name: ("F32", (2,))}).problems == ()


def test_a_shared_experts_gate_is_seen_whatever_the_family() -> None:
    found = describe(Model(layers=1, mtp=0), add={"layers.0.ffn.shared_experts_gate.weight": ("BF16", (1, 512))})
    assert found.layers[0].layer.gate_tensor == "layers.0.ffn.shared_experts_gate.weight"
    assert found.problems == ()


def test_shapes_that_make_no_mlp_are_refused() -> None:
    model = Model(layers=1, mtp=0, experts=1)
    tensors = model.tensors() | expert("layers.0.ffn.experts.0", "mxfp4", 256, 512)
    tensors["layers.0.ffn.experts.0.w2.weight"] = ("I8", (256, 128))
    tensors["layers.0.ffn.experts.0.w2.scale"] = ("F8_E8M0", (256, 8))
    assert codes(description_of(model.full_config(), tensors)) == ["expert-shape"]


@pytest.mark.parametrize(
    ("config", "code", "text"),
    [
        ({"moe_intermediate_size": 512}, "config-width", "moe_intermediate_size is 512, the tensors show 256"),
        ({"n_routed_experts": 9}, "config-experts", "n_routed_experts is 9, the tensors show 2"),
        ({"num_nextn_predict_layers": 4}, "config-conflict", "num_nextn_predict_layers is 4, the tensors show 1 MTP layers"),
        ({"n_shared_experts": 2}, "config-width", "x 2 shared is 512, the shared experts are 256 wide"),
        ({"hidden_size": 1024}, "config-hidden", "hidden_size is 1024, the tensors show 512"),
        ({"expert_dtype": "fp8"}, "config-expert-dtype", "expert_dtype is 'fp8', the routed experts are stored as mxfp4"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "config-block",
            "weight_block_size is [128, 128], experts are stored as FP8 32x32 E8M0",
        ),
    ],
)
def test_a_config_that_contradicts_the_headers_is_a_conflict(config: dict[str, Any], code: str, text: str) -> None:
    found = describe(Model(config=config))
    assert found.problems == ()
    conflict = next(c for c in found.conflicts if c.code == code)
    assert text in conflict.message
    assert (code in LOAD_CONFLICTS) == (code != "config-conflict")


def test_headers_decide_the_block_and_the_config_only_where_they_leave_it_open() -> None:
    model = Model(hidden=320, width=200, shared="fp8-128")
    assert {d.shared.formats[r].block for d in describe(model).layers if d.shared for r in d.shared.formats} == {(128, 128)}
    stored = Model(shared="fp8-32", config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})
    assert {d.shared.formats[r].block for d in describe(stored).layers if d.shared for r in d.shared.formats} == {(32, 32)}


@pytest.mark.parametrize("shared", ["mxfp8", "fp8-channel", "fp8-tensor"])
def test_fp8_beside_a_block_size_that_it_does_not_have(shared: str) -> None:
    found = describe(Model(shared=shared, config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
    assert found.problems == ()
    assert [c.code for c in found.conflicts] == ([] if shared == "mxfp8" else ["config-block"])


def test_an_unknown_family_is_not_guessed_but_what_was_seen_is_said() -> None:
    tensors: Tensors = {"lm_head.weight": ("BF16", (8, 64))}
    for i in range(3):
        tensors |= expert(f"model.layers.{i}.moe.experts.7", "bf16", 32, 64, PROJ)
    found = description_of({"model_type": "newcomer"}, tensors)
    assert found.family is None
    assert found.layers == ()
    assert [(s.pattern, s.count) for s in found.seen] == [
        ("model.layers.N.moe.experts.N.down_proj.weight", 3),
        ("model.layers.N.moe.experts.N.gate_proj.weight", 3),
        ("model.layers.N.moe.experts.N.up_proj.weight", 3),
    ]
    assert found.seen[0].example.shape == (64, 32)


def test_names_of_the_kernel_layout_are_known() -> None:
    assert KERNEL_TENSOR.search("layers.0.ffn.experts.shared_l1_weight_scale")
    assert not KERNEL_TENSOR.search("layers.0.ffn.experts.0.w1.weight")
