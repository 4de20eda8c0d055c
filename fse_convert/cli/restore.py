"""``fse-convert restore``."""

from __future__ import annotations

from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import FOLDER, interruptible, json_option, link_option, log_options
from fse_convert.output.copying import Link
from fse_convert.report.log import Log


@cli.command(
    examples=(
        "fse-convert restore out original",
        "fse-convert restore out original --link hard",
        "fse-convert restore out original --strict --json",
    )
)
@click.argument("out", type=FOLDER)
@click.argument("original", type=FOLDER)
@link_option("ORIGINAL")
@click.option("--strict", is_flag=True, help="Refuse a model card, licence or picture that was added or edited since.")
@log_options
@json_option
def restore(out: Path, original: Path, link: Link, *, strict: bool, log: Log, as_json: bool) -> None:
    """Rebuild the original checkpoint from OUT.

    Padding, changes of format and of config.json, and the kernel layout are taken out of OUT again: ORIGINAL is the checkpoint
    that was converted, bit for bit. That checkpoint is not needed for it: OUT/fse keeps what does not follow from OUT, unless
    --drop-originals left it out. What was added or edited once OUT was published, and no server reads (.gitattributes,
    README.md, licences, pictures), comes as it is now, and is named.
    """
    from fse_convert.plan.commands import inspection_command
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_restored
    from fse_convert.report.records import dump, restoration_record
    from fse_convert.restoration.run import Restoration

    job = Restoration(out, original, link, strict=strict)
    with interruptible(original, lambda: ""), progress(job.workload(), log) as observe:
        result = job.run(observe)
    if as_json:
        click.echo(dump(restoration_record(result)))
    else:
        print_restored(result, original)
    log.done(inspection_command(str(original), job.checkpoint.config, job.manifest.model.family))
