"""Mutations of outputs whose format changed: every one must fail level 1, whether an editor makes the digests again or not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import BITS
from fse_convert.plan.source import open_source
from fse_convert.testing.patch import ShardPatch
from fse_convert.verification.manifest import OutputManifest
from tests.verification.mutating import SEEDS, Converted, Mutation, alone, apply, flipped, level_1, sealed_mutations
from tests.verification.recipes import RECIPES, Recipe

Edit = Callable[[ShardPatch], object]
LABELS = {"F8_E4M3": "I8", "I8": "U8", "U8": "I8", "F8_E8M0": "U8", "F32": "I32", "BF16": "F16", "I64": "U64"}
"""Another dtype of the same width."""
LEAST = 300
"""Mutations of each recipe: there are more than 3,000 in all."""


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def finished(request: pytest.FixtureRequest, changed: Callable[[Recipe], tuple[Path, Path]]) -> Converted:
    root, out = changed(request.param)
    return Converted(open_source(LocalFolder(root)), out, OutputManifest.read(LocalFolder(out)).content)


def kind_of(c: Converted, name: str, entry: dict[str, Any]) -> str:
    if name.startswith("original."):
        return "original"
    source = c.source.checkpoint.tensors.get(name)
    if source is None and name in (c.manifest.renamed or {}):
        return "renamed"
    if source is None or (BITS[source.dtype], list(source.shape)) != (BITS[entry["dtype"]], entry["shape"]):
        return "recoded"
    return "unchanged" if source.dtype == entry["dtype"] else "relabelled"


def byte_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Single bits of every tensor, more of those that are in another format, and zeros of the other sign."""
    for name in shards(c):
        entries, start = c.entries(name)
        raw = (c.out / name).read_bytes()
        for tensor, e in entries.items():
            begin, end = (start + x for x in e["data_offsets"])
            kind = kind_of(c, tensor, e)
            part = "scale" if "scale" in tensor.rpartition(".")[2] else "weight"
            for _ in range({"recoded": 4, "original": 2}.get(kind, 1)):
                at = rng.randrange(begin, end)
                yield Mutation(f"{kind} {part}", name, at, flipped(raw, at, rng))
            zero = raw.find(b"\0", begin, end) if kind == "recoded" and part == "weight" else -1
            if zero >= 0:
                yield Mutation("sign of a zero", name, zero, b"\x80")


def same_values(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Tiles with the same values under another scale: E4M3 codes half as large, their F32 scale twice."""
    for name in shards(c):
        entries, start = c.entries(name)
        raw = (c.out / name).read_bytes()
        for tensor, e in entries.items():
            scale = entries.get(f"{tensor.rpartition('.')[0]}.scale")
            if e["dtype"] != "F8_E4M3" or scale is None or scale["dtype"] != "F32" or kind_of(c, tensor, e) != "recoded":
                continue
            (n, k), (rows, columns), whole = e["shape"], scale["shape"], bytearray(raw)
            b = next(b for b in (32, 128) if (-(-n // b), -(-k // b)) == (rows, columns))
            i, j = rng.randrange(rows), rng.randrange(columns)
            at = start + e["data_offsets"][0]
            for r in range(i * b, min(n, i * b + b)):
                for x in range(at + r * k + j * b, at + r * k + min(k, j * b + b)):
                    whole[x] -= 8 if whole[x] & 0x78 else 0
            x = start + scale["data_offsets"][0] + 4 * (i * columns + j)
            bits = int.from_bytes(raw[x : x + 4], "little") + (1 << 23)
            whole[x : x + 4] = bits.to_bytes(4, "little")
            yield Mutation("a tile under twice the scale", name, 0, bytes(whole), whole=True)


def swaps(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    """Two rows of a tensor, and two tensors of a shape, exchanged."""
    for name in shards(c):
        entries, start = c.entries(name)
        raw = (c.out / name).read_bytes()
        for tensor, e in entries.items():
            if kind_of(c, tensor, e) not in ("recoded", "original", "renamed", "relabelled"):
                continue
            begin, end = (start + x for x in e["data_offsets"])
            size = (end - begin) // e["shape"][0]
            a = begin + rng.randrange(max(1, e["shape"][0] - 1)) * size
            yield from exchanged("two rows", name, raw, (a, a + size), size if a + 2 * size <= end else 0)
            others = [o for n, o in entries.items() if n > tensor and (o["dtype"], o["shape"]) == (e["dtype"], e["shape"])]
            if others:
                other = start + rng.choice(others)["data_offsets"][0]
                yield from exchanged("two tensors", name, raw, (begin, other), end - begin)


def exchanged(region: str, name: str, raw: bytes, places: tuple[int, int], size: int) -> Iterator[Mutation]:
    low, high = sorted(places)
    swapped = raw[high : high + size] + raw[low + size : high] + raw[low : low + size]
    if size and swapped != raw[low : high + size]:
        yield Mutation(region, name, low, swapped)


def header_mutations(c: Converted, rng: random.Random, scratch: Path) -> Iterator[Mutation]:
    """Names, dtypes, order and metadata of headers, the payload as it is; single bits of the header."""
    for name in shards(c):
        raw = (c.out / name).read_bytes()
        entries, start = c.entries(name)

        def edited(region: str, edit: Edit, name: str = name, raw: bytes = raw) -> Iterator[Mutation]:
            scratch.write_bytes(raw)
            with ShardPatch(scratch) as shard:
                edit(shard)
            if scratch.read_bytes() != raw:
                yield Mutation(region, name, 0, scratch.read_bytes(), whole=True)

        for at in (*range(8), *(rng.randrange(8, start) for _ in range(4))):
            yield Mutation("header", name, at, flipped(raw, at, rng))
        touched = [t for t, e in entries.items() if kind_of(c, t, e) != "unchanged"]
        for tensor in rng.sample(touched, min(len(touched), 12)):
            yield from edited("a label", lambda s, t=tensor: retyped(s, t, LABELS[s.tensors[t].dtype]))
            yield from edited("a name", lambda s, t=tensor: renamed(s, t, other_name(c, t)))
            yield from edited("a tensor left out", lambda s, t=tensor: s.tensors.pop(t))
            yield from edited("a tensor at the end", lambda s, t=tensor: s.tensors.update({t: s.tensors.pop(t)}))
            yield from edited("a tensor twice", lambda s, t=tensor: s.tensors.update({f"{t}.copy": s.tensors[t]}))
        if touched:
            yield from edited("metadata", lambda s: setattr(s, "metadata", None))
            yield from edited("metadata", lambda s: setattr(s, "metadata", {**(s.metadata or {}), "more": "1"}))
            yield Mutation("truncated shard", name, 0, raw[:-1], whole=True)
            yield Mutation("longer shard", name, 0, raw + b"\0", whole=True)


def retyped(shard: ShardPatch, tensor: str, dtype: str) -> None:
    shard.tensors[tensor] = shard.tensors[tensor]._replace(dtype=dtype)


def renamed(shard: ShardPatch, old: str, new: str) -> None:
    shard.tensors = {new if name == old else name: held for name, held in shard.tensors.items()}


def other_name(c: Converted, name: str) -> str:
    return (c.manifest.renamed or {}).get(name) or name.removeprefix("original.") + (".kept" if "original" not in name else "")


def file_mutations(c: Converted) -> Iterator[Mutation]:
    """Files that keep originals, left out, added, under other names; an index of ``fse/`` where none belongs."""
    kept = sorted(str(p.relative_to(c.out)) for p in c.out.glob("fse/original-*"))
    for name in kept:
        yield Mutation("originals", name, 0, None)
        yield Mutation("originals", name.replace("original-", "original-of-"), 0, (c.out / name).read_bytes(), whole=True)
    some = (c.out / (kept[0] if kept else shards(c)[0])).read_bytes()
    for name in ("fse/original-stray.safetensors", "fse/shared-00001-of-00001.safetensors", "original-stray.safetensors"):
        yield Mutation("stray file", name, 0, some, whole=True)
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    yield Mutation("index of fse", "fse/model.safetensors.index.json", 0, encode_json(index), whole=True)


def text_mutations(c: Converted, rng: random.Random) -> Iterator[Mutation]:
    for name in ("config.json", "model.safetensors.index.json", "fse/manifest.json"):
        raw = (c.out / name).read_bytes()
        for _ in range(12):
            at = rng.randrange(len(raw))
            yield Mutation(f"bit of {name}", name, at, flipped(raw, at, rng))
        yield Mutation(f"all of {name}", name, 0, None)


def shards(c: Converted) -> list[str]:
    return sorted(str(p.relative_to(c.out)) for p in c.out.rglob("*.safetensors"))


def mutations(c: Converted, rng: random.Random, scratch: Path) -> list[Mutation]:
    return [
        *byte_mutations(c, rng),
        *islice(same_values(c, rng), 3),
        *swaps(c, rng),
        *header_mutations(c, rng, scratch),
        *file_mutations(c),
        *text_mutations(c, rng),
        *sealed_mutations(c, rng),
    ]


@pytest.mark.slow
def test_every_mutation_is_caught(finished: Converted, tmp_path: Path) -> None:
    c = finished
    assert level_1(c)
    assert alone(c)
    todo = list(dict.fromkeys(m for seed in SEEDS for m in mutations(c, random.Random(seed), tmp_path / "scratch")))
    missed: list[tuple[str, Mutation]] = []
    for i, m in enumerate(todo):
        undo = apply(c, m)
        try:
            if level_1(c):
                missed.append(("with the source, digests aside", m))
            if i % 8 == 0 and not m.region.startswith("entry of fse") and alone(c):
                missed.append(("alone", m))
        finally:
            undo()
    regions = Counter(m.region for m in todo)
    listed = ", ".join(f"{n} {region}" for region, n in sorted(regions.items()))
    print(f"{len(todo)} mutations, {len(missed)} missed: {listed}")
    assert not [(how, m.region, m.file, m.what or m.offset) for how, m in missed]
    assert level_1(c)
    assert len(todo) >= LEAST
