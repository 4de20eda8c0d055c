"""The way back: from an output to the checkpoint that it was made from, bit for bit, without that checkpoint.

Padding is the tail of rows or of columns, so what is left after cutting it off is the source. Headers, config and index
are encoded again and compared with the digests that the manifest keeps; every tensor is compared with its own digest
while it is read, so that a damaged output is refused and never restored into a damaged checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import xxhash

from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import BITS, LENGTH_BYTES, TensorInfo
from fse_convert.checkpoint.names import CONFIG, INDEX, SIDECAR
from fse_convert.checkpoint.reader import Checkpoint, Shard, read_checkpoint
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure, environment, some
from fse_convert.output.copying import Link, carry, read_into, write_all
from fse_convert.output.staging import Staging, check_output, check_space, stage
from fse_convert.progress import Event, Observer
from fse_convert.sidecar.claims import Claims, read_claims
from fse_convert.sidecar.originals import config_candidates, header_candidates, index_candidates, pick

CHUNK = 8 << 20
HINT = "fetch the output again: fse-convert verify OUT says what is damaged"
Progress = Callable[[str, int, bool], None]


@dataclass(slots=True)
class Restored:
    """What was restored: how each file came to be, how many tensors lost padding, and whether digests were there to compare."""

    files: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    tensors: int = 0
    unpadded: int = 0
    digests: bool = False


class Restoration:
    """A restoration that can run: the output is opened, and the place of the original is free.

    Raises InvalidCheckpoint when ``out`` is not an output of this tool, VerificationFailure when it is damaged, UsageError
    when ``original`` exists, EnvironmentFailure.
    """

    def __init__(self, out: Path, original: Path, link: Link) -> None:
        check_output(out, original, overwrite=False, replaceable=False)
        self.original, self.link = original, link
        self.folder = LocalFolder(out)
        with environment(original):
            self.claims = read_claims(self.folder)
            opened = read_checkpoint(self.folder)
        if opened.problems:
            raise InvalidCheckpoint(*opened.problems)
        self.checkpoint = opened.checkpoint

    def workload(self) -> tuple[int, int]:
        """Return the bytes of tensors that are read, and how often a file is finished: for progress."""
        return self.checkpoint.total_size, len(self.checkpoint.shards)

    def run(self, observe: Observer) -> Restored:
        """Take padding and ``fse/`` out again: the original exists afterwards, complete and bit for bit, or not at all."""
        shards: int = sum(s["size"] for s in self.claims.source["shards"].values())
        size = shards + sum(self.folder.files[n] for n in self.checkpoint.others)

        def report(name: str, n: int, done: bool) -> None:
            observe(Event(name, n, done=done, how="read back"))

        with environment(self.original):
            check_space(self.original, size)
            with stage(self.original) as staging:
                restored = write_original(self.folder, self.checkpoint, self.claims, staging, self.link, report)
                staging.publish(lambda: None)
        return restored


def write_original(
    folder: LocalFolder, checkpoint: Checkpoint, claims: Claims, staging: Staging, link: Link, observe: Progress
) -> Restored:
    """Write every file of the original into the staging folder.

    Raises VerificationFailure when the output is not as its manifest describes it, and OSError.
    """
    _check_complete(folder, claims)
    if claims.tensors is None:
        _check_links(folder)
    done = Restored(digests=claims.tensors is not None)
    writer = _Restoring(folder, claims, staging, link, observe, done)
    for shard in checkpoint.shards:
        writer.shard(shard)
    writer.small(CONFIG, config_candidates(checkpoint.config, [(s, k, old) for s, k, old, _ in claims.edits]))
    if INDEX in claims.source["files"]:
        index = json.loads(folder.read(INDEX))
        writer.small(INDEX, index_candidates(index, *_totals(checkpoint, claims)))
    for name in checkpoint.others:
        if not name.startswith(f"{SIDECAR}/"):
            writer.carry(name)
    return done


def _check_complete(folder: LocalFolder, claims: Claims) -> None:
    """Refuse to call complete what lacks a file of the original."""
    expected = {*claims.source["shards"], *claims.source["files"], *(claims.files or ())}
    missing = sorted(n for n in expected if n not in folder.files and not n.startswith(f"{SIDECAR}/"))
    if missing:
        raise _unlike("file-missing", some(missing), "the manifest names files that are not there")


def _check_links(folder: LocalFolder) -> None:
    """Refuse links out of the output where no digest says what they must lead to: any file of the machine would be copied."""
    root = folder.root.resolve()
    outside = [n for n in folder.files if not folder.path(n).resolve().is_relative_to(root)]
    if outside:
        raise _unlike("link-outside", some(outside), "leads out of the output, and the manifest has no digests to compare it with")


def _totals(checkpoint: Checkpoint, claims: Claims) -> tuple[int, int]:
    """Bytes of the original's tensors, and elements that padding added to them."""
    total = grown = 0
    for name, t in checkpoint.tensors.items():
        shape = claims.padded.get(name, t.shape)
        total += prod(shape) * BITS[t.dtype] // 8
        grown += prod(t.shape) - prod(shape)
    return total, grown


class _Restoring:
    """One restoration under way."""

    def __init__(
        self, folder: LocalFolder, claims: Claims, staging: Staging, link: Link, observe: Progress, done: Restored
    ) -> None:
        self.folder, self.claims, self.staging, self.link, self.observe, self.done = folder, claims, staging, link, observe, done

    def shard(self, shard: Shard) -> None:
        """Restore one shard: cut padding off, or carry it over when it has none."""
        identity = self.claims.source["shards"].get(shard.name)
        if identity is None:
            raise _unlike("shard-unknown", shard.name, "the manifest knows no such shard")
        padded = [t for t in shard.header.tensors if t.name in self.claims.padded]
        fd = os.open(self.folder.path(shard.name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if padded:
                self._rewrite(shard, fd, identity["header_sha256"])
            else:
                self._check_header(shard, identity["header_sha256"])
                self._carry(shard.name)
                for t in shard.header.tensors:
                    self._tensor(shard, t, fd, None)
        finally:
            os.close(fd)
        size = (self.staging.folder / shard.name).stat().st_size
        if size != identity["size"]:
            raise _unlike("shard-size", shard.name, f"the original has {identity['size']} bytes, what was restored has {size}")
        self.done.bytes += size
        self.done.tensors += len(shard.header.tensors)
        self.done.unpadded += len(padded)
        self.observe(shard.name, 0, True)

    def _check_header(self, shard: Shard, digest: str) -> None:
        if sha256(self.folder.read(shard.name, 0, shard.header.data_start)) != digest:
            raise _unlike("header-unlike", shard.name, "its header is not the original's, though nothing in it was padded")

    def _rewrite(self, shard: Shard, fd: int, digest: str) -> None:
        tensors = [(t.name, t.dtype, self.claims.padded.get(t.name, t.shape)) for t in shard.header.tensors]
        header = self._original(shard.name, digest, header_candidates(tensors, shard.header.metadata))
        out = os.open(self.staging.path(shard.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(out, header)
            for t in shard.header.tensors:
                self._tensor(shard, t, fd, out)
            os.fsync(out)
        finally:
            os.close(out)
        self.done.files[shard.name] = "padding removed"

    def _tensor(self, shard: Shard, t: TensorInfo, fd: int, out: int | None) -> None:
        """Read one tensor, compare its digest, and write what of it is not padding."""
        shape = self.claims.padded.get(t.name)
        new_rows, new_row = rows, row = t.nbytes, 1
        if shape is not None:
            new_rows, new_row = _matrix(t.shape, t.nbytes)
            rows, row = _matrix(shape, prod(shape) * BITS[t.dtype] // 8)
            if rows > new_rows or row > new_row:
                raise _unlike("tensor-shape", f"{shard.name}: {t.name}", f"{list(t.shape)} cannot hold the original {list(shape)}")
        digest = xxhash.xxh3_128()
        start = shard.header.data_start + t.start
        for offset, size, columns in _pieces(new_rows, new_row):
            view = memoryview(bytearray(size))
            read_into(fd, view, start + offset)
            digest.update(view)
            first, column = divmod(offset, new_row)
            real = max(0, min(size // columns, rows - first))
            keep = max(0, min(columns, row - column))
            if out is not None and real and keep:
                write_all(out, _cut(view[: real * columns], columns, keep))
            self.observe(shard.name, size, False)
        stated = self.claims.tensors and self.claims.tensors.get(t.name)
        if self.claims.tensors is not None and stated != digest.hexdigest():
            found = f"XXH3-128 {digest.hexdigest()}, the manifest states {stated}"
            raise _unlike("tensor-damaged", f"{shard.name}: {t.name}", found)

    def _original(self, name: str, digest: str, candidates: Iterable[bytes]) -> bytes:
        """An original file or header: kept as text in the manifest, or found by its digest."""
        text = self.claims.originals.get(name)
        if text is not None:
            raw = text.encode("utf-8")
            candidates = (raw, len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        found = pick(candidates, digest)
        if found is None:
            raise _unlike("original-unknown", name, "cannot be found again by the manifest's digest")
        return found

    def small(self, name: str, candidates: Iterable[bytes]) -> None:
        """Restore config.json or the index."""
        digest = self.claims.source["files"][name]
        raw = self.folder.read(name)
        how = "as it was"
        if sha256(raw) != digest:
            raw, how = self._original(name, digest, candidates), "edits undone"
        self.staging.write(name, raw)
        self.done.files[name] = how
        self.done.bytes += len(raw)

    def carry(self, name: str) -> None:
        """Carry over any other file, and compare its digest."""
        self._carry(name)
        self.done.bytes += self.folder.files[name]
        stated = self.claims.files and self.claims.files.get(name)
        if self.claims.files is not None and (not stated or stated[1] != _file_sha256(self.folder.path(name))):
            raise _unlike("file-damaged", name, "its SHA-256 is not the one that the manifest states")

    def _carry(self, name: str) -> None:
        self.done.files[name] = carry(self.folder.path(name), self.staging.path(name), self.link)


def _pieces(rows: int, row: int) -> Iterator[tuple[int, int, int]]:
    """Cut a matrix of ``rows`` of ``row`` bytes into (offset, bytes, bytes per row): whole rows, or parts of one long row."""
    if row > CHUNK:
        yield from ((first * row + at, n, n) for first in range(rows) for at in range(0, row, CHUNK) if (n := min(CHUNK, row - at)))
    elif row:
        step = CHUNK // row
        yield from ((first * row, min(step, rows - first) * row, row) for first in range(0, rows, step))


def _matrix(shape: tuple[int, ...], nbytes: int) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    return (rows, nbytes // rows) if rows else (0, 0)


def _cut(rows: memoryview, row_bytes: int, keep: int) -> memoryview | bytearray:
    """The first ``keep`` bytes of every row."""
    if row_bytes == keep:
        return rows
    import torch

    out = bytearray(len(rows) // row_bytes * keep)
    kept = torch.frombuffer(out, dtype=torch.uint8).view(-1, keep)
    kept.copy_(torch.frombuffer(rows, dtype=torch.uint8).view(-1, row_bytes)[:, :keep])
    return out


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _unlike(code: str, where: str, message: str) -> VerificationFailure:
    return VerificationFailure(Problem(code, message, where, HINT))
