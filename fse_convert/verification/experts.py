"""Experts as either side stores them, some rows at a time: a lossless one as codes for the fused computation, any as values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.model.description import ExpertGroup
from fse_convert.model.moe import Role
from fse_convert.plan.source import describe_source
from fse_convert.plan.tensors import SharedExpert
from fse_convert.sidecar.reader import read_shards, shard_names
from fse_convert.verification.addresses import GROUP, KernelLayout, Rows, exponents
from fse_convert.verification.code_of_one import E8M0_ONE
from fse_convert.verification.compare import InputFiles, Memory, SourceTensors
from fse_convert.verification.decode import Matrix, decode_codes, decode_mxfp4, decode_scales
from fse_convert.verification.expected import ExpectedOutput, RecodedExpert, kernel_tensors

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """Expert ``number`` of a group, among the tensors of a checkpoint whose files are open; read on ``device``.

    A last, partial group of channels is completed by zeros under scales of 1.0: the kernel scales activations 32 at a time, and a
    zero channel adds nothing.
    """

    group: ExpertGroup
    number: int
    tensors: SourceTensors
    device: torch.device = CPU

    @property
    def hidden(self) -> int:
        """Return H."""
        return self.group.hidden

    @property
    def width(self) -> int:
        """Return S in whole groups."""
        return -(-self.group.width // GROUP) * GROUP

    def to(self, device: torch.device) -> StoredExpert:
        """Read on another device."""
        return replace(self, device=device)

    def matrix(self, role: Role) -> Matrix:
        """Return gate, up or down."""
        f, parts = self.group.formats[role], self.group.experts[self.number].projections[role].parts
        return Matrix(parts[f.weight], parts[f.scale] if f.scale else None, f.shape, f.block, self.tensors)

    def values(self, role: Role, start: int, stop: int) -> Tensor:
        """Return rows of gate, up or down as float64."""
        m = self.matrix(role)
        if m.shape[1] % GROUP:  # in blocks of whole groups, which alone may end within one
            return dequantize(self.rows(role, start, stop))
        return self._whole(role, m.values(start, min(stop, m.shape[0])), stop - start, 1, 0)

    def rows(self, role: Role, start: int, stop: int) -> Rows:
        """Return rows of gate, up or down as E4M3, and their `scales`."""
        m = self.matrix(role)
        codes = _e4m3(self.tensors.rows(m.weight, start, min(stop, m.shape[0]), Memory(), "weight"), m.weight.dtype)
        return self._whole(role, codes, stop - start, 1, 0), self.scales(role, start, stop)

    def scales(self, role: Role, start: int, stop: int) -> Tensor:
        """Return E8M0 bytes for rows and groups of 32 columns: row ``r`` and column ``c`` have that of block ``(r / bm, c / bk)``.

        Raises ValueError for scales that are not powers of two, and for blocks that are not whole groups.
        """
        m = self.matrix(role)
        if m.scale is None or m.block is None or m.block[1] % GROUP:
            raise ValueError(f"{m.weight.name}: no scale for whole groups of {GROUP}")
        (bm, bk), last = m.block, min(stop, m.shape[0])
        stored = self.tensors.rows(m.scale, start // bm, -(-last // bm), Memory(), "scale")
        codes = exponents(stored) if m.scale.dtype == "F32" else stored
        if codes is None:
            raise ValueError(f"{m.scale.name}: a scale is not a power of two")
        row, column = torch.arange(start, last) // bm - start // bm, torch.arange(0, m.shape[1], GROUP) // bk
        return self._whole(role, codes[row[:, None], column], stop - start, GROUP, E8M0_ONE)

    def _whole(self, role: Role, x: Tensor, count: int, per: int, fill: int) -> Tensor:
        """Complete ``count`` rows of elements, one for ``per`` columns."""
        columns = (self.width if role is Role.DOWN else self.hidden) // per
        return pad(x, (0, columns - x.shape[1], 0, count - len(x)), value=fill).to(self.device)


Sides = tuple[StoredExpert, StoredExpert]
"""An expert in the output, and in the source."""


class BothSides:
    """Finds experts in an output, by the output's own headers, and in its source; ValueError for one that cannot be read."""

    def __init__(self, expected: ExpectedOutput, out: LocalFolder, ours: InputFiles, theirs: InputFiles) -> None:
        self.out = out
        self.ours = ours
        self.source = SourceTensors.of(expected.source.checkpoint, theirs)
        self.family = expected.source.description.family_name

    @classmethod
    @contextmanager
    def open(cls, expected: ExpectedOutput, out: LocalFolder) -> Iterator[BothSides]:
        """Open the files of both."""
        with InputFiles(out.root) as ours, InputFiles(expected.source.folder.root) as theirs:
            yield cls(expected, out, ours, theirs)

    @cached_property
    def _standard(self) -> tuple[SourceTensors, dict[str, ExpertGroup]]:
        opened = describe_source(read_checkpoint(self.out).checkpoint, self.family)
        groups = {group.experts[0].name: group for d in opened.description.layers for group in d.groups if group.experts}
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

    def kernel(self, expert: SharedExpert) -> tuple[KernelLayout, StoredExpert]:
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
        return KernelLayout(*tensors), StoredExpert(expert.group, 0, self.source)


def dequantize(rows: Rows) -> Tensor:
    """Return the values of E4M3 codes under a scale for 32 columns: float64, exactly."""
    codes, scale = rows
    return (decode_codes(codes).view(*scale.shape, GROUP) * decode_scales(scale)[:, :, None]).view(codes.shape)


def _e4m3(stored: Tensor, dtype: str) -> Tensor:
    """Return E4M3 codes uint8 ``[n, k]``; every MXFP4 value is an E4M3 value."""
    if dtype == "F8_E4M3":
        return stored
    pairs = decode_mxfp4(torch.arange(256).to(torch.uint8)[:, None]).to(torch.float8_e4m3fn).view(torch.int16).flatten()
    return pairs.index_select(0, stored.flatten().int()).view(torch.uint8).view(len(stored), -1)
