"""Mutations of a finished output: every one must fail level 1, and level 2 too if it changes what the expert computes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.conversion.run import Conversion, Request
from fse_convert.output.copying import Link
from fse_convert.plan.plan import Options, Plan
from fse_convert.plan.source import open_source
from fse_convert.progress import ignore
from fse_convert.servers.targets import find_target
from fse_convert.verification.expected import ExpectedOutput
from fse_convert.verification.layers import check_layers
from fse_convert.verification.manifest import OutputManifest, plan_again
from tests.verification.mutating import SEEDS, Converted, Mutation, alone, apply, flipped, level_1, sealed_mutations

KNOBS = {"hidden": 256, "width": 160, "layers": 1, "mtp": 1, "experts": 2, "vocab": 32, "shard_size": 400_000}
SIDECAR = "fse/shared-00001-of-00001.safetensors"
ZEROS = {0x00, 0x80}


@pytest.fixture(scope="module", params=[("v4.1-flash", {"engram_rows": 16}), ("v4-flash-base", {})], ids=lambda p: p[0])
def finished(request: pytest.FixtureRequest, made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Converted:
    kind, knobs = request.param
    root, out = made(kind, **KNOBS, **knobs), tmp_path_factory.mktemp("out") / "out"
    target = find_target("megamoe-128")
    assert target
    Conversion(Request(root, out, Options(target), Link.COPY)).run(ignore)
    return Converted(open_source(LocalFolder(root)), out, OutputManifest.read(LocalFolder(out)).content)


def level_2(c: Converted) -> bool:
    plan = plan_again(c.manifest, c.source)
    assert isinstance(plan, Plan)
    return check_layers(ExpectedOutput.of(plan), LocalFolder(c.out)).status == "passed"


def tensor_mutations(c: Converted, rng: random.Random, name: str, count: int) -> Iterator[Mutation]:
    """Single bytes of each tensor, in what came from the source and in the padding, where there is some."""
    entries, start = c.entries(name)
    raw = (c.out / name).read_bytes()
    for tensor, e in entries.items():
        begin, end = (start + x for x in e["data_offsets"])
        sort = "sidecar" if name == SIDECAR else "padded" if tensor in c.manifest.padded else "unchanged"
        kind = "scale" if "scale" in tensor.rpartition(".")[2] else "weight"
        for _ in range(min(count, end - begin)):
            at = rng.randrange(begin, end)
            new = flipped(raw, at, rng)
            same_number = kind == "weight" and {raw[at], new[0]} == ZEROS
            yield Mutation(f"{sort} {kind}", name, at, new, sort == "sidecar" and not same_number)
        if tensor in c.manifest.padded:
            rows, row = e["shape"][0], (end - begin) // e["shape"][0]
            old = c.manifest.padded[tensor]
            real_row = row * (old[1] if len(old) > 1 else 1) // (e["shape"][1] if len(old) > 1 else 1)
            for _ in range(2):
                r, col = (rng.randrange(rows), rng.randrange(real_row, row)) if real_row < row else (rng.randrange(old[0], rows), 0)
                at = begin + r * row + col
                yield Mutation(f"{sort} {kind} padding", name, at, flipped(raw, at, rng))


def swap_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Rows, gate and up, scale words and columns of the kernel layout, exchanged."""
    entries, start = c.entries(SIDECAR)
    raw = (c.out / SIDECAR).read_bytes()

    def exchange(region: str, a: int, b: int, size: int) -> Iterator[Mutation]:
        low, high = min(a, b), max(a, b)
        data = bytearray(raw[low : high + size])
        data[:size], data[high - low :] = raw[high : high + size], raw[low : low + size]
        if data != raw[low : high + size]:
            yield Mutation(region, SIDECAR, low, bytes(data), changes_numbers=True)

    filled = {n: e for n, e in entries.items() if e["shape"] != [0]}  # all but the tripwire
    for tensor, e in filled.items():
        begin, (rows, cols) = start + e["data_offsets"][0], e["shape"]
        size = cols * (4 if e["dtype"] == "I32" else 1)
        part = tensor.rpartition(".")[2]
        for _ in range(6):
            a, b = rng.sample(range(min(rows, 320)), 2) if rows > 2 else (0, 1)
            yield from exchange(f"rows of {part}", begin + a * size, begin + b * size, size)
        if part == "shared_l1_weight":
            for _ in range(6):
                d = 16 * rng.randrange(160 // 8) + rng.randrange(8)
                yield from exchange("a gate row and its up row", begin + d * size, begin + (d + 8) * size, size)
            d = 16 * rng.randrange(160 // 8)
            yield from exchange("8 gate rows and their up rows", begin + d * size, begin + (d + 8) * size, 8 * size)
        if e["dtype"] == "I32":
            for _ in range(8):
                a, b = rng.sample(range(cols), 2)
                yield from exchange(f"words of {part}", begin + 4 * a, begin + 4 * b, 4)
            for _ in range(8):
                a, b = rng.sample(range(4), 2)
                word = begin + 4 * rng.randrange(cols)
                yield from exchange(f"bytes of a word of {part}", word + a, word + b, 1)


def main_swaps(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Whole tensors, and rows, of the standard layout exchanged: gate and up of one expert, two experts, two rows."""
    for name in sorted(p.name for p in c.out.glob("*.safetensors")):
        entries, start = c.entries(name)
        raw = (c.out / name).read_bytes()
        for tensor, e in entries.items():
            begin, end = (start + x for x in e["data_offsets"])
            for other in {tensor.replace(".w1.", ".w3."), tensor.replace("experts.0.", "experts.1.")} - {tensor}:
                if other in entries and entries[other]["shape"] == e["shape"]:
                    b, size = start + entries[other]["data_offsets"][0], end - begin
                    low, high = min(begin, b), max(begin, b)
                    swapped = raw[high : high + size] + raw[low + size : high] + raw[low : low + size]
                    if swapped != raw[low : high + size]:
                        yield Mutation("two tensors", name, low, swapped)
            if len(e["shape"]) == 2 and e["shape"][0] > 2 and tensor in c.manifest.padded:
                row = (end - begin) // e["shape"][0]
                a = rng.randrange(e["shape"][0] // 3)
                rows = raw[begin + a * row : begin + (a + 2) * row]
                if rows[:row] != rows[row:]:
                    yield Mutation("two rows", name, begin + a * row, rows[row:] + rows[:row])


def header_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    for name in [*sorted(p.name for p in c.out.glob("*.safetensors")), SIDECAR]:
        entries, start = c.entries(name)
        raw = (c.out / name).read_bytes()
        for at in (*range(8), *(rng.randrange(8, start) for _ in range(8))):
            yield Mutation("header", name, at, flipped(raw, at, rng))
        yield Mutation("truncated shard", name, 0, raw[:-1], whole=True)
        yield Mutation("longer shard", name, 0, raw + b"\0", whole=True)
        names = sorted(entries)
        pairs = [(a, b) for a in names for b in names if a < b and len(a) == len(b) and entries[a]["shape"] == entries[b]["shape"]]
        for a, b in rng.sample(pairs, min(2, len(pairs))):
            head = raw[8:start].decode()
            head = head.replace(json.dumps(a), "\0").replace(json.dumps(b), json.dumps(a)).replace("\0", json.dumps(b))
            yield Mutation("two names in a header", name, 8, head.encode())


def text_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    for path in sorted(p for p in c.out.rglob("*") if p.is_file() and p.suffix != ".safetensors"):
        name, raw = str(path.relative_to(c.out)), path.read_bytes()
        region = {"config.json": "config", "fse/manifest.json": "manifest"}.get(name, "index" if "index" in name else "other file")
        for _ in range({"manifest": 50, "index": 20, "config": 20}.get(region, 4)):
            at = rng.randrange(len(raw))
            yield Mutation(region, name, at, flipped(raw, at, rng))
        yield Mutation(region, name, 0, raw + b"\n", whole=True)
        yield Mutation(region, name, 0, None)
        if path.suffix == ".json":
            value = json.loads(raw)
            yield Mutation(region, name, 0, json.dumps(value, indent=1).encode(), whole=True)
            keys = [k for k, v in value.items() if isinstance(v, dict) and len(v) > 1]
            for key in keys[:2]:
                turned = {**value, key: dict(reversed(value[key].items()))}
                yield Mutation(region, name, 0, json.dumps(turned, indent=2, ensure_ascii=False).encode() + b"\n", whole=True)
    for name in ("fse/shared-00009.safetensors", "model-00099.safetensors", "stray.json", "sub/stray.bin"):
        yield Mutation("unlisted file", name, 0, b"{}", whole=True)


def mutations(c: Converted, rng: random.Random) -> list[Mutation]:
    found: list[Mutation] = []
    for name in sorted(p.name for p in c.out.glob("*.safetensors")):
        found += tensor_mutations(c, rng, name, 1)
    found += tensor_mutations(c, rng, SIDECAR, 16)
    found += [*swap_mutations(c, rng), *main_swaps(c, rng)]
    if "vision" in " ".join(c.source.checkpoint.tensors):  # once is enough for what has nothing to do with tensors
        found += [*header_mutations(c, rng), *text_mutations(c, rng)]
    return [*found, *sealed_mutations(c, rng)]


def test_every_mutation_is_caught(finished: Converted) -> None:
    assert level_1(finished)
    assert level_2(finished)
    assert alone(finished)
    todo = list(dict.fromkeys(m for seed in SEEDS for m in mutations(finished, random.Random(seed))))
    missed: list[tuple[int, Mutation]] = []
    numbers = 0
    for i, m in enumerate(todo):
        undo = apply(finished, m)
        try:
            if level_1(finished):
                missed.append((1, m))
            if i % 8 == 0 and not m.region.startswith("entry of fse") and alone(finished):
                missed.append((0, m))
            if m.changes_numbers:
                numbers += 1
                if level_2(finished):
                    missed.append((2, m))
        finally:
            undo()
    regions = Counter(m.region for m in todo)
    listed = ", ".join(f"{n} {region}" for region, n in sorted(regions.items()))
    print(f"{len(todo)} mutations, {numbers} of them change numbers, {len(missed)} missed: {listed}")
    assert not missed
    assert level_1(finished)
    assert len(todo) >= 300
    assert numbers >= 100
