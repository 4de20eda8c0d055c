"""Digests of files: those of their bytes, at any size around the buffer's, and the scan on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NoReturn

import pytest
import xxhash

from fse_convert.output import digests
from fse_convert.output.digests import Scan, file_sha256, file_xxh3_128


class Hit(Exception):
    pass


def refuse(offset: int) -> NoReturn:
    raise Hit(offset)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_digests_are_those_of_the_bytes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BUFFER", 64)
    data = bytes(range(size))
    path = tmp_path / "file"
    path.write_bytes(data)
    assert file_sha256(path) == hashlib.sha256(data).hexdigest()
    assert file_xxh3_128(path) == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("offset", [0, 63, 64, 199])
def test_a_scan_finds_a_forbidden_byte_in_its_range_alone(offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BUFFER", 64)
    path = tmp_path / "file"
    data = bytearray(200)
    data[offset] = 0x7F
    path.write_bytes(data)
    with pytest.raises(Hit) as hit:
        file_xxh3_128(path, (Scan(offset, offset + 1, (0xFF, 0x7F), refuse),))
    assert hit.value.args == (offset,)
    outside = (Scan(0, offset, (0x7F,), refuse), Scan(offset + 1, 200, (0x7F,), refuse))
    assert file_xxh3_128(path, outside) == xxhash.xxh3_128_hexdigest(bytes(data))
