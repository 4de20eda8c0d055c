"""The keys of config.json that a family's row names, each by itself: numbers of experts, depth, drafters, dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fse_convert.model.config_against_tensors import UNSTATED, unstated
from fse_convert.model.families.find import FAMILIES
from fse_convert.testing.memory import description_of
from tests.model.families.releases import (
    EXPERTS,
    LAYERS,
    RELEASES,
    Release,
    config_of,
    tensors_of,
)

COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "num_experts": (("num_experts",), ("num_shared_experts",)),
    "own": (("num_experts",), ()),
    "either": (("num_experts", "num_local_experts"), ()),
    "local": (("num_local_experts",), ()),
    "routed": (("n_routed_experts",), ()),
    "DeepSeek's": (("n_routed_experts", "num_local_experts"), ("n_shared_experts",)),
}
"""Names of the numbers of routed and of shared experts; the last are those of families that are not below."""
COUNTS_OF: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(
        ("Ling", "Param2", "EXAONE-MoE", "AFMoE", "K2-Horizon", "Cohere2-MoE", "XVERSE-MoE", "Hunyuan-V3", "Kimi-K3"),
        COUNTED["num_experts"],
    ),
    **dict.fromkeys(("Qwen3-Next", "Qwen3.5", "Alice AI", "Qwen2-MoE", "Laguna", "Flint"), COUNTED["own"]),
    **dict.fromkeys(("LFM2-MoE", "Beam", "Intern-S1-Pro", "Gemma 4"), COUNTED["own"]),
    **dict.fromkeys(("Qwen3-MoE", "OLMoE", "Mellum", "Jamba"), COUNTED["either"]),
    **dict.fromkeys(("Mixtral", "MiniMax-M2"), COUNTED["local"]),
    **dict.fromkeys(("MiMo-V2", "LongCat-Flash"), COUNTED["routed"]),
    **dict.fromkeys(("DeepSeek-VL2", "openPangu"), (("n_routed_experts",), ("n_shared_experts",))),
    "MiniMax-M3": (("num_local_experts",), ("n_shared_experts",)),
    "Kimi-Linear": (("num_experts",), ("num_shared_experts", "n_shared_experts")),
    "Ernie-4.5": (("moe_num_experts",), ("moe_num_shared_experts",)),
    "Hunyuan": (("num_experts",), ("num_shared_expert",)),
    "Ling-3": (("num_experts",), ("num_shared_experts", "n_shared_experts")),
    "Sarvam": (("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
    "Kolibri": (("num_local_experts", "num_experts"), ()),
    "Mistral Large 4": (("n_routed_experts", "num_experts"), ("n_shared_experts",)),
}
COUNTERS = sorted({name for pair in COUNTED.values() for names in pair for name in names} | {
    name for pair in COUNTS_OF.values() for names in pair for name in names
} | {"n_shared_experts"})  # fmt: skip


@pytest.mark.parametrize("key", COUNTERS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_a_number_of_experts_is_read_under_the_names_that_loaders_know_and_under_no_other(release: Release, key: str) -> None:
    routed, shared = COUNTS_OF.get(release.family, COUNTED["DeepSeek's"])
    tensors = tensors_of(release)
    config = {k: v for k, v in release.config.items() if k not in (*routed, *shared)}
    counts = {key: EXPERTS + 1 if key in routed else 7 * release.n_shared}
    found = {c.code for c in description_of(config_of(replace(release, config={**config, **counts})), tensors).conflicts}
    expected = "config-experts" if key in routed else "config-width" if key in shared else ""
    # Without the right number loaders take one shared expert, which is a conflict of its own where there are two.
    found = {"config-width" if code == "config-readings" else code for code in found - {UNSTATED}}  # another key may fit
    assert (expected in found) if expected else (found <= ({"config-width"} if release.n_shared > 1 else set()))


DEPTHS: dict[str, dict[str, Any]] = {
    "LongCat-Flash": {"num_layers": LAYERS, "num_hidden_layers": LAYERS},
    "Nemotron-H": {"num_hidden_layers": LAYERS, "layers_block_type": ["moe", "moe"]},
}


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_the_depth_and_the_input_of_experts_are_stated_under_the_names_that_loaders_know(release: Release) -> None:
    family = next(f for f in FAMILIES if release.model_type in f.model_types or f.name == release.family)
    depths = DEPTHS.get(release.family, {"num_hidden_layers": LAYERS})
    rest = {k: v for k, v in config_of(replace(release, nested=False)).items() if k not in depths}
    for key, value in depths.items():
        assert [p.message for p in unstated(family, {**rest, key: value}, 1) if "layer" in p.message] == []
    assert [p.message for p in unstated(family, rest, 1) if "layer" in p.message] == [f"there is no {' or '.join(depths)}"]
    del rest["hidden_size"]
    assert "there is no hidden_size" in [p.message for p in unstated(family, rest, 1)]


MTP_KEYS = {"MiniMax-M3": "num_mtp_modules", "Qwen3.5": "mtp_num_hidden_layers"}
NO_MTP_KEY = {
    "Hunyuan", "AFMoE", "K2-Horizon", "Qwen2-MoE", "Laguna", "Flint", "Kolibri", "Mistral 4", "Mistral Large 4", "Solar Open",
    "Cohere2-MoE", "XVERSE-MoE", "Mixtral", "MiniMax-M2", "Qwen3-MoE", "OLMoE", "Mellum", "LFM2-MoE", "LongCat-Flash", "Jamba",
    "Beam", "Intern-S1-Pro", "Gemma 4", "DeepSeek-VL2",
}  # fmt: skip


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_mtp_layers_are_promised_under_one_name_if_any(release: Release, key: str) -> None:
    config = config_of(replace(release, config={k: v for k, v in release.config.items() if k not in MTP_KEYS.values()}))
    inner = config[release.section] if release.nested else config
    inner.pop("num_nextn_predict_layers", None)
    inner[key] = 2
    promised = key == (None if release.family in NO_MTP_KEY else MTP_KEYS.get(release.family, "num_nextn_predict_layers"))
    code = "config-conflict" if release.mtp else "mtp-missing"
    assert (code in {c.code for c in description_of(config, tensors_of(release)).conflicts}) is promised


@pytest.mark.parametrize("key", ["dspark_n_routed_experts", "mtp_n_routed_experts"])
@pytest.mark.parametrize("release", [r for r in RELEASES if r.mtp], ids=lambda r: r.model_type)
def test_a_drafter_says_how_many_experts_it_has_under_its_own_name(release: Release, key: str) -> None:
    found = description_of(config_of(replace(release, config=release.config | {key: EXPERTS - 1})), tensors_of(release))
    own = {"DeepSeek-V4": "dspark_n_routed_experts", "Nemotron-H": "mtp_n_routed_experts"}.get(release.family)
    assert {p.code for p in found.problems} == ({"experts-extra"} if key == own else set())


@pytest.mark.parametrize("release", [r for r in RELEASES if r.shared and not r.decoder.endswith("{}")], ids=lambda r: r.model_type)
def test_a_shared_expert_stands_in_its_block_and_not_beside_it(release: Release) -> None:
    block, beside = release.decoder.format(0), release.decoder.format(0).rpartition(".")[0]
    tensors = {n.replace(f"{block}.{release.shared}.", f"{beside}.{release.shared}."): i for n, i in tensors_of(release).items()}
    found = description_of(config_of(release), tensors)
    assert "expert-outside" in {p.code for p in found.problems}


PREFIXED = [(0, "first_k_dense_replace", 1, 0), (1, "moe_layer_freq", 2, 1)]
STEPS = [(0, "mlp_only_layers", [0], []), (0, "decoder_sparse_step", 2, 1)]
FLAGS = [(0, "moe_layer_freq", [0, 1], [1, 1]), (1, "moe_layer_freq", 2, 1)]
FIRST = [(0, "num_dense_layers", 1, 0)]
SPARSE_OF: dict[str, list[tuple[int, str, Any, Any]]] = {
    **dict.fromkeys(
        ("Qwen3-Next", "Qwen3.5", "K2-Horizon", "Qwen2-MoE", "Flint", "Qwen3-MoE", "Intern-S1-Pro"), STEPS
    ),
    "Ernie-4.5": [
        (0, "moe_layer_start_index", 1, 0), (1, "moe_layer_end_index", 0, 1), (0, "moe_layer_interval", 2, 1),
    ],
    **dict.fromkeys(("AFMoE", "LFM2-MoE"), FIRST),
    **dict.fromkeys(("MiMo-V2", "MiniMax-M3"), FLAGS),
    "Nemotron-H": [
        (0, "layers_block_type", ["attention", "moe"], ["moe", "moe"]), (0, "hybrid_override_pattern", "*E", "EE"),
    ],
}  # fmt: skip
"""By family: the layer without experts, the key that says so, its value then, and one by which that layer has some."""
EVERY = {
    "Alice AI",
    "DeepSeek-V4",
    "Kolibri",
    "Solar Open",
    "XVERSE-MoE",
    "Mixtral",
    "MiniMax-M2",
    "OLMoE",
    "LongCat-Flash",
    "Hunyuan",
}
UNSAID = {"Laguna", "Mellum", "Jamba", "Beam", "Gemma 4"}
"""Families of which every layer has experts, and those in which no key but ``mlp_layer_types`` says which."""


def told(release: Release, absent: int, config: dict[str, Any]) -> set[str]:
    """Codes of what is missing where one layer has no experts."""
    block = f"{release.decoder.format(absent)}."
    tensors = {name: info for name, info in tensors_of(release).items() if not name.startswith(block)}
    plain = {k: v for k, v in release.config.items() if k not in ("mlp_layer_types", "hybrid_override_pattern")}
    return {p.code for p in description_of(config_of(replace(release, config={**plain, **config})), tensors).gaps}


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_the_keys_that_say_which_layers_have_experts(release: Release) -> None:
    kinds = SPARSE_OF.get(release.family, [] if release.family in EVERY | UNSAID else PREFIXED)
    rest = {"first_k_dense_replace": 0, "moe_layer_start_index": 0, "num_dense_layers": 0}
    for absent, key, dense, sparse in kinds:
        others = {k: v for k, v in rest.items() if k != key}
        assert told(release, absent, {**others, key: dense}) == set(), key
        assert told(release, absent, {**others, key: sparse}) == {"layers-missing"}, key
    if release.family != "Nemotron-H":
        assert told(release, 0, {**rest, "mlp_layer_types": ["dense", "sparse"]}) == set()
        assert told(release, 0, {**rest, "mlp_layer_types": ["sparse", "sparse"]}) == {"layers-missing"}
    assert told(release, 0, rest) == (set() if release.family in UNSAID else {"layers-missing"})
