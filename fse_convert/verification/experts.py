"""Experts as either side stores them: a lossless one as codes for the fused computation, any as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.model.description import ExpertGroup
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.plan.source import describe_source
from fse_convert.verification.addresses import GROUP, ONE, BlockScales, SourceLayout
from fse_convert.verification.decode import Matrix, decode_mxfp4
from fse_convert.verification.expected import ExpectedOutput, RecodedExpert
from fse_convert.verification.pieces import block_scales
from fse_convert.verification.stream import InputFiles
from fse_convert.verification.tensors import SourceTensors


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """Expert ``number`` of a group, among the tensors of a checkpoint whose files are open."""

    group: ExpertGroup
    number: int
    tensors: SourceTensors

    @property
    def hidden(self) -> int:
        """Return H."""
        return self.group.hidden

    @property
    def width(self) -> int:
        """Return S."""
        return self.group.width

    def matrix(self, role: Role) -> Matrix:
        """Return gate, up or down."""
        f, parts = self.group.formats[role], self.group.experts[self.number].projections[role].parts
        return Matrix(parts[f.weight], parts[f.scale] if f.scale else None, f.shape, f.block, self.tensors)

    def values(self, role: Role, start: int, stop: int) -> Tensor:
        """Return rows of gate, up or down as float64."""
        return self.matrix(role).values(start, stop)

    def fused(self) -> SourceLayout:
        """Read the expert for the fused computation; raises ValueError for scales that are not powers of two."""
        tensors = {r: (self.group.formats[r], self.matrix(r)) for r in Role}
        weights = {r: _e4m3(self.tensors.whole(m.weight), f) for r, (f, m) in tensors.items()}
        scales = {r: block_scales(m.scale, f, self.tensors) for r, (f, m) in tensors.items() if m.scale}
        blocks = {s.block for s in scales.values()}
        codes = {r: s.codes if len(blocks) == 1 else _per_group(s) for r, s in scales.items()}
        block = blocks.pop() if len(blocks) == 1 else (1, GROUP)
        gate, up, down = Role
        missing = -self.width % GROUP
        if missing:
            full = self.width + missing
            for role in Role:
                n, k = (weights[role].shape[0], full) if role is down else (full, weights[role].shape[1])
                weights[role] = _grown(weights[role], n, k, 0)
                codes[role] = _grown(codes[role], -(-n // block[0]), -(-k // block[1]), ONE)
        return SourceLayout(weights[gate], codes[gate], weights[up], codes[up], weights[down], codes[down], block)


Sides = tuple[StoredExpert, StoredExpert]
"""An expert in the output, and in the source."""


@contextmanager
def both_sides(expected: ExpectedOutput, out: LocalFolder) -> Iterator[Callable[[RecodedExpert], Sides]]:
    """Give a function that finds an expert in the output, by the output's own headers, and in the source; it raises ValueError."""
    source = expected.source
    with InputFiles(out.root) as ours, InputFiles(source.folder.root) as theirs:

        @lru_cache(maxsize=1)
        def output() -> tuple[SourceTensors, dict[str, ExpertGroup]]:
            opened = describe_source(read_checkpoint(out).checkpoint)
            groups = {group.experts[0].name: group for d in opened.description.layers for group in d.groups}
            return SourceTensors.of(opened.checkpoint, ours), groups

        def find(expert: RecodedExpert) -> Sides:
            tensors, groups = output()
            wanted, group = expert.group, groups.get(expert.group.experts[0].name)
            if group is None or any(group.formats[role].shape != f.shape for role, f in wanted.formats.items()):
                raise ValueError("the output's headers do not have it in a format that is understood")
            of_source = SourceTensors.of(source.checkpoint, theirs)
            return StoredExpert(group, expert.number, tensors), StoredExpert(wanted, expert.number, of_source)

        yield find


def _e4m3(stored: Tensor, f: Format) -> Tensor:
    """Return E4M3 codes uint8 ``[n, k]``; every MXFP4 value is an E4M3 value."""
    if f.kind is not StorageKind.MXFP4:
        return stored
    pairs = decode_mxfp4(torch.arange(256).to(torch.uint8)[:, None]).to(torch.float8_e4m3fn).view(torch.int16).flatten()
    return pairs.index_select(0, stored.flatten().int()).view(torch.uint8).view(len(stored), -1)


def _grown(x: Tensor, rows: int, columns: int, fill: int) -> Tensor:
    """Complete a last, partial group of channels: the kernel scales activations 32 at a time, and a zero channel adds nothing."""
    out = torch.full((rows, columns), fill, dtype=torch.uint8)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _per_group(scales: BlockScales) -> Tensor:
    """Return scales per row and 32 columns, for experts whose projections differ in their blocks."""
    n, k = scales.shape
    return scales.at(torch.arange(n), torch.arange(-(-k // GROUP))[None])[0]
