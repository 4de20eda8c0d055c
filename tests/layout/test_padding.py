"""Padding is a prefix and a fill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.layout.padding import filled, padded


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4), st.sampled_from([b"\0", b"\x7f"]))
def test_padding_keeps_the_corner_and_fills_the_rest(n: int, b: int, more: int, wider: int, fill: bytes) -> None:
    rows = [bytes(range(7 * i, 7 * i + b)) for i in range(n)]
    out = padded(rows, n + more, b + wider, fill)
    assert [row[:b] for row in out[:n]] == rows
    assert [row[b:] for row in out[:n]] == [fill * wider] * n
    assert out[n:] == [fill * (b + wider)] * more


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (2, 3)])
def test_padding_never_shrinks(rows: int, width: int) -> None:
    with pytest.raises(ValueError, match="cannot pad"):
        padded([bytes(4)] * 2, rows, width, b"\0")


def test_fill_has_whole_elements() -> None:
    assert filled(16, b"\0\0\x80\x3f") == b"\0\0\x80\x3f" * 4
    with pytest.raises(ValueError, match="split elements of 4"):
        filled(10, b"\0\0\x80\x3f")
