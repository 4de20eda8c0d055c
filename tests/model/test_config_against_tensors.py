"""Configs that the stored tensors contradict: stale quantisation, wrong numbers, layers and experts that are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.errors import Problem
from fse_convert.model.config_against_tensors import dense_conflicts, expected_layers, unstated
from fse_convert.model.families.find import find_family
from fse_convert.model.moe import LayerKind, MoELayer
from fse_convert.testing.memory import PROJ, Model, Tensors, description_of, expert, subject_of
from fse_convert.testing.patch import drop

Source = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def described(model: Model, quant: dict[str, Any] | None, file: dict[str, Any] | None = None) -> tuple[Problem, ...]:
    config = {k: v for k, v in model.full_config().items() if k != "quantization_config"} | (
        {"quantization_config": quant} if quant else {}
    )
    return subject_of(config, model.tensors(), file).description.conflicts


def conflicts(model: Model, quant: dict[str, Any] | None, file: dict[str, Any] | None = None) -> list[str]:
    return [str(c) for c in described(model, quant, file) if c.code.startswith("quantization-")]


def test_a_config_that_fits_has_none() -> None:
    assert conflicts(Model(), FP8) == []
    assert conflicts(Model(routed="bf16", shared="bf16"), None) == []


def test_quantised_tensors_without_a_config() -> None:
    assert conflicts(Model(), None) == ["config.json: no quantization_config, but experts are stored as FP8 32x32 E8M0, MXFP4"]


def test_a_stale_config_after_dequantising() -> None:
    found = conflicts(Model(routed="bf16", shared="bf16"), FP8)
    assert found == [
        "layers.0.ffn.experts: config.json says fp8, but routed experts are stored as BF16 in 3 layers and are not excluded",
        "layers.0.ffn.shared_experts: config.json says fp8, but shared experts are stored as BF16 in 3 layers and are not excluded",
    ]


LINEAR = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "group_size": 32}}
STALE: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "modules_to_not_convert": ["gate"]},
    "gptq": {"bits": 4, "dynamic": {"-:.*attn.*": {}}},
    "gptq_marlin": {"bits": 4, "modules_in_block_to_quantize": [["ffn.experts.0.w1"], ["ffn.shared_experts.w1"]]},
    "compressed-tensors": {"config_groups": {"0": LINEAR}, "ignore": ["lm_head"]},
    "auto-round": {"bits": 4, "block_name_to_quantize": "layers,mtp", "extra_config": {".*attn.*": {"bits": 16}}},
    "inc": {"bits": 4, "extra_config": {".*experts.*": {"bits": 8}}},
}


@pytest.mark.parametrize("method", STALE)
def test_a_stale_config_of_any_method(method: str) -> None:
    routed, shared = conflicts(Model(routed="bf16", shared="bf16"), {"quant_method": method, **STALE[method]})
    assert f"says {method}, but routed experts are stored as BF16" in routed
    assert f"says {method}, but shared experts are stored as BF16" in shared


def test_mxfp4_means_routed_experts_alone() -> None:
    (found,) = conflicts(Model(routed="bf16", shared="bf16"), {"quant_method": "mxfp4"})
    assert "says mxfp4, but routed experts are stored as BF16" in found
    assert conflicts(Model(routed="bf16", shared="bf16"), {"quant_method": "mxfp4", "modules_to_not_convert": ["experts"]}) == []


@pytest.mark.parametrize(
    "quant",
    [
        {"quant_method": "awq", "modules_to_not_convert": ["experts", "shared_experts"]},
        {"quant_method": "gptq", "dynamic": {"-:.*experts.*": {}}},
        {"quant_method": "gptq", "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
        {"quant_method": "compressed-tensors", "config_groups": {"0": {**LINEAR, "targets": ["re:.*attn.*"]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"0": {**LINEAR, "weights": None}}},
        {"quant_method": "compressed-tensors", "config_groups": {"0": LINEAR}, "ignore": ["re:.*experts.*"]},
        {"quant_method": "auto-round", "extra_config": {".*experts.*": {"bits": 16}}},
        {"quant_method": "auto-round", "to_quant_block_names": ["visual.blocks"]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_experts_that_a_method_leaves_out(quant: dict[str, Any]) -> None:
    assert conflicts(Model(routed="bf16", shared="bf16"), quant) == []


@pytest.mark.parametrize(
    "quant",
    [
        {**FP8, "modules_to_not_convert": ["shared_experts"]},
        {**FP8, "ignored_layers": ["layers.0.ffn.shared_experts", "layers.1.ffn.shared_experts", "mtp.0.ffn.shared_experts"]},
        {"quant_method": "quark", "exclude": ["re:.*shared_experts.*"], "global_quant_config": {}, "export": {}},
        {"quant_method": "modelopt", "ignore": ["*.ffn.shared_experts.*"]},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_excluded_shared_experts_are_no_conflict(quant: dict[str, Any]) -> None:
    assert conflicts(Model(shared="bf16"), quant) == []


@pytest.mark.parametrize(
    ("quant", "says"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt, MXFP8"),
        ({"quant_method": "mxfp8"}, "mxfp8, MXFP8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"type": "int", "num_bits": 4}}}},
         "compressed-tensors, INT4"),
        ({"quant_method": "gptq", "bits": 4}, "gptq, INT4"),
    ],
)  # fmt: skip
def test_elements_that_the_experts_are_not_stored_in(quant: dict[str, Any], says: str) -> None:
    found = conflicts(Model(), {**quant, "ignore": []})
    assert found == [f"config.json: config.json says {says}, but experts are stored as FP8 32x32 E8M0, MXFP4"]


@pytest.mark.parametrize("written", ["fp8", "mxfp4", "FP4", "nvfp4"])
def test_an_expert_dtype_that_servers_do_not_read_as_what_is_stored(written: str) -> None:
    config = {**Model().full_config(), "expert_dtype": written}
    found = subject_of(config, Model().tensors()).description.conflicts
    (problem,) = [c for c in found if c.code == "config-expert-dtype"]
    assert problem.message == f"expert_dtype is {written!r}, the routed experts are stored as mxfp4"
    assert problem.hint == 'set expert_dtype to "fp4" where it stands'


def test_an_exclusion_that_the_tensors_do_not_follow() -> None:
    found = conflicts(Model(), {**FP8, "modules_to_not_convert": ["layers.0.ffn.shared_experts"]})
    assert found == [
        "layers.0.ffn.shared_experts: modules_to_not_convert excludes shared experts of 1 layer, which are stored quantised"
    ]


def test_nvidias_mixed_checkpoints_exclude_from_nvfp4_what_stays_fp8() -> None:
    left_out = ["*.ffn.shared_experts.*", "mtp.*"]
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        assert conflicts(Model(routed="nvfp4"), {**FP8, "moe_quant_algo": "NVFP4", key: left_out}) == []
    (said, *_) = conflicts(Model(), {**FP8, "ignored_layers": left_out})
    assert "ignored_layers excludes" in said


def test_modelopts_own_file_is_read_where_config_json_says_nothing() -> None:
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    found = conflicts(Model(routed="bf16", shared="bf16"), None, file)
    assert len(found) == 2
    assert "hf_quant_config.json says modelopt" in found[0]


def gaps(config: dict[str, Any], tensors: Tensors) -> list[str]:
    return [f"{p.code}: {p.message}" for p in description_of(config, tensors).gaps]


def without(model: Model, *prefixes: str) -> Tensors:
    return {n: t for n, t in model.tensors().items() if not n.startswith(prefixes)}


def test_whole_models_have_no_gaps() -> None:
    for model in (Model(), Model(layers=1, mtp=0), Model(layers=5, mtp=3, experts=7)):
        assert gaps(model.full_config(), model.tensors()) == []


@pytest.mark.parametrize("layer", ["layers.0", "layers.1", "layers.3"])
def test_a_layer_without_experts_is_missing_where_the_config_speaks_of_it(layer: str) -> None:
    model = Model(layers=4)
    number = layer.rpartition(".")[2]
    assert gaps(model.full_config(), without(model, f"{layer}.ffn.")) == [
        f"layers-missing: no experts in decoder layers {number} (1 of 4), which the config says have some"
    ]


def test_a_layer_that_lacks_its_last_expert() -> None:
    model = Model(layers=3, experts=4)
    assert gaps(model.full_config(), without(model, "layers.1.ffn.experts.3.")) == [
        "experts-missing: 1 of 3 decoder layers have another number of routed experts: 3 routed experts in layers.1.ffn, expected 4"
    ]


def test_a_layer_with_its_shared_expert_alone() -> None:
    model = Model(layers=3, experts=4)
    assert "0 routed experts in layers.1.ffn, expected 4" in gaps(model.full_config(), without(model, "layers.1.ffn.experts."))[0]


def test_a_config_that_all_layers_contradict_is_a_conflict_only() -> None:
    model = Model(layers=3, experts=4, config={"n_routed_experts": 8})
    assert gaps(model.full_config(), model.tensors()) == []


def test_mtp_layers_have_a_number_of_their_own() -> None:
    model = Model(layers=2, mtp=2, experts=4, config={"dspark_n_routed_experts": 4})
    assert gaps(model.full_config(), model.tensors()) == []
    cut = without(model, "mtp.0.ffn.experts.3.", "mtp.1.ffn.experts.3.")
    assert "2 of 2 MTP layers" in gaps(model.full_config(), cut)[0]
    assert gaps({**model.full_config(), "dspark_n_routed_experts": 3}, cut) == []


def _expected(model_type: str, config: dict[str, Any], first: int = 1) -> list[int]:
    found = {"model_type": model_type, "moe_intermediate_size": 8, **config}
    family = find_family(found)
    assert family is not None
    return sorted(expected_layers(family, found, [MoELayer("x", LayerKind.DECODER, first, (), None, None, ())]) or ())


@pytest.mark.parametrize(
    ("model_type", "config", "layers"),
    [
        ("deepseek_v3", {"num_hidden_layers": 5, "first_k_dense_replace": 3}, [3, 4]),
        ("deepseek_v3", {"num_hidden_layers": 5, "first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ("deepseek_v3", {"num_hidden_layers": 4}, [1, 2, 3]),
        ("deepseek_v3", {}, []),
        ("kimi_linear", {"num_hidden_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ("glm_moe_dsa", {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, [1, 2]),
        ("qwen3_next", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ("qwen3_next", {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": []}, [0, 1, 2]),
        (
            "ernie4_5_moe",
            {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2},
            [1, 3, 5],
        ),
        ("deepseek_v4", {"num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"]}, [0, 1]),
        ("llama4", {"num_hidden_layers": 4}, [0, 1, 2, 3]),
        ("llama4", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}, [1, 3]),
        ("llama4", {"num_hidden_layers": 4, "interleave_moe_layer_step": 1, "moe_layers": [1, 4]}, [1]),
        ("mellum", {"num_hidden_layers": 4}, []),
    ],
)
def test_which_layers_have_experts(model_type: str, config: dict[str, Any], layers: list[int]) -> None:
    assert _expected(model_type, config) == layers


def test_dense_layers_are_no_gap() -> None:
    tensors: Tensors = {}
    for i in (1, 2):
        for e in range(2):
            tensors |= expert(f"model.layers.{i}.mlp.experts.{e}", "bf16", 256, 512, PROJ)
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "bf16", 256, 512, PROJ)
    config = {"model_type": "deepseek_v3", "n_routed_experts": 2, "moe_intermediate_size": 256, "num_hidden_layers": 3}
    assert gaps({**config, "first_k_dense_replace": 1}, tensors) == []
    assert gaps({**config, "first_k_dense_replace": 0}, tensors) != []


@pytest.mark.parametrize(
    ("model_type", "keys", "dense"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 1}, []),
        ("deepseek_v3", {"first_k_dense_replace": 2}, [1]),
        ("deepseek_v3", {"first_k_dense_replace": None, "moe_layer_freq": None}, []),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [1]),
        ("minimax_m3", {"moe_layer_freq": [0, 1, 0]}, [2]),
        ("minimax_m3", {"moe_layer_freq": [0, 1, 1]}, []),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, [2]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, []),
        ("qwen3_moe", {"decoder_sparse_step": 3}, [1]),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "dense", "sparse"]}, [1]),
        ("deepseek_v4", {"first_k_dense_replace": 9}, []),
        ("llama4", {"mlp_only_layers": [1, 2]}, []),
        ("llama4", {"moe_layers": [1]}, [2]),
        ("hunyuan_v1_moe", {}, []),
    ],
)
def test_layers_with_experts_that_the_config_calls_dense(model_type: str, keys: dict[str, Any], dense: list[int]) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 3, "moe_intermediate_size": 8, **keys}
    family = find_family(config)
    assert family is not None
    layers = [MoELayer(f"layers.{i}.mlp", LayerKind.DECODER, i, (), None, None, ()) for i in (1, 2)]
    found = list(dense_conflicts(family, config, layers))
    assert [p.code for p in found] == ["config-dense"] * bool(dense)
    assert all(f"layers.{i}.mlp" in p.message and next(iter(reversed(keys))) in p.message for p in found for i in dense)


def test_an_entry_per_layer_is_there_for_all_of_them() -> None:
    config = {"model_type": "minimax_m3", "num_hidden_layers": 3, "moe_intermediate_size": 8, "moe_layer_freq": [1, 1]}
    family = find_family(config)
    assert family is not None
    (found,) = dense_conflicts(family, config, [MoELayer("x", LayerKind.DECODER, 1, (), None, None, ())])
    assert (found.code, found.message) == ("config-value", "moe_layer_freq is [1, 1], expected an entry for each of 3 layers")


def test_a_layer_with_more_experts_than_the_others() -> None:
    model = Model(layers=3, experts=4)
    tensors = model.tensors() | expert("layers.1.ffn.experts.4", "mxfp4", model.width, model.hidden)
    (gap,) = gaps(model.full_config(), tensors)
    assert gap.startswith("experts-extra: 1 of 3 decoder layers have another number of routed experts: 5 routed experts in")


def test_convert_and_inspect_refuse_what_is_incomplete(source: Source, tmp_path: Path, run: Run) -> None:
    root = source()
    for p in (1, 2, 3):
        for suffix in ("weight", "scale"):
            drop(root, f"layers.1.ffn.experts.2.w{p}.{suffix}")
    code, _, err = run(root, tmp_path / "out", "--allow-unfused")
    assert code == 3
    assert "error[experts-missing]" in err
    code, _, err = run("inspect", root)
    assert code == 3
    assert "error[experts-missing]" in err


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"intermediate_size": 18432}, "config-readings"),
        ({"moe_intermediate_size": 64, "intermediate_size": 18432}, "config-width"),
        ({"moe_intermediate_size": 64}, "config-width"),
    ],
    ids=["one of two keys fits", "neither fits", "the only key does not fit"],
)
def test_where_another_key_fits_some_loader_loads_it(config: dict[str, Any], code: str) -> None:
    """SGLang reads moe_intermediate_size of DeepSeek-V4, transformers intermediate_size where it is: it is not broken."""
    model = Model()
    found = description_of({**model.full_config(), **config}, model.tensors()).conflicts
    assert {c.code for c in found} == {code}


@pytest.mark.parametrize(("value", "told"), [({"shared_expert_intermediate_size": 256}, False), ({}, True)], ids=["stated", "not"])
def test_a_width_of_shared_experts_that_loaders_would_make_up_is_told(value: dict[str, Any], told: bool) -> None:
    """Without the key loaders of Qwen's take a default of their own."""
    config = {"model_type": "qwen3_5_moe_text", **value}
    family = find_family(config)
    assert family is not None
    assert ("there is no shared_expert_intermediate_size" in [p.message for p in unstated(family, config, 1)]) is told
    assert "there is no shared_expert_intermediate_size" not in [p.message for p in unstated(family, config, 0)]


GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 256, "hidden_size": 512,
}  # fmt: skip


def glm(*modules: str) -> Tensors:
    """A router and these modules in layers 1 and 2."""
    tensors: Tensors = {f"model.layers.{i}.mlp.gate.weight": ("BF16", (2, 512)) for i in (1, 2)}
    for at in (f"model.layers.{i}.mlp.{module}" for i in (1, 2) for module in modules):
        tensors |= expert(at, "bf16", 256, 512, PROJ)
    return tensors


@pytest.mark.parametrize("others", [(), ("expert_0", "expert_1"), ("routed.0", "routed.1")])
def test_a_model_without_any_routed_expert_lacks_them(others: tuple[str, ...]) -> None:
    (gap,) = gaps(GLM, glm("shared_experts", *others))
    assert gap.startswith("experts-missing: 2 of 2 decoder layers")
    assert "0 routed experts in model.layers.1.mlp, model.layers.2.mlp, expected 2" in gap
    assert gaps({**GLM, "n_routed_experts": 0}, glm("shared_experts")) == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "1, 2 (2 of 2)"),
        ({"first_k_dense_replace": None}, "0, 1, 2 (3 of 3)"),
        ({"num_hidden_layers": None}, "of any number"),
        ({"n_routed_experts": None}, ""),
        ({"n_routed_experts": 1}, ""),
        ({"first_k_dense_replace": 3}, ""),
    ],
)
def test_a_model_without_any_layer_of_experts_is_dense_or_lacks_them_all(config: dict[str, Any], told: str) -> None:
    expected = [f"layers-missing: no experts in decoder layers {told}, which the config says have some"] if told else []
    assert gaps({**GLM, **config}, glm()) == expected


def test_experts_under_names_that_are_not_understood_are_not_missing() -> None:
    stacks: Tensors = {f"layers.{i}.mlp.switch_mlp.{p}.weight": ("BF16", (2, 256, 512)) for i in (1, 2) for p in PROJ}
    assert gaps(GLM, stacks) == []
    assert gaps(GLM, glm("shared_experts") | {f"model.layers.{i}.mlp.switch_mlp.up.weight": ("BF16", (8, 8)) for i in (1, 2)}) == []


ROUTED = ("experts.0", "experts.1")


@pytest.mark.parametrize("stated", [{"n_shared_experts": 1}, {}, {"n_shared_experts": 0}, {"n_shared_experts": None}])
def test_shared_experts_that_are_promised_and_in_no_layer(stated: dict[str, Any]) -> None:
    config = {**{k: v for k, v in GLM.items() if k != "n_shared_experts"}, **stated}
    message = "shared-missing: 2 of 2 layers have no shared experts, which the model has: model.layers.1.mlp, model.layers.2.mlp"
    assert gaps(config, glm(*ROUTED)) == ([message] if stated.get("n_shared_experts") else [])


@pytest.mark.parametrize(
    ("model_type", "block", "config", "told"),
    [
        ("llama4_text", "feed_forward", {"num_local_experts": 2}, True),
        ("qwen3_5_moe_text", "mlp", {"num_experts": 2, "shared_expert_intermediate_size": 256}, True),
        ("qwen3_5_moe_text", "mlp", {"num_experts": 2, "shared_expert_intermediate_size": 0}, False),
        ("qwen3_moe", "mlp", {"num_experts": 2}, False),
    ],
)
def test_a_family_without_a_number_of_shared_experts_has_one(
    model_type: str, block: str, config: dict[str, Any], *, told: bool
) -> None:
    tensors = {n.replace(".mlp.", f".{block}."): t for n, t in glm(*ROUTED).items()}
    tensors |= {n.replace(".1.", ".0.", 1): t for n, t in tensors.items() if n.startswith("model.layers.1.")}
    found = gaps({"model_type": model_type, "num_hidden_layers": 3, **config}, tensors)
    assert [gap.partition(":")[0] for gap in found] == ["shared-missing"] * told


@pytest.mark.parametrize("kept", ["layers.0", "mtp.0"])
def test_shared_experts_that_other_layers_have(kept: str) -> None:
    model = Model(config={"n_shared_experts": None})
    tensors = {n: t for n, t in model.tensors().items() if "shared" not in n or n.startswith(kept)}
    del (config := model.full_config())["n_shared_experts"]
    (gap,) = gaps(config, tensors)
    assert gap.startswith("shared-missing: 2 of 3 layers")


def test_an_mtp_layer_has_as_many_experts_as_the_others_where_no_key_says_otherwise() -> None:
    model = Model()
    for lost in (("mtp.0.ffn.experts.1.",), ("mtp.0.ffn.experts.",)):
        (gap,) = gaps(model.full_config(), without(model, *lost))
        assert gap.startswith("experts-missing: 1 of 1 MTP layers")
    assert gaps(model.full_config(), without(model, "mtp.0.ffn.shared"))[0].startswith("shared-missing: 1 of 3 layers")


@pytest.mark.parametrize("lost", ["experts", "shared_experts"])
def test_convert_and_inspect_refuse_experts_that_are_gone_everywhere(lost: str, source: Source, tmp_path: Path, run: Run) -> None:
    root = source()
    index = json.loads((root / "model.safetensors.index.json").read_text())
    drop(root, *(name for name in index["weight_map"] if f".ffn.{lost}." in name))
    code = "experts-missing" if lost == "experts" else "shared-missing"
    for command in (("inspect", root, "--require", "vllm-0.33-aiter"), (root, tmp_path / "out", "--tp", 4)):
        exit_code, _, err = run(*command)
        assert (exit_code, f"error[{code}]" in err) == (3, True)


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        (
            {"moe_intermediate_size": [130, 64]},
            "config-width",
            "moe_intermediate_size is 64 for model.layers.1.mlp, the tensors show 130",
        ),
        (
            {"moe_intermediate_size": [130]},
            "config-value",
            "moe_intermediate_size is [130], expected an entry for each of 2 layers",
        ),
        ({"moe_topk": [1]}, "config-value", "moe_topk is [1], expected an entry for each of 2 layers"),
        ({"moe_intermediate_size": [130, 130], "moe_topk": [1, 1], "num_shared_expert": [1, 1]}, "", ""),
    ],
)
def test_a_list_with_an_entry_per_layer(config: dict[str, Any], code: str, message: str) -> None:
    tensors: Tensors = {}
    for module in ("experts.0", "experts.1", "shared_mlp"):
        for layer in (0, 1):
            tensors |= expert(f"model.layers.{layer}.mlp.{module}", "bf16", 130, 64, PROJ)
    stated = {"model_type": "hunyuan_v1_moe", "hidden_size": 64, "intermediate_size": 130, "num_experts": 2, "num_hidden_layers": 2}
    found = description_of({**stated, "num_shared_expert": 1, **config}, tensors).conflicts
    assert [(c.code, c.message) for c in found] == ([(code, message)] if code else [])
