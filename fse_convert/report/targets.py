"""The table of targets."""

from __future__ import annotations

from typing import Any

from fse_convert.report.common import SCHEMA_VERSION, console
from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.judge import Question
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import TARGETS


def targets_json() -> dict[str, Any]:
    """The table of targets as JSON."""
    native = [
        {
            "name": t.name, "question": Question.NATIVE.value, "engine": t.engine, "release": t.release,
            "contract": t.contract.name, "width_multiple": t.contract.width_multiple,
            "fuses_shared": t.fuses, "pads_routed_to": t.routed_pad or None, "needs": t.started_with, "source": t.source,
        }
        for t in TARGETS
    ]  # fmt: skip
    rocm = [
        {
            "name": t.name, "question": Question.AITER.value, "engine": t.engine, "release": t.release,
            "needs": t.started_with, "source": t.source,
        }
        for t in AITER_TARGETS
    ]  # fmt: skip
    slots = [
        {
            "name": t.name, "question": Question.SLOTS.value, "engine": t.engine, "release": t.release,
            "needs": t.started_with, "source": t.source,
        }
        for t in SLOT_TARGETS
    ]  # fmt: skip
    return {"schema_version": SCHEMA_VERSION, "ok": True, "targets": [*native, *rocm, *slots]}


def print_targets() -> None:
    """Print the table of targets, those that convert takes first, and what each server must be started with."""
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("target", "kernel contract", "width", "fuses shared"):
        table.add_column(column)
    for t in TARGETS:
        pads = f", pads routed to {t.routed_pad}" if t.routed_pad else ""
        table.add_row(t.name, t.contract.name, f"% {t.contract.width_multiple}{pads}", "yes" if t.fuses else "no")
    out.print(Question.NATIVE.heading, table, sep="\n")
    _print_needs({t.started_with: t.engine for t in TARGETS if not t.is_contract})
    for question, rows in ((Question.AITER, AITER_TARGETS), (Question.SLOTS, SLOT_TARGETS)):
        out.print(f"\n{question.heading}; inspect only", ", ".join(t.name for t in rows), sep="\n  ")
        _print_needs({t.started_with: t.name for t in rows})


def _print_needs(needs: dict[str, str]) -> None:
    for need, who in needs.items():
        console().print(f"  {who}: {need}")
