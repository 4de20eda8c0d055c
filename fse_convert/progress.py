"""Progress of any operation, as one kind of event: convert, verify and restore report to the same observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Advance = Callable[[int], None]
"""Called with the bytes just moved of one file, by whatever moves them."""


class Phase(str, Enum):
    """What a run is at."""

    WRITE = "write"
    READ = "read back"
    NUMERICS = "numerics"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Work:
    """What a phase has to do: how many shards, files or layers, and their bytes; 0 where that is not known."""

    phase: Phase
    noun: str
    count: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes moved of one file, or a file or layer that is finished and how it came to be.

    ``kept``: the bytes were there already, from an earlier run.
    """

    file: str
    bytes: int = 0
    done: bool = False
    how: str = ""
    phase: Phase = Phase.WRITE
    kept: bool = False


Observer = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""
