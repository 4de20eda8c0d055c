"""The family that a model of an unknown type is named like."""

from __future__ import annotations

from shlex import quote

import pytest

from fse_convert.model.describe import describe
from fse_convert.model.quantization import read_quantization
from fse_convert.testing.memory import PROJ, checkpoint, description_of, expert
from tests.model.families.releases import (
    EXPERTS,
    RELEASES,
    Release,
    config_of,
    tensors_of,
)
from tests.stacked import CASES, Case, headers


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
    lists = (
        {"config-value"} if unknown.like != release.family and release.family == "Hunyuan" else set()
    )  # of widths, one per layer
    assert (named.problems, {c.code for c in named.conflicts}) == ((), lists)
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
