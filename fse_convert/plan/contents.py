"""Reads what headers do not say, without torch: whether F32 scales are powers of two, and widths that small files state."""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping

from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.model.description import Description
from fse_convert.plan.plan import Contents
from fse_convert.servers.scales import UNREAD, Scales, routed_f32_scales, shared_f32_scales

WIDTH_KEY = "moe_inter_dim"
"""How inference/config.json of the DeepSeek releases calls the width of an expert."""
SMALL = 1 << 20
"""Bytes of a file above which it is no config: tokenizer.json has many more."""
CHUNK = 1 << 20
"""Bytes read at once."""
SIGN_AND_MANTISSA = 0x807FFFFF
"""Bits that no positive power of two has."""


def read_contents(checkpoint: Checkpoint, folder: LocalFolder, description: Description) -> Contents:
    """Read all that a plan rests on beyond headers.

    Raises OSError, EOFError, and EnvironmentFailure when the source changes meanwhile.
    """
    scales = UNREAD if description.problems else read_scales(checkpoint, folder, description, routed=True)
    for shard in {checkpoint.tensors[name].shard for name in scales.read}:
        folder.check(shard)
    return Contents(scales, stated_widths(checkpoint.others, folder))


def stated_widths(names: Iterable[str], folder: Folder) -> dict[str, int]:
    """Widths of an expert that JSON files state in DeepSeek's own inference format; what is no such file is left out."""
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


def read_scales(checkpoint: Checkpoint, folder: Folder, description: Description, *, routed: bool) -> Scales:
    """Read the F32 scales of shared experts, and of routed ones where asked and the layer's shared expert is exact.

    Reading a layer ends with its first value that E8M0 cannot hold. Raises OSError, EOFError.
    """
    starts = {s.name: s.header.data_start for s in checkpoint.shards}
    read: list[str] = []
    inexact: dict[str, str] = {}
    for layer in description.layers:
        found = _first_inexact(shared_f32_scales(layer), folder, starts, read)
        if routed and not found:
            found = _first_inexact(routed_f32_scales(layer), folder, starts, read)
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
    """Say which value of an F32 tensor is no positive normal power of two; empty when every one is."""
    for at in range(0, info.nbytes, CHUNK):
        size = min(CHUNK, info.nbytes - at)
        raw = folder.read(info.shard, data_start + info.start + at, size)
        if len(raw) < size:
            raise EOFError(f"{info.shard} ended inside of {info.name}")
        bits = _words(raw)
        bad = {b for b in set(bits) if b & SIGN_AND_MANTISSA or b >> 23 in (0, 0xFF)}
        if bad:
            i = next(i for i, b in enumerate(bits) if b in bad)
            value = struct.unpack_from("<f", raw, 4 * i)[0]
            return f"scale {at // 4 + i} is {value!r}, not a power of two that E8M0 can hold"
    return ""


def _words(raw: bytes) -> array[int]:
    """Little-endian 32-bit words."""
    words = array("I", raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words
