"""``fse-convert explain``."""

from __future__ import annotations

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import json_option


def complete_code(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Offer codes to the shell."""
    from fse_convert.codes import all_codes

    return [name for name in all_codes() if name.startswith(incomplete)]


@cli.command(
    examples=("fse-convert explain", "fse-convert explain width-ratio", "fse-convert explain scale-block shared-format --json")
)
@click.argument("code", nargs=-1, shell_complete=complete_code)
@json_option
def explain(code: tuple[str, ...], *, as_json: bool) -> None:
    """Say what CODE means; without one, list all.

    A code stands in the brackets of an error, a note or a mismatch, and before the reasons of an inspection.
    """
    from difflib import get_close_matches

    from fse_convert.codes import all_codes
    from fse_convert.errors import Problem, UsageError
    from fse_convert.report.lists import CodesRecord, print_codes, print_names
    from fse_convert.report.records import dump

    known = all_codes()
    for name in code:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see: fse-convert explain"
            raise UsageError(Problem("code-unknown", f"no code {name!r}", "CODE", hint))
    chosen = [known[name] for name in code] or list(known.values())
    if as_json:
        click.echo(dump(CodesRecord(codes=chosen)))
    elif code:
        print_codes(chosen)
    else:
        print_names()
