"""Every family's names and config keys, as its own releases spell them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fse_convert.errors import InvalidCheckpoint
from fse_convert.model.config_against_tensors import LOAD_CONFLICTS, unstated
from fse_convert.model.description import NOT_UNDERSTOOD
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES, find_family
from fse_convert.model.moe import LayerKind, Role
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Options
from fse_convert.plan.source import describe_source
from fse_convert.servers.config_keys import FLAT
from fse_convert.servers.judge import find_any, judge
from fse_convert.testing.examples import example_of
from fse_convert.testing.memory import PROJ, Tensors, checkpoint, description_of, expert, subject_of
from tests.model.families.releases import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    RELEASES,
    TOTAL,
    WIDTH,
    Release,
    config_of,
    tensors_of,
)
from tests.stacked import CASES


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
    each = release.config.keys() & {
        "hybrid_override_pattern",
        "moe_layer_freq",
        "mlp_layer_types",
        "num_shared_expert",
    }  # an entry per layer
    assert bool(conflicts) is (bool(wrong) and (change != "wrong depth" or numbered_on or bool(each)))


@pytest.mark.parametrize("release", [r for r in RELEASES if r.model_type in FLAT], ids=lambda r: r.model_type)
def test_what_a_config_class_reads_at_the_top_level_alone_is_no_yes_where_it_is_nested(release: Release) -> None:
    """vLLM raises for a ``text_config`` that the class does not know, whatever stands in it."""
    flat = config_of(replace(release, nested=False))
    nested = config_of(replace(release, nested=True, section="text_config"))
    for config in (nested, {**flat, "text_config": {}}, {**flat, "text_config": {"quantization_config": FP8}}):
        answers = judge(subject_of(config, tensors_of(release)))
        assert [a.name for a in answers if a.fused and a.engine.startswith(("vLLM", "SGLang"))] == []
    assert judge(subject_of({**flat, "text_config": None}, tensors_of(release))) == judge(subject_of(flat, tensors_of(release)))


def answer(config: dict[str, Any], release: Release) -> tuple[Any, ...]:
    """What is made of a checkpoint: its layers, conflicts and gaps, and every server's verdict on decoder layers."""
    about = subject_of(config, tensors_of(release))
    found = about.description
    decoder = [i for i, d in enumerate(found.layers) if d.layer.kind is LayerKind.DECODER]
    verdicts = (
        ()
        if release.model_type in FLAT
        else tuple(  # of a nested one of these no server takes the config
            (a.name, v.outcome, tuple(r.code for r in v.reasons)) for a in judge(about) for v in (a.layers[i] for i in decoder)
        )
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
    assert {c.code for c in found.conflicts} <= {"config-width", "config-readings"}
    assert bool(found.conflicts) == bool(reading)
    assert not reading or any(c.message.startswith(reading) for c in found.conflicts)


@pytest.mark.parametrize(
    ("written", "there", "count", "codes"),
    [
        ({}, True, 1, ["config-unstated"]),
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
    tried = {r.family for r in RELEASES} | {f.name for f in stacked if f} | {"Step-3", "Muse Spark", "Granite-MoE SWA"}
    assert tried == {f.name for f in FAMILIES if not f.refused}


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
        "text_config": {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_hidden_layers": 2, "hidden_size": HIDDEN},
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
    assert {p.code for p in found.problems} == {"experts-stacked", "family-refused"}
    assert ([p.code for p in found.outside], found.conflicts) == (["family-refused"], ())
    assert (found.n_shared, {d.shared for d in found.layers}) == (0, {None})
    assert not any(answer.fused or v.fused for answer in judge(about) for v in answer.layers)


def test_ernies_experts_for_vision_have_a_width_of_their_own() -> None:
    """Half of the experts are of text, half of vision (vLLM 0.33 model_executor/models/ernie45_vl_moe.py:237-306)."""
    tensors: Tensors = {}
    for i, e in product(range(LAYERS), range(4)):
        tensors |= expert(f"model.layers.{i}.mlp.experts.{e}", "bf16", WIDTH if e < 2 else WIDTH // 2, HIDDEN, PROJ)
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "bf16", 2 * WIDTH, HIDDEN, PROJ)
    config = {"model_type": "ernie4_5_moe_vl", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
    config |= {"moe_num_experts": [2, 2], "moe_num_shared_experts": 2, "moe_intermediate_size": [WIDTH, WIDTH // 2]}
    found = description_of(config, tensors)
    assert {p.code for p in found.problems} == {"experts-differ", "family-refused"}
    assert found.conflicts == ()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.refused], ids=lambda f: f.name)
def test_a_family_that_is_refused_says_why_and_what_to_do(family: Family) -> None:
    source = describe_source(checkpoint(*example_of(family)))
    (problem,) = source.description.problems
    assert (problem.code, (problem.message, problem.hint)) == ("family-refused", family.refused)
    assert "family-refused" in NOT_UNDERSTOOD
    for options in (Options(None, tp=4), Options(find_any("megamoe-512"), allow_unfused=True)):
        with pytest.raises(InvalidCheckpoint) as refused:
            decide(source, options)
        assert refused.value.problems == (problem,)


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
    text["hidden_size"] = HIDDEN
    found = description_of({"model_type": "step3_vl", "text_config": {"model_type": "step3_text", **text}}, tensors)
    assert found.problems == ()
    assert [d.layer.name for d in found.layers] == [f"model.layers.{i}.moe" for i in range(LAYERS)]
    assert all(d.shared and d.shared.width == WIDTH for d in found.layers)
    assert [c.message.partition(" is ")[0] for c in found.conflicts] == ["text_config.share_expert_dim"]


MOE, EITHER = "moe_intermediate_size", "intermediate_size"
SIZED = {
    **dict.fromkeys(("llama4_text", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoe_swa"), (EITHER, "num_local_experts")),
    **dict.fromkeys(("step3p5", "step3_text"), (MOE, "moe_num_experts")),
    "inkling2_text": (MOE, "n_routed_experts"),
    "inkling_text": (MOE, "num_local_experts"),
    "qwen3_vl_moe_text": (MOE, "num_experts"),
    "aria_text": (EITHER, "moe_num_experts"),
    "muse_spark_text": (MOE, "num_local_experts"),
}
"""Keys that size models whose experts are in one tensor."""


@pytest.mark.parametrize("model_type", SIZED)
def test_a_model_of_stacked_experts_lacks_each_key_that_sizes_it(model_type: str) -> None:
    family = find_family({"model_type": model_type})
    assert family is not None
    hidden = "moe_hidden_size" if model_type == "muse_spark_text" else "hidden_size"
    config = dict.fromkeys((hidden, "num_hidden_layers", *SIZED[model_type]), 4)
    assert list(unstated(family, config, 0)) == []
    for key in config:
        (problem,) = unstated(family, {k: v for k, v in config.items() if k != key}, 0)
        assert key in problem.message.removeprefix("there is no ").split(" or ")


@pytest.mark.parametrize(
    ("model_type", "one", "other"),
    [
        ("kimi_linear", "block_sparse_moe", "mlp"),
        ("minimax_m3_vl", "block_sparse_moe", "mlp"),
        ("hy_v4", "shared_experts.gate_proj", "shared_experts.linear_gate"),
    ],
)
def test_a_module_is_known_by_its_other_name_too(model_type: str, one: str, other: str) -> None:
    release = next(r for r in RELEASES if r.model_type == model_type)
    tensors = {name.replace(one, other): info for name, info in tensors_of(release).items()}
    found = description_of(config_of(release), tensors)
    assert (found.problems, len(found.layers)) == ((), LAYERS + bool(release.mtp))


ALSO = {
    "DeepSeek-V4": ("deepseek_v4_text", "deepseek_v41_text"),
    "DeepSeek-VL2": ("unlimited_ocr", "deepseek_ocr2"),
    "GLM-4-MoE": ("glm4v_moe_text",),
    "GLM-5": ("glm5_next_text",),
    "MiniMax-M3": ("minimax_m3_vl_text",),
    "Ernie-4.5-VL": ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
    "Hunyuan-V4": ("hy_v4_vl", "hy_v4_vl_text"),
    "K2-Horizon": ("xllm",),
    "Mistral Large 4": ("mistral_large4_text",),
    "Mixtral": ("minimax",),
    "MiMo-V2": ("mimo_v2_flash",),
    "OLMoE": ("flex_olmo",),
    "Intern-S1-Pro": ("interns1_pro_text",),
    "Gemma 4": ("gemma4_text",),
    "Granite-MoE shared": ("granitemoeshared",),
    "Inkling": ("inkling_model", "inkling_mm_model", "inkling_text"),
    "Inkling 2": ("inkling2",),
    "Llama 4": ("llama4", "llama4_text"),
    "Aria": ("aria", "aria_text"),
    "Qwen3-VL-MoE": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    "Step-5": ("step5",),
    "Step-3": ("step3_vl", "step3_text"),
    "Muse Spark": ("muse_spark", "muse_spark_text"),
}
"""Model types beside those above, each with its family."""


@pytest.mark.parametrize(("model_type", "name"), [(t, name) for name, types in ALSO.items() for t in types])
def test_a_model_type_has_its_family_alone_or_as_the_text_model_of_another(model_type: str, name: str) -> None:
    for config in ({"model_type": model_type}, {"model_type": "newcomer", "text_config": {"model_type": model_type}}):
        family = find_family(config)
        assert family is not None
        assert family.name == name


def test_ernies_drafter_has_a_prefix_of_its_own() -> None:
    release = replace(next(r for r in RELEASES if r.model_type == "ernie4_5_moe"), mtp="model.mtp_block.0.mlp")
    found = description_of(config_of(release), tensors_of(release))
    assert (found.problems, [d.layer.name for d in found.layers if d.layer.kind is LayerKind.MTP]) == ((), [release.mtp])
