"""Scales as bytes: every byte there is, and every float that must not be rounded."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.layout import ue8m0


def test_every_byte_has_the_value_that_torch_gives_it() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    ours = ue8m0.to_fp32(every)
    assert torch.equal(ours[:255], every.view(torch.float8_e8m0fnu).float()[:255])
    assert math.isnan(ours[255])
    assert ours[0] == 2.0**-127
    assert ours[127] == 1.0


def test_normal_powers_of_two_come_back() -> None:
    every = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(ue8m0.from_fp32(ue8m0.to_fp32(every)), every)
    assert torch.equal(ue8m0.from_fp32(ue8m0.to_fp32(every).bfloat16()), every)


@given(st.integers(0, 2**32 - 1))
def test_nothing_else_is_accepted(bits: int) -> None:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    exact = bits & 0x807FFFFF == 0 and 0 < bits >> 23 < 255
    scale = torch.tensor([1.0, value])
    if exact:
        assert ue8m0.from_fp32(scale)[1] == bits >> 23
    else:
        with pytest.raises(ValueError, match="scale 1 is"):
            ue8m0.from_fp32(scale)


@pytest.mark.parametrize(("n", "k", "bn", "bk"), [(256, 256, 128, 128), (96, 64, 32, 32), (192, 160, 128, 128), (5, 64, 1, 32)])
def test_expand_repeats_each_block(n: int, k: int, bn: int, bk: int) -> None:
    blocks = torch.arange(-(-n // bn) * -(-k // bk), dtype=torch.uint8).view(-(-n // bn), -(-k // bk))
    out = ue8m0.expand(blocks, n, k, bn, bk)
    assert out.shape == (n, k // 32)
    for r in (0, n // 2, n - 1):
        for g in (0, k // 32 - 1):
            assert out[r, g] == blocks[r // bn, 32 * g // bk]


@pytest.mark.parametrize(
    ("shape", "args", "match"), [((2, 2), (256, 256, 128, 16), "32 columns"), ((2, 3), (256, 256, 128, 128), "tile")]
)
def test_expand_refuses_what_does_not_tile(shape: tuple[int, int], args: tuple[int, int, int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ue8m0.expand(torch.zeros(shape, dtype=torch.uint8), *args)
