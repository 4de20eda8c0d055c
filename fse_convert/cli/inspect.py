"""``fse-convert inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import complete_path, complete_target, json_option


@cli.command()
@click.argument("checkpoint", shell_complete=complete_path)
@click.option(
    "--target",
    "only",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_target,
    help="Judge this target only; may be given several times.",
)
@click.option(
    "--require",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_target,
    help="Exit with 1 unless this target fuses every layer; repeatable.",
)
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel size, for costs and widths.")
@click.option("--ep", type=click.IntRange(min=1), default=8, show_default=True, help="Expert-parallel size, for costs per rank.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "markdown", "github"]), default="text", show_default=True,
    help="github: annotations for GitHub Actions, then Markdown.",
)  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as one HTML file.")
@json_option
def inspect(
    checkpoint: str,
    only: tuple[str, ...],
    require: tuple[str, ...],
    tp: int,
    ep: int,
    form: str,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Tell which servers fuse CHECKPOINT's shared experts, layer by layer, why not, and what it costs.

    CHECKPOINT is a folder or hf://org/name[@revision]. Config and headers are read, and of a folder F32 scales of shared
    experts; with --require also those of routed ones. The answers are three:
    native MegaMoE fusion (NVIDIA), AITER FSE (vLLM on AMD), and slot fusion; see `fse-convert targets`.
    """
    from fse_convert import inspection
    from fse_convert.errors import environment
    from fse_convert.plan.costs import Serving
    from fse_convert.report.inspection.formats import Format, colored, complaints, render
    from fse_convert.report.inspection.html import check_report
    from fse_convert.report.inspection.html import html as page

    names = inspection.target_names((*only, *require))
    if html:
        with environment(html):
            check_report(html, checkpoint)
    with environment(checkpoint):
        folder = inspection.open_folder(checkpoint)
        found = inspection.inspect(folder, Serving(tp, ep), names if only else frozenset(), thorough=bool(require))
    code = found.exit_code(require)
    if printed := render(found, Format.JSON if as_json else Format(form), only, require, code):
        click.echo(printed, color=colored())
    if html:
        with environment(html):
            html.write_bytes(page(found, only).encode("utf-8", "backslashreplace"))
    for line in complaints(found, require):
        click.echo(line, err=True)
    if code:
        raise click.exceptions.Exit(int(code))
