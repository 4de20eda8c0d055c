"""Damage to checkpoints and outputs: single bytes, tensors of a shard, its header, the JSON files, the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST
from fse_convert.sidecar.manifest import DIGEST, own_digest

Json = dict[str, Any]


class Place(NamedTuple):
    """Where a tensor is: its file, the offset of its first byte there, its header entry."""

    path: Path
    offset: int
    entry: Json

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        start, end = self.entry["data_offsets"]
        return int(end - start)


class Stored(NamedTuple):
    """A tensor of a shard."""

    dtype: str
    shape: list[int]
    data: bytes


class ShardPatch:
    """A safetensors file taken apart, and written back at the end of a ``with`` block: the offsets follow from the tensors.

    ``tensors`` by name, in the order of their bytes; ``metadata`` is ``__metadata__``, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, payload = read_shard(path)
        self.metadata: dict[str, str] | None = header.pop("__metadata__", None)
        self.tensors = {n: Stored(e["dtype"], e["shape"], payload[slice(*e["data_offsets"])]) for n, e in header.items()}

    def __enter__(self) -> ShardPatch:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None:
            return
        header: Json = {} if self.metadata is None else {"__metadata__": self.metadata}
        payload = b""
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
            payload += data
        write_shard(self.path, header, payload)


def read_header(path: Path) -> tuple[Json, int]:
    """Return a shard's header as it is, and the offset of its payload."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def read_shard(path: Path) -> tuple[Json, bytes]:
    """Return a shard's header and payload."""
    header, start = read_header(path)
    return header, path.read_bytes()[start:]


def write_shard(path: Path, header: Json, payload: bytes, *, spaces: int | None = None, **style: Any) -> None:
    """Write a shard whatever its header says, in a ``style`` of `json.dumps`; by default compact, filled up to eight bytes."""
    text = json.dumps(header, **style or {"separators": (",", ":")}).encode()
    text += b" " * (-len(text) % 8 if spaces is None else spaces)
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def find(root: Path, tensor: str) -> Place:
    """Return the place of a tensor of a folder, its subfolders included; KeyError if it has none."""
    for path in sorted(root.rglob("*.safetensors")):
        header, start = read_header(path)
        if tensor in header:
            return Place(path, start + header[tensor]["data_offsets"][0], header[tensor])
    raise KeyError(tensor)


def poke(root: Path, tensor: str, at: int, value: bytes) -> bytes:
    """Overwrite bytes of a tensor from its byte ``at`` on; return what was there."""
    path, offset, _ = find(root, tensor)
    with path.open("r+b") as file:
        file.seek(offset + at)
        before = file.read(len(value))
        file.seek(offset + at)
        file.write(value)
    return before


def flip(path: Path, at: int, tensor: str = "") -> None:
    """Change the lowest bit of a byte of a file, or of a tensor of a folder; a negative ``at`` counts from the end."""
    place = find(path, tensor) if tensor else Place(path, 0, {"data_offsets": [0, path.stat().st_size]})
    raw = bytearray(place.path.read_bytes())
    raw[place.offset + (at if at >= 0 else place.nbytes + at)] ^= 1
    place.path.write_bytes(raw)


def flip_payload(path: Path) -> None:
    """Change the lowest bit of every byte of a shard's tensors."""
    _, start = read_header(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:start] + bytes(byte ^ 1 for byte in raw[start:]))


def drop(root: Path, *names: str) -> None:
    """Remove tensors, bytes and all, from shards and index."""
    for name in names:
        with ShardPatch(find(root, name).path) as shard:
            del shard.tensors[name]
    edit_index(root, lambda index: [index["weight_map"].pop(name) for name in names])


def retype(root: Path, name: str, **changes: Any) -> None:
    """Give a tensor another dtype or shape, bytes unchanged; what they then hold is the caller's business."""
    with ShardPatch(find(root, name).path) as shard:
        shard.tensors[name] = shard.tensors[name]._replace(**changes)


def rename(root: Path, old: str, new: str, *, keep: bool = False) -> None:
    """Rename a tensor in shard and index, or add a copy of it under the new name."""
    with ShardPatch(find(root, old).path) as shard:
        shard.tensors[new] = shard.tensors[old] if keep else shard.tensors.pop(old)

    def change(index: Json) -> None:
        index["weight_map"][new] = index["weight_map"][old] if keep else index["weight_map"].pop(old)

    edit_index(root, change)


def edit_json(path: Path, change: Callable[[Json], object]) -> None:
    """Change the object of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_config(root: Path, change: Callable[[Json], object]) -> None:
    """Change config.json."""
    edit_json(root / CONFIG, change)


def edit_index(root: Path, change: Callable[[Json], object]) -> None:
    """Change the index."""
    edit_json(root / INDEX, change)


def edit_manifest(out: Path, change: Callable[[Json], object], *, signed: bool = True) -> None:
    """Change the manifest of an output, and its own digest with it unless the change is to be found out."""
    path = out / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    if signed:
        manifest.pop(DIGEST, None)  # it is the last key
        manifest[DIGEST] = own_digest(manifest)
    path.write_bytes(encode_json(manifest))
