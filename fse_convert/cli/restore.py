"""``fse-convert restore``."""

from __future__ import annotations

from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import json_option, link_option, log_options
from fse_convert.output.copying import Link
from fse_convert.report.log import Log


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("original", type=click.Path(path_type=Path))
@link_option("ORIGINAL")
@log_options
@json_option
def restore(out: Path, original: Path, link: str, *, log: Log, as_json: bool) -> None:
    """Take padding and the kernel layout out of OUT again: ORIGINAL is the source, bit for bit, and needs no source."""
    from fse_convert.report import common
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_restored, restored_json
    from fse_convert.restoration import Restoration

    job = Restoration(out, original, Link(link))
    with progress(*job.workload(), log) as observe:
        result = job.run(observe)
    if as_json:
        click.echo(common.dump(restored_json(result)))
    else:
        print_restored(result, original)
