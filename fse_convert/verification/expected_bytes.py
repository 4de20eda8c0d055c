"""Cut a file of the output into pieces, each with the source's bytes that it must hold, found by address."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.names import SIDECAR
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.model.moe import Role
from fse_convert.plan.tensors import Computed, Recoded, SharedExpert
from fse_convert.sidecar.tensors import KernelTensorName, is_originals_file
from fse_convert.verification.addresses import GROUP, l1_scale_bytes, l1_scale_rows, l1_weight_rows, l2_scale_bytes
from fse_convert.verification.compare import CHUNK, InputFiles, Memory, Piece, Rows, SourceTensors
from fse_convert.verification.expected import Holds
from fse_convert.verification.experts import StoredExpert
from fse_convert.verification.padded import Padded
from fse_convert.verification.recoded import TileScales, recoded_rows

KINDS = {TensorInfo: "unchanged", Padded: "padded", Computed: "kernel", Recoded: "recoded"}
"""How tensors are counted, by what they hold."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What of an output is compared with which checkpoint; whatever is left out is only hashed.

    ``checkpoint``: has the bytes, below ``root``. ``holds``: what tensors must hold that are comparable. ``same``: files that
    must be equal.
    """

    checkpoint: Checkpoint
    root: Path
    holds: Mapping[str, Mapping[str, Holds]]
    same: Collection[str] = ()

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Comparable tensors by kind; ``recoded`` and ``original`` only where formats changed."""
        of: dict[str, list[str]] = {kind: [] for kind in (*KINDS.values(), "original")}
        for file, tensors in self.holds.items():
            for name, held in tensors.items():
                of["original" if is_originals_file(file) else KINDS[type(held)]].append(name)
        return {kind: sorted(names) for kind, names in of.items() if names or kind in ("unchanged", "padded", "kernel")}


def plain_pieces(comparison: Comparison, name: str, size: int, source: SourceTensors) -> Iterator[Piece]:
    """Cut a file without tensors; it is only hashed where it need not be the source's file of the same name."""
    for at in range(0, size, CHUNK):
        n = min(CHUNK, size - at)
        yield Piece(at, (("", n),), partial(_as_is, source.files, name, at, n) if name in comparison.same else None)


def shard_pieces(comparison: Comparison, shard: Shard, chosen: Collection[str] | None, source: SourceTensors) -> Iterator[Piece]:
    """Cut a shard: neighbours that did not change, or are only hashed, are read as one. ``chosen``: a sample, or None."""
    in_sidecar, start, holds = shard.name.startswith(f"{SIDECAR}/"), shard.header.data_start, comparison.holds.get(shard.name, {})
    same = {name: held for name, held in holds.items() if isinstance(held, TensorInfo)}
    tiles = TileScales(source)
    if chosen is None:
        yield Piece(0, (("", start),))
    run: list[TensorInfo] = []
    for t in shard.header.tensors:
        if (chosen is not None and t.name not in chosen) or (in_sidecar and not t.nbytes):  # the tripwire holds nothing
            continue
        rows = _computed_rows(holds.get(t.name), source, tiles)
        if run and (rows or not _follows(run[-1], t, same)):
            yield from _run(run, start, same, source)
            run = []
        if rows:
            yield from _by_rows(t.name, start + t.start, rows)
        else:
            run.append(t)
    if run:
        yield from _run(run, start, same, source)


def _computed_rows(held: Holds, source: SourceTensors, tiles: TileScales) -> Rows | None:
    """Describe what a tensor holds that is not a source tensor as it is."""
    if isinstance(held, Padded):
        return _padded_rows(held, source)
    if isinstance(held, Recoded):
        return recoded_rows(held, source, tiles)
    if held is None or isinstance(held, TensorInfo):
        return None
    return _kernel_rows(held.name, held.shared, source)


def _follows(last: TensorInfo, t: TensorInfo, same: Mapping[str, TensorInfo]) -> bool:
    """Tell whether two tensors are neighbours in the output and, where both must be the source's, in the source."""
    a, b = same.get(last.name), same.get(t.name)
    if a is None or b is None:
        return last.end == t.start and a is b
    return last.end == t.start and a.shard == b.shard and a.end == b.start


def _run(run: Iterable[TensorInfo], start: int, same: Mapping[str, TensorInfo], source: SourceTensors) -> Iterator[Piece]:
    """Cut neighbours into pieces of at most `CHUNK` bytes. ``start``: of the payload in the file."""
    first = next(iter(run))
    info = same.get(first.name)
    parts: list[tuple[str, int]] = []
    at = room = 0

    def piece() -> Piece:
        expect = partial(_as_is, source.files, info.shard, source.starts[info.shard] + info.start + at, room) if info else None
        return Piece(start + first.start + at, tuple(parts), expect)

    for t in run:
        left = t.nbytes
        while left or not t.nbytes:
            take = min(left, CHUNK - room)
            parts.append((t.name, take))
            left, room = left - take, room + take
            if room == CHUNK:
                yield piece()
                parts, at, room = [], at + room, 0
            if not left:
                break
    if parts:
        yield piece()


def _as_is(files: InputFiles, name: str, offset: int, size: int, memory: Memory) -> memoryview:
    return files.read(name, offset, memory.take("source", size))


def _by_rows(name: str, start: int, rows: Rows) -> Iterator[Piece]:
    step = max(1, CHUNK // max(rows.size, rows.work) // rows.multiple) * rows.multiple
    for first in range(0, rows.count, step):
        count = min(step, rows.count - first)
        yield Piece(
            start + first * rows.size,
            ((name, count * rows.size),),
            partial(rows.expected, first, count),
            lambda offset: rows.is_padding(*divmod(offset - start, rows.size)),
        )


def _padded_rows(p: Padded, source: SourceTensors) -> Rows:
    """Describe a padded tensor: its short stretches are rows; of long ones, elements are, so that a piece may begin anywhere."""
    old, new = p.sizes
    if new > CHUNK:
        return _long_stretches(p, source)
    fill = torch.tensor(list(p.fill), dtype=torch.uint8)
    column = old // len(fill)

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        held = memory.take("source", count * old)
        source.read(p.info, first * old, held)
        out = memory.take("expected", count * new)
        elements = _tensor(out).view(count, -1, len(fill))
        elements[:, column:] = fill
        elements[:, :column] = _tensor(held).view(count, column, len(fill))
        return out

    return Rows(p.stretches, new, expected, lambda _, at: at >= old)


def _long_stretches(p: Padded, source: SourceTensors) -> Rows:
    (old, new), size, fill = p.sizes, len(p.fill), torch.tensor(list(p.fill), dtype=torch.uint8)

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        start, out = first * size, memory.take("expected", count * size)
        at = 0
        while at < len(out):
            stretch, place = divmod(start + at, new)
            real, whole = (min(len(out) - at, max(0, end - place)) for end in (old, new))
            if real:
                source.read(p.info, stretch * old + place, out[at : at + real])
            if whole > real:
                _tensor(out[at + real : at + whole]).view(-1, size)[:] = fill
            at += whole
        return out

    return Rows(p.stretches * new // size, size, expected, lambda row, at: (row * size + at) % new >= old)


def _kernel_rows(name: KernelTensorName, expert: SharedExpert, source: SourceTensors) -> Rows:
    h, s, width = expert.group.hidden, expert.width, expert.group.width
    if name is KernelTensorName.L1_WEIGHT:
        return Rows(2 * s, h, partial(_l1_rows, expert, source), lambda row, _: _of_row(l1_weight_rows, row) >= width, 16)
    if name is KernelTensorName.L2_WEIGHT:
        return _padded_rows(Padded(expert.weight(Role.DOWN), (h, s), b"\0", h), source)
    gate, up, down = (partial(StoredExpert(expert.group, 0, source).scales, role, 0) for role in Role)
    if name is KernelTensorName.L1_SCALE:
        scales = l1_scale_bytes(gate(width), up(width), s)
        return _scale_rows(scales, lambda _, at: _of_row(l1_scale_rows, at // 4) >= width)
    return _scale_rows(l2_scale_bytes(down(h), s), lambda word, at: GROUP * (4 * word + at % 4) >= width)


def _of_row(logical: Callable[[Tensor], tuple[Tensor, Tensor]], physical: int) -> int:
    return int(logical(torch.tensor(physical))[1])


def _l1_rows(expert: SharedExpert, source: SourceTensors, first: int, count: int, memory: Memory) -> memoryview:
    """Return physical rows ``[first, first + count)`` of the L1 weight; both are multiples of 16."""
    h, width = expert.group.hidden, expert.group.width
    low, high = (min(width, d // 2) for d in (first, first + count))
    real = high - low
    rows = memory.take("source", (2 * real + 1) * h)
    for half, role in enumerate((Role.GATE, Role.UP)):
        if real:
            source.read(expert.weight(role), low * h, rows[half * real * h : (half + 1) * real * h])
    rows[2 * real * h :] = bytes(h)
    half_of, row_of = l1_weight_rows(torch.arange(first, first + count))
    index = torch.where(row_of < width, half_of * real + row_of - low, 2 * real)
    out = memory.take("expected", count * h)
    torch.index_select(_tensor(rows).view(-1, h), 0, index, out=_tensor(out).view(count, h))
    return out


def _scale_rows(scales: Tensor, is_padding: Callable[[int, int], bool]) -> Rows:
    """Describe a scale tensor, whose rows are columns of words: uint8 ``[p, n, 4]``."""
    words, rows, _ = scales.shape

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        out = memory.take("expected", count * 4 * rows)
        _tensor(out).copy_(scales[first : first + count].flatten())
        return out

    return Rows(words, 4 * rows, expected, is_padding)


def _tensor(buffer: memoryview) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
