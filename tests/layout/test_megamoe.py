"""The kernel layout: index formulas of the kernel's addressing as the oracle, and inverses that are inverses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fse_convert.layout import megamoe
from tests.layout import tensors

I_VALUES = st.integers(1, 6).map(lambda b: 64 * b)
WORDS = st.integers(1, 5)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def l1_row(r: int, half: int) -> int:
    return 128 * (r // 64) + 64 * ((r // 8) % 2) + 32 * half + 4 * (r % 8) + (r % 64) // 16


def l2_row(r: int) -> int:
    return 128 * (r // 128) + 4 * (r % 32) + (r % 128) // 32


@given(I_VALUES, st.integers(1, 9), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_interleave_puts_every_row_where_the_kernel_reads_it(i: int, k: int, seed: int) -> None:
    gate, up = random_bytes(i, k, seed=seed), random_bytes(i, k, seed=seed + 1)
    w_2ik = tensors.interleave(gate, up)
    rows = torch.arange(i)
    for half, source in enumerate((gate, up)):
        assert torch.equal(w_2ik[16 * (rows // 8) + 8 * half + rows % 8], source)
    assert all(map(torch.equal, megamoe.deinterleave(w_2ik), (gate, up)))


@given(I_VALUES, WORDS, st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_l1_scale_bytes_are_where_the_kernel_reads_them(i: int, words: int, seed: int) -> None:
    g = 4 * words
    halves = random_bytes(i, g, seed=seed), random_bytes(i, g, seed=seed + 1)
    stored = tensors.l1_scale(*halves)
    assert stored.shape == (words, 2 * i)
    assert stored.dtype is torch.int32
    flat = stored.view(torch.uint8).flatten()
    for half, source in enumerate(halves):
        for r in range(i):
            at = torch.tensor([4 * ((kg // 4) * 2 * i + l1_row(r, half)) + kg % 4 for kg in range(g)])
            assert torch.equal(flat[at], source[r])
    assert all(map(torch.equal, megamoe.l1_scale_inverse(stored), halves))


@given(st.integers(1, 3).map(lambda b: 128 * b), WORDS, st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_l2_scale_bytes_are_where_the_kernel_reads_them(h: int, words: int, seed: int) -> None:
    source = random_bytes(h, 4 * words, seed=seed)
    stored = tensors.l2_scale(source)
    flat = stored.view(torch.uint8).flatten()
    for r in range(h):
        at = torch.tensor([4 * ((kg // 4) * h + l2_row(r)) + kg % 4 for kg in range(4 * words)])
        assert torch.equal(flat[at], source[r])
    assert torch.equal(megamoe.l2_scale_inverse(stored), source)


def test_words_are_little_endian_along_k() -> None:
    sf_ng = torch.zeros(128, 4, dtype=torch.uint8)
    sf_ng[0] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert int(tensors.pack(sf_ng)[0, 0]) == 0x04030201


def test_padding_keeps_the_real_rows_a_prefix() -> None:
    """2304 = 36 x 64: the unpadded L1 is a prefix of the padded one, which is why a server may read either width."""
    gate, up = random_bytes(2304, 3), random_bytes(2304, 3, seed=1)
    padded = [torch.cat((w, torch.zeros(256, 3, dtype=torch.uint8))) for w in (gate, up)]
    assert torch.equal(tensors.interleave(*padded)[:4608], tensors.interleave(gate, up))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: tensors.interleave(random_bytes(9, 2), random_bytes(9, 2)), "multiples of 8"),
        (lambda: tensors.interleave(random_bytes(8, 2), random_bytes(16, 2)), "must be equal"),
        (lambda: megamoe.to_utccp(random_bytes(64, 4)), "not a multiple of 128"),
        (lambda: tensors.pack(random_bytes(128, 6)), "K = 192 is not a multiple of 128"),
    ],
    ids=["9 gate rows", "gate and up of two widths", "64 rows of scales", "6 scales of a row"],
)
def test_shapes_that_the_kernel_does_not_take(call: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()  # type: ignore[operator]
