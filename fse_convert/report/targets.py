"""The table of targets."""

from __future__ import annotations

from typing import Any

from fse_convert.fusion.targets import TARGETS
from fse_convert.report.common import SCHEMA_VERSION, console


def targets_json() -> dict[str, Any]:
    """The table of targets as JSON."""
    rows = [
        {
            "name": t.name, "engine": t.engine, "release": t.release,
            "contract": t.contract.name, "width_multiple": t.contract.width_multiple,
            "fuses_shared": t.fuses, "pads_routed_to": t.routed_pad or None, "needs": t.needs, "source": t.source,
        }
        for t in TARGETS
    ]  # fmt: skip
    return {"schema_version": SCHEMA_VERSION, "ok": True, "targets": rows}


def print_targets() -> None:
    """Print the table of targets."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("target", "kernel contract", "width", "fuses shared", "needs"):
        table.add_column(column)
    for t in TARGETS:
        pads = f", pads routed to {t.routed_pad}" if t.routed_pad else ""
        table.add_row(t.name, t.contract.name, f"% {t.contract.width_multiple}{pads}", "yes" if t.fuses else "no", t.needs)
    console().print(table)
