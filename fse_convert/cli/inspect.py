"""``fse-convert inspect``."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fse_convert.checkpoint.reader import garbage_collection_paused
from fse_convert.cli.app import cli
from fse_convert.cli.options import CHECKPOINT, FORMS, complete_target, family_option, json_option, log_options
from fse_convert.errors import environment
from fse_convert.exit_codes import ExitCode
from fse_convert.report.log import Log

if TYPE_CHECKING:
    from fse_convert.report.inspection.view import View


@cli.command(
    examples=(
        "fse-convert inspect DeepSeek-V4.1-Flash",
        "fse-convert inspect hf://deepseek-ai/DeepSeek-V4.1-Flash --html report.html",
        "fse-convert inspect DeepSeek-V4.1-Flash --require vllm-0.33 --format github",
    )
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--target", multiple=True, metavar="NAME", shell_complete=complete_target, help="Judge this target only; repeatable.")
@click.option(
    "--require", multiple=True, metavar="NAME", shell_complete=complete_target,
    help="Exit with 1 unless this target fuses every layer; repeatable.",
)  # fmt: skip
@click.option(
    "--without-drafter", is_flag=True,
    help="Leave the drafter's layers (MTP) out of verdict and exit code: for serving without speculative decoding.",
)  # fmt: skip
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel size, for costs and widths.")
@click.option("--ep", type=click.IntRange(min=1), default=8, show_default=True, help="Expert-parallel size, for costs per rank.")
@family_option
@click.option(
    "--format", "format_name", type=click.Choice(["text", *FORMS]), default="text", show_default=True,
    help="github: annotations for GitHub Actions, then Markdown. junit: a test case for each required target.",
)  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as one HTML file.")
@log_options
@json_option
def inspect(
    checkpoint: str,
    target: tuple[str, ...],
    require: tuple[str, ...],
    tp: int,
    ep: int,
    family: str,
    format_name: str,
    html: Path | None,
    *,
    without_drafter: bool,
    log: Log,
    as_json: bool,
) -> ExitCode:
    """Show which servers fuse CHECKPOINT, and why.

    Reads config and headers of a folder or of hf://org/name[@revision]. Of a local folder it also reads the F32 scales of
    shared experts, and with --require of routed ones. Answers three questions, layer by layer, with the costs: native MegaMoE
    fusion (NVIDIA), AITER FSE (vLLM on AMD), and slot fusion; see `fse-convert targets`.
    """
    from fse_convert import inspection
    from fse_convert.plan.costs import Serving
    from fse_convert.report.inspection.pages import check_page, write_page
    from fse_convert.report.inspection.view import View
    from fse_convert.servers.judge import ALL_TARGETS
    from fse_convert.servers.release_names import find_named

    if as_json and format_name in ("markdown", "github"):
        raise click.UsageError(f"--json and --format {format_name} exclude each other")
    target = tuple(find_named(name, ALL_TARGETS).name for name in target)
    require = tuple(find_named(name, ALL_TARGETS, "--require").name for name in require)
    if html:
        with environment(html):
            check_page(html, checkpoint)
    with environment(checkpoint), garbage_collection_paused():
        folder = inspection.open_folder(checkpoint)
        names = frozenset((*target, *require)) if target else frozenset()
        found = inspection.inspect(
            folder, Serving(tp, ep), names, thorough=bool(require), family=family, drafter=not without_drafter
        )
        gc.freeze()  # as in convert
    view = View(found, target, require)
    _print(view, "json" if as_json else format_name)
    if html:
        with environment(html):
            write_page(html, view)
        log.line("report", f"report written to {html}", path=str(html))
    for problem in view.errors:
        log.error(problem)
    log.done(*view.next_steps)
    return view.exit_code


def _print(view: View, format_name: str) -> None:
    if format_name == "json":
        from fse_convert.report.inspection.records import inspection_record
        from fse_convert.report.records import dump

        click.echo(dump(inspection_record(view)))
    elif format_name == "text":
        from fse_convert.report.inspection.text import print_inspection

        print_inspection(view)
    elif format_name == "junit":
        from fse_convert.report.inspection.pages import junit

        click.echo(junit(view.title, view.found.problems, view.required, view.remarks))
    else:
        from fse_convert.report.inspection.pages import annotation, markdown

        lines = [annotation(c) for c in view.complaints if format_name == "github"]
        click.echo("\n".join([*lines, markdown(view).rstrip("\n")]))
