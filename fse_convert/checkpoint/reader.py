"""A checkpoint as a whole: config, index and all headers, cross-checked in both directions, with every problem collected."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.followed_paths import link_notes, unsafe_shards
from fse_convert.checkpoint.header import LENGTH_BYTES, LFS_HINT, LFS_POINTER, Header, TensorInfo, header_length, parse_header
from fse_convert.checkpoint.left_out import ADAPTERS, INDEXES, OTHER_FORMATS, SLICE, Kind, beside, notes
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, QUANT_CONFIG, SIDECAR, SUFFIX, natural_key
from fse_convert.checkpoint.rank_slices import are_slices
from fse_convert.checkpoint.unlisted import judge_unlisted
from fse_convert.errors import InvalidCheckpoint, Problem, counted, some

MARKS = {"UTF-8": b"\xef\xbb\xbf", "UTF-16": b"\xff\xfe", "UTF-16 (big-endian)": b"\xfe\xff"}
"""Byte order marks, which editors and shells of Windows put at the head of a file."""
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
    carried over beside shards, index and config.json; ``notes`` are observations that do not make it invalid.
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

    @property
    def files(self) -> frozenset[str]:
        """Every file that is part of it; what else its folder has is left out."""
        names = {CONFIG, INDEX, *(s.name for s in self.shards), *self.others}
        return frozenset(names.intersection(self.folder.files))


@dataclass(frozen=True, slots=True)
class PartialCheckpoint:
    """What was found in a folder, complete or not, and everything that is wrong with it.

    ``unread``: files that should be there and could not be read, JSON files and shards, whose content ``checkpoint`` lacks;
    ``absent``: the tensors of such shards by the index, None where there is no index to tell. ``converted``: whether fse-convert
    wrote this folder.
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
        back = shlex.join(["fse-convert", "restore", folder.label, "ORIGINAL"])
        hint = f"convert the original checkpoint, or get it back first: {back}"
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
        self.unread: set[str] = set()
        self.distrusted: set[str] = set()

    def run(self) -> PartialCheckpoint:
        self._check_sidecar()
        if self._lies_below():
            nothing = Checkpoint(self.folder, {}, None, (), {}, None, (), ())
            return PartialCheckpoint(nothing, tuple(self.problems), (CONFIG,), (), MANIFEST in self.files)
        config = self._json(CONFIG, required=True)
        quant_config = self._json(QUANT_CONFIG, required=False)
        index = self._json(INDEX, required=False)
        weight_map = self._weight_map(index) if index is not None else None
        listed = None if weight_map is None else sorted(set(weight_map.values()), key=natural_key)
        missing = [n for n in listed or () if n not in self.files]
        left = dict(self.folder.clutter) | beside(self.files, listed, whole=not missing)
        names = self._unindexed(left) if listed is None else [n for n in listed if n in self.files]
        shards = tuple(self._shards(names))
        if are_slices(chain.from_iterable(s.header.tensors for s in shards), config or {}):
            self._refuse_slices(names)
            shards = ()
        elif listed is None:
            self._ask_for_index(names, left)
        tensors = self._tensors(shards)
        if weight_map is not None:
            left |= self._check_unlisted(weight_map, tensors, left, missing, config or {})
            self._check_index(weight_map, tensors, {s.name for s in shards})
        metadata = self._metadata(index)
        if not self.problems:
            self._check_total(metadata, shards)
        self._note_left_out(left)
        others = tuple(n for n in self.files if n not in {CONFIG, INDEX} and n not in names and n not in left)
        self.notes += link_notes(self.folder.root, others) if isinstance(self.folder, LocalFolder) else []
        read = {s.name for s in shards}
        self.unread.update(n for n in (listed or names) if n not in read)
        if weight_map is not None:
            absent: tuple[str, ...] | None = tuple(t for t, n in weight_map.items() if n in self.unread)
        else:
            absent = None if self.unread - {CONFIG, QUANT_CONFIG} else ()
        checkpoint = Checkpoint(self.folder, config or {}, quant_config, shards, tensors, metadata, others, tuple(self.notes))
        unread = tuple(sorted(self.unread, key=natural_key))
        return PartialCheckpoint(checkpoint, tuple(self.problems), unread, absent, MANIFEST in self.files)

    def _metadata(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        metadata = index.get("metadata") if index else None
        if metadata is not None and not isinstance(metadata, dict):
            message = f"metadata is a JSON {type(metadata).__name__}, expected an object"
            self._problem("index-invalid", message, INDEX, "download it again")
            return None
        return metadata

    def _problem(self, code: str, message: str, where: str, hint: str) -> None:
        self.problems.append(Problem(code, message, where, hint))

    def _check_sidecar(self) -> None:
        inside = [n for n in self.files if n.startswith(f"{SIDECAR}/")]
        if inside and MANIFEST not in self.files:
            message = f"holds {some(inside)} but no manifest: this name is where the output's kernel layout goes"
            self._problem("sidecar-foreign", message, f"{SIDECAR}/", "move the folder away, or convert the original checkpoint")

    def _lies_below(self) -> bool:
        """Tell whether the checkpoint is in a folder below this one, and name that folder: one problem."""
        if any(n in (CONFIG, INDEX) or n.endswith(SUFFIX) for n in self.files if "/" not in n):
            return False
        inner = sorted((n.removesuffix(CONFIG) for n in self.files if n.endswith(f"/{CONFIG}")), key=lambda n: n.count("/"))
        if inner:
            message = f"no config.json here: {some(inner)} {'has' if len(inner) == 1 else 'have'} one"
            self._problem("file-missing", message, CONFIG, f"give {inner[0]} of this folder")
        return bool(inner)

    def _json(self, name: str, *, required: bool) -> dict[str, Any] | None:
        """Read a JSON object; None where there is none, which is told unless the file need not be there."""
        if name not in self.files:
            if required:
                self._problem("file-missing", "no such file in the checkpoint", name, "a checkpoint needs its config.json")
                self.unread.add(name)
            return None
        try:
            return parse_object(self.folder.read(name), name)
        except InvalidCheckpoint as e:
            self.problems += e.problems
            self.unread.add(name)
            return None

    def _weight_map(self, index: dict[str, Any]) -> dict[str, str] | None:
        """Return the tensors' shards by the index, None where it has none."""
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            self._problem("index-invalid", "no weight_map from tensor names to file names", INDEX, "download it again")
            self.unread.add(INDEX)
            return None
        unsafe, problems = unsafe_shards(set(weight_map.values()))
        self.problems += problems
        self.distrusted = {t for t, n in weight_map.items() if n in unsafe}
        return {t: n for t, n in weight_map.items() if t not in self.distrusted} if self.distrusted else weight_map

    def _unindexed(self, left: Mapping[str, Kind]) -> list[str]:
        """Name the shards of a checkpoint without an index."""
        present = sorted((n for n in self.files if n.endswith(SUFFIX) and "/" not in n and n not in left), key=natural_key)
        slices = [n for n in present if SLICE.fullmatch(n)]
        if INDEX in self.unread:
            return present
        if not present:
            message, hint = _no_weights(left)
            self._problem("no-weights", message, self.folder.label, hint)
        elif slices and (len(present) > 1 or "-mp" in slices[0]):
            self._refuse_slices(slices)
            self.unread |= set(present)
            return []
        return present

    def _ask_for_index(self, names: Sequence[str], left: Mapping[str, Kind]) -> None:
        """Say that several shards need an index, unless it was there and could not be read."""
        if len(names) < 2 or INDEX in self.unread:
            return
        message, hint = f"{counted(len(names), 'shard')} but no index", "download the index too"
        if others := [n for n, kind in left.items() if kind is INDEXES]:
            message = f"{counted(len(names), 'shard')}, and no index but {some(others)}: servers read {INDEX} alone"
            hint = f"if it lists these shards, copy {others[0]} to {INDEX}"
        self._problem("file-missing", message, INDEX, hint)

    def _refuse_slices(self, names: Sequence[str]) -> None:
        """Say that shards are slices for the ranks of one server; nothing in them is looked at any further."""
        message = f"slices for the ranks of one server, {len(names)} of them: tensors are cut, and each has a part"
        hint = (
            "keep them all: take the checkpoint that they were cut from, or join them to whole tensors with the tool that cut them"
        )
        self._problem("rank-slices", message, names[0], hint)
        self.unread |= set(names)

    def _check_unlisted(
        self,
        weight_map: Mapping[str, str],
        tensors: Mapping[str, TensorInfo],
        left: Mapping[str, Kind],
        missing: Sequence[str],
        config: Mapping[str, Any],
    ) -> Mapping[str, Kind]:
        """Judge shards that the index does not list, and those that it lists and that are not there; return what is left out."""
        listed = set(weight_map.values())
        names = [n for n in self.files if n.endswith(SUFFIX) and "/" not in n and n not in left and n not in listed]
        names = [] if self.distrusted else names  # the index may name them where it leads outside
        headers = {}
        for name, shard in self._parsed(names):
            if isinstance(shard, Shard):
                headers[name] = shard.header
            else:
                message = f"the index does not list this shard, and what it holds cannot be read: {shard.problems[0].message}"
                self._problem("shard-unlisted", message, name, shard.problems[0].hint)
        if are_slices(chain(tensors.values(), *(h.tensors for h in headers.values())), config):
            self._refuse_slices(sorted({*listed, *headers}, key=natural_key))
            return {}
        judged = judge_unlisted(headers, weight_map, tensors, missing)
        self.problems += judged.problems
        for name in (n for n in missing if n not in judged.explained):
            hint = "it is a symlink to nowhere: was the hub cache pruned?" if name in self.folder.odd else "finish the download"
            self._problem("shard-missing", "the index lists this shard, the folder has no such file", name, hint)
        return judged.left

    def _note_left_out(self, left: Mapping[str, Kind]) -> None:
        if self.folder.odd:
            hint = "dangling links, linked folders and devices are not part of a checkpoint"
            self.notes.append(Problem("not-copied", f"left out: {some(self.folder.odd)}", self.folder.label, hint))
        self.notes += notes(left, self.folder.label)

    def _shards(self, names: list[str]) -> Iterator[Shard]:
        for _, shard in self._parsed(names):
            if isinstance(shard, Shard):
                yield shard
            else:
                self.problems += shard.problems

    def _parsed(self, names: list[str]) -> Iterator[tuple[str, Shard | InvalidCheckpoint]]:
        """Read headers, several at a time: on a network file system or the hub it is the waiting that takes long."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(self.folder.workers) as pool:
            for name, raw in zip(names, pool.map(self._header, names), strict=True):
                if isinstance(raw, InvalidCheckpoint):
                    yield name, raw
                    continue
                try:
                    yield name, Shard(name, self.files[name], parse_header(raw, self.files[name], name))
                except InvalidCheckpoint as e:
                    yield name, e

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
            own = {t.name: t for t in shard.header.tensors}
            twice = [] if tensors.keys().isdisjoint(own) else [name for name in own if name in tensors]
            if twice and INDEX not in self.unread:  # without an index, leftovers cannot be told from duplicates
                first = tensors[twice[0]].shard
                hint = "a server takes whichever it reads last: keep one copy of each (vllm-project/vllm#54230)"
                message = f"holds tensors that {first} or another shard also holds: {some(twice)}"
                self._problem("tensor-duplicate", message, shard.name, hint)
            tensors.update(own)
        return tensors

    def _check_index(self, weight_map: dict[str, str], tensors: dict[str, TensorInfo], read: set[str]) -> None:
        absent: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            if shard in read and (name not in tensors or tensors[name].shard != shard):
                absent.setdefault(shard, []).append(name)
        for shard, names in sorted(absent.items()):
            elsewhere = [f"{n} to {tensors[n].shard}" for n in names if n in tensors]
            hint = "download the index again, and if this stays, the shard: they are of two saves"
            if elsewhere:
                hint = f"in the index's weight_map, set {some(elsewhere)}"
            self._problem("tensor-missing", f"the index says that this shard holds {some(names)}; it does not", shard, hint)
        extra: dict[str, list[str]] = {}
        for name, info in tensors.items():
            if name not in weight_map and name not in self.distrusted:
                extra.setdefault(info.shard, []).append(name)
        for shard, names in sorted(extra.items()):
            message = f"holds tensors that the index does not list: {some(names)}"
            self._problem("tensor-unlisted", message, shard, "rewrite the index")

    def _check_total(self, metadata: Any, shards: tuple[Shard, ...]) -> None:
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(s.header.payload for s in shards)
        if stated is not None and stated != actual:
            message = f"total_size is {stated}, the shards hold {actual} bytes"
            self.notes.append(Problem("total-size", message, INDEX, "the output states the right one"))


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON file that holds one object. Raises InvalidCheckpoint, which says what the file is instead."""
    mark = next((encoding for encoding, start in MARKS.items() if raw.startswith(start)), None)
    hint = "download it again"
    if raw.startswith(LFS_POINTER):
        raise InvalidCheckpoint(Problem("lfs-pointer", "this is a Git LFS pointer, not the file", name, LFS_HINT))
    if mark:
        message, hint = f"it begins with the byte order mark of {mark}, which servers refuse", "save it as UTF-8 without that mark"
    else:
        try:
            value = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as e:
            message = f"not valid JSON: {e}"
        else:
            if isinstance(value, dict):
                return value
            message = f"a JSON {type(value).__name__}, expected an object"
    raise InvalidCheckpoint(Problem("json-invalid", message, name, hint))


def _no_weights(left: Mapping[str, Kind]) -> tuple[str, str]:
    """Say that there is no safetensors file, and what there is instead."""
    kinds = dict.fromkeys(left.values())
    if ADAPTERS in kinds:
        return "only an adapter, no base model", "merge the adapter into its base, and give that folder"
    if OTHER_FORMATS in kinds:
        hint = "save them as safetensors first: save_pretrained of transformers does"
        return f"no safetensors file, only {OTHER_FORMATS.what}", hint
    return "no safetensors file and no index", "give the folder that holds the weights"
