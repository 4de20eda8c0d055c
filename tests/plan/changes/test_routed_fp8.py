"""Routed experts as FP8 blocks: which tensors change, to what, where config.json says so, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from fse_convert.checkpoint.header import BITS
from fse_convert.errors import Problem
from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.change import REMOVED, FormatChange, changed_config
from fse_convert.plan.changes.routed_fp8 import routed_fp8
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Recoded, Rule
from fse_convert.servers.subject import Subject
from fse_convert.testing.checkpoints import make_spec
from fse_convert.testing.memory import Tensors, subject_of
from fse_convert.testing.patch import edit_config
from tests.plan.changes.conftest import Make
from tests.plan.changes.models import letters
from tests.plan.changes.recipes import dropping, setting
from tests.releases import SLOTS


def fitting(source: Source | Subject) -> FormatChange:
    change = routed_fp8(source.subject if isinstance(source, Source) else source)
    assert isinstance(change, FormatChange), change
    return change


@pytest.mark.parametrize(("kind", "side"), [("v4-flash", 128), ("v4-flash-0731", 128), ("v4.1-flash", 32)])
def test_every_expert_tensor_stands_in_its_place_under_its_name(kind: str, side: int, small: Make) -> None:
    source = small(kind)
    change, tensors = fitting(source), source.checkpoint.tensors
    assert change.lossless
    routed, shared = (
        [n for n in tensors if part in n and n.endswith((".weight", ".scale"))] for part in (".experts.", "shared_experts.")
    )
    assert set(change.tensors) == {*routed, *(name for name in shared if name.endswith(".scale"))}
    assert change.originals == {name for name in routed if name.endswith(".scale")}
    for name, (spec,) in change.tensors.items():
        weight, scale = (tensors[name.replace(".scale" if end == ".weight" else ".weight", end)] for end in (".weight", ".scale"))
        packed = weight.dtype == "I8"
        n, k = weight.shape[0], weight.shape[1] * (2 if packed else 1)
        assert isinstance(spec.change, Recoded)
        assert spec.name == name
        assert spec.change.shape == (n, k)
        assert spec.change.scale == scale
        assert spec.change.is_scale is name.endswith(".scale")
        assert spec.change.block == (side, side)
        assert spec.change.rule is (Rule.FP8 if packed else Rule.F32)
        assert spec.change.weight == (weight if packed else None)
        expected = ("F32", (-(-n // side), -(-k // side))) if name.endswith(".scale") else ("F8_E4M3", (n, k))
        assert (spec.dtype, spec.shape) == expected


def test_partial_blocks_have_scales_of_their_own(small: Make) -> None:
    change = fitting(small("v4-flash", width=192, hidden=320))
    assert change.tensors["layers.0.ffn.experts.0.w1.scale"][0].shape == (2, 3)
    assert change.tensors["layers.0.ffn.experts.0.w2.scale"][0].shape == (3, 2)


@pytest.mark.parametrize(
    ("kind", "total"),
    [("v4-flash", 292_554_445_384), ("v4-flash-0731", 305_866_448_632), ("v4.1-flash", 773_640_999_000)],
)
def test_bytes_of_published_checkpoints_afterwards(kind: str, total: int) -> None:
    """Worked out from the released headers: their tensors, with FP8 experts and F32 scales."""
    spec = make_spec(kind, real=True)
    tensors: Tensors = {e.name: (e.dtype, e.shape) for group in spec.traits.groups(spec) for e in group}
    change = fitting(subject_of(spec.config, tensors))
    tensors |= {t.name: (t.dtype, t.shape) for stand_ins in change.tensors.values() for t in stand_ins}
    assert sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values()) == total


@pytest.mark.parametrize(
    ("kind", "edit", "expected"),
    [
        ("v4-flash", lambda c: None, [(("expert_dtype",), "fp8")]),
        ("v4-pro", lambda c: None, [(("expert_dtype",), "fp8")]),
        (
            "v4-flash",
            lambda c: c["quantization_config"].update(expert_dtype="fp4"),
            [(("quantization_config", "expert_dtype"), REMOVED), (("expert_dtype",), "fp8")],
        ),
        ("v4.1-flash", lambda c: None, [(("quantization_config", "expert_dtype"), "fp8")]),
        (
            "v4.1-flash",
            lambda c: c["text_config"].update(expert_dtype="fp4"),
            [(("text_config", "expert_dtype"), REMOVED), (("quantization_config", "expert_dtype"), "fp8")],
        ),
        (
            "v4.1-flash",
            lambda c: c.update(expert_dtype="fp4"),
            [(("expert_dtype",), REMOVED), (("quantization_config", "expert_dtype"), "fp8")],
        ),
    ],
    ids=["V4", "V4-Pro, which has none", "V4, twice", "V4.1", "V4.1, text_config", "V4.1, top level"],
)
def test_expert_dtype_stands_where_every_loader_reads_it(
    kind: str, edit: Callable[[dict[str, Any]], object], expected: list[Any], small: Make
) -> None:
    source = small(kind, lambda root: edit_config(root, edit))
    change = fitting(source)
    assert [(edit.path, edit.value) for edit in change.config] == expected
    after = changed_config(source.checkpoint.config, change.config)
    assert {k: v for k, v in after["quantization_config"].items() if k != "expert_dtype"} == {
        k: v for k, v in source.checkpoint.config["quantization_config"].items() if k != "expert_dtype"
    }


def test_f32_scales_of_shared_experts_stay(small: Make) -> None:
    change = fitting(small("v4-flash", stored={"shared": "fp8-128-f32-scale"}))
    assert not any("shared" in name for name in change.tensors)


def test_sglang_fuses_the_output_as_it_is(small: Make) -> None:
    source = small("v4-flash")
    assert letters(with_changes(source, (fitting(source),)), SLOTS) == ("ffff",) * len(SLOTS)


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("v3", {}, "only DeepSeek-V4 and V4.1 are known to be served with FP8 experts of this form, not deepseek_v3"),
        ("kimi-k2-quark", {}, "only DeepSeek-V4 and V4.1 are known to be served with FP8 experts of this form, not kimi_k2"),
        ("v4-flash-base", {}, "routed experts must be MXFP4 in every layer, here they are: FP8 128x128 F32"),
        ("bf16", {}, "routed experts must be MXFP4 in every layer, here they are: BF16"),
        ("nvfp4", {}, "routed experts must be MXFP4 in every layer, here they are: NVFP4, MXFP4"),
        ("quark-mxfp4", {}, "config.json must describe DeepSeek's FP8, with the weight_block_size that the experts get"),
        (
            "v4-flash",
            {"damage": dropping("weight_block_size")},
            "config.json must describe DeepSeek's FP8, with the weight_block_size that the experts get",
        ),
        (
            "v4-flash",
            {"damage": setting(weight_block_size=[16, 16]), "stored": dict.fromkeys(("shared", "linear"), "bf16")},
            "weight_block_size is [16, 16]; its sides must be powers of two, of at least 32 columns",
        ),
        (
            "v4-flash",
            {"damage": setting(weight_block_size=[96, 96]), "stored": dict.fromkeys(("shared", "linear"), "bf16")},
            "weight_block_size is [96, 96]; its sides must be powers of two, of at least 32 columns",
        ),
    ],
)
def test_what_does_not_fit_says_why(kind: str, knobs: dict[str, Any], message: str, small: Make) -> None:
    assert routed_fp8(small(kind, **knobs).subject) == Problem("routed-fp8-unfit", message)
