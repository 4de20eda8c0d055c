"""The kernel's addresses, against the published formulas written out the other way: from logical rows to physical ones."""

from __future__ import annotations

import pytest
import torch

from fse_convert.verification import addresses


def test_l1_weight_rows_undo_the_interleaving() -> None:
    r = torch.arange(384)
    for half, physical in ((0, 16 * (r // 8) + r % 8), (1, 16 * (r // 8) + 8 + r % 8)):
        found_half, found_row = addresses.l1_weight_rows(physical)
        assert (found_half == half).all()
        assert torch.equal(found_row, r)


def test_l1_scale_rows_undo_interleaving_and_utccp() -> None:
    r = torch.arange(2304)
    physical = []
    for half in (0, 1):
        p = 128 * (r // 64) + 64 * ((r // 8) % 2) + 32 * half + 4 * (r % 8) + (r % 64) // 16
        found_half, found_row = addresses.l1_scale_rows(p)
        assert (found_half == half).all()
        assert torch.equal(found_row, r)
        physical.append(p)
    assert torch.equal(torch.cat(physical).sort().values, torch.arange(2 * 2304))


def test_l2_scale_rows_undo_utccp() -> None:
    n = torch.arange(5120)
    assert torch.equal(addresses.l2_scale_rows(128 * (n // 128) + 4 * (n % 32) + (n % 128) // 32), n)


@pytest.mark.parametrize(("width", "padded"), [(160, 256), (256, 256)])
def test_scale_bytes_are_where_the_kernel_looks(width: int, padded: int) -> None:
    hidden, generator = 256, torch.Generator().manual_seed(0)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (torch.randint(0, 255, (n, k // 32), generator=generator, dtype=torch.uint8) for n, k in shapes)
    l1 = addresses.l1_scale_bytes(gate, up, padded).flatten()
    l2 = addresses.l2_scale_bytes(down, padded).flatten()
    expected_l1, expected_l2 = torch.full_like(l1, 0xEE), torch.full_like(l2, 0xEE)
    for half, s in enumerate((gate, up)):
        for r in range(padded):
            p = 128 * (r // 64) + 64 * ((r // 8) % 2) + 32 * half + 4 * (r % 8) + (r % 64) // 16
            for g in range(hidden // 32):
                expected_l1[4 * ((g // 4) * 2 * padded + p) + g % 4] = s[r, g] if r < width else 0x7F
    for n in range(hidden):
        p = 128 * (n // 128) + 4 * (n % 32) + (n % 128) // 32
        for g in range(padded // 32):
            expected_l2[4 * ((g // 4) * hidden + p) + g % 4] = down[n, g] if 32 * g < width else 0x7F
    assert torch.equal(l1, expected_l1)
    assert torch.equal(l2, expected_l2)


def test_exponents_take_powers_of_two_only() -> None:
    def raw(*values: float) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32).view(torch.uint8).view(1, -1)

    good = addresses.exponents(raw(1.0, 2.0, 2.0**-126, 2.0**127))
    assert good is not None
    assert good.tolist() == [[127, 128, 1, 254]]
    for bad in (0.0, -1.0, 1.5, 2.0**-127, float("inf"), float("nan"), -0.0):
        assert addresses.exponents(raw(1.0, bad)) is None
