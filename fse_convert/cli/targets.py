"""``fse-convert targets``."""

from __future__ import annotations

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import json_option


@cli.command(examples=("fse-convert targets", "fse-convert targets --color always | less -R", "fse-convert targets --json"))
@json_option
def targets(*, as_json: bool) -> None:
    """List kernel contracts and server releases.

    Those are the names that --target and --require take. Contracts say which widths a kernel accepts; under the servers
    stands what they must be started with.
    """
    from fse_convert.report.lists import print_targets, targets_record
    from fse_convert.report.records import dump

    if as_json:
        click.echo(dump(targets_record()))
    else:
        print_targets()
