"""Checkpoints that vLLM on ROCm does not fuse or cannot load, each with what mends it: for our rules and for vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fse_convert.testing.memory import PROJ
from fse_convert.testing.patch import Json, edit_config, read_header, retype

Damage = Callable[[Path], object]
SHARED_MXFP4: Mapping[str, Any] = {"stored": {"shared": "mxfp4-u8"}}


@dataclass(frozen=True)
class Recipe:
    """A kind of checkpoint, its damage, and the changes that mend it.

    ``before`` and ``after``: letters of `models.letters` for the releases of vLLM on ROCm; the last one for all later ones too.
    """

    name: str
    kind: str
    changes: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    damage: Damage = lambda _: None
    knobs: Mapping[str, Any] = field(default_factory=dict)


def quantization(change: Callable[[Json], object]) -> Damage:
    """Damage the quantisation that config.json describes."""
    return lambda root: edit_config(root, lambda config: change(config["quantization_config"]))


def excluding(*entries: str) -> Damage:
    """Add entries to Quark's ``exclude``."""
    return quantization(lambda quark: quark["exclude"].extend(entries))


def unlisting(*entries: str) -> Damage:
    """Take entries of Quark's ``exclude`` away."""
    return quantization(lambda quark: [quark["exclude"].remove(entry) for entry in entries])


def setting(**keys: Any) -> Damage:
    """Write keys of the quantisation."""
    return quantization(lambda quant: quant.update(keys))


def dropping(*keys: str) -> Damage:
    """Take keys of the quantisation out."""
    return quantization(lambda quant: [quant.pop(key) for key in keys])


def shared(*layers: str, names: tuple[str, ...] = PROJ, module: str = "mlp.shared_experts") -> list[str]:
    """Name the projections of shared experts."""
    return [f"{layer}.{module}.{name}" for layer in layers for name in names]


def v4_shared(*layers: str) -> list[str]:
    """Name the projections of DeepSeek-V4's shared experts."""
    return shared(*layers, names=("w1", "w2", "w3"), module="ffn.shared_experts")


def retyped(dtype: str, new: str, end: str) -> Damage:
    """Label every tensor of a dtype, with this end of its name, otherwise."""

    def damage(root: Path) -> None:
        for shard in root.glob("*.safetensors"):
            names = [name for name, entry in read_header(shard)[0].items() if entry.get("dtype") == dtype and name.endswith(end)]
            for name in names:
                retype(root, name, dtype=new)

    return damage


def all_of(*damages: Damage) -> Damage:
    """Make several kinds of damage."""
    return lambda root: [damage(root) for damage in damages]


def by_other_observer(*entries: str) -> Damage:
    """Give modules the global scheme with another history."""

    def change(quark: Json) -> None:
        mx = quark["global_quant_config"]
        other = {**mx, "weight": {**mx["weight"], "observer_cls": "PerBlockMXDiffsObserver", "block_size": None}}
        quark["layer_quant_config"] = {**dict.fromkeys(entries, other), **quark["layer_quant_config"]}

    return quantization(change)


def experts_by_pattern(routed: str, shared: str) -> Damage:
    """Make FP8 the global scheme, and give experts MXFP4 by patterns."""

    def change(quark: Json) -> None:
        mx = quark["global_quant_config"]
        fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
        quark["global_quant_config"] = {**mx, "weight": fp8, "input_tensors": fp8}
        quark["layer_quant_config"] = {routed: mx, shared: mx}

    return quantization(change)


def regular_names(quark: Json) -> None:
    """Name FP8 modules of MTP layers by regular expressions, as published checkpoints do."""
    schemes = quark["layer_quant_config"]
    fp8 = schemes["mtp.0.e_proj"]
    quark["layer_quant_config"] = {k: v for k, v in schemes.items() if k.startswith("layers.") and not k.startswith("layers.3.")}
    quark["layer_quant_config"] |= {r"re:mtp\.0\.(attn\..*|[eh]_proj)": fp8, r"re:mtp\.0\.ffn\.shared_experts\.w[123]": fp8}


def without_twins(quark: Json) -> None:
    """Name the modules of MTP layers as ``mtp.K`` alone."""
    quark["layer_quant_config"] = {k: v for k, v in quark["layer_quant_config"].items() if not k.startswith("layers.3.")}


def misplaced(config: Json) -> None:
    """Move ``expert_dtype`` of DeepSeek-V4 to where vLLM does not read it."""
    config["quantization_config"]["expert_dtype"] = config.pop("expert_dtype")


KIMI, GLM, QWEN = ({"kind": f"{name}-quark", "knobs": SHARED_MXFP4} for name in ("kimi-k2", "glm-4.5", "qwen3.5"))
QWEN_LAYERS = (*(f"model.language_model.layers.{i}" for i in range(3)), "mtp.layers.0")
QWEN_SHARED = shared(*QWEN_LAYERS, module="mlp.shared_expert")
V4_DRAFTER = ("fffu", "fffx", "fffu", "fffu", "fffu")
"""DeepSeek-V4 by Quark: the drafter's shared expert is FP8, which vLLM 0.30 overlooks."""

RECIPES: tuple[Recipe, ...] = (
    Recipe("native V4", "v4-flash", ("shared-mxfp4",), ("uuuu", "xxxx", "xxxx", "xxxx", "uuuu"), V4_DRAFTER),
    Recipe("Kimi-K2 with BF16 shared experts", "kimi-k2-quark", ("shared-mxfp4",), ("uu",) * 5, ("ff",) * 5),
    Recipe("GLM-4.5, its MTP layer in BF16", "glm-4.5-quark", ("shared-mxfp4",), ("uuu",) * 5, ("uuu", *("ffu",) * 4)),
    Recipe("GLM-4.5 without MTP", "glm-4.5-quark", ("shared-mxfp4",), ("uu",) * 5, ("ff",) * 5, knobs={"mtp": 0}),
    Recipe("Qwen3.5 with BF16 shared experts", "qwen3.5-quark", ("shared-mxfp4",), ("uuuu",) * 5, ("ffff",) * 5),
    Recipe(
        "Qwen3.5, excluded by expressions",
        "qwen3.5-quark",
        ("shared-mxfp4",),
        ("uuuu",) * 5,
        ("ffff",) * 5,
        setting(exclude=["lm_head", "re:.*attn.*", r"re:.*shared_expert\..*", "re:.*shared_expert_gate", r"re:.*mlp\.gate$"]),
    ),
    Recipe(
        "native V4 as FP8",
        "v4-flash",
        ("routed-fp8",),
        ("uuuu", "xxxx", "xxxx", "xxxx", "uuuu"),
        ("uuuu", *("fffx",) * 4),  # the drafter is built with slots that nothing fills
    ),
    Recipe(
        "V4, MXFP4 shared experts excluded",
        "quark-mxfp4",
        ("heal-shared-excluded",),
        ("uuuu", "uuux", "uuuu", "uuuu", "uuuu"),
        V4_DRAFTER,
        excluding(*v4_shared("layers.0", "layers.1", "layers.2")),
    ),
    Recipe(
        "Kimi-K2, MXFP4 shared experts excluded",
        **KIMI,
        changes=("heal-shared-excluded",),
        before=("uu",) * 5,
        after=("ff",) * 5,
        damage=excluding(*shared("model.layers.1", "model.layers.2")),
    ),
    Recipe(
        "Kimi-K2, excluded by an expression",
        **KIMI,
        changes=("heal-shared-excluded",),
        before=("uu",) * 5,
        after=("ff",) * 5,
        damage=excluding(r"re:model\.layers\.\d+\.mlp\.shared_experts"),
    ),
    Recipe(
        "Kimi-K2, one projection excluded",
        **KIMI,
        changes=("heal-shared-excluded",),
        before=("uu", *("ef",) * 4),  # 0.29 looks for the word anywhere in the list
        after=("ff",) * 5,
        damage=excluding("model.layers.1.mlp.shared_experts.gate_proj"),
    ),
    Recipe("Qwen3.5, gates excluded", **QWEN, changes=("heal-shared-gate",), before=("uuuu", *("ffff",) * 4), after=("ffff",) * 5),
    Recipe(
        "Qwen3.5, MXFP4 shared experts excluded",
        **QWEN,
        changes=("heal-shared-excluded", "heal-shared-gate"),
        before=("uuuu",) * 5,
        after=("ffff",) * 5,
        damage=excluding(*QWEN_SHARED),
    ),
    Recipe(
        "Qwen3.5, excluded by a pattern with its gates",
        **QWEN,
        changes=("heal-shared-excluded", "heal-shared-gate"),
        before=("uuuu", *("ffff",) * 4),
        after=("ffff",) * 5,
        damage=setting(exclude=["lm_head", "re:.*attn.*", "*shared_expert*"]),
    ),
    Recipe(
        "Kimi-K2 without a list",
        **KIMI,
        changes=("heal-quark-exclude",),
        before=("ee",) * 5,
        after=("ff",) * 5,
        damage=dropping("exclude"),
    ),
    Recipe(
        "Qwen3.5, its list null",
        **QWEN,
        changes=("heal-quark-exclude",),
        before=("eeee",) * 5,
        after=("ffff",) * 5,
        damage=setting(exclude=None),
    ),
    Recipe(
        "Kimi-K2 without export",
        **KIMI,
        changes=("heal-quark-export",),
        before=("ee",) * 5,
        after=("ff",) * 5,
        damage=dropping("export"),
    ),
    Recipe(
        "GLM-4.5, KV cache group null",
        kind="glm-4.5-quark",
        knobs={**SHARED_MXFP4, "mtp": 0},
        changes=("heal-quark-export",),
        before=("ee",) * 5,
        after=("ff",) * 5,
        damage=setting(export={"kv_cache_group": None, "pack_method": "reorder"}),
    ),
    Recipe(
        "GLM-4.5, BF16 shared experts listed in part",
        kind="glm-4.5-quark",
        knobs={"mtp": 0},
        changes=("heal-shared-unlisted",),
        before=("uu", *("ee",) * 4),
        after=("uu",) * 5,
        damage=unlisting(*shared("model.layers.1", "model.layers.2", names=("up_proj",))),
    ),
    Recipe(
        "GLM-4.5, BF16 shared experts excluded by a pattern",
        kind="glm-4.5-quark",
        knobs={"mtp": 0},
        changes=("heal-shared-unlisted",),
        before=("uu", *("xx",) * 4),
        after=("uu",) * 5,
        damage=setting(exclude=["lm_head", "re:.*self_attn.*", "*shared_experts*"]),
    ),
    Recipe(
        "Kimi-K2, shared experts with another observer",
        **KIMI,
        changes=("heal-quark-scheme",),
        before=("uu",) * 5,
        after=("ff",) * 5,
        damage=by_other_observer("*shared_experts*"),
    ),
    Recipe(
        "Kimi-K2, routed experts with another observer",
        **KIMI,
        changes=("heal-quark-scheme",),
        before=("uu",) * 5,
        after=("ff",) * 5,
        damage=by_other_observer("*.mlp.experts*"),
    ),
    Recipe(
        "Kimi-K2, a pattern that misses the routed experts",
        **KIMI,
        changes=("heal-quark-experts-pattern",),
        before=("uu",) * 5,
        after=("ff",) * 5,
        damage=experts_by_pattern("*.mlp.experts.*", "*.mlp.shared_experts.*"),
    ),
    Recipe(
        "V4, the drafter by expressions",
        "quark-mxfp4",
        ("heal-quark-names",),
        ("fffu", "fffx", "fffx", "fffx", "fffx"),
        V4_DRAFTER,
        quantization(regular_names),
    ),
    Recipe(
        "V4, the drafter without twins",
        "quark-mxfp4",
        ("heal-quark-names",),
        ("fffu", "fffx", "fffx", "fffx", "fffu"),
        V4_DRAFTER,
        quantization(without_twins),
    ),
    Recipe(
        "V3, FP8 shared experts ignored",
        "v3",
        ("heal-fp8-ignored",),
        ("uuf",) * 5,
        ("fff",) * 5,
        setting(modules_to_not_convert=shared("model.layers.1", "model.layers.2")),
    ),
    Recipe(
        "V4 in FP8 without expert_dtype",
        "v4-flash-base",
        ("heal-expert-dtype",),
        ("xxxx",) * 5,
        ("uuuu", *("fffx",) * 4),
        lambda root: edit_config(root, lambda config: config.pop("expert_dtype")),
    ),
    Recipe(
        "V4 in FP8, expert_dtype in the wrong place",
        "v4-flash-base",
        ("heal-expert-dtype",),
        ("xxxx",) * 5,
        ("uuuu", *("fffx",) * 4),
        lambda root: edit_config(root, misplaced),
    ),
    Recipe("V4 in FP8 with E8M0 scales", "v4-flash-fp8", ("heal-fp8-scales",), ("xxxx",) * 5, ("uuuu", *("fffx",) * 4)),
    Recipe(
        "V4 in FP8 with E8M0 scales, without expert_dtype",
        "v4-flash-fp8",
        ("heal-expert-dtype", "heal-fp8-scales"),
        ("xxxx",) * 5,
        ("uuuu", *("fffx",) * 4),
        lambda root: edit_config(root, lambda config: config.pop("expert_dtype")),
    ),
    Recipe(
        "Kimi-K2 with four defects",
        **KIMI,
        changes=("heal-quark-export", "heal-quark-scheme", "heal-shared-excluded", "heal-quark-weight-labels"),
        before=("ee",) * 5,
        after=("ff",) * 5,
        damage=all_of(
            dropping("export"),
            by_other_observer("*shared_experts*"),
            excluding(*shared("model.layers.1")),
            retyped("U8", "I8", ".up_proj.weight"),
        ),
    ),
)
"""What `heals`, `shared_mxfp4` and `routed_fp8` are for."""
