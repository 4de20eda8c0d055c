"""An inspection as GitHub Markdown and annotations, and as one HTML file that needs nothing else, by the templates beside this."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fse_convert import __version__
from fse_convert.errors import Problem, UsageError, printable
from fse_convert.report.inspection.view import LOOKS, Complaint, Row, View, told
from fse_convert.report.records import Failure, dump
from fse_convert.report.templates import template

NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, escaped or not; names of files can."""


def markdown(view: View) -> str:
    """Return an inspection as Markdown; what would break a table or start a tag is escaped."""
    return template("inspection/markdown.md.j2").render(view=view)


def annotation(c: Complaint) -> str:
    """Return what makes GitHub Actions show a complaint beside a run."""
    title, message = (c.said, f"{c.problem.code}: {told(c.problem)}") if c.said else (c.problem.code, told(c.problem))
    title = _argument(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{'error' if c.error else 'warning'} title={title}::{_argument(message)}"


def _argument(text: str) -> str:
    """Escape what GitHub would read as the syntax of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def junit(label: str, problems: Sequence[Problem], required: Sequence[Row] = (), remarks: Sequence[Problem] = ()) -> str:
    """Return a JUnit report: a case for the checkpoint ``label``, an error if it has problems, and one for each required target.

    ``remarks`` on the checkpoint, and notes on a target that passes, are the output of their cases.
    """
    text = template("inspection/junit.xml.j2").render(label=label, problems=problems, rows=required, remarks=remarks)
    return NOT_XML.sub("?", text).rstrip("\n")


def failure(form: str, problems: Sequence[Problem], exit_code: int) -> str:
    """Return what kept a command from an answer as ``json``, ``junit``, ``markdown``, or ``github``: a gate must not be mute."""
    if form == "json":
        return dump(Failure(ok=False, exit_code=exit_code, problems=problems))
    if form == "junit":
        return junit(problems[0].where, problems)
    annotations = [annotation(Complaint(error=True, said="", problem=p)) for p in problems if form == "github"]
    return printable("\n".join([*annotations, template("failure.md.j2").render(problems=problems).rstrip("\n")]))


def html(view: View) -> str:
    """Return an inspection as a whole HTML page: no script, no font, no picture from elsewhere."""
    return template("inspection/page.html.j2").render(view=view, outcomes=LOOKS, version=__version__)


def check_page(path: Path, checkpoint: str) -> None:
    """Refuse to write a page over a file that is not one, or into the checkpoint that it is about. Raises UsageError, OSError."""
    if path.is_file() and path.stat().st_size and not path.read_bytes()[:15].lower().startswith(b"<!doctype html"):
        message = "a file that is not an HTML report is there already"
        raise UsageError(Problem("report-exists", message, str(path), "give another name"))
    if "://" not in checkpoint and Path(os.path.realpath(checkpoint)) in Path(os.path.realpath(path)).parents:
        hint = "the source is never written; write the report elsewhere"
        raise UsageError(Problem("report-in-source", "the report would lie in the checkpoint", str(path), hint))


def write_page(path: Path, view: View) -> None:
    """Write an inspection as an HTML file. Raises OSError."""
    path.write_bytes(html(view).encode("utf-8", "backslashreplace"))
