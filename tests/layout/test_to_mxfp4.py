"""The "even" rule against its definition in float64: scales from the exponent of the greatest, codes by the nearest neighbour."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fse_convert.layout.mxfp4 import Unencodable
from fse_convert.layout.to_mxfp4 import from_floats, from_fp8
from tests.layout.values import E4M3, MAGNITUDES, mxfp4_values, packed, powers, unpacked

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def defined(values_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float64 values as the definition says: by logarithm, quotient and distance."""
    groups = values_nk.view(len(values_nk), -1, 32)
    top = groups.abs().amax(2)
    fraction, exponent = torch.frexp(top)  # fraction in [0.5, 1)
    e = (exponent - 3 + (2 * fraction >= 1.75)).clamp(-127, 127).where(top > 0, -127)
    quotient = groups.abs() / torch.exp2(e.double())[..., None]
    distance = (quotient.clamp(max=6)[..., None] - MAGNITUDES).abs() + torch.arange(8) % 2 * 1e-12  # a tie: the even code
    return packed((distance.argmin(-1) + 8 * groups.signbit()).flatten(1)), (e + 127).to(torch.uint8)


def agree(got: tuple[torch.Tensor, torch.Tensor], values_nk: torch.Tensor) -> bool:
    return all(map(torch.equal, got, defined(values_nk)))


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.to(WORDS[dtype]).view(dtype)


@pytest.mark.parametrize(
    ("values", "byte", "first"),
    [
        ([6, 3], 127, 0x57),
        ([7, 3], 128, 0x36),
        ([6.5, 2.5], 127, 0x47),
        ([3.5, -3.5], 127, 0xE6),
        ([1.75, -0.25], 126, 0x96),
        ([-5, 0.75], 127, 0x2E),
        ([5, 1.25], 127, 0x26),
        ([0.0, -0.0], 0, 0x80),
    ],
)
def test_golden_bytes(values: list[float], byte: int, first: int) -> None:
    row = torch.tensor([values + [0.0] * 30])
    codes = row.to(torch.float8_e4m3fn).view(torch.uint8)
    one = torch.ones(1, 1)
    encoded = [from_floats(row.to(dtype)) for dtype in FLOATS]
    encoded += [from_fp8(codes, torch.tensor([[127]], dtype=torch.uint8)), from_fp8(codes, one)]
    assert [(int(sf), int(w[0, 0]), w[0, 1:].any().item()) for w, sf in encoded] == [(byte, first, False)] * 5


def test_what_fp8_becomes_depends_on_its_codes_alone() -> None:
    """T: the exponent by the largest code of a group; L: codes by that and their own. Digests from the float64 definition."""
    exponents, nibbles = [-127], [torch.zeros(127, dtype=torch.uint8)]
    for c in range(1, 127):
        rows = torch.arange(5 * 31).view(5, 31).clamp(max=c)
        w, sf = from_fp8(torch.cat((torch.full((5, 1), c), rows), 1).to(torch.uint8), torch.full((5, 1), 127, dtype=torch.uint8))
        assert len(set(sf.flatten().tolist())) == 1
        exponents.append(int(sf[0]) - 127)
        row = unpacked(w)[:, 1:].flatten()[:127]
        row[c + 1 :] = 0
        nibbles.append(row)
    assert hashlib.sha256(bytes(e % 256 for e in exponents)).hexdigest().startswith("18a1b4c47e8933a8")
    assert hashlib.sha256(bytes(torch.cat(nibbles).tolist())).hexdigest().startswith("ea29b21d2bd0129f")


@pytest.mark.parametrize("scale", [127, 0x3F, 0xC0])
def test_fp8_of_every_pair_of_codes(scale: int) -> None:
    """Every code below every greatest one, with both signs, under E8M0 and under the same scale in F32."""
    a = torch.arange(128).repeat(127, 1).clamp(max=126).clamp(max=torch.arange(127)[:, None])
    codes = torch.cat((torch.arange(127).repeat_interleave(8)[:, None], a.view(-1, 16)), 1).to(torch.uint8)
    codes = torch.cat((codes, codes[:, 1:] | 0x80), 1)[:, :32].contiguous()
    byte = torch.full((len(codes), 1), scale, dtype=torch.uint8)
    values = E4M3[codes.long()] * powers(byte)
    assert agree(from_fp8(codes, byte), values)
    assert agree(from_fp8(codes, powers(byte).float()), values)


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(30, 220))
@settings(max_examples=100, deadline=None)
def test_fp8_with_any_scale(seed: int, spread: int, least: int) -> None:
    """F32 scales with a mantissa: the product has 28 bits, and none may be lost before the definition sees it."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (6, 96), generator=draw)
    codes = torch.where(codes % 128 > min(126, 8 + 4 * spread), codes // 128 * 128, codes).to(torch.uint8)
    bits = torch.randint(least << 23, least + 6 << 23, (6, 3), generator=draw)
    bits = torch.where(torch.rand(6, 3, generator=draw) < 0.5, bits >> 19 << 19, bits)  # few bits: ties occur
    scale = from_bits(bits, torch.float32)
    values = E4M3[codes.long()] * scale.double().repeat_interleave(32, 1)
    assert agree(from_fp8(codes, scale), values)


def test_a_product_just_off_a_tie_is_rounded_by_its_last_bit() -> None:
    """1.25 * 2**k times 15/8 and its neighbours: the F32 product would be the tie for three scales, the exact one is for one."""
    scale = torch.tensor([[10.0 / 9], [14.0 / 9], [4.0 / 3], [7.0 / 6]]).repeat_interleave(3, 0)
    scale = (scale.view(torch.int32) + torch.tensor([-1, 0, 1]).repeat(4)[:, None].int()).view(torch.float32)
    codes = torch.arange(0, 0x40).repeat(12, 1).to(torch.uint8)
    for half in (codes[:, :32], codes[:, 32:]):
        assert agree(from_fp8(half.contiguous(), scale), E4M3[half.long()] * scale.double())


def test_a_subnormal_scale() -> None:
    """2**-133 is subnormal in F32; the group's own scale is not."""
    codes = torch.tensor([[0x7E, 0x40, 0x30] + [0] * 29], dtype=torch.uint8)
    scale = torch.tensor([[3 * 2.0**-132]])
    assert agree(from_fp8(codes, scale), E4M3[codes.long()] * scale.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bit_pattern(dtype: torch.dtype) -> None:
    """As the greatest of its group, beside values of all sizes down to where nothing is left; F32 gets those of BF16 and more."""
    infinity = 0x7C00 if dtype is torch.float16 else 0x7F80
    top = torch.arange(infinity)
    fractions = torch.tensor([1, 0.99, 0.876, 0.875, 0.8, 0.625, 0.6, 0.55, 0.5, 0.4375, 0.42, 0.36, 0.3125, 0.25, 0.21875, 0.2])
    rest = (torch.cat((fractions, fractions / 4)) * top[:, None]).long()
    lower = torch.stack([(top - step).clamp(min=0) for step in (1, 2, 31, 32, 33, 64, 96, 128, 192, 255, 256, 320, 384, 448, 500)])
    bits = torch.cat((top[:, None], lower.t(), rest[:, :16]), 1)
    bits = torch.where(torch.arange(32) % 3 == 1, bits | 0x8000, bits)
    if dtype is torch.float32:
        for tail in (0, 1, 0x8000, 0xFFFF):
            x = from_bits((bits << 16 | tail).clamp(max=2**32 - 1) - (bits >> 15 << 32), dtype)
            assert agree(from_floats(x), x.double())
    else:
        x = from_bits(bits - (bits >> 15 << 16), dtype)
        assert agree(from_floats(x), x.double())


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 4, 127, 252])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_and_their_neighbours_under_every_kind_of_scale(byte: int, dtype: torch.dtype) -> None:
    """Under scales of the least bytes the middles between codes are subnormal numbers."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]).double() * 2.0 ** (byte - 127)
    bits = middles.to(dtype).view(WORDS[dtype])[:, None] + torch.tensor([-1, 0, 1]).to(WORDS[dtype])
    row = torch.cat((torch.tensor([4 * 2.0 ** (byte - 127)]).double(), bits.flatten().view(dtype).double()))
    x = torch.cat((row, -row[:10]))[None].to(dtype)
    w, sf = from_floats(x)
    assert int(sf) == byte
    assert agree((w, sf), x.double())
    down, at, up = unpacked(w)[0, 1:22].view(7, 3).t().tolist()
    assert (down, up) == (list(range(7)), list(range(1, 8)))
    assert at == [0, 2, 2, 4, 4, 6, 6]


@given(st.sampled_from(FLOATS), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_random_floats(dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 64, generator=draw) * torch.exp2(torch.randint(-20, 14, (5, 1), generator=draw).float())
    x = x.to(dtype)
    assert agree(from_floats(x), x.double())


def test_floats_that_are_mxfp4_already_keep_their_values() -> None:
    """Where the greatest magnitude of a group is 4 or 6, its scale is found again, too."""
    w = torch.arange(256).to(torch.uint8).view(16, 16) | 0x60
    sf = torch.randint(90, 160, (16, 1), dtype=torch.uint8)
    encoded, byte = from_floats(mxfp4_values(w, sf).bfloat16())
    assert torch.equal(encoded, w)
    assert torch.equal(byte, sf)


def refusal(call: object, *args: torch.Tensor) -> tuple[str, str]:
    with pytest.raises(Unencodable) as refused:
        call(*args)  # type: ignore[operator]
    return refused.value.code, str(refused.value)


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_that_are_no_numbers_are_refused(value: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 96, dtype=dtype)
    x[1, 67] = float(value)
    assert refusal(from_floats, x) == ("nan", "there is a NaN or an infinity at row 1, columns 64 to 95")


def fp8(rows: int = 3, columns: int = 64) -> torch.Tensor:
    return torch.full((rows, columns), 0x38, dtype=torch.uint8)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_an_fp8_code_that_is_nan_is_refused(code: int, dtype: torch.dtype) -> None:
    codes = fp8()
    codes[2, 31] = code
    kind, text = refusal(from_fp8, codes, torch.full((3, 2), 127).to(dtype))
    assert kind == "nan"
    assert text.startswith("there is a NaN")
    assert text.endswith("at row 2, columns 0 to 31")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    scales = torch.ones(3, 2)
    scales[1, 1] = scale
    where = "the scale is not a positive number at row 1, columns 32 to 63"
    assert refusal(from_fp8, fp8(), scales) == ("scale-range", where)


def test_an_e8m0_scale_that_is_nan_is_refused() -> None:
    """Over zeros, too."""
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    assert refusal(from_fp8, torch.zeros(1, 64).to(torch.uint8), scales) == (
        "nan",
        "the scale is a NaN (0xFF) at row 0, columns 32 to 63",
    )


@pytest.mark.parametrize(("code", "exponent"), [(1, -11), (8, -8), (0x7E, 7)])
def test_the_range_of_scales_ends_where_e8m0_does(code: int, exponent: int) -> None:
    codes = torch.tensor([[code] + [0] * 31, [0] * 32], dtype=torch.uint8)
    least, most = max(0, -exponent), min(254, 254 - exponent)
    for byte in range(255):
        scale = torch.full((2, 1), byte, dtype=torch.uint8)
        for given_scale in (scale, powers(scale).float()):
            if least <= byte <= most:
                assert from_fp8(codes, given_scale)[1].tolist() == [[byte + exponent], [0]]
            else:
                assert refusal(from_fp8, codes, given_scale) == (
                    "scale-range",
                    "the MXFP4 scale would not be in 2**-127 to 2**127 at row 0, columns 0 to 31",
                )


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_floats(torch.zeros(2, 48)),
        lambda: from_fp8(fp8(2, 48), torch.full((2, 1), 127, dtype=torch.uint8)),
        lambda: from_fp8(fp8(2, 48), torch.ones(2, 1)),
    ],
    ids=["floats", "fp8 with E8M0", "fp8 with F32"],
)
def test_partial_groups_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="K = 48 is not a multiple of 32"):
        call()  # type: ignore[operator]
