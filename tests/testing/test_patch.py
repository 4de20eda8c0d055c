"""The patcher: each change is what it says and nothing else, and the library reads what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from fse_convert.testing import patch
from tests.testing.small import headers, tensors

Make = Callable[..., Path]
Digest = Callable[[Path], dict[str, str]]
NAME = "layers.1.ffn.shared_experts.w1.weight"
INDEX = "model.safetensors.index.json"


def raw(root: Path, name: str = NAME) -> bytes:
    path, offset, _ = place = patch.find(root, name)
    return path.read_bytes()[offset : offset + place.nbytes]


def test_a_shard_that_is_not_changed_keeps_its_bytes(source: Make, digest: Digest) -> None:
    root = source()
    before = digest(root)
    for path in root.glob("*.safetensors"):
        with patch.ShardPatch(path):
            pass
    assert digest(root) == before


def test_a_failure_leaves_the_shard_alone(source: Make, digest: Digest) -> None:
    root = source()
    before = digest(root)
    with pytest.raises(ZeroDivisionError), patch.ShardPatch(patch.find(root, NAME).path) as shard:
        shard.tensors.clear()
        raise ZeroDivisionError
    assert digest(root) == before


def test_bytes_of_a_tensor(source: Make) -> None:
    root = source()
    before, size = raw(root), patch.find(root, NAME).path.stat().st_size
    assert patch.poke(root, NAME, 3, b"\x11\x22") == before[3:5]
    patch.flip(root, 0, NAME)
    patch.flip(root, -1, NAME)
    want = bytearray(before)
    want[3:5] = b"\x11\x22"
    want[0] ^= 1
    want[-1] ^= 1
    assert raw(root) == bytes(want)
    patch.flip_payload(patch.find(root, NAME).path)
    assert raw(root) == bytes(byte ^ 1 for byte in want)
    assert patch.find(root, NAME).path.stat().st_size == size


@pytest.mark.parametrize("keep", [False, True], ids=["moved", "copied"])
def test_rename(keep: bool, source: Make) -> None:
    root = source()
    before, names = raw(root), headers(root).keys()
    patch.rename(root, NAME, "another", keep=keep)
    assert raw(root, "another") == before
    assert headers(root).keys() == (names | {"another"} if keep else names - {NAME} | {"another"})
    assert json.loads((root / INDEX).read_text())["weight_map"].keys() == headers(root).keys() == tensors(root).keys()


def test_drop_and_retype(source: Make) -> None:
    root = source()
    before = raw(root)
    patch.drop(root, NAME.replace("weight", "scale"))
    patch.retype(root, NAME, dtype="U8", shape=[len(before)])
    assert raw(root) == before
    assert json.loads((root / INDEX).read_text())["weight_map"].keys() == headers(root).keys()
    with safe_open(patch.find(root, NAME).path, framework="pt") as shard:
        assert shard.get_tensor(NAME).shape == (len(before),)
    with pytest.raises(KeyError):
        patch.find(root, NAME.replace("weight", "scale"))
