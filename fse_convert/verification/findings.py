"""What a proof finds: mismatches, and what was looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fse_convert.verification.demanded import Demand

TOKENS = 16
SEED = 0
"""Of the hidden states that levels 2 and 3 compute with."""
BOUND = "bit-equal, and relative L2 <= hypot(2^-4, noise / norm) + 2^-9 against the exact expert"
NOT_ASKED: Mapping[str, str] = {"status": "not-run", "reason": "not asked for"}
NO_LAYERS = "no layer has the kernel layout"
NO_KERNEL = "needs SM100 and a DeepGEMM with fused shared experts"
KERNEL_RAISED = "DeepGEMM raised an error"
KERNEL_REASONS = (NO_KERNEL, KERNEL_RAISED)
"""Why the kernel level did not run, as manifests record it: the same text on every machine with the same cause."""


class Level(str, Enum):
    """How far a proof goes; each level includes those before it."""

    NONE = "none"
    STORAGE = "storage"
    NUMERICS = "numerics"
    KERNEL = "kernel"

    @property
    def rank(self) -> int:
        """Position, from 0 for none."""
        return list(Level).index(self)


Progress = Callable[[str, int, bool], None]
"""Called with a file's name, the bytes just read of it, and whether it is finished."""


def ignore(_file: str, _size: int, _done: bool) -> None:
    """Progress that nobody watches."""


LIMIT = 100
"""Mismatches that are listed; all are counted."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing that is not as it must be.

    ``code`` is kebab-case and stable. ``offset``: of the first wrong byte in the file; ``count``: how many bytes of this
    tensor or file are wrong (0: not a matter of bytes). ``expected`` and ``found`` are texts, bytes as ``0x..``.
    """

    code: str
    file: str
    tensor: str = ""
    offset: int | None = None
    expected: str = ""
    found: str = ""
    count: int = 0

    def __str__(self) -> str:
        where = self.file + (f", byte {self.offset:,}" if self.offset is not None else "")
        subject = f"{self.tensor} ({where})" if self.tensor else where
        more = f" ({self.count:,} bytes differ)" if self.count > 1 else ""
        return printable(f"{subject}: expected {self.expected}, found {self.found}{more}")


@dataclass(slots=True)
class Findings:
    """Mismatches, the first `LIMIT` of them kept."""

    listed: list[Mismatch] = field(default_factory=list)
    count: int = 0

    def add(self, *mismatches: Mismatch) -> None:
        """Record mismatches."""
        self.count += len(mismatches)
        self.listed += mismatches[: LIMIT - len(self.listed)] if len(self.listed) < LIMIT else ()

    def extend(self, other: Findings) -> None:
        """Take over what another part found."""
        self.listed += other.listed[: max(0, LIMIT - len(self.listed))]
        self.count += other.count


@dataclass(slots=True)
class Coverage:
    """What was compared: tensors by sort (``unchanged``, ``padded``, ``kernel``), their bytes and those of other files, files."""

    tensors: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    files: int = 0

    @property
    def compared(self) -> int:
        """Tensors that were compared, all bytes of each."""
        return sum(self.tensors.values())


@dataclass(frozen=True, slots=True)
class StorageResult:
    """Level 1's answer.

    ``against``: ``source`` or, without one, the output's own ``manifest``. ``sample``: how many tensors were asked for,
    None for all of the ``of_tensors``; ``seed`` chose them. ``tensors``: XXH3-128 of every tensor read, ``files``: size
    and SHA-256 of every file read as a whole; complete unless a sample was taken. ``digests``: whether the manifest's own
    were compared. ``demand``: what the source demands, None without one or where nothing was compared. ``notes``: what is
    no mismatch and should be known. ``kernel_stated``: what the manifest says of the kernel level, if it says passed.
    """

    against: str
    findings: Findings
    coverage: Coverage
    sample: int | None
    tensors: dict[str, str]
    files: dict[str, tuple[int, str]]
    of_tensors: int = 0
    digests: bool = False
    seed: int = 0
    demand: Demand | None = None
    notes: tuple[str, ...] = ()
    kernel_stated: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything that was looked at is as it must be."""
        return not self.findings.count

    @property
    def proved(self) -> bool:
        """Whether there was anything to compare the bytes with: a source, or digests."""
        return self.against == "source" or self.digests

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not-proved``."""
        return "failed" if not self.passed else "passed" if self.proved else "not-proved"

    @property
    def reached(self) -> bool:
        """Whether tensors were looked at: not when the manifest is damaged, or names another source."""
        return self.of_tensors > 0


def printable(text: str) -> str:
    """A text without half characters, which JSON and file names can hold and no terminal can print."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def hexadecimal(data: Iterable[int]) -> str:
    """Bytes as ``0x7F``."""
    return "0x" + bytes(data).hex().upper()
