"""Experts as either side stores them: a lossless one as codes for the fused computation, any as values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.model.description import ExpertGroup
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.plan.source import describe_source
from fse_convert.plan.tensors import SharedExpert
from fse_convert.sidecar.reader import read_shards, shard_names
from fse_convert.verification.addresses import GROUP, ONE, BlockScales, KernelLayout, SourceLayout
from fse_convert.verification.decode import Matrix, decode_mxfp4
from fse_convert.verification.expected import ExpectedOutput, RecodedExpert, kernel_tensors
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


class BothSides:
    """Finds experts in an output, by the output's own headers, and in its source; ValueError for one that cannot be read."""

    def __init__(self, expected: ExpectedOutput, out: LocalFolder, ours: InputFiles, theirs: InputFiles) -> None:
        self.out = out
        self.ours = ours
        self.source = SourceTensors.of(expected.source.checkpoint, theirs)

    @classmethod
    @contextmanager
    def open(cls, expected: ExpectedOutput, out: LocalFolder) -> Iterator[BothSides]:
        """Open the files of both."""
        with InputFiles(out.root) as ours, InputFiles(expected.source.folder.root) as theirs:
            yield cls(expected, out, ours, theirs)

    @cached_property
    def _standard(self) -> tuple[SourceTensors, dict[str, ExpertGroup]]:
        opened = describe_source(read_checkpoint(self.out).checkpoint)
        groups = {group.experts[0].name: group for d in opened.description.layers for group in d.groups}
        return SourceTensors.of(opened.checkpoint, self.ours), groups

    @cached_property
    def _kernel(self) -> SourceTensors:
        shards = read_shards(self.out, shard_names(self.out))[0]
        tensors = {t.name: t for s in shards for t in s.header.tensors}
        return SourceTensors(self.ours, tensors, {s.name: s.header.data_start for s in shards})

    def stored(self, expert: RecodedExpert) -> Sides:
        """Find an expert in the standard layout."""
        tensors, groups = self._standard
        wanted, group = expert.group, groups.get(expert.group.experts[0].name)
        if group is None or any(group.formats[role].shape != f.shape for role, f in wanted.formats.items()):
            raise ValueError("the output's headers do not have it in a format that is understood")
        return StoredExpert(group, expert.number, tensors), StoredExpert(wanted, expert.number, self.source)

    def kernel(self, expert: SharedExpert) -> tuple[KernelLayout, SourceLayout]:
        """Read a shared expert in the kernel layout; a tensor of another dtype or shape is not read."""
        found, tensors = self._kernel, []
        for want in kernel_tensors(expert):
            info = found.tensors.get(want.name)
            if info is None:
                raise ValueError(f"no tensor {want.name}")
            if (info.dtype, info.shape) != (want.dtype, want.shape):
                raise ValueError(f"{want.name} is {info.dtype} {list(info.shape)}, expected {want.dtype} {list(want.shape)}")
            raw = found.whole(info)
            tensors.append(raw.view(torch.int32) if info.dtype == "I32" else raw)
        return KernelLayout(*tensors), StoredExpert(expert.group, 0, self.source).fused()


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
