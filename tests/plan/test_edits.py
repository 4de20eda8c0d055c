"""Which keys of config.json change with the width: every one from which transformers, vLLM or SGLang builds experts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import Any

import pytest

from fse_convert.errors import FseConvertError, NotConvertible, Problem
from fse_convert.model.families.find import FAMILIES, find_family
from fse_convert.plan.edits import config_notes
from fse_convert.plan.plan import Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import describe_source
from fse_convert.servers.targets import find_target
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, expert
from fse_convert.verification.expected import ExpectedOutput
from tests.stacked import ALIKE, CASES, Case, headers

HIDDEN, WIDTH, WIDER = 512, 384, 512
Config = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One model type: its names, the keys that size its experts, and the values of those keys at an expert's width."""

    model_type: str
    keys: dict[str, int]  # key: how many experts wide it is
    config: Config = field(default_factory=dict)
    block: str = "model.layers.{}.mlp"
    routed: tuple[str, str, str] = PROJ
    shared: str = "shared_experts"
    shared_names: tuple[str, str, str] = PROJ
    n_shared: int = 1

    def stated(self, width: int) -> Config:
        """The keys as they are at a width."""
        return {key: times * width for key, times in self.keys.items()}

    def tensors(self) -> Tensors:
        """Two layers of two experts, in formats that can be padded."""
        found: Tensors = {}
        for i in range(2):
            for e in range(2):
                found |= expert(f"{self.block.format(i)}.experts.{e}", "bf16", WIDTH, HIDDEN, self.routed)
            if self.shared:
                found |= expert(f"{self.block.format(i)}.{self.shared}", "bf16", self.n_shared * WIDTH, HIDDEN, self.shared_names)
            if self.shared == "shared_expert":
                found[f"{self.block.format(i)}.{self.shared}_gate.weight"] = ("BF16", (1, HIDDEN))
        return found

    @property
    def options(self) -> Options:
        """Of a conversion that pads to 512: for a kernel where there is a shared expert to fuse, else for 512 ranks."""
        return KERNEL if self.shared else Options(None, tp=512)


MOE = {"moe_intermediate_size": 1}
COUNTS = {"n_routed_experts": 2, "n_shared_experts": 1}
NUMBERED = {"num_experts": 2, "num_shared_experts": 1}
EITHER = {"intermediate_size": 1}
OWN = {"moe_intermediate_size": 1, "shared_expert_intermediate_size": 1}
TOTAL = "moe_shared_expert_intermediate_size"
UP = ("", "up_proj", "down_proj")
SPARSE = "model.layers.{}.block_sparse_moe"
# Per row of the research: transformers 5.24, vLLM 0.33 and SGLang 0.5.23, all keys that any of them reads.
MODELS = (
    Model("deepseek_v4", {**MOE, "intermediate_size": 1}, COUNTS, "layers.{}.ffn", W, shared_names=W),
    Model(
        "deepseek_v4", {**MOE, "intermediate_size": 1}, COUNTS | {"n_shared_experts": 2}, "layers.{}.ffn", W, shared_names=W,
        n_shared=2,
    ),
    Model("deepseek_v41", MOE, COUNTS, "layers.{}.ffn", W, shared_names=W),
    *(
        Model(name, MOE, COUNTS | {"intermediate_size": 18432, "first_k_dense_replace": 0})
        for name in (
            "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe", "glm4_moe_lite", "glm4v_moe",
            "glm_moe_dsa", "glm5_next", "axk1", "axk2", "dots1", "hy_v4",
        )
    ),
    Model("deepseek_v2", MOE, COUNTS | {"n_shared_experts": 2}, n_shared=2),
    Model("dots3_note", {**MOE, "shared_experts_intermediate_size": 1, "moe_shared_expert_intermediate_size": 1}, COUNTS),
    Model(
        "dots3_note", {**MOE, "shared_experts_intermediate_size": 1, "moe_shared_expert_intermediate_size": 1},
        COUNTS | {"n_shared_experts": 2}, n_shared=2,
    ),
    Model(
        "minimax_m3", {"intermediate_size": 1, "shared_intermediate_size": 2},
        {"num_local_experts": 2, "n_shared_experts": 2, "dense_intermediate_size": 2048}, SPARSE, W, n_shared=2,
    ),
    Model("kimi_linear", MOE, NUMBERED, SPARSE, W),
    Model("kimi_linear", MOE, {"num_experts": 2, "n_shared_experts": 2}, SPARSE, W, n_shared=2),
    Model("kimi_k3", MOE, NUMBERED, SPARSE, W),
    *(
        Model(name, OWN, {"num_experts": 2}, shared="shared_expert")
        for name in ("qwen3_next", "qwen3_5_moe", "qwen4_exp", "alice_ai")
    ),
    Model("ernie4_5_moe", MOE, {"moe_num_experts": 2, "moe_num_shared_experts": 2}, n_shared=2),
    Model(
        "hunyuan_v1_moe", {"intermediate_size": 1, "moe_intermediate_size": 1},
        {"num_experts": 2, "num_shared_expert": 1}, shared="shared_mlp",
    ),
    Model("hy_v3", {**MOE, "expert_hidden_dim": 1}, NUMBERED | {"intermediate_size": 13312}, shared="shared_mlp"),
    Model("hy_v3", {**MOE, "expert_hidden_dim": 1}, NUMBERED | {"num_shared_experts": 2}, shared="shared_mlp", n_shared=2),
    Model(
        "step3p7", {**MOE, "share_expert_dim": 1, "share_expert_dims": 1}, {"moe_num_experts": 2}, "model.layers.{}.moe",
        shared="share_expert",
    ),
    Model("bailing_moe_v2", {**MOE, TOTAL: 1}, NUMBERED),
    Model("bailing_moe", {**MOE, TOTAL: 1}, NUMBERED | {"num_shared_experts": 2}, n_shared=2),
    Model("llada2_moe", MOE, NUMBERED | {"num_shared_experts": 2}, n_shared=2),
    Model("bailing_hybrid", {**MOE, TOTAL: 1}, NUMBERED),
    Model("sarvam_moe", {**MOE, TOTAL: 1}, NUMBERED | {"num_shared_experts": 2}, n_shared=2),
    Model("param2moe", {**MOE, TOTAL: 2}, NUMBERED | {"num_shared_experts": 2}, n_shared=2),
    Model(
        "nemotron_h", {**MOE, TOTAL: 2}, COUNTS | {"hybrid_override_pattern": "EE", "intermediate_size": 384},
        "backbone.layers.{}.mixer", UP, shared_names=UP, n_shared=2,
    ),
    Model("nemotron_h", {**MOE, TOTAL: 1}, COUNTS, "backbone.layers.{}.mixer", UP, shared_names=UP),
    *(Model(name, MOE, NUMBERED | {"intermediate_size": 18432}) for name in ("exaone_moe", "afmoe", "k2_horizon")),
    *(Model(name, OWN, {"num_experts": 2}, shared="shared_expert") for name in ("qwen2_moe", "laguna", "flint")),
    Model("kolibri1", OWN, {"num_local_experts": 2}),
    *(Model(name, MOE, COUNTS | {"intermediate_size": 18432}) for name in ("pangu_ultra_moe", "mistral4", "solar_open")),
    Model("cohere2_moe", {"intermediate_size": 1}, NUMBERED),
    Model("xverse", {"intermediate_size": 1}, NUMBERED | {"num_shared_experts": 2}, n_shared=2),
    *(Model(name, MOE, COUNTS | {"intermediate_size": 10944}) for name in ("deepseek", "deepseek_vl_v2", "kimi_vl", "sarvam_mla")),
    Model("mistral_large4", MOE, COUNTS, "layers.{}", W, shared_names=W),
    *(Model(name, EITHER, {"num_local_experts": 2}, SPARSE, W, shared="") for name in ("mixtral", "minimax_m2")),
    Model("qwen3_moe", MOE, {"num_experts": 2, "intermediate_size": 6144}, shared=""),
    Model("mimo_v2", MOE, {"n_routed_experts": 2, "intermediate_size": 16384}, shared=""),
    Model("olmoe", EITHER, {"num_experts": 2}, shared=""),
    Model("mellum", MOE, {"num_experts": 2}, shared=""),
    Model("lfm2_moe", MOE, {"num_experts": 2, "intermediate_size": 7168}, "model.layers.{}.feed_forward", W, shared=""),
    Model("longcat_flash", {"expert_ffn_hidden_size": 1, **MOE}, {"n_routed_experts": 2, "ffn_hidden_size": 6144}, shared=""),
    *(Model(name, MOE, {"num_experts": 2, "intermediate_size": 20480}, shared="") for name in ("beam", "interns1_pro")),
    Model("gemma4", {**MOE, "expert_intermediate_size": 1}, {"num_experts": 2}, "model.layers.{}", shared=""),
    Model("jamba", EITHER, {"num_experts": 2}, "model.layers.{}.feed_forward", shared=""),
)  # fmt: skip
NAMES = [f"{m.model_type} {m.n_shared} shared" for m in MODELS]
NESTED = ("flat", "nested", "both")


def placed(model: Model, inner: Config, where: str) -> Config:
    """The keys at the top level, in ``text_config``, or in both."""
    inner = {"hidden_size": HIDDEN, "num_hidden_layers": 2, **inner}
    text = {"text_config": {"model_type": model.model_type, **inner}}
    vision = {"vision_config": {"hidden_size": 8, **model.stated(WIDTH)}}
    return {"model_type": model.model_type, **(inner if where != "nested" else {}), **(text if where != "flat" else {}), **vision}


KERNEL = Options(find_target("megamoe-512"), allow_unfused=True)


def plan(config: Config, tensors: Tensors, options: Options = KERNEL) -> Plan:
    return make_plan(describe_source(checkpoint(config, tensors)), options)


def refused(config: Config, tensors: Tensors, options: Options = KERNEL) -> tuple[Problem, ...]:
    with pytest.raises(FseConvertError) as e:
        plan(config, tensors, options)
    return e.value.problems


def edited(config: Config, made: Plan) -> Config:
    """The config with the plan's edits done."""
    found = {**config, **({"text_config": {**config["text_config"]}} if "text_config" in config else {})}
    for e in made.decision.config_edits:
        place = found[e.section] if e.section else found
        assert place[e.key] == e.old
        place[e.key] = e.new
    return found


@pytest.mark.parametrize("where", NESTED)
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_every_key_that_a_loader_reads_says_the_new_width_and_no_other_key_changes(model: Model, where: str) -> None:
    config = placed(model, {**model.config, **model.stated(WIDTH)}, where)
    made = plan(config, model.tensors(), model.options)
    expected = placed(model, {**model.config, **model.stated(WIDER)}, where)
    assert edited(config, made) == {**expected, "vision_config": config["vision_config"]}
    decision = made.decision
    again = ExpectedOutput.of(made).config_edits
    assert again == list(decision.config_edits), "the proof expects the same"


TIED = {"bailing_hybrid", "sarvam_moe", "minimax_m3", "hunyuan_v1_moe"}
"""Models of which some loader takes a routed expert's key for the shared width."""


@pytest.mark.parametrize("model", [m for m in MODELS if m.shared], ids=lambda m: f"{m.model_type} {m.n_shared}")
def test_each_key_says_the_width_of_those_that_are_built_from_it(model: Model) -> None:
    """FP8 routed experts must be 512 wide on 4 ranks, BF16 shared ones need not grow."""
    fp8: Tensors = {}
    for block, e in product(("0", "1"), range(2)):
        fp8 |= expert(f"{model.block.format(block)}.experts.{e}", "fp8-128-f32", WIDTH, HIDDEN, model.routed)
    config = placed(model, {**model.config, **model.stated(WIDTH)}, "flat")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    made = plan(config, {n: info for n, info in model.tensors().items() if ".experts." not in n} | fp8, Options(None, tp=4))
    own = () if model.model_type in TIED else [key for key in model.keys if "share" in key]
    new = {key: times * (WIDTH if key in own else WIDER) for key, times in model.keys.items()}
    assert edited(config, made) == {**config, **new}


@pytest.mark.parametrize("case", [*CASES, *ALIKE], ids=lambda c: c.name)
def test_every_key_of_a_model_with_stacked_experts_says_the_new_width(case: Case) -> None:
    config = case.config_of(case.width)
    made = plan(config, headers(case, case.width), Options(None, tp=case.tp))
    assert edited(config, made) == case.config_of(case.padded)
    first = next(k for k, v in case.config.items() if v == "WIDTH")
    problems = refused({k: v for k, v in config.items() if k != first}, headers(case, case.width), Options(None, tp=case.tp))
    assert any(first in p.message for p in problems if p.code == "config-key")
    for key in (k for k, v in case.config.items() if v == "WIDTH"):
        assert {"config-width", "config-readings"} & {
            p.code for p in refused({**config, key: 7}, headers(case, case.width), Options(None, tp=case.tp))
        }


@pytest.mark.parametrize("model", [m for m in MODELS if len(m.keys) > 1], ids=lambda m: f"{m.model_type} {m.n_shared}")
def test_a_name_of_the_width_that_says_another_one_is_refused_whichever_it_is(model: Model) -> None:
    for key, times in model.keys.items():
        for where in NESTED:
            config = placed(model, {**model.config, **model.stated(WIDTH), key: times * 256}, where)
            problems = refused(config, model.tensors(), model.options)
            assert {"config-width", "config-readings"} & {p.code for p in problems}
            said = [p.message for p in problems if key in p.message]
            assert any(f"{n * 256}" in text and f"{n * WIDTH}" in text for n in (times, model.n_shared) for text in said)


def test_the_keys_of_every_family_that_is_padded_are_tried() -> None:
    """Those above and no others: a row that loses, gains or misnames one fails here, and in the tests that edit them."""
    padded = [f for f in FAMILIES if not (f.stacked or f.refused)]
    tried: dict[str, set[str]] = {}
    for model in MODELS:
        family = find_family({"model_type": model.model_type})
        assert family is not None
        tried.setdefault(f"{family.name} {family.model_types[0]}", set()).update(model.keys)
    assert tried.items() >= {f"{f.name} {f.model_types[0]}": {w.key for w in f.widths} for f in padded}.items()


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_without_the_key_that_loaders_take_a_default_for_a_model_is_not_padded(model: Model) -> None:
    """Padded, it would not load."""
    first = next(iter(model.keys))
    stated = {key: value for key, value in model.stated(WIDTH).items() if key != first}
    problems = refused(placed(model, {**model.config, **stated}, "flat"), model.tensors(), model.options)
    assert any(first in p.message for p in problems if p.code == "config-key")


NEEDED = {"shared_expert_intermediate_size", "share_expert_dim"}
"""Keys beside a family's first for which loaders have a default of their own."""


@pytest.mark.parametrize("model", [m for m in MODELS if len(m.keys) > 1], ids=lambda m: f"{m.model_type} {m.n_shared}")
def test_the_other_keys_may_be_missing_where_loaders_then_read_the_first(model: Model) -> None:
    for key in list(model.keys)[1:]:
        stated = {k: v for k, v in model.stated(WIDTH).items() if k != key}
        config = placed(model, {**model.config, **stated}, "flat")
        if key in NEEDED or (model.model_type, key) == ("nemotron_h", TOTAL):
            assert {"config-key", "config-width"} & {p.code for p in refused(config, model.tensors(), model.options)}
        else:
            assert {e.key for e in plan(config, model.tensors(), model.options).decision.config_edits} == stated.keys()


@pytest.mark.parametrize(
    ("shard", "beside", "fine"),
    [
        ("consolidated-00001-of-00002.safetensors", ("params.json",), False),
        ("consolidated-00001-of-00002.safetensors", (), True),
        ("model.safetensors", ("params.json",), True),
    ],
)
def test_mistrals_own_config_would_keep_the_old_width(shard: str, beside: tuple[str, ...], fine: bool) -> None:
    model = next(m for m in MODELS if m.model_type == "mistral_large4")
    made = checkpoint(placed(model, {**model.config, **model.stated(WIDTH)}, "flat"), model.tensors())
    made = replace(made, others=beside, shards=tuple(replace(s, name=shard) for s in made.shards))
    if fine:
        assert make_plan(describe_source(made), KERNEL).decision.config_edits
        return
    with pytest.raises(NotConvertible) as e:
        make_plan(describe_source(made), KERNEL)
    assert [(p.code, p.where) for p in e.value.problems] == [("config-key", "params.json")]


def test_a_list_of_blocks_that_states_widths_is_not_edited() -> None:
    """Nemotron-H puzzles: SGLang 0.5.23 configs/nemotron_h.py:540 reads every layer's own."""
    model = next(m for m in MODELS if m.model_type == "nemotron_h")
    blocks = [{"block_type": "moe", **MOE}] * 2
    config = placed(model, {**model.config, **model.stated(WIDTH), "block_configs": blocks}, "flat")
    (problem,) = refused(config | {"model_type": "nemotron_h_puzzle"}, model.tensors())
    assert (problem.code, problem.message.partition(" states ")[0]) == ("config-key", "block_configs")


@pytest.mark.parametrize("where", ["", "text_config"])
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_a_copy_that_says_another_width_is_refused_in_either_section(model: Model, where: str) -> None:
    key = next(iter(model.keys))
    config = placed(model, {**model.config, **model.stated(WIDTH)}, "both")
    (config[where] if where else config)[key] = 2 * WIDTH
    assert {"config-width", "config-readings"} & {p.code for p in refused(config, model.tensors(), model.options)}


def test_the_order_of_keys_changes_nothing() -> None:
    model = next(m for m in MODELS if m.model_type == "dots3_note")
    found = set()
    for keys in permutations(model.keys):
        config = placed(model, {**dict.fromkeys(keys, WIDTH), **model.config}, "both")
        found.add(plan(config, model.tensors()).decision.config_edits)
    assert len(found) == 1


@pytest.mark.parametrize("where", NESTED)
def test_a_list_of_one_width_per_layer_stays_a_list(where: str) -> None:
    model = next(m for m in MODELS if m.model_type == "hunyuan_v1_moe")
    lists = {"intermediate_size": WIDTH, "moe_intermediate_size": [WIDTH] * 2, "num_shared_expert": [1, 1], "num_experts": 2}
    config = placed(model, lists, where)
    expected = placed(model, {**lists, "intermediate_size": WIDER, "moe_intermediate_size": [WIDER] * 2}, where)
    made = plan(config, model.tensors())
    assert edited(config, made) == {**expected, "vision_config": config["vision_config"]}
    again = ExpectedOutput.of(made).config_edits
    assert again == list(made.decision.config_edits)


def test_a_list_per_modality_is_named_in_full_and_not_edited() -> None:
    model = next(m for m in MODELS if m.model_type == "ernie4_5_moe")
    problems = refused(placed(model, {**model.config, "moe_intermediate_size": [WIDTH, 128]}, "flat"), model.tensors())
    assert [p.code for p in problems] == ["config-key"]
    assert "moe_intermediate_size is [384, 128]" in problems[0].message
    assert problems[0].hint == "", "to write one number there would change what loaders build"


@pytest.mark.parametrize("value", ["384", 384.0, True, [], {}])
def test_a_width_that_is_no_integer_is_not_edited(value: object) -> None:
    model = next(m for m in MODELS if m.model_type == "deepseek_v3")
    problems = refused({"model_type": "deepseek_v3", **COUNTS, "moe_intermediate_size": value}, model.tensors())
    assert [p.code for p in problems] == ["config-value"]
    assert f"moe_intermediate_size is {value!r}, expected an integer" in problems[0].message


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("deepseek_v3", "moe_intermediate_size"),
        ("qwen3_next", "shared_expert_intermediate_size"),
        ("step3p7", "share_expert_dim"),
        ("hunyuan_v1_moe", "intermediate_size"),
        ("minimax_m3", "intermediate_size"),
    ],
)
@pytest.mark.parametrize("where", ["flat", "nested"])
def test_a_missing_key_is_refused_and_adding_it_as_the_hint_says_helps(model_type: str, key: str, where: str) -> None:
    model = next(m for m in MODELS if m.model_type == model_type)
    stated = {k: v for k, v in model.stated(WIDTH).items() if k != key}
    (problem,) = refused(placed(model, {**model.config, **stated}, where), model.tensors())
    assert problem.code == "config-key"
    section = "text_config" if where == "nested" and stated else "the top level"
    assert problem.hint == f'add "{key}": {WIDTH} to {section}, as the tensors have it'
    assert plan(placed(model, {**model.config, **stated, key: WIDTH}, where), model.tensors()).rewritten


def test_a_missing_key_is_no_obstacle_where_nothing_is_padded() -> None:
    target = find_target("megamoe-128")
    assert target is not None
    model = next(m for m in MODELS if m.model_type == "hunyuan_v1_moe")
    made = checkpoint({"model_type": "hunyuan_v1_moe", **model.config}, model.tensors())
    assert not make_plan(describe_source(made), Options(target, allow_unfused=True)).rewritten


def test_hunyuans_dense_layers_are_built_from_the_same_key() -> None:
    model = next(m for m in MODELS if m.model_type == "hunyuan_v1_moe")
    tensors = model.tensors() | expert("model.layers.2.mlp", "bf16", WIDTH, HIDDEN, PROJ)
    config = placed(model, {**model.config, **model.stated(WIDTH), "num_hidden_layers": 3}, "flat")
    config["mlp_layer_types"] = ["sparse", "sparse", "dense"]
    with pytest.raises(NotConvertible) as e:
        plan(config, tensors)
    assert "intermediate_size is the width of dense layers too" in e.value.problems[0].message
    assert "model.layers.2.mlp" in e.value.problems[0].message


def test_a_dense_layer_with_a_key_of_its_own_is_no_obstacle() -> None:
    """Cohere2-MoE: transformers 5.24 cohere2_moe:353 builds dense layers from ``prefix_dense_intermediate_size``, where it is."""
    model = next(m for m in MODELS if m.model_type == "cohere2_moe")
    tensors = model.tensors() | expert("model.layers.2.mlp", "bf16", WIDTH, HIDDEN, PROJ)
    config = placed(model, {**model.config, **model.stated(WIDTH), "num_hidden_layers": 3, "first_k_dense_replace": 0}, "flat")
    config["mlp_layer_types"] = ["sparse", "sparse", "dense"]
    assert "width of dense layers too" in refused(config, tensors)[0].message
    assert plan(config | {"prefix_dense_intermediate_size": WIDTH}, tensors).rewritten


def test_minimax_m3_is_built_by_two_rules_that_must_agree() -> None:
    model = next(m for m in MODELS if m.model_type == "minimax_m3")
    for change in ({"shared_intermediate_size": WIDTH}, {"n_shared_experts": 1}):
        problems = refused(placed(model, {**model.config, **model.stated(WIDTH), **change}, "flat"), model.tensors())
        assert {p.code for p in problems} <= {"config-width", "config-readings"}
        assert problems


@pytest.mark.parametrize(
    ("model_type", "n_shared", "left_out", "value"),
    [
        ("minimax_m3", 2, ("shared_intermediate_size",), 2 * WIDTH),
        ("dots3_note", 1, ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), WIDTH),
        ("dots3_note", 2, ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), WIDTH),
    ],
)
def test_a_default_of_some_loaders_is_noted(model_type: str, n_shared: int, left_out: tuple[str, ...], value: int) -> None:
    model = next(m for m in MODELS if (m.model_type, m.n_shared) == (model_type, n_shared))
    stated = {k: v for k, v in model.stated(WIDTH).items() if k not in left_out}
    (note,) = config_notes(plan(placed(model, {**model.config, **stated}, "flat"), model.tensors()))
    assert (note.code, left_out[0] in note.message) == ("config-default", True)
    assert note.hint == f'add "{left_out[0]}": {value} to the top level, as the tensors have it, and convert again'
    full = plan(placed(model, {**model.config, **model.stated(WIDTH)}, "flat"), model.tensors())
    assert list(config_notes(full)) == []


@pytest.mark.parametrize(
    ("key", "value", "noted"),
    [
        ("intermediate_size", WIDTH, True),
        ("shared_intermediate_size", 2 * WIDTH, True),
        ("shared_intermediate_size", 3 * WIDTH, False),
        ("ffn_hidden_size", WIDTH, True),
        ("moe_ffn_hidden_size", WIDTH, True),
        ("intermediate_size_mlp", WIDTH, True),
        ("moe_inter_dim", 2 * WIDTH, True),
    ],
)
def test_a_key_that_keeps_the_old_width_is_noted(key: str, value: int, noted: bool) -> None:
    """Of one expert, or of all shared experts together."""
    model = next(m for m in MODELS if (m.model_type, m.n_shared) == ("deepseek_v2", 2))
    config = placed(model, {**model.config, **model.stated(WIDTH), key: value}, "flat")
    found = [(n.code, n.message.partition(":")[0]) for n in config_notes(plan(config, model.tensors()))]
    assert found == ([("config-width-kept", f"{key} stays {value}")] if noted else [])
