"""What fits no format: a format that is not supported, in all matrices, or damage, in one among many."""

from __future__ import annotations

import pytest

from fse_convert.model.description import NOT_UNDERSTOOD, Description
from fse_convert.testing.memory import Model, Tensors, description_of, expert, matrix

FOREIGN = ["int8-128", "int8-channel", "w4afp8", "fp4-128", "mxfp6", "ascend-int8", "int4-packed", "gptq", "awq", "mlx", "bnb-nf4"]
"""Formats that exist and are not supported."""


def codes(found: Description) -> list[str]:
    return [p.code for p in found.problems]


def model(**changes: object) -> Model:
    return Model(layers=3, mtp=0, experts=4, hidden=512, width=256, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", FOREIGN)
@pytest.mark.parametrize("changes", [{}, {"shared": "bf16"}], ids=["all", "routed"])
def test_a_format_that_all_experts_have_is_not_understood_and_the_checkpoint_is_whole(store: str, changes: dict[str, str]) -> None:
    m = model(routed=store, **{"shared": store, **changes})
    found = description_of(m.full_config(), m.tensors())
    assert set(codes(found)) <= NOT_UNDERSTOOD
    assert all(d.routed is None and (d.shared is not None) == bool(changes) for d in found.layers)
    assert all("supported" in p.hint for p in found.problems if p.code == "format-unknown")


@pytest.mark.parametrize("store", FOREIGN)
def test_shared_experts_of_their_own_format_are_not_understood_either(store: str) -> None:
    found = description_of(model().full_config(), model(shared=store).tensors())
    assert set(codes(found)) <= NOT_UNDERSTOOD
    assert all(d.routed and d.shared is None for d in found.layers)


@pytest.mark.parametrize("store", FOREIGN)
def test_layers_of_another_format_are_not_damaged_because_others_are_understood(store: str) -> None:
    tensors = model().tensors()
    for e in range(4):
        tensors = {n: t for n, t in tensors.items() if not n.startswith(f"layers.1.ffn.experts.{e}.")}
        tensors |= expert(f"layers.1.ffn.experts.{e}", store, 256, 512)
    found = description_of(model().full_config(), tensors)
    assert codes(found)
    assert set(codes(found)) <= NOT_UNDERSTOOD


@pytest.mark.parametrize("block", ["layers.1.ffn.experts.2", "layers.1.ffn.shared_experts"])
@pytest.mark.parametrize("projection", ["w1", "w2"])
@pytest.mark.parametrize("store", FOREIGN)
def test_one_odd_matrix_among_many_that_are_understood_is_damage(store: str, projection: str, block: str) -> None:
    n, k = (512, 256) if projection == "w2" else (256, 512)
    at = f"{block}.{projection}."
    tensors = {name: info for name, info in model().tensors().items() if not name.startswith(at)}
    tensors |= {at + suffix: info for suffix, info in matrix(store, n, k).items()}
    found = description_of(model().full_config(), tensors)
    assert len(codes(found)) == 1
    assert not set(codes(found)) & NOT_UNDERSTOOD
    assert found.problems[0].where.startswith(at)


@pytest.mark.parametrize("changed", [("layers.1.ffn.experts.2.w2.scale",), ("layers.0.ffn.shared_experts.w1.scale",)])
def test_one_odd_scale_is_damage(changed: tuple[str, ...]) -> None:
    tensors: Tensors = model().tensors()
    tensors |= {name: (tensors[name][0], (tensors[name][1][0], tensors[name][1][1] + 1)) for name in changed}
    found = description_of(model().full_config(), tensors)
    assert codes(found) == ["scale-geometry"]
    assert [p.where for p in found.problems] == list(changed)


def test_scales_that_are_wrong_everywhere_but_in_no_one_way_are_damage() -> None:
    tensors = model().tensors()
    wrong = {n: (d, (s[0] + i % 7 + 1, s[1])) for i, (n, (d, s)) in enumerate(tensors.items()) if n.endswith(".scale")}
    found = description_of(model().full_config(), tensors | wrong)
    assert set(codes(found)) == {"scale-geometry"}


def test_every_empty_tensor_is_damage_whatever_the_others_are() -> None:
    tensors = model().tensors()
    everything = {n: (dtype, (0,)) for n, (dtype, _) in tensors.items()}
    one = tensors | {"layers.2.ffn.experts.0.w3.scale": ("F8_E8M0", (0, 16))}
    for changed, count in ((everything, 12 + 3), (one, 1)):
        found = description_of(model().full_config(), changed)
        assert set(codes(found)) == {"tensor-empty"}
        assert "tensor-empty" not in NOT_UNDERSTOOD
        assert all("no elements" in p.message for p in found.problems)
        assert sum(1 + int(p.where.rpartition(" and ")[2].split()[0]) if " and " in p.where else 1 for p in found.problems) >= count


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.ffn.gate.weight", "layers.0.attn.wo.weight", "layers.0.attn.wq.bias"])
def test_an_empty_tensor_of_another_module_is_damage(name: str) -> None:
    (problem,) = description_of(model().full_config(), model().tensors() | {name: ("BF16", (0, 512))}).problems
    assert (problem.code, problem.message, problem.where) == ("tensor-empty", "BF16 [0, 512] has no elements", name)


def test_state_of_other_kinds_may_be_empty() -> None:
    state: Tensors = {"layers.0.attn.wo._extra_state": ("U8", (0,))}
    assert description_of(model().full_config(), model().tensors() | state).problems == ()


def test_experts_of_two_widths_are_told_with_both() -> None:
    m = Model(layers=1, mtp=0, experts=2, routed="bf16", shared="bf16", width=256)
    tensors = m.tensors() | {n: t for e in (2, 3) for n, t in expert(f"layers.0.ffn.experts.{e}", "bf16", 128, 512).items()}
    (problem,) = description_of(m.full_config(), tensors).problems
    assert problem.code == "experts-differ"
    assert "BF16 [128, 512] (weight BF16), but layers.0.ffn.experts.0.w1 is BF16 [256, 512] (weight BF16)" in problem.message
    assert problem.where == "layers.0.ffn.experts.2.w1 and 1 more"


@pytest.mark.parametrize("name", ["experts.0.gate_up_proj.weight", "shared_experts.w13.weight"])
def test_projections_fused_into_one_matrix_are_not_called_missing(name: str) -> None:
    block, projection = f"layers.1.ffn.{name.rsplit('.', 2)[0]}", name.rsplit(".", 2)[1]
    lost = (f"{block}.w1.", f"{block}.w3.")
    tensors = {n: t for n, t in model().tensors().items() if not n.startswith(lost)}
    found = description_of(model().full_config(), tensors | {f"{block}.{projection}.weight": ("BF16", (512, 512))})
    assert codes(found) == ["expert-unknown"]
    assert "fused" in found.problems[0].hint


def test_experts_without_a_gate_may_differ_too() -> None:
    tensors = {}
    for e, width in enumerate((128, 256)):
        tensors |= expert(f"backbone.layers.0.mixer.experts.{e}", "bf16", width, 512, ("", "up_proj", "down_proj"))
    (problem,) = description_of({"model_type": "nemotron_h", "num_hidden_layers": 1}, tensors).problems
    assert (problem.code, problem.where) == ("experts-differ", "backbone.layers.0.mixer.experts.1.up_proj")
    assert "[256, 512] (weight BF16), but backbone.layers.0.mixer.experts.0.up_proj is BF16 [128, 512]" in problem.message


def test_experts_that_differ_in_labels_alone_are_told_apart() -> None:
    m = model()
    tensors = {n: t for n, t in m.tensors().items() if not n.startswith("layers.0.ffn.experts.2.")}
    (problem,) = description_of(m.full_config(), tensors | expert("layers.0.ffn.experts.2", "mxfp4-u8", 256, 512)).problems
    mine, _, theirs = problem.message.partition(": ")[0].partition(", but layers.0.ffn.experts.0.w1 is ")
    assert (problem.code, problem.where) == ("experts-differ", "layers.0.ffn.experts.2.w1")
    assert (mine, theirs) == ("MXFP4 [256, 512] (weight U8, weight_scale U8)", "MXFP4 [256, 512] (weight I8, scale F8_E8M0)")
