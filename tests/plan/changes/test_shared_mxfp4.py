"""Shared experts as MXFP4: Quark's form of DeepSeek-V4, whole, and the entries that change in Quark's own checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.errors import Problem
from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.change import FormatChange, changed_config
from fse_convert.plan.changes.shared_mxfp4 import shared_mxfp4
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Copied, Recoded, Rule
from fse_convert.testing.patch import edit_config, retype
from tests.plan.changes.conftest import Make
from tests.plan.changes.models import fused_by_quark, letters, made, opened
from tests.plan.changes.recipes import (
    Damage,
    dropping,
    excluding,
    experts_by_pattern,
    quantization,
    setting,
    shared,
    v4_shared,
)
from tests.releases import AITER, SLOTS, until_newest

W = {
    "ch_axis": -1, "dtype": "fp4", "group_size": 32, "is_dynamic": False, "is_scale_quant": False, "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver", "qscheme": "per_group", "round_method": "half_even", "scale_calculation_mode": "even",
    "scale_format": "e8m0", "scale_type": "float", "symmetric": None,
}  # fmt: skip
MX = {"weight": W, "input_tensors": W | {"is_dynamic": True}, "output_tensors": None, "bias": None, "target_device": None}
ATTENTION = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")


def fp8(rows: int, columns: int) -> dict[str, Any]:
    """Return the scheme of FP8 blocks, as AMD's checkpoints spell it."""
    weight = {
        "dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [rows, columns], "is_dynamic": False, "symmetric": True,
        "ch_axis": None, "group_size": None, "scale_type": "float8_e8m0fnu", "scale_format": None, "round_method": "half_even",
    }  # fmt: skip
    inputs = {
        "dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": columns, "is_dynamic": True, "symmetric": True, "ch_axis": -1,
        "scale_type": "float",
    }  # fmt: skip
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}


def fitting(source: Source) -> FormatChange:
    change = shared_mxfp4(source.subject)
    assert isinstance(change, FormatChange), change
    return change


def quantization_after(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = changed_config(source.checkpoint.config, fitting(source).config)["quantization_config"]
    return found


def test_the_whole_quantisation_of_deepseek_v4(small: Make) -> None:
    """Written out for three decoder layers, of which layer 2 has a compressor and an indexer, and one MTP layer."""
    draft = (*(f"attn.{name}" for name in ATTENTION), "e_proj", "h_proj", *(f"ffn.shared_experts.w{n}" for n in (1, 2, 3)))
    modules = [f"layers.{layer}.attn.{name}" for layer in range(3) for name in ATTENTION] + ["layers.2.attn.indexer.wq_b"]
    modules += [f"{layer}.{name}" for layer in ("mtp.0", "layers.3") for name in draft]
    compressor = ("attn.compressor", "attn.indexer.compressor")
    after = quantization_after(small("v4-flash"))
    assert set(after.pop("exclude")) == {
        *("embed", "head", "mtp.0.ffn.gate"),
        *(f"layers.{layer}.ffn.gate" for layer in range(3)),
        *(f"layers.2.{part}.{name}" for part in compressor for name in ("wkv", "wgate")),
        "layers.2.attn.indexer.weights_proj",
    }
    assert after == {
        "quant_method": "quark",
        "version": "0.13",
        "global_quant_config": MX,
        "layer_quant_config": dict.fromkeys(modules, fp8(128, 128)),
        "layer_type_quant_config": {},
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "algo_config": None,
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": {},
        "softmax_quant_spec": None,
    }


def test_quarks_form_has_the_tensors_of_a_checkpoint_by_quark(small: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Names, dtypes and shapes, against the factory's: a kind of its own, with its own names."""
    native = small("v4-flash")
    by_quark = opened(made(tmp_path_factory.mktemp("quark") / "source", "quark-mxfp4"))
    output = with_changes(native, (fitting(native),))
    stored = {n: (i.dtype, i.shape) for n, i in output.checkpoint.tensors.items()}
    assert stored == {n: (i.dtype, i.shape) for n, i in by_quark.checkpoint.tensors.items()}
    ours, theirs = (s.checkpoint.config["quantization_config"]["layer_quant_config"] for s in (output, by_quark))
    assert set(ours) == set(theirs)


def test_bytes_are_copied_but_for_shared_experts_of_decoder_layers(small: Make) -> None:
    source = small("v4-flash")
    change = fitting(source)
    recoded = {spec.name for specs in change.tensors.values() for spec in specs if isinstance(spec.change, Recoded)}
    names = v4_shared("layers.0", "layers.1", "layers.2")
    assert recoded == {f"{name}.{part}" for name in names for part in ("weight", "weight_scale")}
    assert not change.lossless
    assert change.originals == {f"{name}.{part}" for name in names for part in ("weight", "scale")}
    for name, (spec,) in change.tensors.items():
        if spec.name not in recoded:
            assert spec.change == Copied(source.checkpoint.tensors[name])
    drafter = change.tensors["mtp.0.ffn.shared_experts.w1.scale"][0]
    assert (drafter.name, drafter.dtype) == ("mtp.0.ffn.shared_experts.w1.weight_scale", "F8_E8M0")
    assert "mtp.0.ffn.shared_experts.w1.weight" not in change.tensors


@pytest.mark.parametrize(
    ("kind", "stored", "expert", "block"),
    [
        ("v4-flash", {}, "layers.1.ffn.shared_experts.w2", (128, 128)),
        ("v4.1-flash", {}, "layers.1.ffn.shared_experts.w2", (32, 32)),
        ("v4-flash", {"shared": "bf16"}, "layers.1.ffn.shared_experts.w2", None),
        ("quark-mxfp4", {"shared": "fp8-128-quark"}, "layers.1.ffn.shared_experts.w2", (128, 128)),
        ("kimi-k2-quark", {}, "model.layers.1.mlp.shared_experts.down_proj", None),
        ("qwen3.5-quark", {}, "model.language_model.layers.1.mlp.shared_expert.down_proj", None),
    ],
)
def test_a_matrix_becomes_two_tensors(kind: str, stored: dict[str, str], expert: str, block: Any, small: Make) -> None:
    source = small(kind, stored=stored)
    change, tensors = fitting(source), source.checkpoint.tensors
    parts = [name for name in tensors if name.rpartition(".")[0] == expert]
    assert set(parts) <= change.originals
    weight, scale = tensors[f"{expert}.weight"], next((tensors[name] for name in parts if name.endswith("scale")), None)
    codes, scales = sorted(spec for name in parts for spec in change.tensors[name])
    assert (codes.name, codes.dtype, codes.shape) == (f"{expert}.weight", "U8", (512, 128))
    assert (scales.name, scales.dtype, scales.shape) == (f"{expert}.weight_scale", "U8", (512, 8))
    for spec, is_scale in ((codes, False), (scales, True)):
        assert spec.change == Recoded(rule=Rule.MXFP4, weight=weight, scale=scale, shape=(512, 256), block=block, is_scale=is_scale)


def test_three_drafters_have_twins_whatever_the_config_counts(small: Make) -> None:
    """V4-Flash-0731 says one MTP layer and has three."""
    named = quantization_after(small("v4-flash-0731"))["layer_quant_config"]
    for k in range(3):
        assert named[f"mtp.{k}.attn.wkv"] == named[f"layers.{3 + k}.attn.wkv"] == fp8(128, 128)
    assert named["mtp.0.main_proj"] == named["layers.3.main_proj"]


def test_v41_is_named_by_its_own_blocks(small: Make) -> None:
    """One table of its engrams has a scale per row and 32 columns."""
    source = small("v4.1-flash")
    named = quantization_after(source)["layer_quant_config"]
    assert named["layers.0.attn.wq_a"] == fp8(32, 32)
    assert named["layers.1.engram.embed"] == fp8(1, 32)
    assert letters(with_changes(source, (fitting(source),)), SLOTS[1:]) == until_newest(("xxxx", "fffu"), SLOTS[1:])


def test_quarks_lists_lose_the_shared_experts_alone(small: Make) -> None:
    source = small("qwen3.5-quark")
    before, after = source.checkpoint.config["quantization_config"], quantization_after(source)
    layers = (*(f"model.language_model.layers.{i}" for i in range(3)), "mtp.layers.0")
    names = shared(*layers, module="mlp.shared_expert")
    kept = [entry for entry in before["exclude"] if entry not in names and "shared_expert_gate" not in entry]
    assert [entry for entry in after["exclude"] if "shared" not in entry] == kept
    assert [entry for entry in after["exclude"] if "shared" in entry] == [r"re:.*shared_exper[t]_gate"]
    assert {key: value for key, value in after.items() if key != "exclude"} == {
        key: value for key, value in before.items() if key != "exclude"
    }


def test_entries_of_mtp_layers_that_do_not_change_stay(small: Make) -> None:
    source = small("glm-4.5-quark")
    left = [entry for entry in quantization_after(source)["exclude"] if "shared_expert" in entry]
    assert sorted(left) == sorted(shared("model.layers.3"))


def test_schemes_of_fp8_shared_experts_go(small: Make) -> None:
    names = v4_shared("layers.0", "layers.1", "layers.2")

    def by_scheme(quark: dict[str, Any]) -> None:
        quark["layer_quant_config"] |= dict.fromkeys(names, quark["layer_quant_config"]["layers.0.attn.wkv"])

    source = small("quark-mxfp4", quantization(by_scheme), stored={"shared": "fp8-128-quark"})
    before, after = source.checkpoint.config["quantization_config"], quantization_after(source)
    assert list(after["layer_quant_config"]) == [name for name in before["layer_quant_config"] if name not in names]
    assert letters(source) == until_newest(("uuuu", "xxxx", "uuuu"))
    assert [found[:3] for found in letters(with_changes(source, (fitting(source),)))] == ["fff"] * len(AITER)


def test_nothing_is_written_for_a_list_that_is_not_there(small: Make) -> None:
    assert fitting(small("kimi-k2-quark", dropping("exclude"))).config == ()


ROUTED_DIFFER = "layer_quant_config gives routed experts another scheme than the global one: *.mlp.experts*"
NOT_GLOBAL = "global_quant_config is not MXFP4 in groups of 32, so the shared experts would not become MXFP4 by it"


def other_routed(quark: dict[str, Any]) -> None:
    quark["layer_quant_config"]["*.mlp.experts*"] = {**quark["global_quant_config"], "input_tensors": None}


def wide_entry(quark: dict[str, Any]) -> None:
    quark["layer_quant_config"]["*shared_experts*"] = quark["layer_quant_config"]["layers.0.attn.wkv"]


NOT_MXFP4 = "the routed experts of {} are not MXFP4, so MXFP4 shared experts would not fit beside them"
UNFIT: dict[str, tuple[str, Damage, dict[str, Any], str]] = {
    "V3": ("v3", lambda _: None, {}, NOT_MXFP4.format("model.layers.1.mlp")),
    "NVFP4": ("nvfp4", lambda _: None, {}, NOT_MXFP4.format("layers.0.ffn")),
    "MXFP4 already": ("quark-mxfp4", lambda _: None, {}, "there are no shared experts that are not MXFP4 already"),
    "no shared experts": ("v4-flash", lambda _: None, {"shared": 0}, "there are no shared experts that are not MXFP4 already"),
    "per tensor": (
        "v4-flash",
        lambda root: [retype(root, f"{name}.scale", dtype="F32", shape=[]) for name in v4_shared("layers.0")],
        {"hidden": 256, "width": 256},
        "layers.0.ffn.shared_experts.w1 is stored as FP8 per tensor; FP8 blocks and floats can become MXFP4",
    ),
    "columns": (
        "kimi-k2-quark",
        lambda _: None,
        {"width": 48},
        "model.layers.1.mlp.shared_experts.down_proj has 48 columns, which is not a multiple of 32",
    ),
    "no config": (
        "kimi-k2-quark",
        lambda root: edit_config(root, lambda config: config.pop("quantization_config")),
        {},
        "the checkpoint is neither DeepSeek-V4 in its own FP8 nor by AMD Quark with a quantization_config",
    ),
    "another global scheme": (
        "kimi-k2-quark",
        experts_by_pattern("*.mlp.experts*", "*.mlp.shared_experts.*"),
        {},
        NOT_GLOBAL,
    ),
    "no global scheme": ("kimi-k2-quark", setting(global_quant_config=None), {}, NOT_GLOBAL),
    "routed experts by a scheme of their own": ("kimi-k2-quark", quantization(other_routed), {}, ROUTED_DIFFER),
    "an entry for more": (
        "quark-mxfp4",
        quantization(wide_entry),
        {"stored": {"shared": "fp8-128-quark"}},
        "an entry of layer_quant_config means shared experts and other modules: *shared_experts*",
    ),
    "FP8 without blocks": (
        "v4-flash",
        lambda root: retype(root, "layers.0.attn.wkv.scale", dtype="F32", shape=[1]),
        {"head_dim": 64},
        "layers.0.attn.wkv is stored as FP8 per tensor, not in FP8 blocks with E8M0 scales",
    ),
    "F32 scales": (
        "v4-flash",
        lambda _: None,
        {"stored": {"linear": "fp8-128-f32-scale"}},
        "layers.0.attn.wkv is stored as FP8 128x128 F32, not in FP8 blocks with E8M0 scales",
    ),
    "a module that is not understood": (
        "v4-flash",
        lambda root: retype(root, "layers.0.attn.wkv.scale", shape=[4]),
        {},
        "layers.0.attn.wkv is stored in a way that is not understood",
    ),
    "FP8 experts in the drafter": (
        "v4-flash",
        lambda _: None,
        {"stored": {"mtp_routed": "fp8-128"}},
        "routed experts must be MXFP4 in every layer, those of MTP layers too",
    ),
    "no number of layers": (
        "v4-flash",
        lambda root: edit_config(root, lambda config: config.pop("num_hidden_layers")),
        {},
        "config.json has no num_hidden_layers, after which the modules of MTP layers are named",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "knobs", "message"), UNFIT.values(), ids=UNFIT.keys())
def test_what_does_not_fit_says_why(kind: str, damage: Damage, knobs: dict[str, Any], message: str, small: Make) -> None:
    assert shared_mxfp4(small(kind, damage, **knobs).subject) == Problem("shared-mxfp4-unfit", message)


def test_a_fused_shared_mlp_is_left_as_a_whole() -> None:
    problem = shared_mxfp4(fused_by_quark(exclude=["lm_head"]))
    assert isinstance(problem, Problem)
    module = "model.layers.0.mlp.shared_experts.gate_up_proj"
    assert (
        problem.message
        == f"gate and up of the shared experts are one matrix, {module}; only matrices of their own can become MXFP4"
    )


@pytest.mark.parametrize("entry", ["*shared_expert*", "re:.*shared_experts.*", "model.layers.1.mlp.shared_experts.gate_up_proj"])
def test_patterns_and_fused_names_of_shared_experts_go(entry: str, small: Make) -> None:
    source = small("kimi-k2-quark", excluding(entry))
    assert letters(with_changes(source, (fitting(source),))) == ("ff",) * len(AITER)
