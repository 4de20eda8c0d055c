"""Level 2 as a check: padded against unpadded, what must fail, and the bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fse_convert.verification import numerics
from fse_convert.verification.addresses import KernelLayout
from fse_convert.verification.numerics import NumericsResult, relative_l2, requantize, sample_hidden_states, trace_expert
from tests.verification.source_layout import SourceLayout


def check_numerics(
    kernel: KernelLayout, source: SourceLayout, x: Tensor | None = None, *, tokens: int = 32, limit: float | None = None
) -> NumericsResult:
    return numerics.check_numerics(kernel, source, sample_hidden_states(tokens, source.hidden) if x is None else x, limit)


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (1, 32), (96, 64)])
@pytest.mark.parametrize(("width", "padded"), [(128, 128), (128, 256), (384, 512), (160, 512), (96, 128)])
def test_padded_kernel_layout_gives_the_bits_of_the_unpadded_source(make_source, make_kernel, block, width, padded):
    source = make_source(256, width, block, seed=padded)
    result = check_numerics(make_kernel(source, padded), source, tokens=9, limit=10.0)
    assert result.passed, result.reason
    assert result.bit_equal
    assert result.differences == ()
    assert 0 < result.relative_l2 < result.bound < 0.3
    assert "same bits" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("block", [(32, 32), (128, 128)])
def test_real_shape(make_source, make_kernel, block):
    source = make_source(5120, 2304, block)
    kernel = make_kernel(source, 2560)
    result = check_numerics(kernel, source, limit=10.0)
    assert result.passed, result.reason
    assert result.relative_l2 < 0.03
    assert result.bound < 0.15


def test_a_width_that_is_not_padded_needs_no_second_shape(make_source, make_kernel):
    source = make_source(256, 256)
    assert check_numerics(make_kernel(source, 256), source, tokens=3).passed


def flipped(tensor: Tensor, index: tuple[int, int], mask: int) -> Tensor:
    out = tensor.clone()
    out[index] ^= mask
    return out


def swapped_rows(tensor: Tensor, a: int, b: int) -> Tensor:
    out = tensor.clone()
    out[[a, b]] = tensor[[b, a]]
    return out


def as_bytes(kernel: KernelLayout, name: str) -> Tensor:
    return getattr(kernel, name).clone().view(torch.uint8).view(-1)


def with_bytes(kernel: KernelLayout, name: str, flat: Tensor) -> KernelLayout:
    return dataclasses.replace(kernel, **{name: flat.view(torch.int32).view(getattr(kernel, name).shape)})


def doubled_block(kernel: KernelLayout, source: SourceLayout, make_kernel) -> KernelLayout:
    scale = source.gate_scale.clone()
    scale[1, 1] += 1
    return make_kernel(dataclasses.replace(source, gate_scale=scale), kernel.width)


def swapped_scale_bytes(kernel: KernelLayout) -> KernelLayout:
    flat = as_bytes(kernel, "l1_scale")
    word = next(i for i in range(0, len(flat), 4) if flat[i] != flat[i + 1])
    flat[[word, word + 1]] = flat[[word + 1, word]]
    return with_bytes(kernel, "l1_scale", flat)


def without_utccp(kernel: KernelLayout, name: str) -> KernelLayout:
    rows = getattr(kernel, name).shape[1]
    n = torch.arange(rows)
    permuted = getattr(kernel, name)[:, 128 * (n // 128) + 4 * (n % 32) + (n % 128) // 32]
    return dataclasses.replace(kernel, **{name: permuted.contiguous()})


def gate_and_up_exchanged(kernel: KernelLayout) -> KernelLayout:
    d = torch.arange(2 * kernel.width)
    return dataclasses.replace(kernel, l1_weight=kernel.l1_weight[d ^ 8], l1_scale=kernel.l1_scale[:, d ^ 32].contiguous())


SPOILED: dict[str, tuple[Callable[..., KernelLayout], str]] = {
    "gate and up exchanged": (lambda k, s, m: gate_and_up_exchanged(k), "gate sums"),
    "two rows of gate swapped": (
        lambda k, s, m: dataclasses.replace(k, l1_weight=swapped_rows(k.l1_weight, 0, 1)),
        "gate sums",
    ),
    "two rows of up swapped": (
        lambda k, s, m: dataclasses.replace(k, l1_weight=swapped_rows(k.l1_weight, 8, 24)),
        "up sums",
    ),
    "two rows of down swapped": (
        lambda k, s, m: dataclasses.replace(k, l2_weight=swapped_rows(k.l2_weight, 5, 6)),
        "output sums",
    ),
    "one block scale of gate doubled": (doubled_block, "gate sums"),
    "one bit of one gate weight": (
        lambda k, s, m: dataclasses.replace(k, l1_weight=flipped(k.l1_weight, (3, 7), 1)),
        "gate sums",
    ),
    "one bit of one down weight": (
        lambda k, s, m: dataclasses.replace(k, l2_weight=flipped(k.l2_weight, (9, 11), 1)),
        "output sums",
    ),
    "two bytes of one packed scale swapped": (lambda k, s, m: swapped_scale_bytes(k), "gate sums"),
    "one bit of one down scale": (
        lambda k, s, m: dataclasses.replace(k, l2_scale=flipped(k.l2_scale, (0, 3), 1 << 8)),
        "output sums",
    ),
    "L1 scales not permuted for UTCCP": (lambda k, s, m: without_utccp(k, "l1_scale"), "gate sums"),
    "L2 scales not permuted for UTCCP": (lambda k, s, m: without_utccp(k, "l2_scale"), "output sums"),
}


FINE_BLOCKS_ONLY = {"two bytes of one packed scale swapped", "L2 scales not permuted for UTCCP"}  # else the same bytes


@pytest.mark.parametrize(
    ("what", "block"),
    [(w, b) for w in SPOILED for b in ((32, 32), (128, 128)) if b == (32, 32) or w not in FINE_BLOCKS_ONLY],
)
def test_a_spoiled_layout_fails(make_source, make_kernel, what, block):
    source = make_source(256, 256, block)
    spoil, stage = SPOILED[what]
    result = check_numerics(spoil(make_kernel(source, 384), source, make_kernel), source, tokens=8, limit=10.0)
    assert not result.passed
    assert result.differences[0].what.startswith(stage)
    assert result.differences[0].what in result.reason


@pytest.mark.parametrize("what", ["two rows of gate swapped", "one block scale of gate doubled"])
def test_coarse_mistakes_change_the_output_bits_too(make_source, make_kernel, what):
    source = make_source(256, 256, (128, 128))
    result = check_numerics(SPOILED[what][0](make_kernel(source, 384), source, make_kernel), source)
    assert not result.bit_equal
    output = next(d for d in result.differences if d.what == "output (token, hidden)")
    assert output.count > 100
    assert len(output.first) == 2


def test_the_first_difference_names_token_and_channel(make_source, make_kernel):
    source = make_source(256, 128)
    kernel = make_kernel(source, 128)
    spoiled = dataclasses.replace(kernel, l1_weight=flipped(kernel.l1_weight, (16 * 2 + 5, 0), 0x40))  # gate row 21
    first = check_numerics(spoiled, source, torch.ones(2, 256, dtype=torch.bfloat16)).differences[0]
    assert (first.count, first.first) == (2, (0, 21))


PADDING = {
    "gate weight": ("l1_weight", (2 * 160, 3), 1, "gate weight padding", (160, 3)),
    "up weight": ("l1_weight", (2 * 160 + 8, 3), 1, "up weight padding", (160, 3)),
    "negative zero": ("l1_weight", (2 * 160, 3), 0x80, "gate weight padding", (160, 3)),
    "down weight": ("l2_weight", (7, 160), 1, "down weight padding", (7, 160)),
    # channel 192 = 128 + 64: gate scale row 128 * 3 of 512; groups 4 .. 7 are word column 1
    "gate scale": ("l1_scale", (1, 384), 1 << 8, "gate scale padding", (192, 5)),
    "up scale": ("l1_scale", (1, 384 + 32), 1 << 8, "up scale padding", (192, 5)),
    "down scale": ("l2_scale", (1, 4), 1 << 16, "down scale padding", (1, 6)),
}


@pytest.mark.parametrize("what", PADDING)
def test_padding_that_is_not_its_fill_fails(make_source, make_kernel, what):
    source = make_source(256, 160)
    kernel = make_kernel(source, 256)
    name, index, mask, expected, first = PADDING[what]
    spoiled = dataclasses.replace(kernel, **{name: flipped(getattr(kernel, name), index, mask)})
    result = check_numerics(spoiled, source, tokens=2)
    assert not result.passed
    assert result.differences[0].what.startswith(expected)
    assert result.differences[0].first == first
    assert result.differences[0].count == 1


def test_padding_that_computes_something_fails_twice(make_source, make_kernel):
    source = make_source(256, 128)
    kernel = make_kernel(source, 256)
    l1 = kernel.l1_weight.clone()
    l1[2 * 128 :] = 0x38
    result = check_numerics(dataclasses.replace(kernel, l1_weight=l1), source, tokens=2)
    assert result.bit_equal  # the columns of down are still zero
    assert not result.passed
    named = " ".join(d.what for d in result.differences)
    assert "activation codes in padding" in named
    assert "activation scales in padding" in named


def test_a_computation_that_is_wrong_on_both_sides_exceeds_the_bound(make_source, make_kernel, monkeypatch):
    source = make_source(256, 128)
    kernel = make_kernel(source, 128)

    def coarse(v: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = requantize(v)
        return codes & 0xF8, scale  # no mantissa left

    monkeypatch.setattr(numerics, "requantize", coarse)
    result = check_numerics(kernel, source)
    assert result.bit_equal
    assert not result.differences
    assert not result.passed
    assert "relative L2" in result.reason


@pytest.mark.parametrize("sd", [0.002, 0.05, 1.0])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_right_results_stay_well_below_the_bound(make_source, make_kernel, sd, tokens, limit):
    source = make_source(256, 256, (32, 32), seed=tokens, sd=sd)
    result = check_numerics(make_kernel(source, 256), source, tokens=tokens, limit=limit)
    assert result.passed
    assert result.relative_l2 < 0.8 * result.bound


def test_errors_that_agree_on_all_channels_stay_below_the_bound(make_source, make_kernel):
    source = make_source(256, 128, sd=2.0)
    positive = dataclasses.replace(source, **{name: getattr(source, name) & 0x7F for name in ("gate", "up", "down")})
    x = sample_hidden_states(8, 256).abs()
    for limit in (0.7, 1.0, 3.3, 10.0):
        assert check_numerics(make_kernel(positive, 128), positive, x, limit=limit).passed


def test_zero_weights_and_zero_inputs_pass(make_source, make_kernel):
    source = make_source(256, 128)
    zero = dataclasses.replace(source, down=torch.zeros_like(source.down))
    assert check_numerics(make_kernel(zero, 128), zero, tokens=2).passed
    result = check_numerics(make_kernel(source, 128), source, torch.zeros(2, 256, dtype=torch.bfloat16))
    assert (result.passed, result.relative_l2) == (True, 0.0)


def test_what_is_not_finite_is_reported(make_source, make_kernel):
    source = make_source(256, 128)
    for name, value in (("gate", 0x7F), ("down_scale", 0xFF)):
        tensor = getattr(source, name).clone()
        tensor[0] = value
        spoiled = dataclasses.replace(source, **{name: tensor})
        result = check_numerics(make_kernel(spoiled, 128), spoiled, tokens=2)
        assert not result.passed
        assert not result.finite
    assert "not finite" in dataclasses.replace(result, differences=()).reason


@pytest.mark.parametrize(("name", "byte"), [("up_scale", 0xFE), ("gate_scale", 0xFE), ("down_scale", 0xFE), ("up_scale", 1)])
def test_what_fp32_cannot_hold_is_not_called_a_mismatch(name, byte, make_source, make_kernel):
    source = make_source(256, 128)
    source = dataclasses.replace(source, **{name: torch.full_like(getattr(source, name), byte)})
    result = check_numerics(make_kernel(source, 128), source, tokens=2)
    assert (result.passed, result.in_range, result.differences) == (True, False, ())
    assert "overflows or vanishes in FP32 or BF16, from the source's bytes as from the output's" in result.reason
    damaged = dataclasses.replace(source, gate=source.gate ^ 1)
    assert not check_numerics(make_kernel(damaged, 128), source, tokens=2).passed


def test_relative_l2():
    one, zero = torch.ones(4), torch.zeros(4)
    assert relative_l2(one, one) == 0
    assert relative_l2(zero, zero) == 0
    assert relative_l2(one, zero) == math.inf
    assert relative_l2(2 * one, one) == 1
    assert math.isnan(relative_l2(one * math.nan, one))


def test_a_kernel_that_cannot_hold_its_source(make_source, make_kernel):
    source = make_source(256, 128)
    kernel = make_kernel(source, 128)
    with pytest.raises(ValueError, match="cannot hold"):
        check_numerics(kernel, make_source(256, 160))
    with pytest.raises(ValueError, match="cannot hold"):
        check_numerics(kernel, make_source(128, 128))


@pytest.mark.gpu
def test_cuda_gives_the_bits_of_the_cpu(make_source, make_kernel):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = make_source(512, 384)
    x = sample_hidden_states(32, 512)
    cuda = torch.device("cuda")
    here, there = trace_expert(x, source, 10.0), trace_expert(x.to(cuda), source.to(cuda), 10.0)
    for name in ("gate", "up", "codes", "scale", "output"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
    assert check_numerics(make_kernel(source, 512), source, x.to(cuda)).passed
