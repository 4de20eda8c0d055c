"""What this machine has, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from fse_convert.doctor import Finding
from fse_convert.report.console import console, grid, say
from fse_convert.report.records import Response


class DoctorRecord(Response, kw_only=True):
    """What ``doctor`` prints."""

    findings: Sequence[Finding]


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a row for each thing that was looked for."""
    rows = [(f.name, f.found or "no", f.meaning) for f in findings]
    say([grid(rows, console().width, flexible=(1, 2), head=("what", "here", "what that means"))])
