"""What level 2 computes, against an oracle: sums, quantisation, activation."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from fse_convert.errors import EnvironmentFailure
from fse_convert.model.moe import Role
from fse_convert.verification import numerics
from fse_convert.verification.numerics import (
    exact_expert,
    pick_device,
    quantize_input,
    requantize,
    sample_hidden_states,
    swiglu,
    trace_expert,
)
from tests.verification.oracle import ceil_log2, e4m3, fp32, oracle_expert, oracle_groups, to_e4m3


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
    assert torch.equal(torch.cat([trace_expert(part, source, 10.0).y for part in parts]), trace_expert(x, source, 10.0).y)
    exact, exact_parts = exact_expert(x, source, 10.0), [exact_expert(part, source, 10.0) for part in parts]
    torch.testing.assert_close(torch.cat([p.output for p in exact_parts]), exact.output, rtol=1e-12, atol=1e-12)
    assert math.hypot(*(p.noise for p in exact_parts)) == pytest.approx(exact.noise)


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
