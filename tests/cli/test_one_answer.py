"""What inspect finds, convert refuses or notes, under the same codes: two commands, one answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import Json, edit_config, rename, retype

Source = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
EXPERT = "layers.0.ffn.experts.1"


def in_config(**changes: Any) -> Callable[[Path], None]:
    def change(config: Json) -> None:
        config.update(changes)

    return lambda root: edit_config(root, change)


def in_quantization(**changes: Any) -> Callable[[Path], None]:
    return lambda root: edit_config(root, lambda config: config["quantization_config"].update(changes))


REFUSED: dict[str, tuple[int, str, Callable[[Path], None]]] = {
    "stacks of another program": (
        0, "expert-outside", lambda r: rename(r, f"{EXPERT}.w1.weight", "layers.0.mlp.switch_mlp.gate_proj.weight", keep=True),
    ),
    "a layer twice": (
        3, "layer-twice", lambda r: rename(r, f"{EXPERT}.w1.weight", f"model.{EXPERT}.w1.weight", keep=True),
    ),
    "adapters": (0, "expert-unknown", lambda r: rename(r, f"{EXPERT}.w1.weight", f"{EXPERT}.w1.lora_A.weight", keep=True)),
    "one odd matrix": (3, "matrix-odd", lambda r: retype(r, f"{EXPERT}.w1.weight", dtype="F8_E5M2")),
    "kernel layout": (3, "already-converted", lambda r: rename(r, "norm.weight", "layers.0.ffn.experts.shared_l1_weight")),
    "lowered depth": (3, "config-layers", in_config(num_hidden_layers=1)),
    "no layers": (3, "config-value", in_config(num_hidden_layers=-1)),
    "no hidden size": (3, "config-value", in_config(hidden_size=0)),
    "more experts per token than there are": (3, "config-value", in_config(num_experts_per_tok=99)),
    "a list where loaders take one width": (3, "config-value", in_config(moe_intermediate_size=[256, 256])),
    "a number of MTP layers in quotes": (3, "config-value", in_config(num_nextn_predict_layers="1")),
    "a block in quotes": (3, "block-size-invalid", in_quantization(weight_block_size="128")),
    "a format of scales that is a number": (3, "config-value", in_quantization(scale_fmt=5)),
    "dense layers that have experts": (3, "config-dense", in_config(mlp_layer_types=["moe", "dense"])),
    "unknown family": (0, "family-unknown", in_config(model_type="newcomer", architectures=["Newcomer"])),
}  # fmt: skip
"""Exit code of inspect, the code of the error, and the change."""


@pytest.mark.parametrize(("expected", "code", "change"), REFUSED.values(), ids=REFUSED)
def test_what_convert_refuses_is_told_by_inspect_and_fails_the_gate(
    expected: int, code: str, change: Callable[[Path], None], source: Source, tmp_path: Path, run: Run
) -> None:
    root = source("v4-flash")
    change(root)
    exit_code, text, _ = run("inspect", root, "--json")
    found = json.loads(text)
    told = {p["code"] for part in ("problems", "unsupported", "conflicts") for p in found[part]}
    assert exit_code == expected
    assert code in told or (found["family"] is None and code == "family-unknown")
    assert run("inspect", root, "--require", "vllm-0.33")[0] == (expected or 1)
    exit_code, text, _ = run(root, tmp_path / "out", "--allow-unfused", "--dry-run", "--json")
    assert exit_code == 3
    assert [p["code"] for p in json.loads(text)["problems"]] == [code]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("quantization-missing", lambda root: edit_config(root, lambda c: c.pop("quantization_config"))),
        ("expert-dtype-conflict", lambda root: edit_config(root, lambda c: c["quantization_config"].update(expert_dtype="fp8"))),
        ("config-conflict", in_config(num_nextn_predict_layers=5)),
    ],
    ids=["no quantisation", "two dtypes", "MTP layers"],
)
def test_what_inspect_notes_convert_notes_too(
    code: str, change: Callable[[Path], None], source: Source, tmp_path: Path, run: Run
) -> None:
    root = source("v4-flash")
    change(root)
    conflicts = {c["code"] for c in json.loads(run("inspect", root, "--json")[1])["conflicts"]}
    exit_code, text, _ = run(root, tmp_path / "out", "--allow-unfused", "--dry-run", "--json")
    assert exit_code == 0
    assert code in conflicts
    assert conflicts <= {n["code"] for n in json.loads(text)["notes"]}


@pytest.mark.parametrize("null", [True, False], ids=["null", "missing"])
@pytest.mark.parametrize("key", ["global_quant_config", "exclude", "export"])
def test_a_key_of_quark_that_is_null_is_as_one_that_is_missing(key: str, *, null: bool, source: Source, run: Run) -> None:
    root = source("quark-mxfp4")
    assert run("inspect", root, "--require", "vllm-0.33-aiter-mega")[0] == 0
    edit_config(root, lambda c: c["quantization_config"].update({key: None}) if null else c["quantization_config"].pop(key))
    code, text, _ = run("inspect", root, "--require", "vllm-0.33-aiter-mega", "--json")
    found = json.loads(text)
    assert (code, "quark-incomplete" in {c["code"] for c in found["conflicts"]}) == (1, True)
    assert [t["target"] for t in found["targets"] if t["engine"] != "contract" and t["fused"]] == []


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "n_routed_experts"])
def test_a_size_that_is_not_stated_is_no_yes_of_a_server(key: str, source: Callable[..., Path], tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", layers=2)
    edit_config(root, lambda config: config.pop(key))
    assert run("inspect", root, "--require", "vllm-0.33")[0] == 1
    code, _, err = run(root, tmp_path / "out", "--target", "vllm-0.33", "--verify", "none")
    assert (code, f"there is no {key}" in err) == (1, True)
    assert run(root, tmp_path / "out", "--target", "vllm-0.33", "--verify", "none", "--allow-unfused")[0] == 0
    assert run("inspect", tmp_path / "out", "--require", "vllm-0.33")[0] == 1
