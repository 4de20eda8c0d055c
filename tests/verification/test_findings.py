"""How two JSON values differ, to the key; and samples."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.verification.findings import bytes_mismatch, difference, text_mismatches
from fse_convert.verification.sample import Sample


@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a.b[1]", "2", "3")),
        ({"a": 1}, {}, ("a", "1", "nothing")),
        ({}, {"a": 1}, ("a", "nothing", "1")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ("", 'keys in the order ["a", "b"]', 'in the order ["b", "a"]')),
        ([1], [1, 2], ("", "[1]", "[1, 2]")),
        (1, True, ("", "1", "true")),
        (1, 1.0, ("", "1", "1.0")),
    ],
    ids=["same", "nested", "missing", "extra", "order", "length", "boolean", "float"],
)
def test_names_the_first_difference(expected: Any, actual: Any, said: tuple[str, str, str] | None) -> None:
    assert difference(expected, actual) == said


def test_texts_are_told_apart_by_key_then_by_byte() -> None:
    assert text_mismatches("x.json", b'{"a": 1}', b'{"a": 1}') == []
    assert str(text_mismatches("x.json", b'{"a": 1}', b'{"a": 2}')[0]) == "x.json: expected a 1, found 2"
    assert str(text_mismatches("x.json", b'{"a": 1}', b'{"a":1}')[0]) == "x.json, byte 5: expected 0x20, found 0x31"
    assert str(text_mismatches("x.json", b"{}", b"{")[0]).startswith("x.json: expected JSON, found no JSON: ")


def test_a_file_that_ends_early_says_so() -> None:
    assert str(bytes_mismatch("bytes", "x", b"ab", b"a")) == "x, byte 1: expected 0x62, found the end of the file"


def test_a_sample_has_another_seed_every_time() -> None:
    assert Sample(3).seed != Sample(3).seed
    assert Sample(3, 7).seed == 7
