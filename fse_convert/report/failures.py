"""A command that failed before it had an answer, in the form that was asked of the answer: a gate must not be mute."""

from __future__ import annotations

from collections.abc import Sequence

from fse_convert.errors import Problem, printable
from fse_convert.report.inspection.pages import annotation, junit
from fse_convert.report.inspection.view import Complaint
from fse_convert.report.records import Failure, dump
from fse_convert.report.templates import template


def failure(form: str, problems: Sequence[Problem], exit_code: int) -> str:
    """Return what is wrong as ``json``, ``junit``, ``markdown``, or ``github``: annotations, then Markdown."""
    if form == "json":
        return dump(Failure(ok=False, exit_code=exit_code, problems=problems))
    if form == "junit":
        return junit(problems[0].where, problems)
    annotations = [annotation(Complaint(error=True, said="", problem=p)) for p in problems if form == "github"]
    return printable("\n".join([*annotations, template("failure.md.j2").render(problems=problems).rstrip("\n")]))
