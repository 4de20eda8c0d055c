"""How this tool encodes what it writes: safetensors headers and JSON files, the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from fse_convert.checkpoint.header import BITS, LENGTH_BYTES, METADATA


def encode_header(entries: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes:
    """Encode a header as the safetensors library does: its length, no spaces, metadata first, padded with spaces to 8 bytes."""
    full = entries if metadata is None else {METADATA: metadata, **entries}
    raw = json.dumps(full, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def header_entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    """Return one tensor's entry in a header; ``[start, end)`` are bytes of the payload."""
    return {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}


def header_entries(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Any]:
    """Return the entries of tensors (name, dtype, shape) that lie one after the other."""
    entries: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in tensors:
        start, at = at, at + prod(shape) * BITS[dtype] // 8
        entries[name] = header_entry(dtype, shape, start, at)
    return entries


def encode_json(value: Any) -> bytes:
    """Encode JSON as the hub's files are: two spaces, UTF-8, a newline at the end; file names that are not Unicode as escapes."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def sha256(data: bytes) -> str:
    """Return the SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()
