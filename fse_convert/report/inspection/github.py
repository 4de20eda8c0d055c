"""An inspection as the annotations that GitHub Actions shows beside a run."""

from __future__ import annotations

from fse_convert.report.inspection.view import Complaint, View, told


def workflow_commands(view: View) -> list[str]:
    """Return workflow commands: what is complained of, each with its hint."""
    return [_command(c) for c in view.complaints]


def _command(c: Complaint) -> str:
    title, message = (c.said, f"{c.problem.code}: {told(c.problem)}") if c.said else (c.problem.code, told(c.problem))
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{'error' if c.error else 'warning'} title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    """Escape what GitHub would read as the syntax of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
