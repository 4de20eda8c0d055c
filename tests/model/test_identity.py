"""Which layer a tensor is of: by kind and number, whatever the prefix says; and what does not change a description."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fse_convert.errors import InvalidCheckpoint
from fse_convert.model.config_against_tensors import LOAD_CONFLICTS
from fse_convert.model.description import NOT_UNDERSTOOD, Description
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Options
from fse_convert.plan.source import describe_source
from fse_convert.servers.judge import judge
from fse_convert.servers.targets import TARGETS
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.memory import PROJ, Model, Tensors, W, checkpoint, description_of, expert, subject_of

QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 2,
        "shared_expert_intermediate_size": 64, "num_hidden_layers": 2,
    },
}  # fmt: skip
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}


def qwen(prefix: str, layers: int = 2) -> Tensors:
    tensors: Tensors = {}
    for i in range(layers):
        block = f"{prefix}.{i}.mlp"
        tensors[f"{block}.shared_expert_gate.weight"] = ("BF16", (1, 128))
        for module in ("experts.0", "experts.1", "shared_expert"):
            tensors |= expert(f"{block}.{module}", "bf16", 64, 128, PROJ)
    return tensors


def v3(*numbers: int, mtp: tuple[int, ...] = (), names: tuple[str, ...] = ("enorm", "hnorm", "eh_proj")) -> Tensors:
    tensors: Tensors = {}
    for i in (*numbers, *mtp):
        for module in ("experts.0", "experts.1", "shared_experts"):
            tensors |= expert(f"model.layers.{i}.mlp.{module}", "bf16", 256, 512, PROJ)
    return tensors | {f"model.layers.{i}.{name}.weight": ("BF16", (512,)) for i in mtp for name in names}


def codes(found: Description) -> list[str]:
    return [c.code for c in found.conflicts]


def places(found: Description) -> list[tuple[str, int]]:
    return [(d.layer.kind.value, d.layer.index) for d in found.layers]


@pytest.mark.parametrize(
    "second", ["model.layers", "model.language_model.language_model.layers", "language_model.model.layers", "layers"]
)
def test_a_layer_that_is_there_under_two_prefixes_is_one_layer_and_refused(second: str) -> None:
    tensors = qwen("model.language_model.layers") | qwen(second)
    found = description_of(QWEN, tensors)
    assert places(found) == [("decoder", 0), ("decoder", 1)]
    assert [p.code for p in found.problems] == ["layer-twice"] * 2
    assert "layer-twice" not in NOT_UNDERSTOOD
    for prefix in ("model.language_model.layers", second):
        assert prefix in found.problems[0].message
    with pytest.raises(InvalidCheckpoint) as e:
        decide(describe_source(checkpoint(QWEN, tensors)), Options(TARGETS[0]))
    assert [p.code for p in e.value.problems] == ["layer-twice"]
    assert not any(a.fused for a in judge(subject_of(QWEN, tensors)))


KIMI = {"model_type": "kimi_linear", "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("model.layers.0.mlp", "model.layers.00.mlp", "model.layers.0.mlp and model.layers.00.mlp"),
        ("model.layers.0.block_sparse_moe", "model.layers.0.mlp", "block_sparse_moe and mlp"),
    ],
)
def test_what_differs_between_two_names_of_a_layer_is_named(first: str, second: str, names: str) -> None:
    tensors: Tensors = {}
    for block in (first, second):
        for module, parts in (("experts.0", W), ("experts.1", W), ("shared_experts", PROJ)):
            tensors |= expert(f"{block}.{module}", "bf16", 256, 512, parts)
    (problem,) = description_of(KIMI, tensors).problems
    assert (problem.code, problem.message) == ("layer-twice", f"this layer is there twice, under two names: {names}")


def test_routed_and_shared_experts_under_two_prefixes_are_so_for_every_server() -> None:
    m = Model(layers=1, mtp=0)
    tensors = {f"model.{n}" if "shared_experts" in n else n: t for n, t in m.tensors().items()}
    about = subject_of(m.full_config(), tensors)
    (problem,) = about.description.problems
    assert problem.message == "this layer is there twice, under two prefixes: layers and model.layers"
    assert {r.code for a in judge(about) for v in a.layers for r in v.reasons} == {"layer-twice"}


def test_an_mtp_layer_may_not_be_there_twice_either() -> None:
    tensors = Model(layers=2, mtp=1).tensors()
    tensors |= {n.replace("mtp.0.", "layers.2."): t for n, t in tensors.items() if n.startswith("mtp.0.")}
    tensors["layers.2.enorm.weight"] = ("BF16", (512,))
    found = description_of(Model(layers=2, mtp=1).full_config(), tensors)
    assert places(found) == [("decoder", 0), ("decoder", 1), ("mtp", 0)]
    assert [p.code for p in found.problems] == ["layer-twice"]


def test_experts_under_a_strange_prefix_alone_are_outside() -> None:
    found = description_of(QWEN, qwen("model.language_model.layers") | qwen("draft.layers", 1))
    assert [p.code for p in found.problems] == ["expert-outside"]
    assert "6 x draft" not in found.problems[0].message
    assert "2 x draft.layers.N.mlp.experts.N.gate_proj.weight [64, 128]" in found.problems[0].message


@pytest.mark.parametrize(
    "names", [("enorm", "hnorm", "eh_proj"), ("enorm",), ("eh_proj",), ("shared_head.head",), ("e_proj", "h_proj")]
)
def test_an_mtp_layer_is_known_by_its_tensors(names: tuple[str, ...]) -> None:
    found = description_of({**V3, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}, v3(0, 1, mtp=(2,), names=names))
    assert places(found) == [("decoder", 0), ("decoder", 1), ("mtp", 0)]
    assert found.conflicts == found.problems == ()


@pytest.mark.parametrize(
    ("depth", "decoder", "mtp", "named"),
    [
        pytest.param(3, range(6), (6,), ("model.layers.3", "model.layers.4", "model.layers.5"), id="lowered, MTP behind"),
        pytest.param(5, range(6), (), ("model.layers.5",), id="lowered, no MTP"),
        pytest.param(7, range(6), (6,), ("model.layers.6",), id="MTP layer counted in"),
    ],
)
def test_a_depth_that_the_tensors_contradict_is_a_conflict_and_makes_no_mtp_layers(
    depth: int, decoder: range, mtp: tuple[int, ...], named: tuple[str, ...]
) -> None:
    found = description_of({**V3, "num_hidden_layers": depth}, v3(*decoder, mtp=mtp))
    assert places(found) == [("decoder", i) for i in decoder] + [("mtp", i) for i in range(len(mtp))]
    conflict = next(c for c in found.conflicts if c.code == "config-layers")
    assert all(name in conflict.message for name in named)
    assert f"num_hidden_layers is {depth}" in conflict.message
    assert "config-layers" in LOAD_CONFLICTS


def test_a_draft_exported_by_itself_is_no_model_whose_depth_could_be_mended() -> None:
    found = description_of({**V3, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}, v3(mtp=(0,), names=("eh_proj",)))
    (conflict,) = [c for c in found.conflicts if c.code == "config-layers"]
    assert "a draft model exported by itself" in conflict.hint
    assert "set num_hidden_layers" not in conflict.hint


def test_a_lowered_depth_shows_where_mtp_layers_have_a_prefix_of_their_own() -> None:
    found = description_of(Model(layers=4, mtp=1).full_config() | {"num_hidden_layers": 2}, Model(layers=4, mtp=1).tensors())
    assert places(found) == [("decoder", i) for i in range(4)] + [("mtp", 0)]
    assert codes(found) == ["config-layers"]


def test_a_lost_first_mtp_layer_does_not_renumber_the_second() -> None:
    found = description_of({**V3, "num_hidden_layers": 2}, v3(0, 1, mtp=(3,)))
    assert places(found) == [("decoder", 0), ("decoder", 1), ("mtp", 1)]


ONE = ("BF16", (512,))


def dense(layer: str) -> Tensors:
    return expert(f"{layer}.mlp", "bf16", 256, 512, PROJ)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        pytest.param(v3(0), ["mtp-missing"], id="nowhere"),
        pytest.param(v3(0, mtp=(1,)), [], id="with experts"),
        pytest.param(v3(0) | {"model.layers.1.enorm.weight": ONE} | dense("model.layers.1"), [], id="dense"),
        pytest.param(v3(0) | dense("model.mtp.layers.0"), [], id="own prefix, dense"),
        pytest.param(v3(0) | dense("model.mtp_block.0"), [], id="Ernie"),
        pytest.param(v3(0) | {"model.layers.1.enorm.weight": ONE}, ["mtp-missing"], id="a norm is left"),
        pytest.param(
            v3(0) | {"mtp.fc.weight": ONE, "mtp.layers.0.norm.weight": ONE}, ["mtp-missing"], id="own prefix, a norm is left"
        ),
    ],
)
def test_a_promised_mtp_layer_that_is_nowhere_is_told(tensors: Tensors, expected: list[str]) -> None:
    config = {**V3, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert codes(description_of(config, tensors)) == expected
    assert codes(description_of({**config, "num_nextn_predict_layers": 0}, v3(0))) == []
    other = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"} | {"num_mtp_layers": 1}
    assert codes(description_of(other, tensors)) == expected
    assert "mtp-missing" not in LOAD_CONFLICTS


@pytest.mark.parametrize("stated", [None, 0, 1, 2])
def test_there_are_no_shared_experts_where_no_tensor_is_one(stated: int | None) -> None:
    tensors = {n: t for n, t in v3(0).items() if "shared" not in n}
    assert description_of({**V3, "num_hidden_layers": 1, "n_shared_experts": stated}, tensors).n_shared == 0
    assert description_of({**V3, "num_hidden_layers": 1, "n_shared_experts": 1}, v3(0)).n_shared == 1


def test_what_is_not_known_is_told_apart_from_what_is_not_there() -> None:
    unknown = description_of({"model_type": "newcomer"}, v3(0)).unknown
    assert unknown is not None
    assert (unknown.code, unknown.message) == ("family-unknown", "model type 'newcomer' is not known")
    elsewhere = description_of({**V3, "model_type": "deepseek_v4"}, {f"other.{n}": t for n, t in v3(0).items()}).unknown
    assert elsewhere is not None
    assert elsewhere.code == "expert-outside"
    assert description_of({**V3, "num_hidden_layers": 1}, {"lm_head.weight": ("BF16", (8, 8))}).unknown is None
    assert description_of({**V3, "num_hidden_layers": 1}, v3(0)).unknown is None


def test_configs_that_contradict_each_other_are_conflicts_of_the_description_too() -> None:
    config = {**V3, "num_hidden_layers": 1, "expert_dtype": "fp8", "text_config": {"expert_dtype": "fp4"}}
    assert "expert-dtype-conflict" in codes(description_of(config, v3(0)))


def test_forty_layers_that_have_one_fault_are_one_error() -> None:
    tensors: Tensors = {}
    for i in range(40):
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = ("BF16", (2, 512, 512))
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "bf16", 256, 512, PROJ)
    with pytest.raises(InvalidCheckpoint) as e:
        decide(describe_source(checkpoint({**V3, "num_hidden_layers": 40}, tensors)), Options(TARGETS[0]))
    (problem,) = e.value.problems
    assert problem.code == "experts-stacked"
    assert problem.where == "model.layers.0.mlp.experts.gate_up_proj; the same in 39 more places"


def test_stacks_and_shared_experts_outside_of_the_blocks_are_named_with_their_shapes() -> None:
    tensors: Tensors = {f"model.layers.0.mlp.switch_mlp.{p}.weight": ("BF16", (4, 256, 512)) for p in PROJ}
    tensors |= expert("model.layers.0.mlp.shared_experts", "bf16", 256, 512, PROJ)
    (problem,) = description_of({**V3, "model_type": "deepseek_v4"}, tensors).problems
    assert problem.code == "expert-outside"
    for name in (*(f"switch_mlp.{p}.weight [4, 256, 512]" for p in PROJ), "shared_experts.down_proj.weight [512, 256]"):
        assert f"1 x model.layers.N.mlp.{name}" in problem.message


def shuffled(tensors: Tensors) -> Tensors:
    order = list(tensors)
    random.Random(5).shuffle(order)
    return {name: tensors[name] for name in order}


def turned(tensors: Tensors) -> Tensors:
    return dict(reversed(tensors.items()))


def facts(found: Description) -> tuple[object, ...]:
    """Return all that a description says but tensors' places in their shards."""
    groups = [tuple((g.formats, g.hidden, g.width) for g in d.groups) for d in found.layers]
    experts = [[e.name for e in d.layer.routed] for d in found.layers]
    layers = [(m.name, m.kind, m.index, m.gate_tensor, m.unknown) for m in (d.layer for d in found.layers)], experts, groups
    return layers, found.problems, found.conflicts, found.n_shared, [(s.pattern, s.count, s.example.name) for s in found.seen]


DAMAGED = {n: t for n, t in Model(experts=12).tensors().items() if ".experts.3.w2.scale" not in n} | {
    "layers.1.ffn.experts.extra.a": ("BF16", (4,)),
    "layers.1.ffn.experts.extra.b": ("BF16", (4,)),
    "adapter.experts.1.x": ("BF16", (4,)),
    "adapter.experts.10.x": ("BF16", (4,)),
    "adapter.experts.2.x": ("BF16", (4,)),
}
MODELS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "V4": (Model(layers=11, mtp=3).full_config(), Model(layers=11, mtp=3).tensors()),
    "V3": ({**V3, "num_hidden_layers": 11, "num_nextn_predict_layers": 1}, v3(*range(11), mtp=(11,))),
    "V3, lowered depth": ({**V3, "num_hidden_layers": 3}, v3(*range(11), mtp=(11,))),
    "Qwen": (QWEN, qwen("model.language_model.layers")),
    "Qwen twice": (QWEN, qwen("model.language_model.layers") | qwen("model.layers")),
    "damaged": (Model(experts=12).full_config(), DAMAGED),
    "unknown family": ({"model_type": "newcomer"}, v3(*range(11))),
}


@pytest.mark.parametrize("change", [shuffled, turned])
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_tensors_changes_nothing(name: str, change: Callable[[Tensors], Tensors]) -> None:
    config, tensors = MODELS[name]
    assert facts(description_of(config, change(tensors))) == facts(description_of(config, tensors))
    assert judge(subject_of(config, change(tensors))) == judge(subject_of(config, tensors))


@pytest.mark.parametrize("shards", [2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_how_tensors_are_split_into_shards_changes_nothing(name: str, shards: int) -> None:
    config, tensors = MODELS[name]
    whole = checkpoint(config, tensors)
    split = {
        n: t._replace(shard=f"{i % shards}.safetensors", start=0, end=t.nbytes) for i, (n, t) in enumerate(whole.tensors.items())
    }
    parts = describe_source(replace(whole, tensors=split))
    assert facts(parts.description) == facts(describe_source(whole).description)
    assert judge(parts.subject) == judge(describe_source(whole).subject)


SPELLINGS = ["model.layers", "language_model.model.layers", "model.language_model.layers"]


@pytest.mark.parametrize("prefix", SPELLINGS)
@pytest.mark.parametrize("depth", [11, 3])
def test_how_a_prefix_is_spelled_changes_names_alone(prefix: str, depth: int) -> None:
    def respelled(value: object) -> str:
        return repr(value).replace(f"{prefix}.", "model.layers.")

    config, tensors = {**V3, "num_hidden_layers": depth}, v3(*range(11), mtp=(11,))
    renamed = {n.replace("model.layers", prefix): t for n, t in tensors.items()}
    assert respelled(facts(description_of(config, renamed))) == repr(facts(description_of(config, tensors)))
    assert respelled(judge(subject_of(config, renamed))) == repr(judge(subject_of(config, tensors)))


def test_the_verdict_of_a_layer_that_is_not_understood_is_unknown_where_the_config_alone_would_say_yes() -> None:
    config = {**V3, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 1}
    sound, empty = v3(0), {n: (dtype, (0,)) for n, (dtype, _) in v3(0).items()}
    lora = {**sound, "model.layers.0.mlp.experts.0.up_proj.lora_A.weight": ("BF16", (4, 512))}

    def outcome(tensors: Tensors) -> Outcome:
        return next(a for a in judge(subject_of(config, tensors)) if a.name == "vllm-0.33-aiter").model.outcome

    assert [outcome(t) for t in (sound, empty, lora)] == [Outcome.FUSED, Outcome.UNKNOWN, Outcome.UNKNOWN]
