"""The templates of reports: Markdown, in which what would break a table or start a tag is escaped, and HTML and XML."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fse_convert.report.inspection.view import told

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def template(name: str) -> Template:
    """Return a template by its path in this room."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("fse_convert", "report"),
        autoescape=select_autoescape(["html.j2", "xml.j2"]),
        undefined=StrictUndefined,
        finalize=_escaped if name.endswith("md.j2") else None,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["told"] = told
    return environment.get_template(name)


def _escaped(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
