"""Every family's names and config keys, as its own releases spell them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from shlex import quote
from typing import Any

import pytest

from fse_convert.model.consistency import LOAD_CONFLICTS, unstated
from fse_convert.model.describe import describe
from fse_convert.model.families import FAMILIES, find_family
from fse_convert.model.moe import LayerKind, Role
from fse_convert.model.quantization import read_quantization
from fse_convert.servers.judge import judge
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, description_of, expert, subject_of
from tests.stacked import CASES, Case, headers

HIDDEN, WIDTH, EXPERTS, LAYERS = 256, 128, 3, 2


@dataclass(frozen=True)
class Release:
    """One model type: its config, and prefixes of a decoder layer's block and of the drafter's."""

    family: str
    model_type: str
    decoder: str
    mtp: str = ""
    routed: tuple[str, str, str] = PROJ
    shared: str = "shared_experts"
    shared_names: tuple[str, str, str] = PROJ
    beside: str = ""
    shared_width: int = WIDTH
    n_shared: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    section: str = "text_config"
    gate: bool = False
    depth: str = "num_hidden_layers"


COUNT = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
OWN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 64}
LING = {"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
TOTAL = "moe_shared_expert_intermediate_size"
BOTH = {"num_experts": EXPERTS, "num_shared_experts": 1, "intermediate_size": WIDTH}
LOCAL = {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}
ROUTED = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
UP = ("", "up_proj", "down_proj")
V3, V3_MTP = "model.layers.{}.mlp", "model.layers.2.mlp"
VL = "model.language_model.layers.{}.mlp"
SPARSE = "model.layers.{}.block_sparse_moe"
RELEASES = (
    Release("DeepSeek-V4", "deepseek_v4", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT),
    Release("DeepSeek-V4", "deepseek_v41", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT, nested=True),
    Release("DeepSeek-V3", "deepseek_v2", V3, config=COUNT | {"n_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("DeepSeek-V3", "deepseek", V3, config=COUNT | {"n_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("DeepSeek-V3", "deepseek_v3", V3, V3_MTP, config=COUNT),
    Release("DeepSeek-V3", "deepseek_v32", V3, V3_MTP, config=COUNT),
    Release("DeepSeek-VL2", "deepseek_vl_v2", "language.model.layers.{}.mlp", config=COUNT, nested=True, section="language_config"),
    Release("DeepSeek-VL2", "unlimited-ocr", V3, config=COUNT, nested=True, section="language_config"),
    Release("Kimi-K2", "kimi_k2", V3, config=COUNT),
    Release("Kimi-K2", "kimi_vl", "language_model.model.layers.{}.mlp", config=COUNT, nested=True),
    Release("Kimi-K2", "kimi_k25", "language_model.model.layers.{}.mlp", config=COUNT, nested=True),
    Release("GLM-4-MoE", "glm4_moe", V3, V3_MTP, config=COUNT),
    Release("GLM-4-MoE", "glm4v_moe", VL, config=COUNT, nested=True),
    Release("GLM-5", "glm_moe_dsa", V3, V3_MTP, config=COUNT),
    Release("GLM-5", "glm5_next", VL, config=COUNT, nested=True),
    Release("AXK1", "axk1", V3, config=COUNT),
    Release(
        "MiniMax-M3", "minimax_m3_vl", "language_model.model.layers.{}.block_sparse_moe",
        "language_model.model.mtp.layers.0.block_sparse_moe", W, nested=True,
        config={
            "num_local_experts": EXPERTS, "n_shared_experts": 1, "intermediate_size": WIDTH, "dense_intermediate_size": 512,
            "shared_intermediate_size": WIDTH, "num_mtp_modules": 1,
        },
    ),
    Release(
        "Kimi-Linear", "kimi_linear", SPARSE, routed=W,
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH},
    ),
    Release(
        "Kimi-K3", "kimi_k3", "language_model.layers.{}.block_sparse_moe", "language_model.layers.2.block_sparse_moe", W,
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH}, nested=True,
    ),
    Release("Qwen3-Next", "qwen3_next", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release(
        "Qwen3.5", "qwen3_5_moe", VL, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN,
        nested=True, gate=True,
    ),
    Release("Qwen3.5", "qwen4_exp_text", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release("Alice AI", "alice_ai", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release(
        "Ernie-4.5", "ernie4_5_moe", V3, shared_width=2 * WIDTH, n_shared=2,
        config={"moe_num_experts": EXPERTS, "moe_num_shared_experts": 2, "moe_intermediate_size": WIDTH},
    ),
    Release(
        "Hunyuan", "hunyuan_v1_moe", V3, shared="shared_mlp",
        config={"num_experts": EXPERTS, "num_shared_expert": [1, 1], "moe_intermediate_size": [WIDTH, WIDTH]},
    ),
    Release(
        "Hunyuan-V3", "hy_v3", V3, V3_MTP, shared="shared_mlp",
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH},
    ),
    Release("Hunyuan-V4", "hy_v4", V3, V3_MTP, config=COUNT),
    Release("dots", "dots1", V3, config=COUNT),
    Release("Ling", "bailing_moe_v2", V3, V3_MTP, config=LING | {TOTAL: 64}, shared_width=64),
    Release("Ling", "llada2_moe", V3, config=LING | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("Ling-3", "bailing_hybrid", V3, V3_MTP, config=LING | {TOTAL: WIDTH}),
    Release("Ling-3", "bailing_moe_v3_vl", VL, "model.language_model.layers.2.mlp", config=LING, nested=True),
    Release("Sarvam", "sarvam_moe", V3, config=LING),
    Release("Sarvam", "sarvam_mla", V3, config=COUNT),
    Release("Param2", "param2moe", V3, config=LING | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release(
        "Nemotron-H", "nemotron_h", "backbone.layers.{}.mixer", "mtp.layers.0.mixer", UP, shared_names=UP, shared_width=2 * WIDTH,
        config=COUNT | {TOTAL: 2 * WIDTH, "hybrid_override_pattern": "EE"},
    ),
    Release(
        "Nemotron-H", "nemotron_h_omni", "language_model.backbone.layers.{}.mixer", routed=UP, shared_names=UP,
        config=COUNT | {TOTAL: WIDTH, "hybrid_override_pattern": "EE"}, nested=True, section="llm_config",
    ),
    Release("EXAONE-MoE", "exaone_moe", V3, "mtp.layers.0.mlp", config=LING),
    Release("AFMoE", "afmoe", V3, config=LING | {"num_dense_layers": 0}),
    Release("K2-Horizon", "k2_horizon", V3, config=LING | {"mlp_only_layers": []}),
    Release("Qwen2-MoE", "qwen2_moe", V3, shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release("Laguna", "laguna", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Flint", "flint", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Kolibri", "kolibri1", V3, shared_width=64, config={**OWN, "num_local_experts": EXPERTS}),
    Release("openPangu", "pangu_ultra_moe", V3, V3_MTP, config=COUNT),
    Release("Mistral 4", "mistral4", VL, config=COUNT, nested=True),
    Release("Mistral Large 4", "mistral_large4", "layers.{}", routed=W, shared_names=W, config=COUNT, nested=True),
    Release(
        "Qwen3.5", "intern_s2_preview", VL, shared="shared_expert", shared_width=64, config=OWN, nested=True, gate=True,
    ),
    Release("Solar Open", "solar_open", V3, config=COUNT),
    Release("Cohere2-MoE", "cohere2_moe", V3, config=BOTH),
    Release("XVERSE-MoE", "xverse", V3, config=BOTH | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("Mixtral", "mixtral", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Mixtral", "phimoe", SPARSE, routed=W, shared="", config=LOCAL),
    Release("MiniMax-M2", "minimax_m2", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Qwen3-MoE", "qwen3_moe", V3, shared="", config=ROUTED),
    Release("Qwen3-MoE", "sdar_moe", V3, shared="", config={"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release(
        "MiMo-V2", "mimo_v2", V3, "model.mtp.layers.0.mlp", shared="",
        config={"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_layer_freq": [1, 1]},
    ),
    Release("Beam", "beam", V3, shared="", config=ROUTED | {"mlp_layer_types": ["sparse"] * 2}),
    Release("Intern-S1-Pro", "interns1_pro", VL, shared="", config=ROUTED, nested=True),
    Release(
        "Gemma 4", "gemma4", "model.language_model.layers.{}", shared="", config=ROUTED | {"intermediate_size": 512}, nested=True
    ),
    Release("OLMoE", "olmoe", V3, shared="", config={"num_experts": EXPERTS, "intermediate_size": WIDTH}),
    Release("Mellum", "mellum", V3, shared="", config={"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release(
        "LFM2-MoE", "lfm2_moe", "model.layers.{}.feed_forward", routed=W, shared="",
        config={"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "num_dense_layers": 0},
    ),
    Release(
        "LongCat-Flash", "longcat_flash", V3, shared="", depth="num_layers",
        config={"n_routed_experts": EXPERTS, "expert_ffn_hidden_size": WIDTH},
    ),
    Release(
        "Jamba", "jamba", "model.layers.{}.feed_forward", shared="",
        config={"num_experts": EXPERTS, "intermediate_size": WIDTH},
    ),
    Release("dots3-note", "dots3_note", V3, config=COUNT | {TOTAL: 64}, shared_width=64),
    Release("dots3-note", "dots3_note_text", V3, config=COUNT | {"shared_experts_intermediate_size": 64}, shared_width=64),
)  # fmt: skip


def tensors_of(release: Release) -> Tensors:
    found: Tensors = {
        "model.embed_tokens.weight": ("BF16", (8, HIDDEN)),
        "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (3,)),
    }
    for block in [*(release.decoder.format(i) for i in range(LAYERS)), *([release.mtp] if release.mtp else [])]:
        for e in range(EXPERTS):
            found |= expert(f"{block}.experts.{e}", "bf16", WIDTH, HIDDEN, release.routed)
        if release.shared:
            found |= expert(f"{block}.{release.shared}", "bf16", release.shared_width, HIDDEN, release.shared_names)
        if release.gate:
            found[f"{block}.{release.shared}_gate.weight"] = ("BF16", (1, HIDDEN))
    if release.mtp:
        found[f"{release.mtp.rpartition('.')[0]}.enorm.weight"] = ("BF16", (HIDDEN,))
    return found


def config_of(release: Release) -> dict[str, Any]:
    inner = {release.depth: LAYERS, "hidden_size": HIDDEN, **release.config}
    if not release.mtp:
        inner.pop("num_nextn_predict_layers", None)
    if release.nested:
        return {"model_type": release.model_type, release.section: {"model_type": f"{release.model_type}_text", **inner}}
    return {"model_type": release.model_type, **inner}


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_a_releases_names_are_understood_to_the_last_tensor(release: Release) -> None:
    found = description_of(config_of(release), tensors_of(release))
    assert found.family is not None
    assert found.family.name == release.family
    assert found.problems == ()
    assert found.conflicts == ()
    decoder = [d for d in found.layers if d.layer.kind is LayerKind.DECODER]
    mtp = [d for d in found.layers if d.layer.kind is LayerKind.MTP]
    assert [(d.layer.name, d.layer.index) for d in decoder] == [(release.decoder.format(i), i) for i in range(LAYERS)]
    assert [(d.layer.name, d.layer.index) for d in mtp] == ([(release.mtp, 0)] if release.mtp else [])
    for d in found.layers:
        assert d.routed is not None
        assert (d.shared is not None) is bool(release.shared)
        assert (len(d.layer.routed), d.routed.width) == (EXPERTS, WIDTH)
        assert d.shared is None or d.shared.width == release.shared_width
        assert bool(d.layer.gate_tensor) is release.gate is found.family.gated
    assert found.n_shared == (release.n_shared if release.shared else 0)
    assert found.section == (release.section if release.nested else "")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANGES: dict[str, dict[str, Any]] = {
    "as released": {},
    "quantisation at the top": {"quantization_config": FP8},
    "wrong hidden size": {"hidden_size": 2 * HIDDEN},
    "wrong depth": dict.fromkeys(("num_hidden_layers", "num_layers"), LAYERS + 1),
    "wrong number of experts": dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), EXPERTS + 1
    ),
    "wrong width": dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 2 * WIDTH),
}
"""What the config is made to say; keys that a release does not have are left out."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_nested_or_flat_in_any_order_the_answer_is_the_same(release: Release, change: str) -> None:
    inner = config_of(replace(release, nested=False))
    wrong = {k: v for k, v in CHANGES[change].items() if k in inner}
    beside = {k: v for k, v in CHANGES[change].items() if k == "quantization_config"}
    answers = set()
    for nested, backwards, copied in product((False, True), repeat=3):
        config = {**config_of(replace(release, nested=nested, config={**release.config, **wrong})), **beside}
        if copied and nested:
            config |= {k: v for k, v in {**inner, **wrong}.items() if k != "model_type"}
        if backwards:
            config = {k: dict(reversed(v.items())) if isinstance(v, dict) else v for k, v in reversed(config.items())}
        answers.add(answer(config, release))
    assert len(answers) == 1
    conflicts = {code for *_, codes in answers for code in codes}
    numbered_on = release.mtp == release.decoder.format(LAYERS)  # then that layer's own tensors say that it is no decoder layer
    assert bool(conflicts) is (bool(wrong) and (change != "wrong depth" or numbered_on))


def answer(config: dict[str, Any], release: Release) -> tuple[Any, ...]:
    """What is made of a checkpoint: its layers, conflicts and gaps, and every server's verdict on decoder layers."""
    about = subject_of(config, tensors_of(release))
    found = about.description
    decoder = [i for i, d in enumerate(found.layers) if d.layer.kind is LayerKind.DECODER]
    verdicts = tuple(
        (a.name, v.outcome, tuple(r.code for r in v.reasons)) for a in judge(about) for v in (a.layers[i] for i in decoder)
    )
    gaps = tuple(p.code for p in found.gaps)
    codes = frozenset(c.code for c in found.conflicts if not c.code.startswith("quantization"))
    return repr(found.layers), found.n_shared, verdicts, gaps, codes


@pytest.mark.parametrize("copy", ["", "nested"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_a_copy_that_says_something_else_is_a_conflict_in_either_section(release: Release, copy: str) -> None:
    inner = {"hidden_size": HIDDEN, release.depth: LAYERS, **release.config}
    family = next(f for f in FAMILIES if release.model_type in f.model_types)
    keys = {"hidden_size", *(w.key for w in family.widths), *family.n_routed_keys, *family.n_shared_keys} & inner.keys()
    for key in keys:
        config = {**config_of(replace(release, nested=True)), **inner}
        (config[release.section] if copy else config)[key] = 7
        conflicts = [c for c in description_of(config, tensors_of(release)).conflicts if c.code in LOAD_CONFLICTS]
        assert conflicts, key


def test_numbers_of_experts_per_modality_add_up() -> None:
    release = next(r for r in RELEASES if r.family == "Ernie-4.5")
    found = description_of(config_of(replace(release, config={**release.config, "moe_num_experts": [2, 1]})), tensors_of(release))
    assert found.conflicts == ()
    two = description_of(config_of(replace(release, config={**release.config, "moe_num_experts": [3, 3]})), tensors_of(release))
    assert [c.message for c in two.conflicts] == ["moe_num_experts is [3, 3], the tensors show 3 routed experts per decoder layer"]
    per_layer = next(r for r in RELEASES if r.family == "Hunyuan")
    assert description_of(config_of(per_layer), tensors_of(per_layer)).n_shared == 1


@pytest.mark.parametrize(
    ("model_type", "change", "width", "reading"),
    [
        ("bailing_hybrid", {}, WIDTH, ""),
        ("bailing_hybrid", {TOTAL: 64}, 64, "moe_intermediate_size x 1 shared is 128"),
        ("bailing_hybrid", {"num_shared_experts": 2}, 2 * WIDTH, f"{TOTAL} is 128, the tensors show 256"),
        ("bailing_hybrid", {"num_shared_experts": 2, TOTAL: 2 * WIDTH}, 2 * WIDTH, f"{TOTAL} x 2 shared is 512"),
        ("sarvam_moe", {"num_shared_experts": 2}, 2 * WIDTH, ""),
        ("sarvam_moe", {"num_shared_experts": 2, TOTAL: 64}, WIDTH, "moe_intermediate_size x 2 shared is 256"),
        ("nemotron_h", {"n_shared_experts": 2}, 2 * WIDTH, f"{TOTAL} x 2 shared is 512"),
        ("nemotron_h", {"n_shared_experts": 2, TOTAL: WIDTH}, 2 * WIDTH, f"{TOTAL} is 128, the tensors show 256"),
        ("param2moe", {"num_shared_experts": 2, TOTAL: 192}, 192, ""),
        (
            "hunyuan_v1_moe",
            {"num_shared_expert": 2, "intermediate_size": WIDTH},
            2 * WIDTH,
            "intermediate_size is 128, the tensors",
        ),
    ],
)
def test_loaders_that_read_a_key_in_different_ways_must_come_to_one_width(
    model_type: str, change: dict[str, Any], width: int, reading: str
) -> None:
    release = next(r for r in RELEASES if r.model_type == model_type)
    release = replace(release, config=release.config | change, shared_width=width)
    found = description_of(config_of(release), tensors_of(release))
    assert found.problems == ()
    assert {c.code for c in found.conflicts} == ({"config-width"} if reading else set())
    assert not reading or any(c.message.startswith(reading) for c in found.conflicts)


@pytest.mark.parametrize(
    ("written", "there", "count", "codes"),
    [
        ({}, True, 1, []),
        ({}, False, 0, []),
        ({"n_shared_experts": None}, False, 0, []),
        ({"n_shared_experts": 0}, False, 0, []),
        ({"n_shared_experts": None}, True, 0, ["config-width"]),
        ({"n_shared_experts": 0}, True, 0, ["config-width"]),
    ],
)
def test_how_many_shared_experts_there_are(written: dict[str, Any], there: bool, count: int, codes: list[str]) -> None:
    release = next(r for r in RELEASES if r.model_type == "deepseek_v3")
    config = {k: v for k, v in release.config.items() if k != "n_shared_experts"} | written
    tensors = {n: i for n, i in tensors_of(release).items() if there or "shared_experts" not in n}
    for nested in (False, True):
        found = description_of(config_of(replace(release, config=config, nested=nested)), tensors)
        assert (found.n_shared, [c.code for c in found.conflicts]) == (count, codes)


def test_a_gated_familys_gate_must_be_there() -> None:
    release = next(r for r in RELEASES if r.gate)
    tensors = {n: i for n, i in tensors_of(release).items() if not n.startswith(f"{release.decoder.format(1)}.shared_expert_gate")}
    found = description_of(config_of(release), tensors)
    assert [(p.code, p.where) for p in found.problems] == [("gate-missing", f"{release.decoder.format(1)}.shared_expert")]


COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "num_experts": (("num_experts",), ("num_shared_experts",)),
    "own": (("num_experts",), ()),
    "either": (("num_experts", "num_local_experts"), ()),
    "local": (("num_local_experts",), ()),
    "routed": (("n_routed_experts",), ()),
}
"""Names of the numbers of routed and of shared experts, where they are not DeepSeek's."""
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
    routed, shared = COUNTS_OF.get(release.family, (("n_routed_experts",), ("n_shared_experts",)))
    tensors = tensors_of(release)
    config = {k: v for k, v in release.config.items() if k not in (*routed, *shared)}
    counts = {key: EXPERTS + 1 if key in routed else 7 * release.n_shared}
    found = {c.code for c in description_of(config_of(replace(release, config={**config, **counts})), tensors).conflicts}
    expected = "config-experts" if key in routed else "config-width" if key in shared else ""
    # Without the right number loaders take one shared expert, which is a conflict of its own where there are two.
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
def test_a_drafter_with_fewer_experts_says_so_under_its_own_name(release: Release, key: str) -> None:
    found = description_of(config_of(replace(release, config=release.config | {key: EXPERTS - 1})), tensors_of(release))
    own = {"DeepSeek-V4": "dspark_n_routed_experts", "Nemotron-H": "mtp_n_routed_experts"}.get(release.family)
    assert {p.code for p in found.problems} == ({"experts-missing"} if key == own else set())


@pytest.mark.parametrize("release", [r for r in RELEASES if r.shared and not r.decoder.endswith("{}")], ids=lambda r: r.model_type)
def test_a_shared_expert_stands_in_its_block_and_not_beside_it(release: Release) -> None:
    block, beside = release.decoder.format(0), release.decoder.format(0).rpartition(".")[0]
    tensors = {n.replace(f"{block}.{release.shared}.", f"{beside}.{release.shared}."): i for n, i in tensors_of(release).items()}
    found = description_of(config_of(release), tensors)
    assert "expert-outside" in {p.code for p in found.problems}


PREFIXED = [(0, "first_k_dense_replace", 1, 0), (1, "moe_layer_freq", 2, 1)]
STEPS = [(0, "mlp_only_layers", [0], []), (0, "decoder_sparse_step", 2, 1)]
FLAGS = [(0, "moe_layer_freq", [0, 1], [1, 1])]
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
EVERY = {"Alice AI", "DeepSeek-V4", "Kolibri", "Solar Open", "XVERSE-MoE", "Mixtral", "MiniMax-M2", "OLMoE", "LongCat-Flash"}
UNSAID = {"Hunyuan", "Laguna", "Mellum", "Jamba", "Beam", "Gemma 4"}
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


def test_every_family_of_the_table_is_tried() -> None:
    stacked = [find_family({"model_type": case.model_type}) for case in CASES]
    tried = {r.family for r in RELEASES} | {f.name for f in stacked if f} | {"Step-3", "Inkling", "Muse Spark", "Granite-MoE SWA"}
    assert tried == {f.name for f in FAMILIES}


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_a_model_type_that_is_not_known_resembles_a_family_with_such_names(release: Release) -> None:
    config = config_of(release) | {"model_type": "newcomer"}
    config = {k: {**v, "model_type": "newcomer_text"} if isinstance(v, dict) else v for k, v in config.items()}
    unknown = description_of(config, tensors_of(release))
    assert unknown.family is None
    assert unknown.unknown is not None
    assert f"add --family {quote(unknown.like)}" in unknown.unknown.hint
    made = checkpoint(config, tensors_of(release))
    named, known = (describe(made, read_quantization(config), f) for f in (unknown.like, release.family))
    assert named.problems == named.conflicts == ()
    assert named.layers == known.layers == description_of(config_of(release), tensors_of(release)).layers


@pytest.mark.parametrize("case", [c for c in CASES if c.stacks[0].startswith("experts.")], ids=lambda c: c.name)
def test_stacked_experts_of_a_model_type_that_is_not_known_resemble_a_family_with_such_stacks(case: Case) -> None:
    config, tensors = case.config_of(case.width), headers(case, case.width)
    like = description_of({**config, "model_type": "newcomer"}, tensors).like
    made = checkpoint({**config, "model_type": "newcomer"}, tensors)
    named = describe(made, read_quantization(made.config), like)
    assert named.problems == named.conflicts == ()
    assert named.layers == description_of(config, tensors).layers


def test_stacks_that_two_families_read_differently_resemble_none() -> None:
    """Both gpt-oss's keys and Qwen3-VL's: gate and up may stand in turn or one behind the other."""
    case = next(c for c in CASES if c.name == "L3 BF16")
    config = case.config_of(case.width) | {"model_type": "newcomer", "moe_intermediate_size": case.width}
    assert description_of(config, headers(case, case.width)).like == ""


@pytest.mark.parametrize("change", ["no down", "experts of their own", "another width", "another name"])
def test_stacks_that_are_not_all_of_a_layer_resemble_none(change: str) -> None:
    case = next(c for c in CASES if c.name == "L1 Qwen3.5")
    config, tensors = case.config_of(case.width) | {"model_type": "newcomer"}, headers(case, case.width)
    block = "model.layers.0.mlp.experts"
    if change == "no down":
        tensors = {name: t for name, t in tensors.items() if "experts.down_proj" not in name}
    elif change == "experts of their own":
        tensors |= expert(f"{block}.0", "bf16", case.width, case.hidden, PROJ)
    elif change == "another width":
        config["moe_intermediate_size"] = 64
    else:
        tensors[f"{block}.w13_blocks"] = ("U8", (EXPERTS, 66, 2, 16))
    assert description_of(config, tensors).like == ""


@pytest.mark.parametrize("change", ["another projection", "no width", "no count", "experts elsewhere", "stacked"])
def test_a_model_that_is_built_in_another_way_resembles_none(change: str) -> None:
    release = next(r for r in RELEASES if r.model_type == "deepseek_v3")
    config, tensors = config_of(release) | {"model_type": "newcomer"}, tensors_of(release)
    if change == "another projection":
        tensors |= {name.replace("up_proj", "side_proj"): info for name, info in tensors.items()}
    elif change == "no width":
        del config["moe_intermediate_size"]
    elif change == "no count":
        del config["n_routed_experts"]
    elif change == "experts elsewhere":
        tensors["adapter.experts.0.gate_proj.weight"] = ("BF16", (4, 4))
    else:
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = ("BF16", (4, 4, 4))
    assert description_of(config, tensors).like == ""


def test_the_family_of_a_known_model_type_is_not_a_matter_of_opinion() -> None:
    release = next(r for r in RELEASES if r.model_type == "deepseek_v3")
    made = checkpoint(config_of(release), tensors_of(release))
    found = describe(made, read_quantization(made.config), "MiniMax-M3")
    assert (found.family and found.family.name, found.problems) == ("DeepSeek-V3", ())


def test_model_types_belong_to_one_family_each() -> None:
    types = [t for f in FAMILIES for t in f.model_types]
    assert len(types) == len(set(types))
    assert all(f.source for f in FAMILIES)


def test_patterns_compile_and_take_no_more_than_a_block() -> None:
    for family in FAMILIES:
        pattern = family.pattern
        assert isinstance(pattern, re.Pattern)
        assert pattern.fullmatch("vision_tower.layers.0.mlp") is None


def test_llama4_holds_all_experts_of_a_layer_in_two_tensors() -> None:
    prefix = "language_model.model.layers.{}.feed_forward"
    tensors: Tensors = {}
    for i in range(LAYERS):
        tensors[f"{prefix.format(i)}.experts.gate_up_proj"] = ("BF16", (EXPERTS, HIDDEN, 2 * WIDTH))
        tensors[f"{prefix.format(i)}.experts.down_proj"] = ("BF16", (EXPERTS, WIDTH, HIDDEN))
        tensors |= expert(f"{prefix.format(i)}.shared_expert", "bf16", WIDTH, HIDDEN, PROJ)
    config = {
        "model_type": "llama4",
        "text_config": {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_hidden_layers": 2},
    }
    found = description_of(config, tensors)
    assert found.problems == found.conflicts == ()
    assert all(d.shared and d.shared.width == WIDTH for d in found.layers)
    assert [(d.layer.count, d.routed and (d.routed.width, d.routed.hidden)) for d in found.layers] == [
        (3, (WIDTH, HIDDEN))
    ] * LAYERS


@pytest.mark.parametrize("shared", ["share_expert", "moe.share_expert"])
def test_step5_holds_stacked_experts_in_the_block_and_the_shared_one_beside_it(shared: str) -> None:
    tensors: Tensors = {}
    for i in (1, 2):
        for name, shape in (("gate_proj", (4, WIDTH, HIDDEN)), ("up_proj", (4, WIDTH, HIDDEN)), ("down_proj", (4, HIDDEN, WIDTH))):
            tensors[f"model.layers.{i}.moe.{name}.weight"] = ("BF16", shape)
        tensors[f"model.layers.{i}.moe.router_bias"] = ("F32", (4,))
        tensors |= expert(f"model.layers.{i}.{shared}", "bf16", WIDTH, HIDDEN, PROJ)
    tensors["model.layers.2.eh_proj.weight"] = ("BF16", (HIDDEN, 2 * HIDDEN))
    tensors |= {f"model.layers.0.mlp.{p}.weight": ("BF16", (WIDTH, HIDDEN)) for p in PROJ}
    config = {
        "model_type": "step5",
        "moe_num_experts": 4,
        "moe_intermediate_size": WIDTH,
        "share_expert_dim": WIDTH,
        "num_hidden_layers": 2,
    }
    found = description_of(config, tensors)
    assert [(d.layer.name, d.layer.kind.value) for d in found.layers] == [
        ("model.layers.1.moe", "decoder"),
        ("model.layers.2.moe", "mtp"),
    ]
    assert found.problems == ()
    assert all(d.shared and d.routed and d.shared.width == d.routed.width == WIDTH for d in found.layers)
    assert found.layers[0].layer.shared is not None
    assert found.layers[0].layer.shared.projections[Role.GATE].name == f"model.layers.1.{shared}.gate_proj"


def test_a_family_is_found_by_the_text_models_type_too() -> None:
    assert find_family({"model_type": "kimi_vl", "text_config": {"model_type": "deepseek_v3"}}) is not None
    assert find_family({"model_type": "newcomer"}) is None
    assert find_family({}) is None


def test_numbers_are_read_where_the_widths_are_and_lists_of_equal_numbers_count_as_one() -> None:
    family = find_family({"model_type": "deepseek_v41"})
    assert family is not None
    config = {"num_hidden_layers": 9, "text_config": {"moe_intermediate_size": 5, "num_hidden_layers": 7, "n": [3, 3], "m": [3, 4]}}
    assert family.number(config, "num_hidden_layers") == 7
    assert family.number(config, "n") == 3
    assert family.number(config, "m") is None
    assert family.number(config, None) is None
    assert family.number({"moe_intermediate_size": True}, "moe_intermediate_size") is None


def test_layers_of_a_puzzle_may_differ() -> None:
    """Nemotron-H puzzles state every layer's experts in ``block_configs`` (SGLang 0.5.23 configs/nemotron_h.py:524-560)."""
    release = next(r for r in RELEASES if r.model_type == "nemotron_h")
    tensors = {n: i for n, i in tensors_of(release).items() if not n.startswith("backbone.layers.1.mixer.experts.2.")}
    blocks = [{"block_type": "moe", "n_routed_experts": n, "moe_intermediate_size": WIDTH} for n in (EXPERTS, EXPERTS - 1)]
    config = config_of(release) | {"model_type": "nemotron_h_puzzle", "block_configs": blocks}
    assert description_of(config, tensors).problems == ()
    del config["block_configs"]
    assert {p.code for p in description_of(config, tensors).problems} == {"experts-missing"}


def test_inklings_sink_experts_are_no_shared_experts_that_could_fuse() -> None:
    """Their weights come from the router (vLLM 0.33 models/inkling/nvidia/moe.py:6-11): nothing may call them a slot."""
    tensors: Tensors = {}
    for i in range(LAYERS):
        block = f"model.llm.layers.{i}.mlp"
        tensors[f"{block}.experts.w13_weight"] = ("BF16", (EXPERTS, 2 * WIDTH, HIDDEN))
        tensors[f"{block}.experts.w2_weight"] = ("BF16", (EXPERTS, HIDDEN, WIDTH))
        tensors[f"{block}.shared_experts.shared_w13_weight"] = ("BF16", (2, 2 * WIDTH, HIDDEN))
        tensors[f"{block}.shared_experts.shared_w2_weight"] = ("BF16", (2, HIDDEN, WIDTH))
        tensors[f"{block}.gate.weight"] = ("BF16", (EXPERTS + 2, HIDDEN))
    text = {"n_routed_experts": EXPERTS, "n_shared_experts": 2, "moe_intermediate_size": WIDTH, "hidden_size": HIDDEN}
    config = {"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text", "num_hidden_layers": LAYERS, **text}}
    about = subject_of(config, tensors)
    found = about.description
    assert [d.layer.name for d in found.layers] == [f"model.llm.layers.{i}.mlp" for i in range(LAYERS)]
    assert {p.code for p in found.problems} == {"experts-stacked"}
    assert found.outside == found.conflicts == ()
    assert (found.n_shared, {d.shared for d in found.layers}) == (0, {None})
    assert not any(answer.fused or v.fused for answer in judge(about) for v in answer.layers)


def test_muse_sparks_experts_work_on_a_hidden_size_of_their_own() -> None:
    block = "model.language_model.layers.{}.mlp"
    tensors: Tensors = {}
    for i in range(LAYERS):
        for e in range(EXPERTS):
            tensors |= expert(f"{block.format(i)}.experts.{e}", "bf16", WIDTH, HIDDEN, PROJ)
        tensors[f"{block.format(i)}.experts.post_expert_norm.weight"] = ("BF16", (HIDDEN,))
    text = {"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_hidden_size": HIDDEN, "hidden_size": 2 * HIDDEN}
    config = {"model_type": "muse_spark", "text_config": {"num_hidden_layers": LAYERS, **text}}
    found = description_of(config, tensors)
    assert (found.problems, found.conflicts) == ((), ())
    text["moe_hidden_size"] = 2 * HIDDEN
    config["text_config"] = {"num_hidden_layers": LAYERS, **text}
    assert {c.code for c in description_of(config, tensors).conflicts} == {"config-hidden"}


def test_step3_has_a_shared_expert_beside_its_stacked_ones() -> None:
    tensors: Tensors = {}
    for i in range(LAYERS):
        for name, shape in (("gate_proj", (4, WIDTH, HIDDEN)), ("up_proj", (4, WIDTH, HIDDEN)), ("down_proj", (4, HIDDEN, WIDTH))):
            tensors[f"model.layers.{i}.moe.{name}.weight"] = ("BF16", shape)
        tensors |= expert(f"model.layers.{i}.share_expert", "bf16", WIDTH, HIDDEN, PROJ)
    text = {"moe_num_experts": 4, "moe_intermediate_size": WIDTH, "share_expert_dim": 2 * WIDTH, "num_hidden_layers": LAYERS}
    found = description_of({"model_type": "step3_vl", "text_config": {"model_type": "step3_text", **text}}, tensors)
    assert found.problems == ()
    assert [d.layer.name for d in found.layers] == [f"model.layers.{i}.moe" for i in range(LAYERS)]
    assert all(d.shared and d.shared.width == WIDTH for d in found.layers)
    assert [c.message.partition(" is ")[0] for c in found.conflicts] == ["text_config.share_expert_dim"]


SIZED = {
    "llama4_text": ("hidden_size", "num_hidden_layers", "intermediate_size", "num_local_experts"),
    "step3p5": ("hidden_size", "num_hidden_layers", "moe_intermediate_size", "moe_num_experts"),
    "step3_text": ("hidden_size", "num_hidden_layers", "moe_intermediate_size", "moe_num_experts"),
    "inkling_text": ("hidden_size", "num_hidden_layers", "moe_intermediate_size", "n_routed_experts"),
    "muse_spark_text": ("moe_hidden_size", "num_hidden_layers", "moe_intermediate_size", "num_local_experts"),
}
"""Keys that size models whose experts are in one tensor."""


@pytest.mark.parametrize("model_type", SIZED)
def test_a_model_of_stacked_experts_lacks_each_key_that_sizes_it(model_type: str) -> None:
    family = find_family({"model_type": model_type})
    assert family is not None
    config = dict.fromkeys(SIZED[model_type], 4)
    assert list(unstated(family, config, 0)) == []
    for key in config:
        (problem,) = unstated(family, {k: v for k, v in config.items() if k != key}, 0)
        assert key in problem.message.removeprefix("there is no ").split(" or ")
