"""What codes mean, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fse_convert.codes import Code, Kind, all_codes
from fse_convert.report.console import console, say
from fse_convert.report.records import Response


def print_codes(codes: Sequence[Code]) -> None:
    """Print the meaning of codes and the way out, one after the other."""
    shown = (f"{c.name}: {', '.join(k.value for k in c.kinds)}\n{c.meaning}\n{c.way_out}" for c in codes)
    say(["\n\n".join(shown)])


def print_names() -> None:
    """Print the names of all codes, by the kind in which they are most frequent."""
    width = console().width
    for kind in Kind:
        names = [c.name for c in all_codes().values() if c.kinds[0] is kind]
        listed = textwrap.fill(", ".join(names), width, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  ")
        say([f"{kind.heading} ({len(names)})", listed])


class CodesRecord(Response, kw_only=True):
    """What ``explain`` prints."""

    codes: Sequence[Code]
