"""What the mends write, key by key, and what looks like a defect and is none that the headers prove."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.change import ConfigChange, FormatChange, changed_config
from fse_convert.plan.changes.heal import heals
from fse_convert.plan.changes.shared_mxfp4 import shared_mxfp4
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Copied, Recoded, Rule
from fse_convert.servers.subject import Subject
from fse_convert.testing.checkpoints import make_spec
from fse_convert.testing.memory import Tensors, subject_of
from fse_convert.testing.patch import drop, edit_config, rename
from tests.model.test_stacked import headers
from tests.plan.changes.conftest import Make
from tests.plan.changes.models import fused_by_quark, letters
from tests.plan.changes.recipes import (
    SHARED_MXFP4,
    Damage,
    all_of,
    by_other_observer,
    dropping,
    excluding,
    experts_by_pattern,
    misplaced,
    quantization,
    regular_names,
    retyped,
    setting,
    shared,
    v4_shared,
    without_twins,
)
from tests.releases import AITER, SLOTS, until_newest
from tests.stacked import CASES, LAYERS

KIMI_SHARED = shared("model.layers.1", "model.layers.2")
KIMI_EXPERTS = [f"model.layers.{layer}.mlp.shared_experts" for layer in (1, 2)]


def healed(source: Source) -> dict[str, Any]:
    """Return the quantisation after all mends."""
    config = changed_config(source.checkpoint.config, (edit for change in heals(source.subject) for edit in change.config))
    found: dict[str, Any] = config["quantization_config"]
    return found


def names(source: Source) -> list[str]:
    return [change.name for change in heals(source.subject)]


def only(source: Source, name: str) -> FormatChange:
    changes = heals(source.subject)
    assert [change.name for change in changes] == [name]
    return changes[0]


@pytest.mark.parametrize(
    "kind", ["v4-flash", "v4.1-flash", "v4-flash-base", "v3", "nvfp4", "bf16", "quark-mxfp4", "kimi-k2-quark", "glm-4.5-quark",
             "qwen3.5-quark"]
)  # fmt: skip
def test_published_checkpoints_need_no_mend(kind: str, small: Make) -> None:
    assert heals(small(kind).subject) == ()


def test_v4_pro_as_first_published_lacks_what_the_heterogeneous_kernel_asks_for(small: Make) -> None:
    assert only(small("v4-pro"), "heal-expert-dtype").config == (ConfigChange(("expert_dtype",), "fp4"),)


def test_mxfp4_experts_of_v41_may_be_told_of_in_several_places(small: Make) -> None:
    assert heals(small("v4.1-flash", lambda root: edit_config(root, expert_dtype_everywhere)).subject) == ()


def test_entries_of_shared_experts_go_and_all_others_stay_in_their_order(small: Make) -> None:
    source = small("kimi-k2-quark", excluding(*KIMI_SHARED, "model.layers.0.mlp"), **SHARED_MXFP4)
    before = source.checkpoint.config["quantization_config"]["exclude"]
    assert healed(source)["exclude"] == [entry for entry in before if entry not in KIMI_SHARED]


def test_a_pattern_makes_way_for_the_names_of_what_it_also_excluded(small: Make) -> None:
    damage = setting(exclude=["lm_head", "re:.*attn.*", "*.mlp.shared_expert*"])
    source = small("qwen3.5-quark", damage, stored={"shared": "mxfp4-u8", "mtp_routed": "bf16"})
    assert healed(source)["exclude"] == ["lm_head", "re:.*attn.*", "re:.*shared_exper[t]_gate"]


def test_unquantised_experts_that_a_pattern_excluded_are_named(small: Make) -> None:
    """The MTP layer's routed experts are BF16: a pattern that means them and MXFP4 shared experts is split."""
    stored = {"shared": "mxfp4-u8", "mtp_shared": "bf16"}
    source = small("glm-4.5-quark", setting(exclude=["lm_head", "*.mlp.*"]), stored=stored)
    exclude = healed(source)["exclude"]
    assert exclude[0] == "lm_head"
    assert set(exclude[1:]) == {
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"model.layers.{layer}.mlp.gate" for layer in (1, 2, 3)),
        *shared("model.layers.3"),
        "model.layers.3.mlp.experts",
    }


def test_the_list_that_is_missing_names_what_is_stored_unquantised(small: Make) -> None:
    source = small("qwen3.5-quark", dropping("exclude"), layers=1, mtp=0)
    layer = "model.language_model.layers.0"
    assert set(healed(source)["exclude"]) == {
        "lm_head",
        "model.language_model.embed_tokens",
        *(f"{layer}.linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj")),
        f"{layer}.mlp.gate",
        *shared(layer, module="mlp.shared_expert"),
        "re:.*shared_exper[t]_gate",
    }


def test_export_keeps_its_other_keys(small: Make) -> None:
    damage = setting(export={"kv_cache_group": None, "pack_method": "order", "weight_format": "real_quantized"})
    export = healed(small("kimi-k2-quark", damage, **SHARED_MXFP4))["export"]
    assert export == {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"}


def test_gates_have_one_entry_in_the_place_of_the_first(small: Make) -> None:
    source = small("qwen3.5-quark", setting(exclude=["a", "x.mlp.shared_expert_gate", "b", "*shared_expert_gate"]), **SHARED_MXFP4)
    assert only(source, "heal-shared-gate").config[0].path == ("quantization_config", "exclude")
    assert healed(source)["exclude"] == ["a", "re:.*shared_exper[t]_gate", "b"]


def test_unlisted_projections_are_added_by_name(small: Make) -> None:
    damage = setting(
        exclude=["lm_head", "model.layers.1.mlp.shared_experts.gate_proj", r"re:model\.layers\.2\.mlp\.shared_experts"]
    )
    source = small("glm-4.5-quark", damage, mtp=0)
    change = only(source, "heal-shared-unlisted")
    added = [f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("up", "down")]
    assert sorted(change.config[0].value) == sorted(source.checkpoint.config["quantization_config"]["exclude"] + added)


def test_one_scheme_is_spelled_as_the_global_one(small: Make) -> None:
    quark = healed(small("kimi-k2-quark", by_other_observer("*shared_experts*"), **SHARED_MXFP4))
    assert quark["layer_quant_config"] == {"*shared_experts*": quark["global_quant_config"]}


@pytest.mark.parametrize(
    ("part", "keys", "mended"),
    [
        ("weight", {"observer_cls": "other", "round_method": "floor", "scale_calculation_mode": "floor"}, True),
        ("weight", {"block_size": None}, True),
        ("weight", {"scale_format": "e4m3"}, False),
        ("weight", {"ch_axis": 1}, False),
        ("input_tensors", {"observer_cls": "other"}, True),
        ("input_tensors", {"scale_calculation_mode": "floor"}, False),
        ("input_tensors", {"is_dynamic": False}, False),
    ],
)
def test_history_of_a_scheme_is_what_no_value_depends_on(part: str, keys: dict[str, Any], mended: bool, small: Make) -> None:
    """How inputs are rounded is no history: that happens while serving."""

    def change(quark: dict[str, Any]) -> None:
        mx = quark["global_quant_config"]
        quark["layer_quant_config"]["*shared_experts*"] = {**mx, part: {**mx[part], **keys}, "target_device": "cpu"}

    source = small("kimi-k2-quark", quantization(change), **SHARED_MXFP4)
    assert names(source) == (["heal-quark-scheme"] if mended else [])


def test_a_pattern_for_routed_experts_is_widened_in_its_place(small: Make) -> None:
    damage = experts_by_pattern("*.mlp.experts.*", "*.mlp.shared_experts.*")
    source = small("kimi-k2-quark", damage, **SHARED_MXFP4)
    before = source.checkpoint.config["quantization_config"]["layer_quant_config"]
    after = healed(source)["layer_quant_config"]
    assert list(after.items()) == [
        ("*.mlp.experts*", before["*.mlp.experts.*"]),
        ("*.mlp.shared_experts.*", before["*.mlp.shared_experts.*"]),
    ]


@pytest.mark.parametrize("damage", [regular_names, without_twins], ids=["by expressions", "without twins"])
def test_fp8_modules_are_named_as_an_undamaged_checkpoint_names_them(damage: Any, small: Make) -> None:
    damaged = small("quark-mxfp4", quantization(damage))
    after = healed(damaged)["layer_quant_config"]
    before = damaged.checkpoint.config["quantization_config"]["layer_quant_config"]
    modules = {name.removesuffix(".weight") for name, info in damaged.checkpoint.tensors.items() if info.dtype == "F8_E4M3"}
    twins = {name.replace("mtp.0.", "layers.3.") for name in modules if name.startswith("mtp.0.")}
    assert set(after) == modules | twins | set(before)
    assert {spec["weight"]["dtype"] for spec in after.values()} == {"fp8_e4m3"}


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_fp8_shared_experts_leave_either_list(key: str, small: Make) -> None:
    entries = ["lm_head", *(f"{name}.weight" for name in shared("model.layers.1")), "model.layers.2.mlp.shared_experts"]
    source = small("v3", setting(**{key: entries}))
    assert only(source, "heal-fp8-ignored").config[0].path == ("quantization_config", key)
    assert healed(source)[key] == ["lm_head"]


def test_both_lists_are_mended_since_servers_read_the_second_where_the_first_is_empty(small: Make) -> None:
    source = small("v3", setting(ignored_layers=shared("model.layers.1"), modules_to_not_convert=shared("model.layers.2")))
    quantization = healed(source)
    assert (quantization["ignored_layers"], quantization["modules_to_not_convert"]) == ([], [])


def expert_dtype_everywhere(config: dict[str, Any]) -> None:
    config["expert_dtype"] = config["quantization_config"]["expert_dtype"] = config["text_config"]["expert_dtype"] = "fp4"


@pytest.mark.parametrize("change", [expert_dtype_everywhere, lambda config: config["quantization_config"].pop("expert_dtype")])
def test_expert_dtype_of_v41_stands_in_the_quantisation_alone(change: Any, small: Make) -> None:
    source = small("v4.1-flash", lambda root: edit_config(root, change), stored={"routed": "fp8-32"})
    assert names(source) == ["heal-expert-dtype", "heal-fp8-scales"]
    config = changed_config(source.checkpoint.config, (edit for change in heals(source.subject) for edit in change.config))
    assert config["quantization_config"]["expert_dtype"] == "fp8"
    assert "expert_dtype" not in config
    assert "expert_dtype" not in config["text_config"]


def test_expert_dtype_of_v4_stands_at_the_top_alone(small: Make) -> None:
    source = small("v4-flash-base", lambda root: edit_config(root, misplaced))
    config = changed_config(source.checkpoint.config, only(source, "heal-expert-dtype").config)
    assert config["expert_dtype"] == "fp8"
    assert "expert_dtype" not in config["quantization_config"]


def test_scales_of_fp8_experts_become_f32_in_their_places_and_no_others(small: Make) -> None:
    source = small("v4-flash-fp8", mtp=1)
    change = only(source, "heal-fp8-scales")
    experts = {n: i for n, i in source.checkpoint.tensors.items() if "experts" in n and n.endswith(".scale")}
    assert len(experts) == (3 + 1) * 3 * 3
    assert change.tensors.keys() == experts.keys()
    assert change.config == ()
    assert change.originals == frozenset()
    for name, (spec,) in change.tensors.items():
        assert (spec.name, spec.dtype, spec.shape) == (name, "F32", experts[name].shape)
        assert spec.change == Recoded(
            rule=Rule.F32,
            weight=None,
            scale=experts[name],
            shape=source.checkpoint.tensors[name.replace(".scale", ".weight")].shape,  # type: ignore[arg-type]
            block=(128, 128),
            is_scale=True,
        )


@pytest.mark.parametrize("stored", [{"routed": "fp8-128-f32-scale"}, {"shared": "fp8-128-f32-scale"}], ids=["shared", "routed"])
def test_one_group_of_scales_alone_is_mended(stored: Mapping[str, str], small: Make) -> None:
    source = small("v4-flash-fp8", stored=stored)
    part = ".experts." if "shared" in stored else ".shared_experts."
    tensors = only(source, "heal-fp8-scales").tensors
    assert tensors
    assert all(part in name for name in tensors)


def test_labels_of_mxfp4_are_mended_and_fp8_scales_keep_theirs(small: Make) -> None:
    damage = all_of(retyped("U8", "F8_E8M0", ".weight_scale"), retyped("U8", "I8", ".weight"))
    source = small("quark-mxfp4", damage)
    assert letters(source, SLOTS) == ("xxxx",) * len(SLOTS)
    changes = {change.name: change for change in heals(source.subject)}
    assert list(changes) == ["heal-quark-scale-labels", "heal-quark-weight-labels"]
    mxfp4 = {n for n, i in source.checkpoint.tensors.items() if i.dtype == "I8"}
    scales = {f"{name}_scale" for name in mxfp4}
    assert changes["heal-quark-weight-labels"].tensors.keys() == mxfp4
    assert changes["heal-quark-scale-labels"].tensors.keys() == scales
    for name, (spec,) in (pair for change in changes.values() for pair in change.tensors.items()):
        assert (spec.name, spec.dtype, spec.shape) == (name, "U8", source.checkpoint.tensors[name].shape)
        assert spec.change == Copied(source.checkpoint.tensors[name])
    assert letters(with_changes(source, tuple(changes.values())), SLOTS) == until_newest(("xxxx", "xxxx", "fffu"), SLOTS)


def test_scale_labels_alone_turn_a_silent_loss_into_fusion(small: Make) -> None:
    source = small("quark-mxfp4", retyped("U8", "F8_E8M0", ".weight_scale"))
    assert letters(source, SLOTS[2:]) == ("xxxx",) * len(SLOTS[2:])
    assert letters(with_changes(source, (only(source, "heal-quark-scale-labels"),)), SLOTS[2:]) == ("fffu",) * len(SLOTS[2:])


def unscaled(module: str) -> Damage:
    """Take a matrix's scale away."""
    return lambda root: drop(root, f"{module}.weight_scale")


NEAR: dict[str, tuple[str, Damage, dict[str, Any]]] = {
    "excluded and stored in BF16": ("kimi-k2-quark", lambda _: None, {}),
    "excluded, MXFP4 by the headers, FP8 by the scheme": (
        "kimi-k2-quark",
        all_of(excluding(*KIMI_SHARED), experts_by_pattern("*.mlp.experts*", "*.nothing*")),
        SHARED_MXFP4,
    ),
    "excluded, and a matrix of each has no scale": (
        "kimi-k2-quark",
        all_of(excluding(*KIMI_SHARED), *(unscaled(f"{shared}.up_proj") for shared in KIMI_EXPERTS)),
        SHARED_MXFP4,
    ),
    "a list that is a word": ("kimi-k2-quark", setting(exclude="lm_head"), SHARED_MXFP4),
    "entries of an MTP layer in BF16": (
        "glm-4.5-quark",
        excluding(*shared("model.layers.3")),
        {"stored": {"shared": "mxfp4-u8", "mtp_shared": "bf16"}},
    ),
    "gates beside shared experts in BF16": ("qwen3.5-quark", lambda _: None, {}),
    "another scheme, not another history": (
        "kimi-k2-quark",
        quantization(
            lambda q: q["layer_quant_config"].update(
                {"*shared_experts*": {**q["global_quant_config"], "input_tensors": None}},
            )
        ),
        SHARED_MXFP4,
    ),
    "a pattern for routed experts with the global scheme": (
        "kimi-k2-quark",
        quantization(lambda q: q["layer_quant_config"].update({"*.mlp.experts.*": q["global_quant_config"]})),
        SHARED_MXFP4,
    ),
    "a pattern for routed experts that would take the place of another": (
        "kimi-k2-quark",
        all_of(
            experts_by_pattern("*.mlp.experts.*", "*.mlp.shared_experts.*"),
            quantization(lambda q: q["layer_quant_config"].update({"*.mlp.experts*": q["global_quant_config"]})),
        ),
        SHARED_MXFP4,
    ),
    "FP8 modules of which no entry says how": (
        "quark-mxfp4",
        quantization(lambda q: q.update(layer_quant_config={"layers.0.attn.wq_a": q["layer_quant_config"]["layers.0.attn.wq_a"]})),
        {},
    ),
    "FP8 modules of decoder layers by shell patterns": (
        "quark-mxfp4",
        quantization(lambda q: q.update(layer_quant_config={"*attn*": q["layer_quant_config"]["layers.0.attn.wkv"]})),
        {"mtp": 0},
    ),
    "no export, and scales of a KV cache": (
        "kimi-k2-quark",
        all_of(
            dropping("export"),
            lambda root: rename(root, "model.norm.weight", "model.layers.0.self_attn.k_proj.output_scale", keep=True),
        ),
        SHARED_MXFP4,
    ),
    "ignored, and stored in BF16": ("v3", setting(ignored_layers=shared("model.layers.1")), {"stored": {"shared": "bf16"}}),
    "FP8 experts that are MXFP4 in the drafter, without expert_dtype": (
        "v4-flash-base",
        lambda root: edit_config(root, lambda config: config.pop("expert_dtype")),
        {"stored": {"mtp_routed": "mxfp4"}},
    ),
    "MXFP4 experts, E8M0 scales of FP8 shared ones": ("v4-flash", lambda _: None, {}),
    "FP8 experts by Quark": ("quark-mxfp4", lambda _: None, {"stored": {"routed": "fp8-128-quark", "shared": "fp8-128-quark"}}),
    "MXFP4 scales typed E8M0 in DeepSeek's own form": ("v4-flash", retyped("I8", "U8", ".weight"), {}),
}


@pytest.mark.parametrize(("kind", "damage", "knobs"), NEAR.values(), ids=NEAR.keys())
def test_what_the_headers_do_not_prove_is_left_alone(kind: str, damage: Damage, knobs: dict[str, Any], small: Make) -> None:
    assert names(small(kind, damage, **knobs)) == []


def test_a_mend_can_be_left_out_and_the_others_do_not_make_its_edits(small: Make) -> None:
    damage = excluding(*shared("model.language_model.layers.1", module="mlp.shared_expert"))
    source = small("qwen3.5-quark", damage, **SHARED_MXFP4)
    assert names(source) == ["heal-shared-excluded", "heal-shared-gate"]
    assert [change.name for change in heals(source.subject, but=["heal-shared-gate"])] == ["heal-shared-excluded"]
    assert heals(source.subject, but=["heal-shared-excluded"]) == (), "the gate's entry is not all that vLLM 0.29 would find"


def test_mends_come_before_a_recoding_of_the_same_list(small: Make) -> None:
    """Shared experts in BF16 beside a list that is missing: it is written first, then what becomes MXFP4 leaves it."""
    source = small("kimi-k2-quark", dropping("exclude", "export"))
    mends = heals(source.subject)
    recoded = shared_mxfp4(with_changes(source, mends).subject)
    assert isinstance(recoded, FormatChange)
    output = with_changes(source, (*mends, recoded))
    assert [change.name for change in mends] == ["heal-quark-export", "heal-quark-exclude"]
    assert letters(source) == ("ee",) * len(AITER)
    assert letters(output) == ("ff",) * len(AITER)


def test_an_expert_that_is_stored_in_two_ways_is_left_alone() -> None:
    """No config makes servers load gate and up projection in different formats."""
    spec = make_spec("kimi-k2-quark", hidden=512, width=256, layers=2, experts=2, vocab=64, stored={"shared": "mxfp4-u8"})
    tensors: Tensors = {e.name: (e.dtype, e.shape) for group in spec.traits.groups(spec) for e in group}
    names = shared("model.layers.1")
    config = {**spec.config, "quantization_config": {**spec.config["quantization_config"], "exclude": names}}
    assert [change.name for change in heals(subject_of(config, tensors))] == ["heal-shared-excluded"]
    tensors[f"{names[0]}.weight"] = ("BF16", (256, 512))
    del tensors[f"{names[0]}.weight_scale"]
    assert heals(subject_of(config, tensors)) == ()


def test_a_fused_shared_mlp_is_listed_as_a_whole() -> None:
    shared_experts = [f"model.layers.{i}.mlp.shared_experts.{p}" for i in range(LAYERS) for p in ("down_proj", "gate_up_proj")]
    assert edited(fused_by_quark(exclude=["lm_head"])) == ["lm_head", *shared_experts]
    assert edited(fused_by_quark(exclude=["lm_head", *shared_experts])) is None


def test_a_fused_shared_mlp_in_fp8_is_taken_off_as_a_whole() -> None:
    case = next(c for c in CASES if c.name == "L1 MiniMax-M3 FP8")
    entries = [f"model.layers.0.mlp.shared_experts.{p}" for p in ("down_proj", "gate_up_proj")]
    quantization = {**case.config["quantization_config"], "ignored_layers": ["lm_head", *entries]}
    subject = subject_of({**case.config_of(case.width), "quantization_config": quantization}, headers(case, case.width))
    assert edited(subject) == ["lm_head"]


def edited(subject: Subject) -> object:
    """Return the list that one mend leaves; None where there is nothing to mend."""
    edits = [edit.value for change in heals(subject) for edit in change.config]
    return edits[0] if edits else None


def test_v4_shared_experts_are_taken_off_under_their_own_names(small: Make) -> None:
    entries = v4_shared("layers.0", "layers.1", "layers.2")
    source = small("quark-mxfp4", excluding(*entries, "re:.*compressor.*"))
    change = only(source, "heal-shared-excluded")
    assert not set(entries) & set(change.config[0].value)
    assert "re:.*compressor.*" in change.config[0].value
