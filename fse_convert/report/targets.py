"""The table of targets, as text and as JSON."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from fse_convert.report.console import boxed, console
from fse_convert.report.records import Record, Response, fill
from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.judge import Question
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import TARGETS


def print_targets() -> None:
    """Print the targets, those that convert takes first, and what each server must be started with."""
    out = console()
    table = boxed("target", "kernel contract", "width", "fuses shared")
    for t in TARGETS:
        pads = f", pads routed to {t.routed_pad}" if t.routed_pad else ""
        table.add_row(t.name, t.contract.name, f"multiple of {t.contract.width_multiple}{pads}", "yes" if t.fuses else "no")
    out.print(Question.NATIVE.heading, table, sep="\n")
    _print_needs({t.started_with: t.engine for t in TARGETS if not t.is_contract})
    for question, rows in ((Question.AITER, AITER_TARGETS), (Question.SLOTS, SLOT_TARGETS)):
        out.print(f"\n{question.heading}; inspect only", ", ".join(t.name for t in rows), sep="\n  ")
        _print_needs({t.started_with: t.name for t in rows})


def _print_needs(needs: dict[str, str]) -> None:
    for need, who in needs.items():
        console().print(f"  {who}: {need}")


class TargetsRecord(Response, kw_only=True):
    """What ``targets`` prints."""

    targets: list[TargetRecord]


class TargetRecord(Record, kw_only=True):
    """One row of the table of targets; those that convert takes have a kernel contract."""

    name: str
    question: Question
    engine: str
    release: str
    contract: str | UnsetType = UNSET
    width_multiple: int | UnsetType = UNSET
    fuses_shared: bool | UnsetType = UNSET
    pads_routed_to: int | UnsetType | None = UNSET
    needs: str
    source: str


def targets_record() -> TargetsRecord:
    """Describe the table of targets."""
    native = [
        fill(
            TargetRecord,
            t,
            question=Question.NATIVE,
            needs=t.started_with,
            contract=t.contract.name,
            width_multiple=t.contract.width_multiple,
            fuses_shared=t.fuses,
            pads_routed_to=t.routed_pad or None,
        )
        for t in TARGETS
    ]
    rocm = [fill(TargetRecord, t, question=Question.AITER, needs=t.started_with) for t in AITER_TARGETS]
    slots = [fill(TargetRecord, t, question=Question.SLOTS, needs=t.started_with) for t in SLOT_TARGETS]
    return TargetsRecord(targets=[*native, *rocm, *slots])
