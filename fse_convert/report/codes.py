"""What codes mean, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from fse_convert.codes import Code, Kind, all_codes
from fse_convert.report.console import console, say, wrapped
from fse_convert.report.records import Response


def print_codes(codes: Sequence[Code]) -> None:
    """Print the meaning of codes and the way out, one after the other."""
    shown = (f"{c.name}: {', '.join(k.value for k in c.kinds)}\n{c.meaning}\n{c.way_out}" for c in codes)
    say(["\n\n".join(shown)])


def print_names() -> None:
    """Print the names of all codes, by the kind in which they are most frequent."""
    for kind in Kind:
        names = [c.name for c in all_codes().values() if c.kinds[0] is kind]
        say([f"{kind.heading} ({len(names)})", wrapped(", ".join(names), console().width, indent=2)])


class CodesRecord(Response, kw_only=True):
    """What ``explain`` prints."""

    codes: Sequence[Code]
