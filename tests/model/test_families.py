"""Every family's names and config keys, as its own releases spell them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from shlex import quote
from typing import Any

import pytest

from fse_convert.model.consistency import LOAD_CONFLICTS
from fse_convert.model.describe import describe
from fse_convert.model.families import FAMILIES, find_family
from fse_convert.model.moe import LayerKind, Role
from fse_convert.model.quantization import read_quantization
from fse_convert.servers.judge import judge
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, description_of, expert, subject_of
from tests.stacked import CASES

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
    gate: bool = False
    depth: str = "num_hidden_layers"


COUNT = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
OWN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 64}
LING = {"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
TOTAL = "moe_shared_expert_intermediate_size"
BOTH = {"num_experts": EXPERTS, "num_shared_experts": 1, "intermediate_size": WIDTH}
LOCAL = {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}
UP = ("", "up_proj", "down_proj")
V3, V3_MTP = "model.layers.{}.mlp", "model.layers.2.mlp"
VL = "model.language_model.layers.{}.mlp"
SPARSE = "model.layers.{}.block_sparse_moe"
RELEASES = (
    Release("DeepSeek-V4", "deepseek_v4", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT),
    Release("DeepSeek-V4", "deepseek_v41", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT, nested=True),
    Release("DeepSeek-V3", "deepseek_v2", V3, config=COUNT | {"n_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("DeepSeek-V3", "deepseek_v3", V3, V3_MTP, config=COUNT),
    Release("DeepSeek-V3", "deepseek_v32", V3, V3_MTP, config=COUNT),
    Release("Kimi-K2", "kimi_k2", V3, config=COUNT),
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
    Release("Param2", "param2moe", V3, config=LING | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release(
        "Nemotron-H", "nemotron_h", "backbone.layers.{}.mixer", "mtp.layers.0.mixer", UP, shared_names=UP, shared_width=2 * WIDTH,
        config=COUNT | {TOTAL: 2 * WIDTH, "hybrid_override_pattern": "EE"},
    ),
    Release("EXAONE-MoE", "exaone_moe", V3, config=LING),
    Release("AFMoE", "afmoe", V3, config=LING | {"num_dense_layers": 0}),
    Release("K2-Horizon", "k2_horizon", V3, config=LING | {"mlp_only_layers": []}),
    Release("Qwen2-MoE", "qwen2_moe", V3, shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release("Laguna", "laguna", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Flint", "flint", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Kolibri", "kolibri1", V3, shared_width=64, config={**OWN, "num_local_experts": EXPERTS}),
    Release("openPangu", "pangu_ultra_moe", V3, V3_MTP, config=COUNT),
    Release("Mistral 4", "mistral4", VL, config=COUNT, nested=True),
    Release("Mistral Large 4", "mistral_large4", "layers.{}", routed=W, shared_names=W, config=COUNT, nested=True),
    Release("Solar Open", "solar_open", V3, config=COUNT),
    Release("Cohere2-MoE", "cohere2_moe", V3, config=BOTH),
    Release("XVERSE-MoE", "xverse", V3, config=BOTH | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("Mixtral", "mixtral", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Mixtral", "phimoe", SPARSE, routed=W, shared="", config=LOCAL),
    Release("MiniMax-M2", "minimax_m2", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Qwen3-MoE", "qwen3_moe", V3, shared="", config={"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release("Qwen3-MoE", "sdar_moe", V3, shared="", config={"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release(
        "MiMo-V2", "mimo_v2", V3, shared="",
        config={"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_layer_freq": [1, 1]},
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
        return {"model_type": release.model_type, "text_config": {"model_type": f"{release.model_type}_text", **inner}}
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
    assert found.section == ("text_config" if release.nested else "")


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


@pytest.mark.parametrize("copy", ["", "text_config"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.model_type)
def test_a_copy_that_says_something_else_is_a_conflict_in_either_section(release: Release, copy: str) -> None:
    inner = {"hidden_size": HIDDEN, release.depth: LAYERS, **release.config}
    family = next(f for f in FAMILIES if release.model_type in f.model_types)
    keys = {"hidden_size", *(w.key for w in family.widths), *family.n_routed_keys, *family.n_shared_keys} & inner.keys()
    for key in keys:
        config = {**config_of(replace(release, nested=True)), **inner}
        (config[copy] if copy else config)[key] = 7
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
        ("param2moe", {"num_shared_experts": 2, TOTAL: 192}, 192, ""),
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


def test_every_family_of_the_table_is_tried() -> None:
    stacked = [find_family({"model_type": case.model_type}) for case in CASES]
    assert {r.family for r in RELEASES} | {f.name for f in stacked if f} == {f.name for f in FAMILIES}


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
