"""Changes of an input that a fuzzer of bytes finds late: of the JSON in it, at any place."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "../x", "/", "\0", "\ud800", "e\u0301", "F8_E4M3", "F8_E8M0", "F4", "BF16", "config.json",
    [], [0], [[]], {}, {"": {}}, [1, 2, 3], [-1, 1],
)  # fmt: skip
"""What is put in the place of a value."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change one JSON object of an input, at one to three places, or one of its bytes where there is none."""
    parts = data.split(b"\xff\xff")
    found = [(at, raw, start) for at, raw in enumerate(parts) if (start := raw.find(b"{")) >= 0]
    if found and rng.random() < 0.95:
        at, raw, start = rng.choice(found)
        try:
            value = json.loads(raw[start:])
        except (ValueError, RecursionError):
            return _flipped(data, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            value = _edited(value, rng)
        parts[at] = raw[:start] + json.dumps(value).encode()
        return b"\xff\xff".join(parts)
    return _flipped(data, rng)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data)) if data else 0
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _edited(value: Any, rng: random.Random) -> Any:
    """Walk down to a random place and change what is there: another value, gone, twice, or under another name."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        return _other(value, rng)
    place: Any = value
    while True:
        key: Any = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            place = inner
            continue
        act = rng.randrange(6)
        if act == 0:
            del place[key]
        elif act == 1 and isinstance(place, list):
            place.insert(key, deepcopy(inner))
        elif act == 1:
            place[f"{key}x"] = deepcopy(inner)
        elif act == 2:
            other = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            place[key], place[other] = place[other], inner
        else:
            place[key] = _other(inner, rng)
        return value


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2, -value - 1, value, 128))
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", ".", "0", "x", value)) + value[at + 1 :]
    return deepcopy(rng.choice(ODD))
