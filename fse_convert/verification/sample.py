"""Which tensors and layers a proof looks at when it is asked for a number of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fse_convert.checkpoint.encoding import sha256


@dataclass(frozen=True, slots=True)
class Sample:
    """Look at ``count`` tensors, or layers, instead of all, chosen by ``seed``: another one every time unless it is given."""

    count: int
    seed: int = field(default_factory=lambda: secrets.randbelow(1 << 32))


COMPUTED = ("kernel", "recoded")
"""Kinds of tensors that a conversion computes."""


def choose(sample: Sample, kinds: Mapping[str, list[str]]) -> set[str]:
    """Choose names, in turn from each kind, by a hash of name and seed: the same on every machine.

    What a conversion computes comes first: the kernel layout, and what it coded again. The seed must not follow from the output,
    or whoever damages one knows what a sample leaves out.
    """

    def rank(name: str) -> str:
        return sha256(f"{sample.seed} {name}".encode("utf-8", "surrogatepass"))

    queues = [sorted(kinds[kind], key=rank) for kind in sorted(kinds, key=lambda kind: kind not in COMPUTED)]
    turns = (q[i] for i in range(max(map(len, queues), default=0)) for q in queues if i < len(q))
    return {name for name, _ in zip(turns, range(sample.count), strict=False)}
