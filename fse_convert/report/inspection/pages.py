"""An inspection as GitHub Markdown, and as one HTML file that needs nothing else: the templates beside this file, filled in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert import __version__
from fse_convert.errors import Problem, UsageError
from fse_convert.report.inspection.view import LOOKS, View, told

if TYPE_CHECKING:
    from jinja2 import Template


def markdown(view: View) -> str:
    """Return an inspection as Markdown; what would break a table or start a tag is escaped."""
    return _template("markdown.md.j2").render(view=view)


def html(view: View) -> str:
    """Return an inspection as a whole HTML page: no script, no font, no picture from elsewhere."""
    return _template("page.html.j2").render(view=view, outcomes=LOOKS, version=__version__)


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("fse_convert.report", "inspection"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        finalize=None if name.endswith("html.j2") else _escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["told"] = told
    return environment.get_template(name)


def _escaped(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def check_page(path: Path, checkpoint: str) -> None:
    """Refuse to write a page over a file that is not one, or into the checkpoint that it is about. Raises UsageError, OSError."""
    if path.is_file() and path.stat().st_size and not path.read_bytes()[:15].lower().startswith(b"<!doctype html"):
        raise UsageError(
            Problem("report-exists", "a file that is not an HTML report is there already", str(path), "give another name")
        )
    if "://" not in checkpoint and Path(os.path.realpath(checkpoint)) in Path(os.path.realpath(path)).parents:
        hint = "the source is never written; write the report elsewhere"
        raise UsageError(Problem("report-in-source", "the report would lie in the checkpoint", str(path), hint))


def write_page(path: Path, view: View) -> None:
    """Write an inspection as an HTML file. Raises OSError."""
    path.write_bytes(html(view).encode("utf-8", "backslashreplace"))
