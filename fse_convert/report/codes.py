"""What codes mean, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from fse_convert.codes import Code, Kind, all_codes
from fse_convert.report.console import console
from fse_convert.report.records import Record, Response, fill


def print_codes(codes: Iterable[Code]) -> None:
    """Print the meaning of codes and the way out, one after the other."""
    shown = (f"{c.name}: {', '.join(k.value for k in c.kinds)}\n{c.meaning}\n{c.way_out}" for c in codes)
    console().print("\n\n".join(shown))


def print_names() -> None:
    """Print the names of all codes, by the kind in which they are most frequent."""
    out = console()
    for kind in Kind:
        names = [c.name for c in all_codes().values() if c.kinds[0] is kind]
        listed = textwrap.fill(", ".join(names), out.width - 2, break_on_hyphens=False)
        out.print(f"{kind.heading} ({len(names)})", textwrap.indent(listed, "  "), sep="\n")


class CodesRecord(Response, kw_only=True):
    """What ``explain`` prints."""

    codes: list[CodeRecord]


class CodeRecord(Record, kw_only=True):
    """One code."""

    name: str
    kinds: tuple[Kind, ...]
    meaning: str
    way_out: str


def codes_record(codes: Iterable[Code]) -> CodesRecord:
    """Describe codes."""
    return CodesRecord(codes=[fill(CodeRecord, c) for c in codes])
