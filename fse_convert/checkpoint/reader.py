"""A checkpoint as a whole: config, index and all headers, cross-checked in both directions, with every problem collected."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.header import LENGTH_BYTES, LFS_POINTER, Header, TensorInfo, header_length, parse_header
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, QUANT_CONFIG, SIDECAR, SUFFIX, natural_key
from fse_convert.errors import InvalidCheckpoint, Problem, some

FIRST_READ = 1 << 18
"""Bytes that the first read of a shard takes: V4.1's largest header has 261,440, so one read serves nearly every shard."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its name in the folder, size in bytes, and header."""

    name: str
    size: int
    header: Header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, consistent checkpoint.

    ``tensors`` maps every tensor name to its place; ``shards`` are in natural order; ``others`` are the files that are
    neither shards nor the index nor config.json; ``notes`` are observations that do not make it invalid.
    """

    folder: Folder
    config: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    index_metadata: Mapping[str, Any] | None
    others: tuple[str, ...]
    notes: tuple[Problem, ...]

    @property
    def total_size(self) -> int:
        """Bytes of payload over all shards: what the index calls ``total_size``."""
        return sum(s.header.payload for s in self.shards)


@dataclass(frozen=True, slots=True)
class PartialCheckpoint:
    """What was found in a folder, complete or not, and everything that is wrong with it.

    ``unread``: shards that should be there and could not be read, so that their tensors are missing from ``checkpoint``;
    ``absent``: those tensors by the index, None where there is no index to tell. ``converted``: whether fse-convert wrote
    this folder.
    """

    checkpoint: Checkpoint
    problems: tuple[Problem, ...]
    unread: tuple[str, ...]
    absent: tuple[str, ...] | None
    converted: bool


def open_checkpoint(folder: Folder) -> Checkpoint:
    """Read config, index and headers of a checkpoint and cross-check them.

    Raises InvalidCheckpoint with every problem found, not just the first.
    """
    if MANIFEST in folder.files:
        hint = "convert the original checkpoint, or take the padding out first: fse-convert restore"
        raise InvalidCheckpoint(Problem("already-converted", "this checkpoint is already converted", MANIFEST, hint))
    reading = read_checkpoint(folder)
    if reading.problems:
        raise InvalidCheckpoint(*reading.problems)
    return reading.checkpoint


def read_checkpoint(folder: Folder) -> PartialCheckpoint:
    """Read whatever there is of a checkpoint, be it broken or written by fse-convert itself; never raises InvalidCheckpoint."""
    with garbage_collection_paused():
        return _CheckpointReader(folder).run()


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector off: it would walk 100,000 live tensors again and again, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CheckpointReader:
    """Collects the parts of one checkpoint and everything that is wrong with it."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files = folder.files
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []

    def run(self) -> PartialCheckpoint:
        self._check_sidecar()
        config = self._json(CONFIG, required=True)
        quant_config = self._json(QUANT_CONFIG, required=False)
        index = self._json(INDEX, required=False)
        weight_map = self._weight_map(index) if index is not None else None
        names = self._shard_names(weight_map)
        shards = tuple(self._shards(names))
        tensors = self._tensors(shards)
        if weight_map is not None:
            self._check_index(weight_map, tensors, {s.name for s in shards})
        metadata = self._metadata(index)
        if not self.problems:
            self._check_total(metadata, shards)
        if self.folder.odd:
            hint = "dangling links, linked folders and devices are not part of a checkpoint"
            self.notes.append(Problem("not-copied", f"left out: {some(self.folder.odd)}", self.folder.label, hint))
        others = tuple(n for n in self.files if n not in {CONFIG, INDEX} and n not in names)
        wanted = set(weight_map.values()) if weight_map is not None else set(names)
        unread = tuple(sorted(wanted - {s.name for s in shards}, key=natural_key))
        checkpoint = Checkpoint(self.folder, config or {}, quant_config, shards, tensors, metadata, others, tuple(self.notes))
        lost = set(unread)
        absent = tuple(t for t, n in weight_map.items() if n in lost) if lost and weight_map is not None else None
        return PartialCheckpoint(checkpoint, tuple(self.problems), unread, absent if lost else (), MANIFEST in self.files)

    def _metadata(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        metadata = index.get("metadata") if index else None
        if metadata is not None and not isinstance(metadata, dict):
            self._problem(
                "index-invalid", f"metadata is a JSON {type(metadata).__name__}, expected an object", INDEX, "download it again"
            )
            return None
        return metadata

    def _problem(self, code: str, message: str, where: str, hint: str = "") -> None:
        self.problems.append(Problem(code, message, where, hint))

    def _check_sidecar(self) -> None:
        inside = [n for n in self.files if n.startswith(f"{SIDECAR}/")]
        if inside and MANIFEST not in self.files:
            message = f"holds {some(inside)} but no manifest: this name is where the output's kernel layout goes"
            self._problem("sidecar-foreign", message, f"{SIDECAR}/", "move the folder away, or convert the original checkpoint")

    def _json(self, name: str, *, required: bool) -> dict[str, Any] | None:
        if name not in self.files:
            if required:
                self._problem("file-missing", "no such file in the checkpoint", name, "a checkpoint needs its config.json")
            return None
        raw = self.folder.read(name)
        if raw.startswith(LFS_POINTER):
            self._problem("lfs-pointer", "this is a Git LFS pointer, not the file", name, "fetch the real file: git lfs pull")
            return None
        try:
            value = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as e:
            self._problem("json-invalid", f"not valid JSON: {e}", name, "download it again")
            return None
        if not isinstance(value, dict):
            self._problem("json-invalid", f"a JSON {type(value).__name__}, expected an object", name, "download it again")
            return None
        return value

    def _weight_map(self, index: dict[str, Any]) -> dict[str, str]:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            self._problem("index-invalid", "no weight_map from tensor names to file names", INDEX, "download it again")
            return {}
        outside = sorted(n for n in set(weight_map.values()) if not _is_inside(n))
        for name in outside:
            message = f"weight_map leads outside of the checkpoint: {name!r}"
            self._problem("index-path", message, INDEX, "do not trust this checkpoint")
        return {t: n for t, n in weight_map.items() if n not in outside} if outside else weight_map

    def _shard_names(self, weight_map: dict[str, str] | None) -> list[str]:
        present = [n for n in self.files if n.endswith(SUFFIX) and "/" not in n]
        if weight_map is None:
            self._check_single(present)
            return sorted(present, key=natural_key)
        listed = sorted(set(weight_map.values()), key=natural_key)
        missing = [n for n in listed if n not in self.files]
        for name in missing:
            self._problem(
                "shard-missing",
                "the index lists this shard, the folder has no such file",
                name,
                self._missing_hint(name),
            )
        for name in sorted(set(present) - set(listed)):
            hint = "remove it or list it: servers read every listed file, some read every file (vllm-project/vllm#54230)"
            self._problem("shard-unlisted", "the folder has this shard, the index does not list it", name, hint)
        return [n for n in listed if n in self.files]

    def _missing_hint(self, name: str) -> str:
        return "it is a symlink to nowhere: was the hub cache pruned?" if name in self.folder.odd else "finish the download"

    def _check_single(self, present: list[str]) -> None:
        if not present:
            self._problem(
                "no-weights",
                "no safetensors file and no index",
                self.folder.label,
                "give the folder that holds the weights",
            )
        elif len(present) > 1:
            self._problem("file-missing", f"{len(present)} shards but no index", INDEX, "download the index too")

    def _shards(self, names: list[str]) -> Iterator[Shard]:
        """Read headers, several at a time: on a network file system or the hub it is the waiting that takes long."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(self.folder.workers) as pool:
            for name, raw in zip(names, pool.map(self._header, names), strict=True):
                try:
                    if isinstance(raw, InvalidCheckpoint):
                        raise raw
                    yield Shard(name, self.files[name], parse_header(raw, self.files[name], name))
                except InvalidCheckpoint as e:
                    self.problems += e.problems

    def _header(self, name: str) -> bytes | InvalidCheckpoint:
        """Read the JSON of a shard's header."""
        try:
            first = self.folder.read(name, 0, FIRST_READ)
            length = header_length(first, self.files[name], name)
            raw = first[LENGTH_BYTES : LENGTH_BYTES + length]
            if len(raw) < length:
                raw += self.folder.read(name, LENGTH_BYTES + len(raw), length - len(raw))
        except InvalidCheckpoint as e:
            return e
        if len(raw) < length:
            message = f"the file ended inside of its header of {length} bytes"
            return InvalidCheckpoint(Problem("shard-truncated", message, name, "download it again"))
        return raw

    def _tensors(self, shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            twice = [t.name for t in shard.header.tensors if t.name in tensors]
            if twice:
                first = tensors[twice[0]].shard
                hint = "a server takes whichever it reads last: keep one copy of each (vllm-project/vllm#54230)"
                self._problem(
                    "tensor-duplicate",
                    f"holds tensors that {first} or another shard also holds: {some(twice)}",
                    shard.name,
                    hint,
                )
            tensors.update((t.name, t) for t in shard.header.tensors)
        return tensors

    def _check_index(self, weight_map: dict[str, str], tensors: dict[str, TensorInfo], read: set[str]) -> None:
        absent: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            if shard in read and (name not in tensors or tensors[name].shard != shard):
                absent.setdefault(shard, []).append(name)
        for shard, names in sorted(absent.items()):
            self._problem(
                "tensor-missing",
                f"the index says that this shard holds {some(names)}; it does not",
                shard,
                "download it again",
            )
        extra: dict[str, list[str]] = {}
        for name, info in tensors.items():
            if name not in weight_map:
                extra.setdefault(info.shard, []).append(name)
        for shard, names in sorted(extra.items()):
            self._problem(
                "tensor-unlisted",
                f"holds tensors that the index does not list: {some(names)}",
                shard,
                "rewrite the index",
            )

    def _check_total(self, metadata: Any, shards: tuple[Shard, ...]) -> None:
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(s.header.payload for s in shards)
        if stated is not None and stated != actual:
            message = f"total_size is {stated}, the shards hold {actual} bytes"
            self.notes.append(Problem("total-size", message, INDEX, "the output states the right one"))


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and "\\" not in name and "\0" not in name and ".." not in path.parts
