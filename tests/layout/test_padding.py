"""Padding is a prefix and a fill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.layout.padding import pad


@given(
    st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4), st.sampled_from([b"\0", b"\x7f", b"\0\0\x80\x3f"])
)
def test_pad_keeps_the_corner_and_fills_the_rest(n: int, b: int, rows: int, cols: int, fill: bytes) -> None:
    width = len(fill)
    x = torch.randint(0, 256, (n, b * width), dtype=torch.uint8)
    out = pad(x, n + rows, (b + cols) * width, fill)
    assert torch.equal(out[:n, : b * width], x)
    assert bytes(out[n:].flatten().tolist()) == fill * (rows * (b + cols))
    assert bytes(out[:n, b * width :].flatten().tolist()) == fill * (n * cols)


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (2, 3), (2, 6)])
def test_pad_never_shrinks_or_splits_an_element(rows: int, width: int) -> None:
    with pytest.raises(ValueError, match="cannot pad"):
        pad(torch.zeros(2, 4, dtype=torch.uint8), rows, width, b"\0\0\x80\x3f")
