"""All files of an output, one pass each, several at a time; and the choice of a sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.torch_threads import one_torch_thread
from fse_convert.verification.expected import KernelExpert, Padded
from fse_convert.verification.findings import Coverage, Findings, Progress, StorageResult
from fse_convert.verification.pieces import SourceTensors, main_pieces, plain_pieces, sidecar_pieces
from fse_convert.verification.stream import FileReport, InputFiles, Piece, input_files, walk

WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Files read at a time: each keeps one core busy with comparing and one with SHA-256."""


@dataclass(slots=True)
class Comparison:
    """What of an output is compared with which checkpoint; whatever is left out is only hashed.

    ``checkpoint``: holds the bytes, below ``root``. ``main``: standard-layout tensors that are comparable, ``padded``
    those of them that grew. ``experts``: whose tensor each comparable one of the sidecar is. ``same``: files that must be
    equal. ``sample``: how many tensors to look at, None for all, chosen by ``seed``. ``workers``: files read at a time.
    """

    checkpoint: Checkpoint
    root: Path
    main: Collection[str] = ()
    padded: Mapping[str, Padded] = field(default_factory=dict)
    experts: Mapping[str, KernelExpert] = field(default_factory=dict)
    same: Collection[str] = ()
    sample: int | None = None
    workers: int | None = None
    seed: int = 0

    @property
    def sorts(self) -> dict[str, list[str]]:
        """Comparable tensors by sort."""
        return {
            "unchanged": sorted(n for n in self.main if n not in self.padded),
            "padded": sorted(n for n in self.main if n in self.padded),
            "kernel": sorted(self.experts),
        }


def choose(sample: int, sorts: Mapping[str, list[str]], seed: int) -> set[str]:
    """Choose ``sample`` names, in turn from each sort, by a hash of name and seed: the same on every machine.

    The kernel layout comes first: it is what a conversion computes. The seed must not follow from the output, or whoever
    damages one knows what a sample leaves out.
    """
    order = sorted(sorts, key=lambda sort: sort != "kernel")
    queues = [sorted(sorts[sort], key=lambda n: sha256(f"{seed} {n}".encode("utf-8", "surrogatepass"))) for sort in order]
    turns = (q[i] for i in range(max(map(len, queues), default=0)) for q in queues if i < len(q))
    return {name for name, _ in zip(turns, range(sample), strict=False)}


def read_back(
    compare: Comparison, out: LocalFolder, main: Iterable[Shard], sidecar: Iterable[Shard], findings: Findings, progress: Progress
) -> StorageResult:
    """Read every file of an output once (of a sample: the chosen tensors and all files that hold none), compare and hash.

    What is wrong goes to ``findings``, file by file, in the order of the files whatever the number of workers.
    """
    sorts = compare.sorts
    chosen = None if compare.sample is None else choose(compare.sample, sorts, compare.seed)
    jobs = list(_jobs(compare, out, tuple(main), tuple(sidecar), chosen))
    coverage = Coverage({k: len(v if chosen is None else chosen.intersection(v)) for k, v in sorts.items()})
    result = StorageResult("", findings, coverage, compare.sample, {}, {}, seed=compare.seed)
    for report in _run(jobs, out.root, compare.root, compare.workers or WORKERS, progress):
        findings.extend(report.findings)
        coverage.bytes += report.compared
        coverage.files += 1
        result.tensors.update(report.tensors)
        if report.sha256:
            result.files[report.name] = (report.size, report.sha256)
    return result


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    pieces: Callable[[InputFiles], Iterator[Piece]]
    whole: bool


def _jobs(
    compare: Comparison, out: LocalFolder, main: tuple[Shard, ...], sidecar: tuple[Shard, ...], chosen: set[str] | None
) -> Iterator[_Job]:
    for shards, pieces in ((main, _main), (sidecar, _sidecar)):
        for shard in shards:
            if chosen is None or any(t.name in chosen for t in shard.header.tensors):
                yield _Job(shard.name, partial(pieces, compare, shard, chosen), chosen is None)
    known = {s.name for s in (*main, *sidecar)} | {MANIFEST}
    for name, size in out.files.items():
        if name not in known:
            yield _Job(name, partial(_plain, compare, name, size), whole=True)


def _main(compare: Comparison, shard: Shard, chosen: set[str] | None, files: InputFiles) -> Iterator[Piece]:
    source = SourceTensors.of(compare.checkpoint, files)
    return main_pieces(shard, source if compare.main else None, compare.padded, compare.main, chosen)


def _sidecar(compare: Comparison, shard: Shard, chosen: set[str] | None, files: InputFiles) -> Iterator[Piece]:
    return sidecar_pieces(shard, SourceTensors.of(compare.checkpoint, files), compare.experts, chosen)


def _plain(compare: Comparison, name: str, size: int, files: InputFiles) -> Iterator[Piece]:
    return plain_pieces(files if name in compare.same else None, name, size)


def _run(jobs: list[_Job], out: Path, source: Path, workers: int, progress: Progress) -> Iterator[FileReport]:
    lock = Lock()

    def observe(name: str, size: int, done: bool) -> None:
        with lock:
            progress(name, size, done)

    def run(job: _Job) -> FileReport:
        with input_files(out) as ours, input_files(source) as theirs:
            return walk(ours, job.name, job.pieces(theirs), observe, whole=job.whole)

    with one_torch_thread():
        if workers == 1:
            yield from map(run, jobs)
            return
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(run, jobs)
