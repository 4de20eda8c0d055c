"""The tensors of an output as values: how each comes to be, and the shards that they make up.

How a tensor comes to be is its `Change`: the one place where a new change of a tensor plugs in. The writer, sizes, memory and the
dry run follow from it. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple

from fse_convert.checkpoint.encoding import encode_header, header_entry
from fse_convert.checkpoint.header import TensorInfo, element_bytes
from fse_convert.checkpoint.reader import Shard
from fse_convert.layout.nan_and_one import NaN
from fse_convert.model.description import ExpertGroup
from fse_convert.model.moe import Expert, Role
from fse_convert.sidecar.tensors import KernelTensorName


class Copied(NamedTuple):
    """A tensor that is the source's, byte for byte."""

    source: TensorInfo

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read."""
        return (self.source,)


class Growth(NamedTuple):
    """How a tensor grows that is cut into ``stretches`` of ``old`` bytes: each at its end, to ``new`` bytes, by elements ``fill``.

    Rows are added to a matrix as one stretch, columns with one a row, and rows to each of several matrices in a tensor with one a
    matrix. ``nan``: the codes to look for in what is read.
    """

    stretches: int
    old: int
    new: int
    fill: bytes
    nan: NaN | None


Grown = tuple[tuple[int, ...], Growth]
"""The shape that a tensor grows to, and how. A million experts share few of them."""


class Padded(NamedTuple):
    """A stored tensor that grows."""

    source: TensorInfo
    growth: Growth

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read."""
        return (self.source,)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A layer's shared MLP on its way into the kernel layout: stored at ``group.width``, written at ``width``."""

    prefix: str
    group: ExpertGroup
    width: int

    @property
    def expert(self) -> Expert:
        """The shared MLP's tensors."""
        return self.group.experts[0]

    def weight(self, role: Role) -> TensorInfo:
        """Return a projection's weight in the source."""
        return self.expert.projections[role].parts[self.group.formats[role].weight]

    def scale(self, role: Role) -> TensorInfo:
        """Return a projection's block scales in the source; raises KeyError where it has none."""
        return self.expert.projections[role].parts[self.group.formats[role].scale or ""]


@dataclass(frozen=True, slots=True)
class Computed:
    """A kernel-layout tensor, computed from a shared expert."""

    name: KernelTensorName
    shared: SharedExpert

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read."""
        gate_and_up = self.name in (KernelTensorName.L1_WEIGHT, KernelTensorName.L1_SCALE)
        read = self.shared.scale if self.name.is_scale else self.shared.weight
        return tuple(read(role) for role in ((Role.GATE, Role.UP) if gate_and_up else (Role.DOWN,)))


@dataclass(frozen=True, slots=True)
class Tripwire:
    """A tensor of the model, by name, without elements: a loader that takes ``fse/`` for a checkpoint stops at its shape.

    SGLang 0.5.23 only warns of names that it does not know (models/deepseek_v4.py, load_weights): without this it would serve
    uninitialised weights when somebody puts a config.json there.
    """

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read: nothing."""
        return ()


class Rule(str, Enum):
    """How elements are coded again. The writer and the proof each have code of their own for every rule.

    ``FP8``: MXFP4 as E4M3 with one F32 scale a block, every value exact. ``MXFP4``: FP8 or floats as MXFP4, rounded to nearest
    even. ``F32``: E8M0 scales as F32, the same powers of two.
    """

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    F32 = "f32"


class Recoded(NamedTuple):
    """A weight ``[n, k]`` or its scales, coded in another format.

    ``weight`` and ``scale``: what is read; no weight where scales alone are rewritten, no scale beside floats. ``shape``: the
    logical ``[n, k]`` of the weight. ``block``: rows and columns that share a scale, in the output for `Rule.FP8`, else in the
    source. ``is_scale``: which of the two tensors this is.
    """

    rule: Rule
    weight: TensorInfo | None
    scale: TensorInfo | None
    shape: tuple[int, int]
    block: tuple[int, int] | None
    is_scale: bool

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read."""
        return tuple(filter(None, (self.weight, self.scale)))


Change = Copied | Padded | Recoded | Computed | Tripwire


class TensorSpec(NamedTuple):
    """A tensor of the output that has no place yet. A `Copied` one with another name or an equally wide dtype is relabelled."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    change: Change

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.change.source.nbytes if isinstance(self.change, Copied) else prod(self.shape) * element_bytes(self.dtype)


class OutputTensor(NamedTuple):
    """One tensor of an output shard; ``[start, end)`` are bytes of the shard's payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    change: Change

    @property
    def as_is(self) -> bool:
        """Whether it is a tensor of the source, its name and dtype included."""
        c = self.change
        return isinstance(c, Copied) and (self.name, self.dtype, self.shape) == (c.source.name, c.source.dtype, c.source.shape)


@dataclass(frozen=True)
class OutputShard:
    """One safetensors file of the output. ``source``: the shard of the same name that it stands for; None in ``fse/``."""

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]
    source: Shard | None = None

    @property
    def carried(self) -> bool:
        """Whether it is its source's file as is."""
        return self.source is not None and all(t.as_is for t in self.tensors)

    @property
    def payload(self) -> int:
        """Bytes of payload."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def header(self) -> bytes:
        """The header of a file that is written: length, JSON, spaces up to 8 bytes."""
        return encode_header({t.name: header_entry(t.dtype, t.shape, t.start, t.end) for t in self.tensors}, self.metadata)

    @cached_property
    def size(self) -> int:
        """Bytes of the file; encoding a header of thousands of tensors to learn its length is done once."""
        return self.source.size if self.source and self.carried else len(self.header) + self.payload

    @property
    def kernel_tensors(self) -> tuple[OutputTensor, ...]:
        """Its tensors in the kernel layout."""
        return tuple(t for t in self.tensors if isinstance(t.change, Computed))


def matrix(info: TensorInfo) -> tuple[int, int]:
    """Return rows and bytes per row of a stored tensor; one-dimensional tensors are columns."""
    rows = info.shape[0] if info.shape else 1
    return rows, info.nbytes // rows if rows else 0


def placed(tensors: Iterable[TensorSpec]) -> tuple[OutputTensor, ...]:
    """Lay tensors out one after the other."""
    result: list[OutputTensor] = []
    at = 0
    for t in tensors:
        end = at + t.nbytes
        result.append(OutputTensor(name=t.name, dtype=t.dtype, shape=t.shape, start=at, end=end, change=t.change))
        at = end
    return tuple(result)
