"""The forms in which an inspection is printed, by name."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from enum import Enum

from fse_convert.errors import ExitCode
from fse_convert.inspection import Inspection
from fse_convert.report import common

WIDTH = 100
"""Columns where there is no terminal."""


class Format(str, Enum):
    """What ``--format`` takes."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    GITHUB = "github"


def render(found: Inspection, form: Format, names: Sequence[str], required: Sequence[str], code: ExitCode) -> str:
    """Render an inspection; ``names`` are the targets that the user asked for, ``required`` those that must fuse."""
    if form is Format.JSON:
        from fse_convert.report.inspection.json import inspection_json

        return common.dump(inspection_json(found, required, code))
    if form is Format.TEXT:
        from fse_convert.report.inspection.text import text

        columns = shutil.get_terminal_size((WIDTH, 40)).columns if sys.stdout.isatty() else WIDTH
        return text(found, names, width=columns, unicode=(sys.stdout.encoding or "").lower().replace("-", "") == "utf8")
    from fse_convert.report.inspection.markdown import markdown, workflow_commands

    page = markdown(found, names, required).rstrip("\n")
    return "\n".join([*workflow_commands(found, required), page]) if form is Format.GITHUB else page


def colored() -> bool:
    """Whether stdout is a terminal that wants colours; https://no-color.org."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def complaints(found: Inspection, required: Sequence[str]) -> list[str]:
    """What goes to stderr: everything that is broken, and the required targets that do not fuse, with every reason."""
    lines = [line for problem in found.problems for line in common.problem_lines(problem)]
    if required:
        lines += [line for problem in found.contradictions for line in common.problem_lines(problem)]
    for answer in found.failing(required):
        reasons = "; ".join(f"{r.code}: {r.message}" for r in answer.objections)
        lines.append(f"error[not-fused]: {answer.name} does not fuse every layer: {reasons}")
    return lines
