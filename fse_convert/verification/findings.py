"""What a proof finds: mismatches, how JSON and bytes differ, and what was looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.editable_files import is_editable
from fse_convert.errors import printable, some
from fse_convert.verification.sample import Sample

if TYPE_CHECKING:
    from fse_convert.sidecar.manifest import FileDigest

TOKENS = 16
SEED = 0
"""Of the hidden states that levels 2 and 3 compute with."""
BOUND = "bit-equal, and relative L2 <= hypot(2^-4, noise / norm) + 2^-9 against the exact expert"
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


LIMIT = 100
"""Mismatches that are listed; all are counted."""
ABSENT = "nothing"
SHOWN = 80
"""Characters of a JSON value that a message shows."""


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
    """Mismatches, the first `LIMIT` of them kept.

    ``strict``: whether those of files that are edited once an output is published count too; else ``edited`` has their names.
    """

    listed: list[Mismatch] = field(default_factory=list)
    count: int = 0
    strict: bool = True
    edited: set[str] = field(default_factory=set)

    def add(self, *mismatches: Mismatch) -> None:
        """Record mismatches."""
        counted = []
        for m in mismatches:
            if not self.strict and is_editable(m.file):
                self.edited.add(m.file)
            else:
                counted.append(m)
        self.count += len(counted)
        self.listed += counted[: max(0, LIMIT - len(self.listed))]


@dataclass(slots=True)
class Coverage:
    """What was compared: tensors by sort (`Comparison.kinds`), their bytes and those of other files, files."""

    tensors: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    files: int = 0

    @property
    def compared(self) -> int:
        """Tensors that were compared, all bytes of each."""
        return sum(self.tensors.values())


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Which MoE layers of the source a level is about.

    ``of_layers``: those that must have the kernel layout, out of all ``moe_layers``. ``left_out``: (name, reason) of the others.
    ``sample``: how many of ``of_layers`` were asked for; None for all.
    """

    of_layers: int
    moe_layers: int
    left_out: tuple[tuple[str, str], ...] = ()
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class StorageResult:
    """Level 1's answer.

    ``against``: ``source`` or, without one, the output's own ``manifest``. ``sample``: how many tensors were asked for, None
    for all of the ``of_tensors``. ``tensors``: XXH3-128 of every tensor read, ``files``: size and SHA-256 of every file read
    as a whole; complete unless a sample was taken. ``digests``: whether the manifest's own were compared. ``layers``: None
    without a source, and where nothing was compared. ``remarks``: what is not a mismatch and should be known.
    ``kernel_in_manifest``: what the manifest says of the kernel level, if it says passed.
    """

    against: str
    findings: Findings
    sample: Sample | None = None
    coverage: Coverage = field(default_factory=Coverage)
    tensors: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileDigest] = field(default_factory=dict)
    of_tensors: int = 0
    digests: bool = False
    layers: LayerCoverage | None = None
    remarks: tuple[str, ...] = ()
    kernel_in_manifest: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, and which files differ and may."""
        edited = some(sorted(self.findings.edited))
        also = f"added, removed or edited since the conversion, and read by no server: {edited}"
        return (*self.remarks, also) if edited else self.remarks

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


@dataclass(frozen=True, slots=True)
class Like:
    """A JSON value of which only some property is known; ``shown``: what a message says of it."""

    shown: Any
    fits: Callable[[Any], bool]


def difference(expected: Any, actual: Any, path: str = "") -> tuple[str, str, str] | None:
    """Return the first place where two JSON values differ, as (path, expected, actual); another order of keys is a difference.

    ``expected`` may hold `Like`.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in dict.fromkeys([*expected, *actual]):
            at = printable(f"{path}.{key}" if path else str(key))
            if key not in actual or key not in expected:
                return at, _value(expected, key), _value(actual, key)
            inner = difference(expected[key], actual[key], at)
            if inner:
                return inner
        if list(expected) != list(actual):
            return path, f"keys in the order {short(list(expected))}", f"in the order {short(list(actual))}"
        return None
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]"))), None)
    if expected.fits(actual) if isinstance(expected, Like) else expected == actual and type(expected) is type(actual):
        return None
    return path, short(expected), short(actual)


def short(value: Any) -> str:
    """Return a value as JSON, cut to a line."""
    text = printable(json.dumps(value, ensure_ascii=False, default=lambda like: like.shown))
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


def _value(value: dict[str, Any], key: str) -> str:
    return short(value[key]) if key in value else ABSENT


def json_mismatches(code: str, name: str, expected: Any, actual: Any, path: str = "") -> list[Mismatch]:
    """Compare two JSON values; the mismatch names the first key that differs."""
    unlike = difference(expected, actual, path)
    return [Mismatch(code, name, expected=f"{unlike[0]} {unlike[1]}".strip(), found=unlike[2])] if unlike else []


def text_mismatches(name: str, expected: bytes, actual: bytes) -> list[Mismatch]:
    """Compare a JSON file with the bytes that it must have; the mismatch names the key where there is one."""
    if expected == actual:
        return []
    try:
        unlike = json_mismatches("text", name, json.loads(expected), json.loads(actual.decode("utf-8")))
    except (ValueError, RecursionError) as e:
        return [Mismatch("text", name, expected="JSON", found=f"no JSON: {e}")]
    return unlike or [bytes_mismatch("text", name, expected, actual)]


def bytes_mismatch(code: str, name: str, expected: bytes, actual: bytes) -> Mismatch:
    """Describe the first difference of two byte strings that do differ."""
    pairs = zip(expected, actual, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    want, got = (hexadecimal(raw[at : at + 1]) if at < len(raw) else "the end of the file" for raw in (expected, actual))
    return Mismatch(code, name, offset=at, expected=want, found=got)


def hexadecimal(data: Iterable[int]) -> str:
    """Return bytes as ``0x7F``."""
    return "0x" + bytes(data).hex().upper()
