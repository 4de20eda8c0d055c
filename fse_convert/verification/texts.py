"""JSON files of the output against what they must be, told apart to the key."""

from __future__ import annotations

import json
from typing import Any

from fse_convert.verification.findings import Mismatch, hexadecimal, printable

ABSENT = "nothing"
SHOWN = 80


def difference(expected: Any, found: Any, path: str = "") -> tuple[str, str, str] | None:
    """First place at which two JSON values differ, as (path, expected, found); keys in another order count as different."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*expected, *found]):
            at = printable(f"{path}.{key}" if path else str(key))
            if key not in found or key not in expected:
                return at, _show(expected, key), _show(found, key)
            inner = difference(expected[key], found[key], at)
            if inner:
                return inner
        if list(expected) != list(found):
            return path, f"keys in the order {short(list(expected))}", f"in the order {short(list(found))}"
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]"))), None)
    if expected == found and type(expected) is type(found):
        return None
    return path, short(expected), short(found)


def short(value: Any) -> str:
    """A value as JSON, cut to a line."""
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


def _show(value: dict[str, Any], key: str) -> str:
    return short(value[key]) if key in value else ABSENT


def compare_text(name: str, expected: bytes, found: bytes) -> list[Mismatch]:
    """Compare a JSON file with the bytes that it must have; the mismatch names the key where there is one."""
    if expected == found:
        return []
    try:
        unlike = difference(json.loads(expected), json.loads(found.decode("utf-8")))
    except (ValueError, RecursionError) as e:
        unlike = ("", "JSON", f"no JSON: {e}")
    if unlike:
        path, want, got = unlike
        return [Mismatch("text", name, expected=f"{path} {want}".strip(), found=got)]
    return [bytes_mismatch("text", name, expected, found)]


def bytes_mismatch(code: str, name: str, expected: bytes, found: bytes, offset: int = 0) -> Mismatch:
    """Describe the first difference of two byte strings that do differ."""
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    want, got = expected[at : at + 1], found[at : at + 1]
    return Mismatch(
        code,
        name,
        offset=offset + at,
        expected=hexadecimal(want) if want else "the end of the file",
        found=hexadecimal(got) if got else "the end of the file",
    )
