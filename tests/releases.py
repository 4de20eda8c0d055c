"""Names that move when a release is added to the tables, for tests that say nothing of one release; oldest first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import TARGETS

T = TypeVar("T")
VLLM = [t.name for t in TARGETS if t.engine == "vLLM"]
SGLANG = [t.name for t in TARGETS if t.engine == "SGLang"]
AITER = [t.name for t in AITER_TARGETS if not (t.mega_moe or t.heterogeneous)]
MEGA = [t.name for t in AITER_TARGETS if t.mega_moe]
FHMOE = [t.name for t in AITER_TARGETS if t.heterogeneous]
SLOTS = [t.name for t in SLOT_TARGETS if t.engine == "SGLang"]
NEWEST = [t for t in TARGETS if t.engine == "vLLM"][-1]
"""The newest vLLM that is known."""
LAST = NEWEST.release.rpartition(".")[2]
"""Its last number, which ends a range in a report."""


def from_release(first: str, rows: Sequence[str]) -> str:
    """Return how reports name the releases from ``first`` on, when they answer alike."""
    last = rows[-1].rpartition(".")[2]
    return first if first == rows[-1] else f"{first}..{last}"


FROM_031 = from_release("vllm-0.31", VLLM)


def until_newest(answers: Sequence[T], targets: Collection[str] = AITER) -> tuple[T, ...]:
    """Give releases that were added since the last answer: they are taken to answer like the one before."""
    return (*answers, *[answers[-1]] * (len(targets) - len(answers)))
