"""What `targets`, `explain` and `doctor` list, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType, field

from fse_convert.codes import Code, Kind, all_codes
from fse_convert.doctor import Finding
from fse_convert.report.console import console, gathered, grid, say, wrapped
from fse_convert.report.records import Record, Response, fill
from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.judge import AnyTarget, Question
from fse_convert.servers.load_padding import ROUTED_PAD
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import TARGETS

OTHERS = ((Question.AITER, AITER_TARGETS), (Question.SLOTS, SLOT_TARGETS))
"""Those without a kernel contract: for them formats change, not widths."""


def print_targets() -> None:
    """Print the targets, those with a kernel contract first, and what each server must be started with."""
    native = []
    for t in TARGETS:
        pads = f", pads routed to {ROUTED_PAD[t.name]}" if t.name in ROUTED_PAD else ""
        native.append((t.name, t.contract.name, f"multiple of {t.contract.width_multiple}{pads}", "yes" if t.fuses else "no"))
    table = grid(native, console().width, flexible=(2,), head=("target", "kernel contract", "width", "fuses shared"))
    say([Question.NATIVE.heading, table, *_needs(t for t in TARGETS if not t.is_contract)])
    for question, rows in OTHERS:
        say(["", question.heading, *_needs(rows)])


def _needs(rows: Iterable[AnyTarget]) -> list[str]:
    """Return a line for all targets that are started alike."""
    return [f"  {', '.join(names)}: {need}" for need, names in gathered((t.started_with, t.name) for t in rows).items()]


class TargetsRecord(Response, kw_only=True):
    """What ``targets`` prints."""

    targets: list[TargetRecord]


class TargetRecord(Record, kw_only=True):
    """One row of the table of targets; native ones have a kernel contract."""

    name: str
    question: Question
    engine: str
    release: str
    contract: str | UnsetType = UNSET
    width_multiple: int | UnsetType = UNSET
    fuses: bool | UnsetType = field(name="fuses_shared", default=UNSET)
    pads_routed_to: int | UnsetType | None = UNSET
    started_with: str = field(name="needs")
    source: str


def targets_record() -> TargetsRecord:
    """Describe the table of targets."""
    native = [
        fill(TargetRecord, t, t.contract, question=Question.NATIVE, contract=t.contract.name, pads_routed_to=ROUTED_PAD.get(t.name))
        for t in TARGETS
    ]
    others = [fill(TargetRecord, t, question=question) for question, rows in OTHERS for t in rows]
    return TargetsRecord(targets=[*native, *others])


def print_codes(codes: Sequence[Code]) -> None:
    """Print the meaning of codes and the way out, one after the other."""
    shown = (f"{c.name}: {', '.join(k.value for k in c.kinds)}\n{c.meaning}\n{c.way_out}" for c in codes)
    say(["\n\n".join(shown)])


def print_names() -> None:
    """Print the names of all codes, by the kind in which they are most frequent."""
    for kind in Kind:
        names = [c.name for c in all_codes().values() if c.kinds[0] is kind]
        say([f"{kind.heading} ({len(names)})", wrapped(", ".join(names), console().width, indent=2)])


class CodesRecord(Response, kw_only=True):
    """What ``explain`` prints."""

    codes: Sequence[Code]


class DoctorRecord(Response, kw_only=True):
    """What ``doctor`` prints."""

    findings: Sequence[Finding]


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a row for each thing that was looked for."""
    rows = [(f.name, f.found or "no", f.meaning) for f in findings]
    say([grid(rows, console().width, flexible=(1, 2), head=("what", "here", "what that means"))])
