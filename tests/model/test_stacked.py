"""Stacked experts as headers show them: what is understood, and what is damage or another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fse_convert.model.description import NOT_UNDERSTOOD, Description
from fse_convert.model.moe import Role
from fse_convert.plan.costs import padding, stored
from fse_convert.servers.native import LaunchWidths
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, description_of, expert
from tests.stacked import (
    ALIKE,
    CASES,
    EXPERTS,
    LAYERS,
    Case,
    apart,
    headers,
    interleaved,
    interleaved_transposed,
    transposed,
)


def described(case: Case, edit: Callable[[Tensors], Any] = lambda _: None, **config: Any) -> Description:
    tensors = headers(case, case.width)
    edit(tensors)
    return description_of({**case.config_of(case.width), **config}, tensors)


def codes(found: Description) -> list[str]:
    return sorted({p.code for p in found.problems})


@pytest.mark.parametrize("case", [*CASES, *ALIKE], ids=lambda c: c.name)
def test_every_layout_is_understood(case: Case) -> None:
    found = described(case)
    assert found.problems == found.conflicts == ()
    assert len(found.layers) == LAYERS + bool(case.mtp)
    for d in found.layers:
        assert d.routed
        assert (d.layer.count, d.routed.width, d.routed.hidden) == (EXPERTS, case.width, case.hidden)
        assert d.routed.formats[Role.GATE].shape == d.routed.formats[Role.DOWN].shape[::-1] == (case.width, case.hidden)
        assert bool(case.shared) == bool(d.shared)
        assert d.shared is None or (d.shared.width, bool(d.shared.stacked)) == (case.width, case.fused is not None)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_costs_are_those_of_the_headers(case: Case) -> None:
    def size(width: int) -> tuple[int, int]:
        tensors = headers(case, width)
        info = checkpoint(case.config_of(width), tensors).tensors
        mlp = [t for t in info.values() if "embed" not in t.name and not t.name.endswith("gate.weight")]
        of_shared = [t for t in mlp if "share" in t.name]
        return sum(t.nbytes for t in mlp) - sum(t.nbytes for t in of_shared), sum(t.nbytes for t in of_shared)

    found, (routed, shared) = described(case), size(case.width)
    counted = stored(found.layers)
    gates = sum(2 * case.hidden for d in found.layers if d.layer.gate_tensor)
    assert (counted.routed, counted.shared) == (routed, shared) or counted.shared == shared - gates
    of_shared = next((d.shared.width for d in found.layers if d.shared), 0)
    grown = padding(found, LaunchWidths(case.padded, of_shared // case.width * case.padded))
    assert grown.disk == sum(size(case.padded)) - routed - shared


@pytest.mark.parametrize("case", [*CASES, *ALIKE], ids=lambda c: c.name)
def test_each_half_of_a_stack_grows_at_its_own_end(case: Case) -> None:
    (routed,) = {d.routed.stacked for d in described(case).layers[:1] if d.routed}
    first = next(s for s in routed if s.module.endswith(case.stacks[0]) and s.part.startswith("weight"))
    turned = case.form in (transposed, interleaved_transposed)
    halves = 1 if case.form in (interleaved, interleaved_transposed, apart) else 2
    shared = [s for d in described(case).layers[:1] if d.shared for s in d.shared.stacked if s.role is Role.UP]
    assert {s.parts for s in shared} == ({2} if case.fused else set())
    assert (first.axis, first.parts, first.stretches) == (1 + turned, halves, EXPERTS * (case.hidden if turned else 1) * halves)


def case_named(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


AT = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({f"{AT}gate_up_proj": ("BF16", (EXPERTS, 64, 66))}, ["expert-shape"]),  # the other orientation
        ({f"{AT}gate_up_proj": ("BF16", (EXPERTS, 67, 64))}, ["expert-shape"]),  # no two halves
        ({f"{AT}gate_up_proj": ("BF16", (EXPERTS + 1, 66, 64))}, ["expert-shape", "experts-extra"]),
        ({f"{AT}gate_up_proj": ("BF16", (66, 64))}, ["experts-stacked", "projection-missing"]),
        ({f"{AT}gate_up_proj": ("I32", (EXPERTS, 66, 8))}, ["matrix-odd"]),
        ({f"{AT}gate_up_proj_zero": ("BF16", (EXPERTS, 66, 1))}, ["experts-stacked"]),
        ({f"{AT}gate_up_proj_bias": ("I32", (EXPERTS, 66))}, ["experts-stacked"]),
        ({f"{AT}down_proj": None}, ["projection-missing"]),
        (expert(f"{AT}0", "bf16", 33, 64, ("gate_proj", "up_proj", "down_proj")), ["experts-missing", "layer-twice"]),
    ],
)
def test_what_is_not_the_familys_layout_is_told(change: dict[str, Any], expected: list[str]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.update({n: info for n, info in change.items() if info})
        for name in [n for n, info in change.items() if not info]:
            del tensors[name]

    found = described(CASES[0], edit)
    assert codes(found) == expected
    assert all(p.where.startswith("model.layers.0.mlp") for p in found.problems)


def test_stacks_that_make_no_mlp_are_told_as_they_are_stored() -> None:
    turned: Tensors = {f"{AT}gate_up_proj": ("BF16", (EXPERTS, 64, 66))}
    (problem,) = described(CASES[0], lambda tensors: tensors.update(turned)).problems
    assert problem.message == f"{AT}gate_up_proj [{EXPERTS}, 64, 66] and {AT}down_proj [{EXPERTS}, 64, 33] do not make one MLP"
    assert "rows and columns" in problem.hint


def test_a_layer_with_fewer_experts_than_the_others_is_a_gap() -> None:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(AT)]:
            tensors[name] = (tensors[name][0], (EXPERTS - 1, *tensors[name][1][1:]))

    assert codes(described(CASES[0], edit)) == ["experts-missing"]


def test_experts_both_stacked_and_each_by_itself_are_there_twice() -> None:
    def edit(tensors: Tensors) -> None:
        for e in range(EXPERTS):
            tensors |= expert(f"{AT}{e}", "bf16", 33, 64, PROJ)

    found = described(case_named("L1 Qwen3.5"), edit)
    assert [(p.code, p.where) for p in found.problems] == [("layer-twice", f"{AT}down_proj and 1 more")]
    assert "layer-twice" not in NOT_UNDERSTOOD


@pytest.mark.parametrize("shape", [(0,), (0, 192, 64), (EXPERTS, 0, 64)])
@pytest.mark.parametrize("which", ["gate_up_proj", "down_proj", "_proj"])
def test_a_stack_without_elements_is_damage(which: str, shape: tuple[int, ...]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.update({n: (dtype, shape) for n, (dtype, _) in tensors.items() if n.endswith(which)})

    found = described(case_named("L1 Qwen3.5"), edit)
    assert codes(found) == ["tensor-empty"]
    assert {p.message for p in found.problems} == {f"BF16 {list(shape)} has no elements"}


def test_the_number_of_experts_is_compared_with_the_config() -> None:
    assert "config-experts" in [c.code for c in described(CASES[0], num_experts=EXPERTS + 1).conflicts]


@pytest.mark.parametrize(
    ("width", "scales", "block", "message"),
    [
        (80, 5, [32, 32], "holds rows of gate and of up"),  # 160 rows
        (90, 6, [32, 32], "holds rows of gate and of up"),  # the last of 180 rows are a partial block
        (80, 5, None, "holds rows of gate and of up"),
        (192, 3, None, "holds rows of gate and of up"),  # 128 rows a block; the second holds 64 of gate and 64 of up
        (192, 3, [128, 32], "holds rows of gate and of up"),
        (100, 2, None, "holds rows of gate and of up"),  # 128 and 72 rows, not 100 each
        (48, 1, [128, 32], "holds rows of gate and of up"),
        (64, 4, None, "no weight_block_size"),
        (64, 4, [64, 32], "no weight_block_size"),
    ],
)
def test_a_block_of_scales_over_gate_and_up_is_refused(width: int, scales: int, block: list[int] | None, message: str) -> None:
    """One block holds rows of both, or nothing says that none does."""
    case = case_named("L1 FP8")
    tensors, stated = {}, block or [32, 32]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = ("F8_E4M3", (EXPERTS, 2 * width, 64))
        tensors[f"{at}.gate_up_proj_scale_inv"] = ("F32", (EXPERTS, scales, -(-64 // stated[1])))
        tensors[f"{at}.down_proj"] = ("F8_E4M3", (EXPERTS, 64, width))
        tensors[f"{at}.down_proj_scale_inv"] = ("F32", (EXPERTS, -(-64 // stated[0]), -(-width // stated[1])))
    stating = {"quant_method": "fp8", "weight_block_size": block}
    found = description_of({**case.config_of(width), "quantization_config": stating}, tensors)
    stacks = [p for p in found.problems if "gate_up_proj" in p.where]
    assert {p.code for p in stacks} == {"scale-straddles"}
    assert "scale-straddles" in NOT_UNDERSTOOD
    assert all(message in p.message for p in stacks)
    assert {p.where for p in stacks} == {f"model.layers.{i}.mlp.experts.gate_up_proj_scale_inv" for i in range(LAYERS)}


@pytest.mark.parametrize(("dtype", "shape"), [("F32", (EXPERTS, 1, 1)), ("F32", (EXPERTS, 192, 1)), ("F8_E8M0", (EXPERTS, 192, 2))])
def test_scales_of_a_row_or_of_a_whole_matrix_hold_gate_and_up_apart(dtype: str, shape: tuple[int, ...]) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("gate_up_proj_scale_inv")]:
            tensors[name] = (dtype, shape)

    assert codes(described(case_named("L1 FP8"), edit, quantization_config={"quant_method": "fp8"})) == []


SHARED = "model.layers.0.mlp.shared_experts."


@pytest.mark.parametrize(
    ("name", "added", "shape"),
    [
        ("L1 FP8", f"{SHARED}linear_gate.weight", (96, 64)),
        ("L1 Qwen3.5", f"{AT}gate_up_proj.weight", (EXPERTS, 66, 64)),
        ("L3 BF16", f"{AT}gate_up_proj.bias", (EXPERTS, 66)),
        ("L1 MiniMax-M3", f"{SHARED}up_proj.weight", (33, 64)),
    ],
)
def test_a_projection_under_two_names_is_told(name: str, added: str, shape: tuple[int, ...]) -> None:
    found = described(case_named(name), lambda tensors: tensors.update({added: ("BF16", shape)}))
    assert codes(found) == ["part-ambiguous"]
    assert all(problem.where.startswith("model.layers.0.mlp.") for problem in found.problems)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("L1 MiniMax-M3", ["mlp.experts", *(f"model.layers.{i}.mlp.shared_experts.gate_up_proj" for i in range(LAYERS))]),
        ("L1 Granite", ["block_sparse_moe.input_linear", "re:.*shared_mlp.input_linear"]),
    ],
)
def test_exclusions_name_stacks_too(name: str, entries: list[str]) -> None:
    """All experts are unquantised and excluded by the names of their stacks; nothing is stale."""
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "ignored_layers": entries}
    assert described(case_named(name), quantization_config=quantization).conflicts == ()
    stored = described(case_named(f"{name} FP8"), quantization_config=quantization).conflicts
    assert [c.code for c in stored] == ["quantization-excluded"] * 2
    assert all(sum(entry in c.hint for c in stored) == 1 for entry in entries)


@pytest.mark.parametrize(("name", "rows"), [("gate_up_proj_bias", -2), ("gate_up_proj_bias", 28), ("down_proj_bias", -59)])
@pytest.mark.parametrize("case", ["L3 MXFP4"])
def test_a_bias_has_an_element_for_every_row_of_its_matrices(case: str, name: str, rows: int) -> None:
    def edit(tensors: Tensors) -> None:
        for full in [n for n in tensors if n.endswith(name)]:
            dtype, (experts, length) = tensors[full]
            tensors[full] = dtype, (experts, length + rows)

    found = described(case_named(case), edit)
    assert "expert-shape" in codes(found)
    assert any(p.where.endswith(name) for p in found.problems)


@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
@pytest.mark.parametrize("name", ["L3 MXFP4", "L3 BF16"])
def test_a_bias_that_other_layers_have_is_missing(name: str, bias: str) -> None:
    found = described(case_named(name), lambda tensors: tensors.pop(f"{AT}{bias}"))
    weight = bias.replace("bias", "blocks") if name == "L3 MXFP4" else bias.removesuffix("_bias")
    assert [(p.code, p.where) for p in found.problems] == [("bias-missing", f"{AT}{weight}")]


def test_every_loader_of_gpt_oss_builds_biases() -> None:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_bias")]:
            del tensors[name]

    case = case_named("L3 BF16")
    assert {p.code for p in described(case, edit).problems} == {"bias-missing"}
    assert all({p.code for p in d.problems} == {"bias-missing"} for d in described(case, edit).layers)


@pytest.mark.parametrize("name", ["L1 Qwen3.5", "L1 MiniMax-M3", "L2 Llama 4", "L4 BF16", "L1 Granite"])
@pytest.mark.parametrize("whose", ["routed", "shared"])
def test_the_matrices_of_an_expert_are_floats_of_one_kind(name: str, whose: str) -> None:
    case = case_named(name)
    at = case.blocks[0] if whose == "routed" else case.shared.replace("BLOCK", case.blocks[0]).replace("LAYER", "model.layers.0")
    stacks = case.stacks if whose == "routed" else (case.fused or ("gate_proj", "up_proj", "down_proj"))

    def edit(tensors: Tensors) -> None:
        (down,) = [n for n in tensors if n in (f"{at}.{stacks[-1]}", f"{at}.{stacks[-1]}.weight")]
        tensors[down] = "F32", tensors[down][1]

    (problem,) = described(case, edit).problems
    assert (problem.code, problem.where) == ("experts-differ", at)
    assert problem.message == "gate BF16, up BF16 and down F32: an expert's matrices must be stored alike"


ONE_EACH = list({case.model_type: case for case in sorted((*CASES, *ALIKE), key=lambda c: c.parts[0].dtype.itemsize)}.values())
"""A case in BF16, where there is one, of every model type."""


@pytest.mark.parametrize("case", ONE_EACH, ids=lambda c: c.model_type)
def test_experts_that_are_stored_by_themselves_are_read_all_the_same(case: Case) -> None:
    names = W if case.model_type == "minimax_m3_text" else PROJ

    def edit(tensors: Tensors) -> None:
        for block in case.blocks:
            for name in [n for n in tensors if n.startswith(tuple(f"{block}.{stack}" for stack in case.stacks))]:
                del tensors[name]
            for e in range(EXPERTS):
                tensors |= expert(f"{block}.experts.{e}", "bf16", case.width, case.hidden, names)

    found = described(case, edit, quantization_config=None)
    assert [p for p in found.problems if "experts." in p.where or "routed" in p.message] == []
    assert {(len(d.layer.routed), d.routed and d.routed.width) for d in found.layers} == {(EXPERTS, case.width)}


STEPPED = ("qwen3_5_moe_text", "qwen3_vl_moe_text")
DENSE: dict[str, dict[str, Any]] = {
    **{name: {"mlp_only_layers": [0], "decoder_sparse_step": 2} for name in STEPPED},
    **{name: {"moe_layer_freq": [0, 1]} for name in ("hy_v4", "minimax_m3_text", "mistral4")},
}
"""Keys that say, each by itself, that layer 0 has no experts."""
UNSAID = {"step3p5", "step3p7", "step3_text", "gemma4_text", "muse_spark_text"}
"""Model types in which no key but ``mlp_layer_types`` says which layers have experts."""


@pytest.mark.parametrize("case", ONE_EACH, ids=lambda c: c.model_type)
def test_the_keys_that_say_which_layers_have_experts(case: Case) -> None:
    def told(**config: Any) -> list[str]:
        def edit(tensors: Tensors) -> None:
            for name in [n for n in tensors if n.startswith(("model.layers.0.", "model.llm.layers.0."))]:
                del tensors[name]

        return [p.code for p in described(case, edit, **{"first_k_dense_replace": 0, **config}).gaps]

    assert told() == ([] if case.model_type in UNSAID else ["layers-missing"])
    for key, value in DENSE.get(case.model_type, {}).items():
        assert told(**{key: value}) == [], key
    for word, codes_told in (("dense", []), ("sparse", ["layers-missing"])):
        assert told(mlp_layer_types=[word, "sparse"]) == codes_told


OWN = {"shared_intermediate_size", "share_expert_dim", "share_expert_dims", "shared_expert_intermediate_size"}


OWN_WIDTH = [c for c in ONE_EACH if OWN & c.config.keys() and c.model_type != "minimax_m3_text" and c.parts[0].dtype.itemsize == 2]


@pytest.mark.parametrize("case", OWN_WIDTH, ids=lambda c: c.name)
def test_a_shared_mlp_may_have_a_width_of_its_own(case: Case) -> None:
    module = case.shared.partition(".")[2]

    def edit(tensors: Tensors) -> None:
        for name, (dtype, shape) in [t for t in tensors.items() if f".{module}." in t[0]]:
            tensors[name] = dtype, tuple(2 * n if n % case.width == 0 else n for n in shape)

    twice = dict.fromkeys(OWN & case.config.keys(), 2 * case.width)
    found = described(case, edit, **twice)
    assert (found.problems, found.conflicts) == ((), ())
    assert {d.shared and d.shared.width for d in found.layers} == {2 * case.width}
    for key in twice:
        assert {"config-width", "config-readings"} & {c.code for c in described(case, edit, **{**twice, key: case.width}).conflicts}


@pytest.mark.parametrize(
    ("name", "key"),
    [("L3 Inkling 2", "num_local_experts"), ("L2 square", "num_local_experts"), ("L4 BF16", "n_routed_experts")],
)
def test_the_number_of_experts_has_another_name_too(name: str, key: str) -> None:
    assert described(case_named(name), **{key: EXPERTS}).conflicts == ()
    assert [c.code for c in described(case_named(name), **{key: EXPERTS + 1}).conflicts] == ["config-experts"]


@pytest.mark.parametrize(("name", "key"), [("L2 Aria", "moe_num_shared_experts"), ("L1 FP8", "n_shared_experts")])
def test_the_number_of_shared_experts_is_compared_with_their_width(name: str, key: str) -> None:
    assert [c.code for c in described(case_named(name), **{key: 7}).conflicts] == ["config-width"]


@pytest.mark.parametrize("case", [c for c in (*CASES, *ALIKE) if c.shared.startswith("BLOCK.")], ids=lambda c: c.name)
def test_a_shared_expert_of_the_block_does_not_stand_beside_it(case: Case) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".shared_expert" in n]:
            head, shared, tail = name.partition(".shared_expert")
            tensors[f"{head.rpartition('.')[0]}{shared}{tail}"] = tensors.pop(name)

    assert "expert-outside" in codes(described(case, edit))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
@pytest.mark.parametrize(
    "name", ["L4 BF16", "L1 FP8", "L1 MiniMax-M3", "L1 Granite", "L2 Llama 4", "L2 square", "L2 Aria", "L4 Step-3"]
)
def test_mtp_layers_are_promised_under_one_name_if_any(name: str, key: str) -> None:
    own = {"L4 BF16": "num_nextn_predict_layers", "L1 FP8": "num_nextn_predict_layers", "L1 MiniMax-M3": "num_mtp_modules"}
    case = next(c for c in (*CASES, *ALIKE) if c.name == name)
    assert [c.code for c in described(case, **{key: 2}).conflicts] == (["mtp-missing"] if key == own.get(name) else [])
