"""The table of what config.json may hold: every key of every family, with values that servers take and values that none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.quantization import read_quantization
from fse_convert.model.values import QUANTIZATION, TOP_K, allowed, misstated
from fse_convert.testing.memory import Model, description_of, matrix

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]

SAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "an integer of at least 1": ([1, 7168], [0, -1, "1", "x", 1.0, True, [1], {}]),
    "an integer of at least 0": ([0, 1], [-1, "1", 1.0, False, [1], {}]),
    "an integer of at least -1": ([-1, 3], [-2, "1", 1.0, [1]]),
    "an integer of at least 1, or a list of integers of at least 1": ([1, [3, 3]], [0, [], [3, 0], ["3"], "x", [[3]]]),
    "an integer of at least 0, or a list of integers of at least 0": ([0, [0, 1]], [-1, [], [1, -1], [None], "x"]),
    "an integer of at least -1, or a list of integers of at least -1": ([-1, [29, 28]], [-2, [], ["1"], "x"]),
    "an integer of at least 1, or a list of 0 and 1, one per layer": ([1, [0, 1, 1]], [0, [], [2], ["1"], "x"]),
    "a list of numbers of layers": ([[], [0, 3]], [0, "0", [-1], ["0"], [[0]], {}]),
    "a string": (["x"], [5, True, ["x"], {}]),
    "a string, or a list of strings": (["EM", ["dense", "sparse"], []], [5, [1], {}]),
    "an object": ([{}, {"a": 1}], ["x", 5, []]),
    "a number": ([1, 2.5], ["2.5", True, [1]]),
    "true or false": ([True, False], ["true", 1, [True]]),
    '"dynamic", or "static"': (["dynamic"], ["online", 5, ["dynamic"]]),
}
"""Values that a loader can compute with, and others, by what the table says of a key."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name} {f.model_types[0]}")
@pytest.mark.parametrize("section", ["", "text_config"])
def test_every_key_of_every_family(section: str, family: Family) -> None:
    table = allowed(family)
    assert {family.hidden_key, *family.depth_keys, *family.n_routed_keys, *TOP_K, *(w.key for w in family.widths)} <= table.keys()
    for key, values in table.items():
        right, wrong = SAMPLES[values.what]
        for value in (*right, *wrong, None):
            config: dict[str, Any] = {"model_type": family.model_types[0]}
            (config.setdefault(section, {}) if section else config)[key] = value
            path = f"{section}.{key}" if section else key
            found = [(p.code, p.message.partition(" is ")[0]) for p in misstated(family, config)]
            assert found == ([("config-value", path)] if _is(value, wrong) else []), (key, value)


def _is(value: object, values: list[Any]) -> bool:
    """Tell whether a value is among others, 1 and True apart."""
    return any(type(v) is type(value) and v == value for v in values)


@pytest.mark.parametrize("place", ["config.json", "text_config", "compression_config", "hf_quant_config.json"])
def test_every_key_of_a_quantisation(place: str) -> None:
    for key, values in QUANTIZATION.items():
        right, wrong = SAMPLES[values.what]
        for value in (*right, *wrong, None):
            described = {"quant_method": "mxfp8", key: value}
            config: dict[str, Any] = {} if place == "hf_quant_config.json" else {"quantization_config": described}
            if place == "text_config":
                config = {"text_config": config}
            elif place == "compression_config":
                config = {place: described}
            found = read_quantization(config, None if config else described)
            told = [p.message.partition(" is ")[0] for p in found.conflicts if p.code == "config-value"]
            assert told == ([key] if _is(value, wrong) else []), (key, value)


def test_a_block_takes_dynamic_activations_alone() -> None:
    """vLLM and SGLang raise a ValueError for blocks beside static ones."""
    for block, method, wrong in (([128, 128], "fp8", 1), (None, "fp8", 0), ([128, 128], "quark", 0)):
        scheme = {"quant_method": method, "weight_block_size": block, "activation_scheme": "static"}
        found = [p.message for p in read_quantization({"quantization_config": scheme}).conflicts if p.code == "config-value"]
        assert found == ["activation_scheme is 'static', expected \"dynamic\""] * wrong


@pytest.mark.parametrize(("key", "most"), [("num_experts_per_tok", 2), ("moe_topk", 2), ("dspark_num_experts_per_tok", 2)])
def test_a_token_passes_no_more_experts_than_there_are(key: str, most: int) -> None:
    model = Model(experts=most)
    for value in (0, 1, most, most + 1):
        found = description_of({**model.full_config(), key: value}, model.tensors()).conflicts
        assert [p.message for p in found if p.code == "config-value"] == (
            [f"{key} is {value}, expected 1 to {most}, the routed experts of a layer"] if value not in (1, most) else []
        )


WRONG = {"scale_fmt": 5, "activation_scheme": "x", "weight_block_size": "128", "modules_to_not_convert": "lm_head"} | {
    key: {} for key in ("hidden_size", "num_hidden_layers", "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
                        "num_experts_per_tok", "num_nextn_predict_layers", "dspark_n_routed_experts", "mlp_layer_types",
                        "quant_method")
}  # fmt: skip
"""A wrong value by key; the first four and the last are of a quantisation."""
IN_QUANTISATION = (*list(WRONG)[:4], "quant_method")
CODES = {"weight_block_size": "block-size-invalid", "modules_to_not_convert": "ignore-not-a-list"}


@pytest.mark.parametrize("key", WRONG)
def test_commands_give_one_answer(key: str, source: Made, tmp_path: Path, run: Run) -> None:
    """No server takes the value, so no gate says yes: `inspect`, its gate and `convert` exit with 3."""
    root, code = source(layers=1, mtp=0), CODES.get(key, "config-value")
    config = json.loads((root / "config.json").read_text())
    config["quantization_config" if key in IN_QUANTISATION else "text_config"][key] = WRONG[key]
    (root / "config.json").write_text(json.dumps(config))
    for arguments in (
        ("inspect", root),
        ("inspect", root, "--require", "sglang-0.5.23"),
        (root, tmp_path / "out", "--allow-unfused"),
    ):
        exit_code, text, _ = run(*arguments, "--json")
        assert (exit_code, code in {p["code"] for p in json.loads(text)["problems"]}) == (3, True)


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}], ids=["absent", "null"])
@pytest.mark.parametrize("method", ["fp8", "deepseek_v4_fp8"])
def test_blocks_that_the_config_does_not_state(method: str, block: dict[str, Any]) -> None:
    """vLLM and SGLang then make one scale per matrix (layers/quantization/fp8.py of 0.33 and 0.5.23)."""
    for shared, expected in (("fp8-128", ["config-block"]), ("fp8-tensor", []), ("mxfp8", [])):
        scheme = {"quant_method": method, "activation_scheme": "dynamic", **block}
        model = Model(shared=shared, config={"quantization_config": scheme})
        found = description_of(model.full_config(), model.tensors()).conflicts
        assert [c.code for c in found] == expected, shared
    assert (
        "there is no weight_block_size, experts are stored as FP8 128x128"
        in description_of(Model(config={"quantization_config": scheme}).full_config(), Model(shared="fp8-128").tensors())
        .conflicts[0]
        .message
    )


def test_a_model_without_routed_experts_says_zero() -> None:
    """Dense Granite 4.0 has num_local_experts 0 and num_experts_per_tok 0, and a shared MLP in each layer."""
    config = {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0, "hidden_size": 64,
              "intermediate_size": 128, "shared_intermediate_size": 128, "num_hidden_layers": 1}  # fmt: skip
    tensors = {
        f"model.layers.0.shared_mlp.{name}.weight": matrix("bf16", n, k)["weight"]
        for name, (n, k) in {"input_linear": (256, 64), "output_linear": (64, 128)}.items()
    }
    assert [p for p in description_of(config, tensors).conflicts if p.code == "config-value"] == []
