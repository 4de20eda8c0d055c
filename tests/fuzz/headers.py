#!/usr/bin/env python3
"""Coverage-guided fuzzing of what reads a checkpoint's bytes, with atheris and safetensors itself as the judge.

    pip install atheris
    python tests/fuzz/headers.py header|checkpoint CORPUS -max_total_time=600 -rss_limit_mb=1024 -dict=tests/fuzz/headers.dict

``header``: one shard, its bytes as they are or its header with a length and a payload that fit; whatever this package accepts,
safetensors accepts, with the same tensors. ``checkpoint``:
config, index and headers of three files, from opening to the verdicts of every target and to a plan. Both: nothing but a
problem with a code ever comes out, and memory stays bounded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fse_convert"]):
    from fse_convert.checkpoint.header import BITS, header_length, parse_header
    from fse_convert.checkpoint.names import CONFIG, INDEX
    from fse_convert.checkpoint.reader import open_checkpoint
    from fse_convert.errors import FseConvertError, InvalidCheckpoint
    from fse_convert.model.describe import describe
    from fse_convert.model.quantization import read_quantization
    from fse_convert.plan.notes import notes
    from fse_convert.plan.plan import Options
    from fse_convert.plan.planner import make_plan
    from fse_convert.servers.judge import Subject, judge
    from fse_convert.servers.targets import TARGETS
    from fse_convert.testing.memory import Model, matrix

from safetensors import SafetensorError, deserialize

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
COUNTS = {"inputs": 0, "accepted": 0, "refused": 0, "planned": 0}


@dataclass
class Memory:
    """A folder of byte strings."""

    contents: dict[str, bytes]
    label: str = "memory"
    odd: list[str] = field(default_factory=list)
    workers: int = 1

    @property
    def files(self) -> dict[str, int]:
        return {name: len(raw) for name, raw in sorted(self.contents.items())}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.contents[name][offset : None if length is None else offset + length]


def header(data: bytes) -> None:
    """One shard: never accept what the library refuses, nor read it otherwise."""
    if data[:1] == b"+":
        data = with_payload(data[1:])
    try:
        found = parse_header(data[8 : 8 + header_length(data[:64], len(data), "s")], len(data), "s")
    except InvalidCheckpoint:
        COUNTS["refused"] += 1
        return
    COUNTS["accepted"] += 1
    try:
        theirs = {name: (list(info["shape"]), len(info["data"])) for name, info in deserialize(data)}
    except SafetensorError as e:
        raise AssertionError(f"accepted what safetensors refuses: {e}") from e
    ours = {t.name: (list(t.shape), t.nbytes) for t in found.tensors}
    if ours != theirs:
        raise AssertionError(f"read otherwise: {ours} {theirs}")


def checkpoint(data: bytes) -> None:
    """Config, index and headers, up to plans and verdicts."""
    parts = data.split(b"\xff\xff")
    parts += [b""] * (4 - len(parts))
    contents = {CONFIG: parts[0], **({INDEX: parts[1]} if parts[1] else {})}
    contents |= {name: with_payload(raw) for name, raw in zip(SHARDS, parts[2:4], strict=True) if raw}
    try:
        opened = open_checkpoint(Memory(contents))
        quantization = read_quantization(opened.config, opened.quant_config)
        description = describe(opened, quantization)
        judge(Subject(opened.config, opened.quant_config, quantization, description))
        COUNTS["accepted"] += 1
    except FseConvertError:
        COUNTS["refused"] += 1
        return
    for target in TARGETS[:4]:
        try:
            list(notes(make_plan(opened, description, Options(target, allow_unfused=True))))
            COUNTS["planned"] += 1
        except FseConvertError:
            continue


def with_payload(raw: bytes) -> bytes:
    """A shard of that header with as many bytes behind it as the header asks for, so that shapes matter and not luck."""
    try:
        wanted = max(e["data_offsets"][1] for n, e in json.loads(raw).items() if n != "__metadata__")
        payload = wanted if isinstance(wanted, int) and 0 <= wanted < 1 << 20 else 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        payload = 0
    return len(raw).to_bytes(8, "little") + raw + bytes(payload)


def seeds(corpus: Path, kind: str) -> None:
    """Start from whole checkpoints of every kind that the factory makes, and from every dtype."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, store in enumerate(("mxfp4", "nvfp4", "fp8-128", "bf16", "fp8-128-f32", "mxfp4-packed", "int4-packed", "gptq")):
        model = Model(hidden=64, width=32, layers=1, experts=1, routed=store, shared="fp8-32")
        at, entries = 0, {}
        for name, (dtype, shape) in {**model.tensors(), **matrix(store, 32, 64)}.items():
            size = BITS[dtype] // 8
            for n in shape:
                size *= n
            entries[name], at = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}, at + size
        raw = json.dumps(entries).encode()
        index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(entries, SHARDS[0])}).encode()
        config = json.dumps(model.full_config()).encode()
        whole = b"+" + raw if kind == "header" else b"\xff\xff".join((config, index, raw))
        (corpus / f"seed-{number}").write_bytes(whole)
    if kind == "header":
        for dtype, bits in BITS.items():
            entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
            raw = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
            (corpus / f"seed-{dtype}").write_bytes(b"+" + raw)
            (corpus / f"whole-{dtype}").write_bytes(with_payload(raw))


def main() -> None:
    """Fuzz until libFuzzer says that it is enough, and print the counts."""
    kind, corpus, *rest = sys.argv[1:]
    seeds(Path(corpus), kind)
    call = {"header": header, "checkpoint": checkpoint}[kind]

    def one(data: bytes) -> None:
        COUNTS["inputs"] += 1
        call(data)
        if COUNTS["inputs"] % 20_000 == 0:
            print(COUNTS, flush=True)

    atheris.Setup([sys.argv[0], corpus, *rest], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
