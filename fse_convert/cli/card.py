"""``fse-convert card``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import FOLDER, hub_name, log_options
from fse_convert.report.log import Log


@cli.command(
    examples=(
        "fse-convert card out > section.md",
        "fse-convert card out --repo me/DeepSeek-V4.1-Flash-2560",
        "fse-convert card out --base deepseek-ai/DeepSeek-V4.1-Flash@main",
    )
)
@click.argument("out", type=FOLDER)
@click.option(
    "--repo", callback=hub_name, metavar="ORG/NAME[@REVISION]", help="Where OUT is published, for the commands in the section."
)
@click.option("--base", callback=hub_name, metavar="ORG/NAME[@REVISION]", help="The model on the Hub that OUT was made from.")
@log_options
def card(out: Path, repo: str, base: str, log: Log) -> None:
    """Print a section for the model card of OUT.

    Markdown to paste into README.md before OUT is published: base model, what changed, what was proved, and how to serve it, as
    OUT's manifest states it.
    """
    from fse_convert.checkpoint.folder import LocalFolder
    from fse_convert.errors import environment
    from fse_convert.report.card import card as section
    from fse_convert.sidecar.manifest import read_manifest

    with environment(out):
        manifest = read_manifest(LocalFolder(out))
    click.echo(section(manifest, out, repo, base), nl=False)
    if repo:
        upload = ["hf", "upload", repo.partition("@")[0], str(out)]  # never to a revision: a tag or a commit cannot be written to
        log.done(shlex.join(["fse-convert", "verify", str(out)]), shlex.join(upload))
