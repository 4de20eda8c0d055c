from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fse_convert.errors import EnvironmentFailure
from fse_convert.model.moe import Role
from fse_convert.verification import numerics
from fse_convert.verification.addresses import KernelLayout, SourceLayout
from fse_convert.verification.numerics import (
    NumericsResult,
    exact_expert,
    fused_expert,
    pick_device,
    quantize_input,
    relative_l2,
    requantize,
    sample_hidden_states,
    swiglu,
    trace_expert,
)

# --- an oracle that shares nothing with the code under test: integers, fractions, one element at a time


def e4m3(code: int) -> Fraction:
    sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 3) & 15, code & 7
    assert code & 0x7F != 0x7F
    return sign * (
        Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )


POSITIVE = [e4m3(code) for code in range(0x7F)]


def to_e4m3(value: Fraction) -> int:
    """Nearest code, ties to the even one, saturating."""
    magnitude = min(abs(value), Fraction(448))
    code = min(range(0x7F), key=lambda c: (abs(POSITIVE[c] - magnitude), c & 1))
    return code | (0x80 if value < 0 else 0)


def fp32(value: float | Fraction) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16(value: float) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def ceil_log2(value: Fraction) -> int:
    exponent = -200
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def oracle_groups(row: list[float], exponent_of: Callable[[Fraction], int]) -> list[tuple[int, int]]:
    """(code, scale byte) of each element of a row."""
    out = []
    for g in range(0, len(row), 32):
        group = [Fraction(v) for v in row[g : g + 32]]
        exponent = exponent_of(max(abs(v) for v in group))
        out += [(to_e4m3(v / Fraction(2) ** exponent), exponent + 127) for v in group]
    return out


def oracle_dot(x: list[tuple[int, int]], codes: list[int], scale_bytes: list[int]) -> float:
    exact = sum(
        (e4m3(c) * e4m3(w) * Fraction(2) ** (s + b - 254) for (c, s), w, b in zip(x, codes, scale_bytes, strict=True)),
        Fraction(0),
    )
    return float(exact)


def oracle_weight(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    return [
        (codes[r].tolist(), [int(scale[r // block[0], k // block[1]]) for k in range(codes.shape[1])])
        for r in range(codes.shape[0])
    ]


def oracle_expert(x: Tensor, s: SourceLayout, limit: float | None) -> tuple[list[list[float]], list[list[int]]]:
    """Outputs as BF16 values and requantised codes."""
    gate, up, down = (
        oracle_weight(w, sf, s.block) for w, sf in ((s.gate, s.gate_scale), (s.up, s.up_scale), (s.down, s.down_scale))
    )
    inverse = Fraction(fp32(1 / 448))
    outputs, all_codes = [], []
    for row in x.float().tolist():
        xq = oracle_groups(row, lambda amax: ceil_log2(max(amax, Fraction(fp32(1e-4))) / 448))
        v = []
        for w1, w3 in zip(gate, up, strict=True):
            g, u = bf16(fp32(oracle_dot(xq, *w1))), bf16(fp32(oracle_dot(xq, *w3)))
            if limit is not None:
                c = bf16(fp32(limit))
                g, u = min(g, c), max(min(u, c), -c)
            sigmoid = fp32(1 / fp32(1 + fp32(math.exp(-g))))
            v.append(fp32(fp32(g * sigmoid) * u))
        q = oracle_groups(v, lambda amax: ceil_log2(Fraction(fp32(amax * inverse))) if amax else -127)
        all_codes.append([code for code, _ in q])
        outputs.append([bf16(fp32(oracle_dot(q, *w))) for w in down])
    return outputs, all_codes


@pytest.mark.parametrize(
    ("width", "block", "limit"),
    [(32, (32, 32), None), (64, (128, 128), 10.0), (96, (64, 64), 0.375), (64, (1, 32), 0.3)],
)
def test_agrees_with_an_element_by_element_oracle(make_source, width, block, limit):
    source = make_source(64, width, block, seed=width, sd=0.3)
    x = sample_hidden_states(3, 64, seed=1)
    x[1] *= 37
    x[2] = 0
    trace = trace_expert(x, source, limit)
    outputs, codes = oracle_expert(x, source, limit)
    # -0.0 and 0.0 have different codes; the oracle keeps the sign of what it rounds, and has no negative zero itself
    same = (trace.codes == torch.tensor(codes, dtype=torch.uint8)) | ((trace.codes & 0x7F) == 0)
    assert same.all()
    assert trace.y.double().tolist() == outputs
    assert torch.equal(trace.y, fused_expert(x, source, limit))
    assert not trace.y[2].any()


def test_every_code_and_every_scale_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    values = numerics.decode_codes(codes)
    assert values[[0x7F, 0xFF]].isnan().all()
    assert all(values[c] == float(e4m3(c)) for c in range(256) if c & 0x7F != 0x7F)
    scales = numerics.decode_scales(codes)
    assert scales[255].isnan()
    assert all(scales[b] == 2.0 ** (b - 127) for b in range(255))


@pytest.mark.parametrize("what", ["gate_scale", "up_scale", "down_scale"])
def test_every_scale_byte_reaches_the_sums_exactly(make_source, what):
    source = make_source(256, 256, (1, 32))
    unit = torch.full_like(getattr(source, what), 127)
    byte = torch.arange(256, dtype=torch.uint8)[:, None].expand_as(unit).contiguous()  # row r has scale byte r
    x = sample_hidden_states(2, 256)
    stage = {"gate_scale": "gate", "up_scale": "up", "down_scale": "output"}[what]
    base = getattr(trace_expert(x, dataclasses.replace(source, **{what: unit})), stage)
    scaled = getattr(trace_expert(x, dataclasses.replace(source, **{what: byte})), stage)
    assert torch.equal(scaled[:, :255], base[:, :255] * torch.exp2(torch.arange(-127, 128).double()))
    assert scaled[:, 255].isnan().all()


def test_sums_over_a_group_are_exact_at_both_ends_of_the_range():
    biggest, smallest = 0x7E, 0x01  # 448 and 2**-9
    x = torch.tensor([[biggest] * 31 + [smallest], [smallest] * 32], dtype=torch.uint8)
    w = torch.tensor([[biggest] * 31 + [smallest], [0xFE] * 16 + [biggest] * 15 + [0x81]], dtype=torch.uint8)
    ones = torch.full((2, 1), 127, dtype=torch.uint8)
    weights = SimpleNamespace(width=2, rows=lambda _role, a, b: (w[a:b], ones[a:b]))
    sums = numerics._linear((x, ones), weights, Role.GATE)  # type: ignore[arg-type]
    for t in range(2):
        for n in range(2):
            exact = sum(e4m3(a) * e4m3(b) for a, b in zip(x[t].tolist(), w[n].tolist(), strict=True))
            assert Fraction(float(sums[t, n])) == exact


@pytest.mark.parametrize("working_set", [1, 200_000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_do_not_depend_on_chunks_or_threads(make_source, monkeypatch, working_set, threads):
    source = make_source(512, 384)
    x = sample_hidden_states(5, 512)
    expected = trace_expert(x, source, 10.0)
    before = torch.get_num_threads()
    monkeypatch.setattr(numerics, "WORKING_SET", working_set)
    try:
        torch.set_num_threads(threads)
        got = trace_expert(x, source, 10.0)
    finally:
        torch.set_num_threads(before)
    for name in ("gate", "up", "codes", "scale", "output"):
        assert torch.equal(getattr(got, name), getattr(expected, name))


def test_tokens_do_not_see_each_other(make_source):
    source = make_source(256, 128)
    x = sample_hidden_states(7, 256)
    parts = torch.split(x, 3)
    assert torch.equal(torch.cat([fused_expert(part, source, 10.0) for part in parts]), fused_expert(x, source, 10.0))
    exact, exact_parts = exact_expert(x, source, 10.0), [exact_expert(part, source, 10.0) for part in parts]
    torch.testing.assert_close(torch.cat([p.output for p in exact_parts]), exact.output, rtol=1e-12, atol=1e-12)
    assert math.hypot(*(p.noise for p in exact_parts)) == pytest.approx(exact.noise)


# --- quantisation


def test_input_scale_has_a_floor_and_rounds_up_to_powers_of_two():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[1, 3], x[1, 40] = 448.0, -450.0
    x[2, 5] = 2.0**-20
    codes, scale = quantize_input(x)
    floor = 127 + math.ceil(math.log2(1e-4 / 448))
    assert scale.tolist() == [[floor] * 2, [127, 128], [floor] * 2, [floor] * 2]
    assert codes[1, 3] == 0x7E
    assert codes[1, 40] == 0x80 | to_e4m3(Fraction(225))
    assert not codes[[0, 3]].any()


def test_requantisation_of_zeros_gives_byte_zero():
    codes, scale = requantize(torch.zeros(2, 64))
    assert not codes.any()
    assert not scale.any()


@pytest.mark.parametrize("exponent", [-126, -100, -1, 0, 1, 60, 119])
def test_requantisation_of_an_exact_maximum_and_of_its_neighbours(exponent):
    maximum = torch.tensor(448.0) * 2.0**exponent
    above, below = (torch.nextafter(maximum, torch.tensor(end)) for end in (math.inf, 0.0))
    for value, byte, code in ((maximum, 127, 0x7E), (below, 127, 0x7E), (above, 128, 0x76), (-above, 128, 0xF6)):
        codes, scale = requantize(torch.full((1, 32), float(value)))
        assert scale.tolist() == [[byte + exponent]]
        assert codes.unique().tolist() == [code]


def test_requantisation_of_subnormal_maxima_uses_byte_one_and_underflows_to_zero():
    for exponent in (-127, -135, -140):
        codes, scale = requantize(torch.full((1, 32), 448 * 2.0**exponent))
        assert scale.tolist() == [[1]]
        assert codes.unique().tolist() == [to_e4m3(448 * Fraction(2) ** (exponent + 126))]
    codes, scale = requantize(torch.full((1, 32), 2.0**-149))  # amax / 448 is zero in FP32
    assert not codes.any()
    assert not scale.any()


def test_requantisation_agrees_with_the_oracle_on_random_rows():
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(6, 32, generator=generator) * torch.exp2(torch.randint(-60, 60, (6, 1), generator=generator))
    codes, scale = requantize(v)
    inverse = Fraction(fp32(1 / 448))
    for row, got, byte in zip(v.tolist(), codes.tolist(), scale[:, 0].tolist(), strict=True):
        expected = oracle_groups(row, lambda amax: ceil_log2(Fraction(fp32(amax * inverse))))
        assert [(c, byte) for c in got] == expected


def test_clamp_bounds_gate_from_above_only_and_up_from_both_sides():
    gate = torch.tensor([[-20.0, 3.0, 20.0]], dtype=torch.bfloat16)
    up = torch.tensor([[-20.0, 3.0, 20.0]], dtype=torch.bfloat16)
    one = torch.ones_like(gate)

    def silu(g: float) -> float:
        return fp32(g * fp32(1 / fp32(1 + fp32(math.exp(-g)))))

    assert swiglu(gate, one, 10.0).tolist() == [[silu(-20), silu(3), silu(10)]]
    assert swiglu(gate, one, None).tolist() == [[silu(-20), silu(3), silu(20)]]
    assert swiglu(one, up, 10.0).tolist() == [[fp32(silu(1) * u) for u in (-10, 3, 10)]]
    assert swiglu(one, up, 9.97).tolist() == [[fp32(silu(1) * u) for u in (-10, 3, 10)]]  # the limit is a BF16 too
    assert swiglu(one, up, math.inf).tolist() == swiglu(one, up, None).tolist()


def test_activation_multiplies_gate_and_sigmoid_first():
    generator = torch.Generator().manual_seed(7)
    gate, up = torch.randn(2, 1, 2000, generator=generator).mul(4).bfloat16()
    expected = [
        fp32(fp32(g * fp32(1 / fp32(1 + fp32(math.exp(-g))))) * u) for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True)
    ]
    assert swiglu(gate, up, None)[0].tolist() == expected


def test_activation_of_extreme_gates():
    gate = torch.tensor([[-1e30, -100.0, -0.0, 0.0, 100.0, math.nan]], dtype=torch.bfloat16)
    got = swiglu(gate, torch.ones_like(gate), None)[0]
    assert got[:4].tolist() == [0, 0, 0, 0]
    assert got[4] == 100
    assert got[5].isnan()
    assert swiglu(gate, torch.ones_like(gate), 10.0)[0, 5].isnan()


# --- padded against unpadded


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


# --- what must fail: one byte, row, block or word at a time, in the kernel's bytes


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


# --- the bound


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
    for name, value in (("gate", 0x7F), ("down_scale", 0xFF), ("up_scale", 0xFE)):  # the last overflows FP32
        tensor = getattr(source, name).clone()
        tensor[0] = value
        spoiled = dataclasses.replace(source, **{name: tensor})
        result = check_numerics(make_kernel(spoiled, 128), spoiled, tokens=2)
        assert not result.passed
        assert not result.finite
    assert "not finite" in dataclasses.replace(result, differences=()).reason


def test_relative_l2():
    one, zero = torch.ones(4), torch.zeros(4)
    assert relative_l2(one, one) == 0
    assert relative_l2(zero, zero) == 0
    assert relative_l2(one, zero) == math.inf
    assert relative_l2(2 * one, one) == 1
    assert math.isnan(relative_l2(one * math.nan, one))


# --- arguments


def test_layouts_refuse_what_does_not_fit(make_source, make_kernel):
    source = make_source(256, 128)
    kernel = make_kernel(source, 128)
    with pytest.raises(ValueError, match=r"l1_scale is torch.int32 \(256, 2\)"):
        dataclasses.replace(kernel, l1_scale=kernel.l1_scale.T.contiguous())
    with pytest.raises(ValueError, match="l1_weight"):
        dataclasses.replace(kernel, l1_weight=kernel.l1_weight.view(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="contiguous"):
        dataclasses.replace(kernel, l1_scale=kernel.l1_scale.T.contiguous().T)
    with pytest.raises(ValueError, match="multiples of 128"):
        dataclasses.replace(kernel, l2_weight=kernel.l2_weight[:, :96].contiguous())
    with pytest.raises(ValueError, match="gate_scale"):
        dataclasses.replace(source, gate_scale=source.gate_scale[1:].contiguous())
    with pytest.raises(ValueError, match="multiples of 32"):
        dataclasses.replace(source, block=(128, 16))
    with pytest.raises(ValueError, match="multiples of 32"):
        dataclasses.replace(source, gate=source.gate[:33].contiguous())
    with pytest.raises(ValueError, match="cannot hold"):
        check_numerics(kernel, make_source(256, 160))
    with pytest.raises(ValueError, match="cannot hold"):
        check_numerics(kernel, make_source(128, 128))


def test_sampled_hidden_states_are_fixed_by_their_seed():
    assert torch.equal(sample_hidden_states(2, 64, 5), sample_hidden_states(2, 64, 5))
    assert not torch.equal(sample_hidden_states(2, 64, 5), sample_hidden_states(2, 64, 6))


def test_pick_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(EnvironmentFailure, match="no usable CUDA device"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")


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
