"""Tensors of a checkpoint as a proof reads them: by name and offset, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.verification.compare import InputFiles, Memory


@dataclass(frozen=True, slots=True)
class SourceTensors:
    """The source's tensors, by name and by file offset."""

    files: InputFiles
    tensors: Mapping[str, TensorInfo]
    starts: Mapping[str, int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, files: InputFiles) -> SourceTensors:
        """Find the tensors of a checkpoint whose files are open."""
        return cls(files, checkpoint.tensors, {s.name: s.header.data_start for s in checkpoint.shards})

    def read(self, info: TensorInfo, offset: int, into: memoryview) -> memoryview:
        """Fill a buffer from a tensor's bytes at ``offset``, and from its neighbours after it."""
        return self.files.read(info.shard, self.starts[info.shard] + info.start + offset, into)

    def rows(self, info: TensorInfo, start: int, stop: int, memory: Memory, purpose: str) -> Tensor:
        """Read rows ``[start, stop)`` of a matrix into the buffer for ``purpose``: uint8 ``[rows, row bytes]``."""
        size = info.nbytes // info.shape[0]
        buffer = memory.take(purpose, (stop - start) * size)
        self.read(info, start * size, buffer)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(stop - start, size)

    def whole(self, info: TensorInfo) -> Tensor:
        """Read all of a small matrix, uint8 ``[rows, row bytes]``."""
        buffer = bytearray(info.nbytes)
        self.read(info, 0, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(info.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose ``count`` rows of ``size`` bytes are computed, some at a time, in multiples of ``multiple``.

    ``expected``: (first, count, memory) -> the bytes of these rows. ``is_padding``: of a byte, by row and place in the row.
    ``work``: bytes that computing a row takes, where these are more.
    """

    count: int
    size: int
    expected: Callable[[int, int, Memory], memoryview]
    is_padding: Callable[[int, int], bool] = lambda _row, _at: False
    multiple: int = 1
    work: int = 0
