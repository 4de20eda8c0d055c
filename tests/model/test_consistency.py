"""Stale and contradicting quantisation configs, told by how experts are stored."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.model.consistency import covered, header_conflicts
from fse_convert.model.quantization import read_quantization
from fse_convert.testing.memory import Model

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def conflicts(model: Model, quant: dict[str, Any] | None, file: dict[str, Any] | None = None) -> list[str]:
    config = {k: v for k, v in model.full_config().items() if k != "quantization_config"} | (
        {"quantization_config": quant} if quant else {}
    )
    return [str(c) for c in header_conflicts(read_quantization(config, file), model.subject().description)]


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


@pytest.mark.parametrize(
    "quant",
    [
        {**FP8, "modules_to_not_convert": ["shared_experts"]},
        {**FP8, "ignored_layers": ["layers.0.ffn.shared_experts", "layers.1.ffn.shared_experts", "mtp.0.ffn.shared_experts"]},
        {"quant_method": "quark", "exclude": ["re:.*shared_experts.*"], "global_quant_config": {}, "export": {}},
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["*.ffn.shared_experts.*"]},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_excluded_shared_experts_are_no_conflict(quant: dict[str, Any]) -> None:
    assert conflicts(Model(shared="bf16"), quant) == []


def test_an_exclusion_that_the_tensors_do_not_follow() -> None:
    found = conflicts(Model(), {**FP8, "modules_to_not_convert": ["layers.0.ffn.shared_experts"]})
    assert found == [
        "layers.0.ffn.shared_experts: modules_to_not_convert excludes shared experts of 1 layers, which are stored quantised"
    ]


def test_nvidias_mixed_checkpoints_exclude_from_nvfp4_what_stays_fp8() -> None:
    quant = {**FP8, "moe_quant_algo": "NVFP4", "ignore": ["*.ffn.shared_experts.*", "mtp.*"]}
    assert conflicts(Model(routed="nvfp4"), quant) == []


def test_modelopts_own_file_is_read_where_config_json_says_nothing() -> None:
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    found = conflicts(Model(routed="bf16", shared="bf16"), None, file)
    assert len(found) == 2
    assert "hf_quant_config.json says modelopt" in found[0]


@pytest.mark.parametrize(
    ("entry", "yes"),
    [
        ("layers.1.ffn.experts", True),
        ("layers.1", True),
        ("layers.1.", True),
        ("layers.10", False),
        ("model.layers.1.ffn.experts", True),
        ("*experts*", True),
        ("*.experts.*", True),
        ("re:.*experts", True),
        ("re:layers\\.1\\.ffn\\.experts\\.0\\.w1", True),
        ("re:(", False),
        ("lm_head", False),
        ("expert", False),
        ("*", True),
        ("", False),
    ],
)
def test_what_an_entry_may_mean(entry: str, yes: bool) -> None:
    assert covered([entry], "layers.1.ffn.experts") is yes
