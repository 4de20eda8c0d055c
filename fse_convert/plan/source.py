"""A source opened once: headers, quantisation, description, and what headers do not say: F32 scales, and widths in small files.

The only file of this room that reads; without torch.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint, open_checkpoint
from fse_convert.layout.power_of_two import inexact, is_power_of_two
from fse_convert.model.describe import describe
from fse_convert.model.description import Description
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.quantization import Quantization, read_quantization
from fse_convert.servers.f32_scales import UNREAD, Scales, f32_block_scales
from fse_convert.servers.subject import Subject

FAMILY_NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))
"""What a user can call a model whose type is not known."""
WIDTH_KEY = "moe_inter_dim"
"""How inference/config.json of the DeepSeek releases calls the width of an expert."""
SMALL = 1 << 20
"""Bytes of a file above which it is not a config: tokenizer.json has many more."""
CHUNK = 1 << 20
"""Bytes read at once."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, opened and described; everything downstream takes it from here.

    ``scales``: what reading the F32 scales showed, if they were read. ``stated_widths``: the width of an expert that JSON files
    beside config.json state, by name.
    """

    checkpoint: Checkpoint
    quantization: Quantization
    description: Description
    scales: Scales = UNREAD
    stated_widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> LocalFolder:
        """The folder that the checkpoint lies in; raises TypeError for a checkpoint that is not on this machine."""
        if not isinstance(self.checkpoint.folder, LocalFolder):
            raise TypeError(f"{self.checkpoint.folder.label} is not a folder of this machine")
        return self.checkpoint.folder

    @cached_property
    def subject(self) -> Subject:
        """The checkpoint as the servers' rules see it."""
        return Subject(
            config=self.checkpoint.config,
            quant_config=self.checkpoint.quant_config,
            quantization=self.quantization,
            description=self.description,
            tensors=self.checkpoint.tensors,
            scales=self.scales,
        )


def describe_source(checkpoint: Checkpoint, family: str = "") -> Source:
    """Describe a checkpoint from its headers and configs alone; ``family``: the name for a model type that is not known."""
    quantization = read_quantization(checkpoint.config, checkpoint.quant_config)
    return Source(checkpoint=checkpoint, quantization=quantization, description=describe(checkpoint, quantization, family))


def open_source(folder: LocalFolder, family: str = "") -> Source:
    """Open a checkpoint and read all that a plan rests on; ``family`` as `describe_source` has it.

    Raises InvalidCheckpoint, OSError, EOFError, and EnvironmentFailure when the source changes meanwhile.
    """
    source = describe_source(open_checkpoint(folder), family)
    scales = UNREAD if source.description.problems else read_scales(source, routed=True)
    for shard in {source.checkpoint.tensors[name].shard for name in scales.read}:
        folder.check(shard)
    widths = read_stated_widths(source.checkpoint.others, folder)
    return replace(source, scales=scales, stated_widths=widths)


def read_stated_widths(names: Iterable[str], folder: Folder) -> dict[str, int]:
    """Return the widths of an expert that JSON files state in DeepSeek's own inference format; other files are left out."""
    found = {}
    for name in names:
        if not name.endswith(".json") or folder.files[name] > SMALL:
            continue
        raw = folder.read(name)
        try:
            value = json.loads(raw) if WIDTH_KEY.encode() in raw else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and type(value.get(WIDTH_KEY)) is int:
            found[name] = value[WIDTH_KEY]
    return found


def read_scales(source: Source, *, routed: bool) -> Scales:
    """Read the F32 scales of shared experts, and of routed ones where asked and the layer's shared expert is exact.

    Reading a layer stops at its first value that E8M0 cannot hold. Raises OSError, EOFError.
    """
    folder = source.checkpoint.folder
    starts = {s.name: s.header.data_start for s in source.checkpoint.shards}
    read: list[str] = []
    inexact: dict[str, str] = {}
    for layer in source.description.layers:
        found = _first_inexact(f32_block_scales(layer.shared), folder, starts, read)
        if routed and not found:
            found = _first_inexact(f32_block_scales(layer.routed), folder, starts, read)
        inexact |= found
    return Scales(frozenset(read), inexact)


def _first_inexact(tensors: Iterable[TensorInfo], folder: Folder, starts: Mapping[str, int], read: list[str]) -> dict[str, str]:
    for info in tensors:
        read.append(info.name)
        found = inexact_value(info, folder, starts[info.shard])
        if found:
            return {info.name: found}
    return {}


def inexact_value(info: TensorInfo, folder: Folder, data_start: int) -> str:
    """Say which value of an F32 tensor E8M0 cannot hold; empty when it can hold every one."""
    for at in range(0, info.nbytes, CHUNK):
        size = min(CHUNK, info.nbytes - at)
        raw = folder.read(info.shard, data_start + info.start + at, size)
        if len(raw) < size:
            raise EOFError(f"{info.shard} ended inside of {info.name}")
        bits = _words(raw)
        bad = {b for b in set(bits) if not is_power_of_two(b)}
        if bad:
            i = next(i for i, b in enumerate(bits) if b in bad)
            return inexact(at // 4 + i, struct.unpack_from("<f", raw, 4 * i)[0])
    return ""


def _words(raw: bytes) -> array[int]:
    """Return little-endian 32-bit words."""
    words = array("I", raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words
