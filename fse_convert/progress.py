"""Progress of any operation, as one kind of event: convert, verify and restore report to the same observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Advance = Callable[[int], None]
"""Called with the bytes just moved of one file, by whatever moves them."""


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes moved of one file, or a file or layer that is finished and how it came to be."""

    file: str
    bytes: int = 0
    done: bool = False
    how: str = ""


Observer = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""
