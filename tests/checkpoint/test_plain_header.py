"""JSON that is parsed at once and JSON that is looked at closely agree: on tensors, on metadata, and on what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from fse_convert.checkpoint import header
from fse_convert.checkpoint.header import Header, parse_header
from fse_convert.errors import InvalidCheckpoint

PLAIN: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "layers.0.w1.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]},
    "layers.0.w1.scale": {"dtype": "F8_E8M0", "shape": [1, 1], "data_offsets": [32, 33]},
    "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [33, 33]},
    "scalar": {"dtype": "F32", "shape": [], "data_offsets": [33, 37]},
}
PAYLOAD = 37


def encode(entries: object) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def outcome(raw: bytes, payload: int) -> Header | str:
    try:
        return parse_header(raw, payload + 8 + len(raw), "s")
    except InvalidCheckpoint as e:
        return str(e.problems)


def closely(raw: bytes, payload: int, monkeypatch: pytest.MonkeyPatch) -> Header | str:
    with monkeypatch.context() as m:
        m.setattr(header, "_PLAIN", msgspec.json.Decoder(None))
        return outcome(raw, payload)


def test_an_ordinary_header_goes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode(PLAIN)
    with monkeypatch.context() as m:
        m.setattr(header, "json", None)
        quick = parse_header(raw, PAYLOAD + 8 + len(raw), "s")
    assert quick == closely(raw, PAYLOAD, monkeypatch)
    assert [t.name for t in quick.tensors] == list(PLAIN)[1:]


@pytest.mark.parametrize(
    "raw",
    [
        encode(PLAIN) + b"   ",
        encode(PLAIN).replace(b":", b" : "),
        encode({k: v for k, v in PLAIN.items() if k != "__metadata__"}),
        encode({**PLAIN, "__metadata__": {}}),
        encode({**PLAIN, "__metadata__": None}),
        encode({**PLAIN, "__metadata__": []}),
        encode({**PLAIN, "__metadata__": {"format": "pt", "a:b": "c:d"}}),
        encode({**PLAIN, "__metadata__": {"format": 1}}),
        encode(dict(reversed(PLAIN.items()))),
        encode({**PLAIN, "scalar": {**PLAIN["scalar"], "extra": 1}}),
        encode({**PLAIN, "scalar": {**PLAIN["scalar"], "extra": {"a": 1}}}),
        encode({**PLAIN, "scalar": {**PLAIN["scalar"], "extra": 1.5}}),
        encode(PLAIN).replace(b'"empty"', b'"scalar"'),
        encode(PLAIN).replace(b'"shape":[]', b'"shape":[],"shape":[]'),
        encode(PLAIN).replace(b'"shape":[1,1]', b'"shape":[true,1]'),
        encode(PLAIN).replace(b'"shape":[1,1]', b'"shape":[1.0,1]'),
        encode(PLAIN).replace(b'"shape":[1,1]', b'"shape":[-1,-1]'),
        encode(PLAIN).replace(b'"shape":[1,1]', b'"shape":"11"'),
        encode(PLAIN).replace(b'"shape":[1,1]', b'"shape":{"1":1}'),
        encode(PLAIN).replace(b'"shape":[4,8]', b'"shape":[4,9]'),
        encode(PLAIN).replace(b"[32,33]", b"[32,33,33]"),
        encode(PLAIN).replace(b"[32,33]", b'["a","b"]'),
        encode(PLAIN).replace(b"[32,33]", b'{"a":1,"b":2}'),
        encode(PLAIN).replace(b"[32,33]", b"[-0,33]"),
        encode(PLAIN).replace(b"F8_E8M0", b"F8_E8M0FNU"),
        encode(PLAIN).replace(b'"F8_E8M0"', b"[]"),
        encode(PLAIN).replace(b'"F8_E8M0"', b"null"),
        encode(PLAIN).replace(b"empty", b"\\u0065mpty"),
        encode(PLAIN).replace(b"empty", b"\\ud800"),
        encode(PLAIN).replace(b"empty", b"\xff"),
        encode(PLAIN).decode().encode("utf-16-le"),
        encode(PLAIN).decode().encode("utf-16"),
        b"\xef\xbb\xbf" + encode(PLAIN),
        encode(PLAIN) + b"\0",
        encode([1, 2]),
        encode(7),
        b"",
        b"[" * 100_000,
    ],
)
def test_odd_headers_are_judged_alike(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for payload in (PAYLOAD, PAYLOAD - 1, PAYLOAD + 1):
        assert outcome(raw, payload) == closely(raw, payload, monkeypatch)


def test_a_thousand_damaged_headers_are_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    raw = encode(PLAIN)
    alphabet = b'{}[]:,"0123456789-.etrufalsn \\'
    for _ in range(1000):
        damaged = bytearray(raw)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(damaged))
            if chance.random() < 0.5:
                damaged[at] = chance.choice(alphabet)
            else:
                del damaged[at : at + chance.randint(1, 20)]
        assert outcome(bytes(damaged), PAYLOAD) == closely(bytes(damaged), PAYLOAD, monkeypatch)
