"""Strict safetensors headers: accepts what the safetensors library accepts, or less, and says why not.

The format: 8 bytes of little-endian length, that many bytes of JSON, then the payload, covered without holes or overlaps.
Rules: https://github.com/huggingface/safetensors#format and safetensors/src/tensor.rs of release 0.8.0. Stricter than
the library in one thing: a repeated key is refused everywhere, where the library lets the last one win.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple, NoReturn, TypeGuard

import msgspec

from fse_convert.errors import InvalidCheckpoint, Problem

MAX_HEADER = 100_000_000
"""Bytes; the library refuses longer headers (it can write them)."""
LENGTH_BYTES = 8
METADATA = "__metadata__"
LFS_POINTER = b"version https://git-lfs"
LFS_HINT = "fetch the real file: git lfs pull in a git clone, else download this file again"
U64_MAX = 2**64 - 1

BITS: Mapping[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element of every dtype that safetensors 0.8.0 knows."""
E8M0_DTYPES = ("F8_E8M0", "U8")
"""Dtypes that UE8M0 scales are stored in: under their own dtype, or as bytes (Quark, ModelOpt)."""


class TensorInfo(NamedTuple):
    """One tensor of one shard: dtype by its safetensors name, logical shape, and byte range ``[start, end)`` of the payload."""

    name: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: tensors in offset order, string metadata, and where the payload starts in the file (bytes)."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_start: int
    payload: int


def header_length(first: bytes, file_size: int, shard: str) -> int:
    """Length in bytes of the JSON that follows the first 8 bytes.

    ``first``: at least the first 23 bytes of the file, or all of it. Raises InvalidCheckpoint for a file that is too
    short, for a Git LFS pointer, and for a length that exceeds the limit or the file.
    """
    if first.startswith(LFS_POINTER):
        _refuse("lfs-pointer", shard, "this is a Git LFS pointer, not the weights", LFS_HINT)
    if file_size < LENGTH_BYTES:
        _refuse("header-short", shard, f"the file has {file_size} bytes, a header needs at least {LENGTH_BYTES}", RELOAD)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        _refuse("header-too-large", shard, f"header length {length} exceeds the limit of {MAX_HEADER}", NOT_SAFETENSORS)
    if length > file_size - LENGTH_BYTES:
        _refuse("header-length", shard, f"header length {length} exceeds the file of {file_size} bytes", RELOAD)
    return length


def parse_header(raw: bytes, file_size: int, shard: str) -> Header:
    """Parse the JSON of a header and check that it covers the payload exactly.

    ``raw``: the JSON bytes; ``file_size``: of the whole file. Raises InvalidCheckpoint naming the shard and the tensor.
    """
    payload = file_size - LENGTH_BYTES - len(raw)
    entries = _load(raw, shard)
    metadata = _metadata(entries.pop(METADATA, None), shard)
    tensors = [_tensor(name, entry, shard) for name, entry in entries.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    _check_cover(tensors, payload, shard)
    return Header(tuple(tensors), metadata, LENGTH_BYTES + len(raw), payload)


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element; raises ValueError for sub-byte dtypes, whose elements have no address of their own."""
    bits = BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} has {bits} bits per element")
    return bits // 8


RELOAD = "the file is truncated or damaged: download it again"
NOT_SAFETENSORS = "is it a safetensors file at all?"


def _refuse(code: str, where: str, message: str, hint: str = "") -> NoReturn:
    raise InvalidCheckpoint(Problem(code, message, where, hint))


def _load(raw: bytes, shard: str) -> dict[str, Any]:
    """Parse the JSON, at once where it is as every writer writes it. A key that occurs twice shows in the count of colons."""
    if b"-" not in raw and b"\\" not in raw:
        with suppress(msgspec.DecodeError, ValueError, RecursionError):  # 0.19's is no ValueError
            plain = _PLAIN.decode(raw)
            if raw.count(b":") == len(plain) + sum(map(len, plain.values())):
                return plain

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) != len(pairs):
            names = [k for k, _ in pairs]
            raise KeyError(next(n for n in names if names.count(n) > 1))
        return entry

    # "-0" is an integer for Python and a float for the library.
    parse_int = _parse_int if b"-" in raw else None
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_parse_constant, parse_int=parse_int)
        if b"\\u" in raw:  # half a surrogate pair, wherever it stands, is not JSON for the library
            json.dumps(entries, ensure_ascii=False).encode("utf-8")
    except KeyError as e:
        _refuse("header-duplicate", f"{shard}: {e.args[0]}", "the header lists this key twice", "rewrite the shard")
    except (ValueError, RecursionError) as e:
        _refuse("header-json", shard, f"the header is not valid JSON: {e}", RELOAD)
    if not isinstance(entries, dict):
        _refuse("header-json", shard, f"the header is a JSON {type(entries).__name__}, not an object", NOT_SAFETENSORS)
    return entries


def _parse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_PLAIN = msgspec.json.Decoder(dict[str, dict[str, Any]], float_hook=_parse_constant)


def _parse_int(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is not an integer")
    return int(text)


def _metadata(value: object, shard: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _refuse("header-metadata", shard, f"{METADATA} must map strings to strings", "rewrite the shard")
    return value


def _tensor(name: str, entry: object, shard: str) -> TensorInfo:
    if not isinstance(entry, dict):
        _refuse("header-entry", f"{shard}: {name}", "the entry is not an object", NOT_SAFETENSORS)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype is None:
        _refuse("header-entry", f"{shard}: {name}", "the entry has no dtype", NOT_SAFETENSORS)
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(
            "dtype-unknown", f"{shard}: {name}", f"unknown dtype {dtype!r}", "a newer safetensors format? known: " + " ".join(BITS)
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        _refuse("header-entry", f"{shard}: {name}", f"bad shape {shape!r} or data_offsets {offsets!r}", NOT_SAFETENSORS)
    start, end = offsets
    dtype, sizes, bits = _form(dtype, *shape)
    if bits is None or bits % 8 or end - start != bits // 8:
        expected = "more than 64 bits can count" if bits is None else f"{bits} bits"
        _refuse(
            "tensor-size", f"{shard}: {name}", f"{dtype} {shape} needs {expected}, data_offsets give {end - start} bytes", RELOAD
        )
    return TensorInfo(name, shard, dtype, sizes, start, end)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    if type(value) is not list:
        return False
    for v in value:  # noqa: SIM110 - all() of a generator takes twice as long
        if type(v) is not int or not 0 <= v <= U64_MAX:
            return False
    return True


@lru_cache(1024)
def _form(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], int | None]:
    """Return dtype and shape, the same objects for a million tensors, and the size in bits; None for an overflow.

    Multiplied as the library does: an overflow on the way is an error even when a later dimension is 0.
    """
    products = (*accumulate(shape, mul), BITS[dtype] * prod(shape))
    return dtype, shape, products[-1] if max(products) <= U64_MAX else None


def _check_cover(tensors: list[TensorInfo], payload: int, shard: str) -> None:
    at = 0
    for t in tensors:
        if t.start != at:
            kind = "overlaps the one before" if t.start < at else "leaves a hole before it"
            _refuse("tensor-offset", f"{shard}: {t.name}", f"starts at byte {t.start}, expected {at}: {kind}", "rewrite the shard")
        at = t.end
    if at > payload:
        _refuse("shard-truncated", shard, f"the header describes {at} bytes of payload, the file holds {payload}", RELOAD)
    if at < payload:
        _refuse("shard-trailing", shard, f"{payload - at} bytes follow the last tensor", "rewrite the shard")
