"""The way back: from an output to the checkpoint that it was made from, bit for bit, without that checkpoint.

Padding is the tail of rows or of columns, so what is left after cutting it off is the source. Headers, config and index
are encoded again and compared with the digests that the manifest keeps; every tensor is compared with its own digest
while it is read, so that a damaged output is refused and never restored into a damaged checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import xxhash
from msgspec import UNSET

from fse_convert.checkpoint.editable_files import is_editable
from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.folder import LocalFolder, Stamp
from fse_convert.checkpoint.followed_paths import is_own, leads_out
from fse_convert.checkpoint.header import BITS, LENGTH_BYTES, TensorInfo, parse_header
from fse_convert.checkpoint.names import CONFIG, INDEX, SIDECAR
from fse_convert.checkpoint.reader import Shard, read_checkpoint
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure, environment, naming, some
from fse_convert.output.copying import SHARED, Link, carry, new_file, way, write_all
from fse_convert.output.digests import file_sha256, file_xxh3_128
from fse_convert.output.free_space import check_space, existing_home
from fse_convert.output.lock import staging_lost
from fse_convert.output.overwrite import check_output
from fse_convert.output.staging import Staging, reading, stage
from fse_convert.progress import Event, Observer, Phase, Work
from fse_convert.restoration.reading import Bytes, TensorFile, unlike
from fse_convert.restoration.recipes import Recipe, recipes, restored
from fse_convert.sidecar.manifest import damaged_manifest, read_manifest, stretches
from fse_convert.sidecar.originals import config_candidates, header_candidates, index_candidates, pick
from fse_convert.sidecar.reader import read_shards
from fse_convert.sidecar.tensors import is_originals_file, originals_file

UNLIKE = "what is read back is not what was written"
EDITED = "edited since the conversion"
"""How a file was restored that is not the original's."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored: how each file came to be, and whether there were digests to compare.

    ``recoded``: how many tensors had another format, name or dtype; ``unpadded``: how many lost padding.
    ``edited``: files that are not the original's, since they were added, edited or removed once the output was published.
    """

    files: dict[str, str]
    bytes: int
    tensors: int
    recoded: int
    unpadded: int
    digests: bool
    edited: tuple[str, ...] = ()


class Restoration:
    """A restoration that can run: the output is opened, and the place of the original is free.

    ``strict``: refuse an output whose model card, licences or pictures were edited, which are restored as they are otherwise.
    Raises InvalidCheckpoint when ``out`` is not an output of this tool, VerificationFailure when it is damaged, UsageError
    when ``original`` exists, EnvironmentFailure.
    """

    def __init__(self, out: Path, original: Path, link: Link, *, strict: bool = False) -> None:
        check_output(out, original, overwrite=False, replaceable=False)
        self.original, self.link, self.strict = original, link, strict
        self.staged: dict[str, Stamp] = {}
        self.edited: set[str] = set()
        self.folder = LocalFolder(out)
        with environment(original):
            self.manifest = read_manifest(self.folder)
            opened = read_checkpoint(self.folder)
            if opened.problems:
                raise InvalidCheckpoint(*opened.problems)
            self.checkpoint = opened.checkpoint
            self._check_complete()
            originals = [n for s in self.checkpoint.shards if (n := originals_file(s.name)) in self.folder.files]
            kept, problems = read_shards(self.folder, originals)
            if problems:
                raise InvalidCheckpoint(*problems)
        self.shards = {shard.name: shard for shard in (*self.checkpoint.shards, *kept)}
        self.recipes = {s.name: found for s in self.checkpoint.shards if (found := self._recipes(s))}
        beside = {*self.checkpoint.others, *(self.manifest.files or ())} & self.folder.files.keys()
        parts = {CONFIG, INDEX, *self.manifest.source.shards}
        self.others = sorted(n for n in beside - parts if not n.startswith(f"{SIDECAR}/"))

    def workload(self) -> list[Work]:
        """Return how many shards are written, and the bytes of tensors that are read for it: for progress."""
        as_stored = sum(shard.header.payload for shard in self.checkpoint.shards if shard.name not in self.recipes)
        changed = sum(recipe.reads for changed in self.recipes.values() for recipe in changed)
        return [Work(Phase.WRITE, "shard", len(self.checkpoint.shards), as_stored + changed)]

    def run(self, observe: Observer) -> Restored:
        """Take changes, padding and ``fse/`` out again: the original exists afterwards, complete and bit for bit, or not at all.

        Raises VerificationFailure when the output is not as its manifest describes it, EnvironmentFailure.
        """
        source = self.manifest.source
        with environment(self.original):
            check_space(self.original, self._room())
            with stage(self.original) as staging, reading(self.folder):
                files = {shard.name: self._restore_shard(shard, staging, observe) for shard in self.checkpoint.shards}
                files[CONFIG] = self._restore_text(CONFIG, config_candidates(self.checkpoint.config, self.manifest.edits), staging)
                if INDEX in source.files:
                    candidates = index_candidates(json.loads(self.folder.read(INDEX)), *self._totals())
                    files[INDEX] = self._restore_text(INDEX, candidates, staging)
                files |= {name: self._restore_other(name, staging) for name in self.others}
                staging.publish(lambda: staging.check(self.folder, self.staged))
        return Restored(
            files=files,
            bytes=sum(stamp.size for stamp in self.staged.values()),
            tensors=sum(len(self.recipes.get(s.name, s.header.tensors)) for s in self.checkpoint.shards),
            recoded=sum(not (recipe.as_is or recipe.stretches) for changed in self.recipes.values() for recipe in changed),
            unpadded=len(self.manifest.padded.keys() & self.checkpoint.tensors.keys()),
            digests=self.manifest.tensors is not None,
            edited=tuple(sorted(self.edited)),
        )

    def _room(self) -> int:
        """Return the bytes that the original takes; a shard without padding may share those of the output. Raises OSError."""
        shards = self.checkpoint.shards
        shared = way(self.folder.path(shards[0].name), existing_home(self.original), self.link) in SHARED
        free = {s.name for s in shards if shared and s.name not in self.recipes}
        sizes = {name: identity.size for name, identity in self.manifest.source.shards.items()}
        return sum(n for name, n in sizes.items() if name not in free) + sum(self.folder.files[n] for n in self.others)

    def _check_complete(self) -> None:
        """Refuse an output that lacks a file of the original, or of which no digest says what its links must lead to."""
        expected = {*self.manifest.source.shards, *self.manifest.source.files, *(self.manifest.files or ())}
        needless = {n for n in expected if n.startswith(f"{SIDECAR}/") and not is_originals_file(n)}
        missing = sorted(expected - needless - self.folder.files.keys())
        self.edited.update(n for n in missing if self._may_differ(n))
        missing = [n for n in missing if not self._may_differ(n)]
        if missing:
            raise unlike("file-missing", some(missing), "the manifest names files that are not there")
        if self.manifest.tensors is None:  # any file of the machine would be copied
            outside = [n for n in self.folder.files if leads_out(self.folder.root, n)]
            if outside:
                message = "leads out of the output, and the manifest has no digests to compare it with"
                raise unlike("link-outside", some(outside), message)

    def _totals(self) -> tuple[int, int]:
        """Return the bytes of the original's tensors, and the elements that padding added to them."""
        changed = [recipe for recipes in self.recipes.values() for recipe in recipes]
        as_stored = sum(s.header.payload for s in self.checkpoint.shards if s.name not in self.recipes)
        added = sum(prod(r.stored.shape) - prod(r.source.shape) for r in changed if r.stretches)
        return as_stored + sum(r.source.nbytes for r in changed), added

    def _unpadded(self, t: TensorInfo) -> Recipe:
        """Return the way back of a tensor of a padded shard. Raises VerificationFailure for a shape that padding cannot give."""
        shape = tuple(self.manifest.padded.get(t.name, t.shape))
        source = t._replace(shape=shape, end=t.start + prod(shape) * BITS[t.dtype] // 8)
        recorded = {} if self.manifest.stretches is UNSET else self.manifest.stretches
        try:
            count = recorded[t.name] if t.name in recorded else stretches(shape, t.shape)
        except ValueError as e:
            raise unlike("tensor-shape", f"{t.shard}: {t.name}", str(e)) from e
        return Recipe(source=source, stored=t, stretches=count if t.name in self.manifest.padded else 0)

    def _restore_shard(self, shard: Shard, staging: Staging, observe: Observer) -> str:
        """Undo what changed in one shard, or carry it over when nothing did; return how."""
        identity = self.manifest.source.shards.get(shard.name)
        if identity is None:
            raise unlike("shard-unknown", shard.name, "the manifest does not list this shard")
        target = staging.path(shard.name)
        if changed := self.recipes.get(shard.name):
            tensors = [(r.source.name, r.source.dtype, r.source.shape) for r in changed]
            header = self._derive(shard.name, identity.header_sha256, header_candidates(tensors, shard.header.metadata))
            self._write(shard.name, header, self._restored(shard, observe), staging)
            how = "padding removed" if any(r.stretches for r in changed) else "format restored"
        else:
            how = self._carry(shard.name, staging)
            with naming(target), target.open("rb") as f:
                if sha256(f.read(shard.header.data_start)) != identity.header_sha256:
                    raise unlike("header-unlike", shard.name, "its header is not the original's, though nothing in it was padded")
            with self._file(shard.name, target, observe) as file:
                for _ in (piece for t in shard.header.tensors for piece in file.pieces(t)):
                    pass  # each is compared with its digest
        size = self.staged[shard.name].size
        if size != identity.size:
            raise unlike("shard-size", shard.name, f"the original has {identity.size} bytes, what was restored has {size}")
        observe(Event(shard.name, done=True, how=how))
        return how

    def _write(self, name: str, header: bytes, chunks: Iterator[Bytes], staging: Staging) -> None:
        """Write a shard, and read it back."""
        target = staging.path(name)
        written = xxhash.xxh3_128(header)
        with new_file(target) as out:
            write_all(out, header)
            for chunk in chunks:
                written.update(chunk)
                write_all(out, memoryview(chunk))
        if file_xxh3_128(self._staged(name, staging)) != written.hexdigest():
            raise staging_lost(UNLIKE, target)

    def _recipes(self, shard: Shard) -> list[Recipe]:
        """Find the way back of a shard that changed, in format or by padding; empty for others."""
        text = self.manifest.source.originals.get(shard.name)
        identity = self.manifest.source.shards.get(shard.name)
        if text is None or identity is None or self.manifest.changes is UNSET:
            tensors = shard.header.tensors
            return [self._unpadded(t) for t in tensors] if any(t.name in self.manifest.padded for t in tensors) else []
        raw = self._derive(shard.name, identity.header_sha256, ())[LENGTH_BYTES:]
        try:
            header = parse_header(raw, identity.size, shard.name)
        except InvalidCheckpoint as e:
            raise damaged_manifest(f"the source's header of {e.problems[0].where} does not fit: {e.problems[0].message}") from e
        renamed = {} if self.manifest.renamed is UNSET else self.manifest.renamed
        dropped = self.manifest.arguments.drop_originals is True
        return recipes(header, shard, self.shards.get(originals_file(shard.name)), renamed, dropped=dropped)

    def _restored(self, shard: Shard, observe: Observer) -> Iterator[Bytes]:
        """Yield the bytes of a changed shard's source tensors."""
        originals = originals_file(shard.name)
        with ExitStack() as opened:
            output = opened.enter_context(self._file(shard.name, self.folder.path(shard.name), observe))
            kept = None
            if originals in self.shards:
                kept = opened.enter_context(self._file(originals, self.folder.path(originals), observe))
            for recipe in self.recipes[shard.name]:
                yield from restored(recipe, output, kept)

    def _carry(self, name: str, staging: Staging) -> str:
        """Carry a file over; return how. Where the manifest has no digests, what came is compared with what was carried."""
        how = carry(self.folder.path(name), staging.path(name), self.link)
        staged = self._staged(name, staging)
        cut = self.staged[name].size != self.folder.files[name]
        if cut or (self.manifest.tensors is None and file_xxh3_128(staged) != file_xxh3_128(self.folder.path(name))):
            raise staging_lost(UNLIKE, staged)
        return how

    def _staged(self, name: str, staging: Staging) -> Path:
        """Return the path of a staged file that is to be read back: it may not change from here on."""
        self.staged[name] = staging.stamp(name)
        return staging.folder / name

    def _file(self, name: str, path: Path, observe: Observer) -> TensorFile:
        """Open a file of the output, or its copy at ``path``, to read tensors and compare their digests."""
        return TensorFile(self.shards[name], path, self.manifest.tensors, observe)

    def _derive(self, name: str, digest: str, candidates: Iterable[bytes]) -> bytes:
        """Return an original file or header: kept as text in the manifest, or the candidate with its digest."""
        text = self.manifest.source.originals.get(name)
        if text is not None:
            raw = text.encode("utf-8")
            candidates = (raw, len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        original = pick(candidates, digest)
        if original is None:
            raise unlike("original-unknown", name, "the original with the manifest's digest cannot be derived from this file")
        return original

    def _restore_text(self, name: str, candidates: Iterable[bytes], staging: Staging) -> str:
        """Restore config.json or the index; return how."""
        raw, digest = self.folder.read(name), self.manifest.source.files[name]
        same = sha256(raw) == digest
        staging.write(name, raw if same else self._derive(name, digest, candidates))
        if file_sha256(self._staged(name, staging)) != digest:
            raise staging_lost(UNLIKE, staging.folder / name)
        return "as it was" if same else "edits undone"

    def _restore_other(self, name: str, staging: Staging) -> str:
        """Carry over any other file and compare its digest; return how."""
        how = self._carry(name, staging)
        if self.manifest.files is not None:
            listed = self.manifest.files.get(name)
            if listed is None or listed.sha256 != file_sha256(staging.folder / name):
                if not self._may_differ(name) and listed is None:
                    message = "the manifest does not list this file"
                    raise VerificationFailure(Problem("file-unexpected", message, name, "move it out of the output"))
                if not self._may_differ(name):
                    raise unlike("file-damaged", name, "its SHA-256 is not the one in the manifest")
                if not is_own(self.folder.root, name):
                    raise unlike("link-outside", name, "leads out of the output, to a file that is not the one in the manifest")
                self.edited.add(name)
                return EDITED
        return how

    def _may_differ(self, name: str) -> bool:
        return not self.strict and is_editable(name)
