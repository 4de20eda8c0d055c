"""``fse-convert targets``."""

from __future__ import annotations

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import json_option


@cli.command()
@json_option
def targets(*, as_json: bool) -> None:
    """List the kernel contracts and server releases that --target knows."""
    from fse_convert.report import common
    from fse_convert.report import targets as table

    if as_json:
        click.echo(common.dump(table.targets_json()))
    else:
        table.print_targets()
