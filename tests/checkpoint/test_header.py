"""Strict headers: every rule of the format, judged by the safetensors library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from fse_convert.checkpoint.header import BITS, Header, element_bytes, header_length, parse_header
from fse_convert.errors import InvalidCheckpoint


def blob(header: Any, payload: bytes = b"", pad: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += pad
    return len(raw).to_bytes(8, "little") + raw + payload


def ours(data: bytes) -> Header:
    length = header_length(data[:64], len(data), "s")
    return parse_header(data[8 : 8 + length], len(data), "s")


def code(data: bytes) -> str:
    with pytest.raises(InvalidCheckpoint) as e:
        ours(data)
    return e.value.problems[0].code


def library_accepts(data: bytes, path: Path) -> bool:
    path.write_bytes(data)
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def tensor(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ACCEPTED = {
    "spaces": blob({"a": tensor()}, b"1234", b"     "),
    "newline": blob({"a": tensor()}, b"1234", b"\n"),
    "leading space": blob(b' {"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "metadata null": blob({"__metadata__": None, "a": tensor()}, b"1234"),
    "metadata empty": blob({"__metadata__": {}, "a": tensor()}, b"1234"),
    "metadata": blob({"__metadata__": {"format": "pt"}, "a": tensor()}, b"1234"),
    "order": blob({"b": tensor(offsets=(4, 8)), "a": tensor()}, b"12345678"),
    "extra key": blob({"a": {**tensor(), "x": [1]}}, b"1234"),
    "empty tensor": blob({"a": tensor(shape=(0, 3), offsets=(0, 0)), "b": tensor()}, b"1234"),
    "0-d": blob({"a": tensor("F32", (), (0, 4))}, b"1234"),
    "unaligned": blob({"a": tensor(shape=(1,), offsets=(0, 1)), "b": tensor("F32", (1,), (1, 5))}, b"12345"),
    "no tensors": blob({}),
    "only metadata": blob({"__metadata__": {"a": "b"}}),
    "odd names": blob({"": tensor(), "ü/\u0000": tensor(offsets=(4, 8))}, b"12345678"),
    "f4": blob({"a": tensor("F4", (8,), (0, 4))}, b"1234"),
    "f6": blob({"a": tensor("F6_E2M3", (4,), (0, 3))}, b"123"),
    "e8m0": blob({"a": tensor("F8_E8M0")}, b"1234"),
}
REFUSED = {
    "header-short": b"\0\0\0\0\0\0\0",
    "header-length": (99).to_bytes(8, "little") + b"{}",
    "header-too-large": (100_000_001).to_bytes(8, "little") + b"{}",
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
    "header-json": blob({"a": tensor()}, b"1234", b"\0"),
    "header-json 2": blob(b"[1]"),
    "header-json 3": blob(b"\xff\xfe{}"),
    "header-json 4": blob(b"[" * 100_000),
    "header-json 5": blob(b'{"a": NaN}'),
    "header-json 6": blob(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "header-json 7": blob(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}', b"1234"),
    "header-json 8": blob(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"1234"),
    "header-json 9": blob(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"\\ud800"}}', b"1234"),
    "header-metadata": blob({"__metadata__": {"a": 1}}),
    "header-entry": blob({"a": [1]}),
    "header-entry 2": blob({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "header-entry 3": blob({"a": tensor(shape=(4.0,))}, b"1234"),
    "header-entry 4": blob({"a": tensor(shape=(True, 4))}, b"1234"),
    "header-entry 5": blob({"a": tensor(shape=(-4,))}, b"1234"),
    "header-entry 6": blob({"a": tensor(shape=(2**64,), offsets=(0, 0))}),
    "header-entry 7": blob({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "dtype-unknown": blob({"a": tensor("F8_E4M3FN")}, b"1234"),
    "tensor-size": blob({"a": tensor(shape=(5,))}, b"1234"),
    "tensor-size overflow": blob({"a": tensor(shape=(2**63, 4, 0), offsets=(0, 0))}),
    "tensor-size odd f4": blob({"a": tensor("F4", (7,), (0, 4))}, b"1234"),
    "tensor-size reversed": blob({"a": tensor(offsets=(4, 0))}, b"1234"),
    "tensor-offset hole": blob({"a": tensor(), "b": tensor(offsets=(5, 9))}, b"123456789"),
    "tensor-offset overlap": blob({"a": tensor(), "b": tensor(offsets=(3, 7))}, b"1234567"),
    "tensor-offset first": blob({"a": tensor(offsets=(1, 5))}, b"12345"),
    "shard-truncated": blob({"a": tensor()}, b"123"),
    "shard-trailing": blob({"a": tensor()}, b"12345"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_what_the_library_accepts(name: str, tmp_path: Path) -> None:
    assert library_accepts(ACCEPTED[name], tmp_path / "x")
    ours(ACCEPTED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_the_library_refuses(name: str, tmp_path: Path) -> None:
    assert not library_accepts(REFUSED[name], tmp_path / "x")
    assert code(REFUSED[name]) == name.split(maxsplit=1)[0]


ENTRY = b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


@pytest.mark.parametrize("data", [blob(b'{"__metadata__":{"a":"1","a":"2"}}'), blob(b"{" + ENTRY + b"," + ENTRY + b"}", b"1234")])
def test_is_stricter_only_about_repeated_keys(data: bytes, tmp_path: Path) -> None:
    assert library_accepts(data, tmp_path / "x")
    assert code(data) == "header-duplicate"


def test_reads_offsets_shapes_and_metadata() -> None:
    data = blob({"__metadata__": {"k": "v"}, "b": tensor("F32", (2, 1), (4, 12)), "a": tensor()}, bytes(12))
    header = ours(data)
    assert [(t.name, t.dtype, t.shape, t.start, t.end, t.nbytes) for t in header.tensors] == [
        ("a", "U8", (4,), 0, 4, 4),
        ("b", "F32", (2, 1), 4, 12, 8),
    ]
    assert header.metadata == {"k": "v"}
    assert data[header.data_start :] == bytes(12)


def test_sub_byte_elements_have_no_size() -> None:
    assert element_bytes("BF16") == 2
    with pytest.raises(ValueError, match="F4 has 4 bits"):
        element_bytes("F4")


names = st.text(max_size=4)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F8_E4M3FN", ""]),
        "shape": st.lists(st.one_of(st.integers(0, 6), st.sampled_from([2**32, 2**63, 2**64, -1, 1.5, None])), max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), max_size=3),
    }
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(names, st.one_of(entries, st.none()), max_size=3), st.integers(0, 40))
@example({"a": tensor()}, 4)
def test_agrees_with_the_library_on_generated_headers(header: dict[str, Any], payload: int) -> None:
    import tempfile

    data = blob(header, bytes(payload))
    with tempfile.TemporaryDirectory() as folder:
        accepted = library_accepts(data, Path(folder) / "x")
    if accepted:
        ours(data)
    else:
        code(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_header_byte_never_crashes_and_agrees(at: int, value: int) -> None:
    import tempfile

    data = bytearray(
        blob(
            {"__metadata__": {"format": "pt"}, "a.weight": tensor("BF16", (2, 3), (0, 12)), "b": tensor(offsets=(12, 16))},
            bytes(16),
        )
    )
    data[at % (len(data) - 16)] = value
    with tempfile.TemporaryDirectory() as folder:
        accepted = library_accepts(bytes(data), Path(folder) / "x")
    if not accepted:
        code(bytes(data))
    else:
        ours(bytes(data))
