"""What reads a checkpoint's bytes, from headers to plans and verdicts, with safetensors itself as the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from safetensors import SafetensorError, deserialize

from fse_convert.checkpoint.header import BITS, header_length, parse_header
from fse_convert.checkpoint.left_out import Kind
from fse_convert.checkpoint.names import CONFIG, INDEX
from fse_convert.checkpoint.reader import open_checkpoint
from fse_convert.errors import FseConvertError, InvalidCheckpoint
from fse_convert.plan.notes import notes
from fse_convert.plan.plan import Options
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import describe_source
from fse_convert.servers.judge import judge
from fse_convert.servers.targets import TARGETS
from fse_convert.testing.memory import Model, matrix

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STORES = ("mxfp4", "nvfp4", "fp8-128", "bf16", "fp8-128-f32", "mxfp4-packed", "int4-packed", "gptq")


@dataclass
class Memory:
    """A folder of byte strings."""

    contents: dict[str, bytes]
    label: str = "memory"
    clutter: dict[str, Kind] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    workers: int = 1

    @property
    def files(self) -> dict[str, int]:
        return {name: len(raw) for name, raw in sorted(self.contents.items())}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.contents[name][offset : None if length is None else offset + length]


def header(data: bytes) -> str:
    """One shard, as it is or its header with a payload that fits: never accept what the library refuses, nor read it otherwise."""
    if data[:1] == b"+":
        data = with_payload(data[1:])
    try:
        found = parse_header(data[8 : 8 + header_length(data[:64], len(data), "s")], len(data), "s")
    except InvalidCheckpoint:
        return "refused"
    try:
        theirs = {name: (list(info["shape"]), len(info["data"])) for name, info in deserialize(data)}
    except SafetensorError as e:
        raise AssertionError(f"accepted what safetensors refuses: {e}") from e
    ours = {t.name: (list(t.shape), t.nbytes) for t in found.tensors}
    if ours != theirs:
        raise AssertionError(f"read otherwise: {ours} {theirs}")
    return "accepted"


def checkpoint(data: bytes) -> str:
    """Config, index and headers of two shards, from opening to the verdicts of every target and to plans."""
    parts = data.split(b"\xff\xff")
    parts += [b""] * (4 - len(parts))
    contents = {CONFIG: parts[0], **({INDEX: parts[1]} if parts[1] else {})}
    contents |= {name: with_payload(raw) for name, raw in zip(SHARDS, parts[2:4], strict=True) if raw}
    try:
        source = describe_source(open_checkpoint(Memory(contents)))
        judge(source.subject)
    except FseConvertError:
        return "refused"
    planned = False
    for target in TARGETS[:4]:
        try:
            list(notes(make_plan(source, Options(target, allow_unfused=True))))
            planned = True
        except FseConvertError:
            continue
    return "planned" if planned else "judged"


def with_payload(raw: bytes) -> bytes:
    """A shard of that header with as many bytes behind it as the header asks for, so that shapes matter and not luck."""
    try:
        wanted = max(e["data_offsets"][1] for n, e in json.loads(raw).items() if n != "__metadata__")
        payload = wanted if isinstance(wanted, int) and 0 <= wanted < 1 << 20 else 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        payload = 0
    return len(raw).to_bytes(8, "little") + raw + bytes(payload)


def whole_checkpoints() -> Iterator[tuple[bytes, bytes, bytes]]:
    """Config, index and the header of one shard, of every storage format."""
    for store in STORES:
        model = Model(hidden=64, width=32, layers=1, experts=1, routed=store, shared="fp8-32")
        at, entries = 0, {}
        for name, (dtype, shape) in {**model.tensors(), **matrix(store, 32, 64)}.items():
            size = BITS[dtype] // 8
            for n in shape:
                size *= n
            entries[name], at = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}, at + size
        index = {"metadata": {}, "weight_map": dict.fromkeys(entries, SHARDS[0])}
        config, weights, raw = (json.dumps(value).encode() for value in (model.full_config(), index, entries))
        yield config, weights, raw


def header_seeds() -> Iterator[bytes]:
    """Headers of every storage format and of every dtype, these with a payload too."""
    yield from (b"+" + raw for *_, raw in whole_checkpoints())
    for dtype, bits in BITS.items():
        entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
        raw = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
        yield from (b"+" + raw, with_payload(raw))


def checkpoint_seeds() -> Iterator[bytes]:
    """Checkpoints of every storage format."""
    yield from map(b"\xff\xff".join, whole_checkpoints())


READERS = {"header": (header, list(header_seeds())), "checkpoint": (checkpoint, list(checkpoint_seeds()))}
"""What can be fuzzed, by name: the function, and its seeds."""
