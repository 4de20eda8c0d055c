"""Every stable code: what it means, and the way out. The data is `codes.txt`, read when it is asked for.

A block of `codes.txt` is three lines: ``code: kinds``, the meaning, the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files


class Kind(str, Enum):
    """Where a code is shown; the value is the word for it."""

    ERROR = "error"
    CONFLICT = "conflict"
    NOTE = "note"
    REASON = "reason"
    MISMATCH = "mismatch"
    REFUSAL = "refusal"

    @property
    def heading(self) -> str:
        """The kind in a few words."""
        return {
            Kind.ERROR: "Errors: a command stops",
            Kind.CONFLICT: "Conflicts: the configs contradict the tensors, or each other",
            Kind.NOTE: "Notes: nothing is wrong, but worth knowing",
            Kind.REASON: "Reasons: why a server does not fuse a layer",
            Kind.MISMATCH: "Mismatches: what a proof finds",
            Kind.REFUSAL: "Refusals: the plugin inside vLLM or SGLang does not serve an output",
        }[self]


@dataclass(frozen=True, slots=True)
class Code:
    """One code: the kinds in which it occurs, the most frequent first, what it means, and the way out."""

    name: str
    kinds: tuple[Kind, ...]
    meaning: str
    way_out: str


@cache
def all_codes() -> Mapping[str, Code]:
    """Read every code, by name, in the order in which a reader meets them."""
    blocks = (block.splitlines() for block in files("fse_convert").joinpath("codes.txt").read_text("utf-8").split("\n\n"))
    parsed = ((*head.split(": "), meaning, way_out) for head, meaning, way_out in blocks)
    return {
        name: Code(name=name, kinds=tuple(map(Kind, kinds.split(", "))), meaning=meaning, way_out=way_out)
        for name, kinds, meaning, way_out in parsed
    }
