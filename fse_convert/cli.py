"""The command line: parse, call, render, exit. No logic, and no torch until a command needs it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import fse_convert
from fse_convert.checkpoint.ranges import Link
from fse_convert.errors import ExitCode, FseConvertError, Problem, UsageError
from fse_convert.fusion.targets import TARGETS, find_target
from fse_convert.plan import Experts, Options

DEBUG = "FSE_CONVERT_DEBUG"
EXIT_CODES = """
\b
Exit codes:
  0  done, or the answer is yes
  1  the answer is no: a required target does not fuse, or a verification found a mismatch
  2  the arguments do not fit
  3  the checkpoint is broken, not understood, or not convertible as asked
  4  the machine said no: space, permission, I/O
  5  interrupted, can be resumed
  6  another run is writing the same output
  130, 143  stopped by SIGINT, SIGTERM
"""


class DefaultGroup(click.Group):
    """A group whose command ``convert`` may be left out: ``fse-convert CHECKPOINT OUT``."""

    default = "convert"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command unless one is named; a mistyped command is told apart from a path."""
        if args and args[0] not in {*self.commands, "--help", "-h", "--version"}:
            close = [] if args[0].startswith("-") else difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.75)
            if close and not os.path.lexists(args[0]):
                raise click.UsageError(f"no command and no folder {args[0]!r}. Did you mean {close[0]!r}?", ctx)
            args = [self.default, *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(fse_convert.__version__, prog_name="fse-convert")
def cli() -> None:
    """Make a MoE checkpoint's shared experts run fused in MegaMoE servers, offline, and prove it.

    `fse-convert CHECKPOINT OUT` pads the experts to what the target's kernel accepts and writes the kernel layout of
    the shared experts to OUT/fse. The source is never written; OUT appears complete or not at all.
    """


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, also on failure.")(command)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target", default="megamoe-512", show_default=True, metavar="NAME",
    help="Kernel contract or server release to convert for; see `fse-convert targets`.",
)  # fmt: skip
@click.option(
    "--experts", type=click.Choice([e.value for e in Experts]), default=Experts.ALL.value, show_default=True,
    help="all: pad every expert in the standard layout. shared: leave the shards alone, pad the shared experts in OUT/fse only.",
)  # fmt: skip
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tensor-parallel size that the width must also divide by.",
)
@click.option(
    "--link", type=click.Choice([link.value for link in Link]), default=Link.AUTO.value, show_default=True,
    help="How untouched shards reach OUT. auto: share blocks where the file system can, else copy. hard: hard links.",
)  # fmt: skip
@click.option("--allow-unfused", is_flag=True, help="Also write layers that would not fuse, in the standard layout only.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is an earlier output of fse-convert or an empty folder.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@json_option
def convert(
    checkpoint: Path,
    out: Path,
    target: str,
    experts: str,
    tp: int,
    link: str,
    *,
    allow_unfused: bool,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert CHECKPOINT into OUT (the default command)."""
    from fse_convert import pipeline
    from fse_convert.checkpoint.transaction import check_output
    from fse_convert.report import common, conversion
    from fse_convert.report.progress import progress

    options = Options(_target(target), Experts(experts), tp, allow_unfused)
    request = pipeline.Request(checkpoint, out, options, Link(link), overwrite)
    check_output(checkpoint, out, overwrite=overwrite)
    plan, folder = pipeline.plan_conversion(checkpoint, options)
    if not as_json:
        conversion.print_notes(plan)
    if dry_run:
        if as_json:
            click.echo(common.dump(conversion.plan_json(plan)))
        else:
            conversion.print_plan(plan, title="plan")
        return
    with progress(plan) as observe:
        outcome = pipeline.run(request, plan, folder, observe)
    if as_json:
        click.echo(common.dump(conversion.outcome_json(outcome)))
    else:
        conversion.print_plan(plan, title="converted")
        conversion.print_written(outcome, out)


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


def _target(name: str) -> Any:
    target = find_target(name)
    if target is None:
        close = difflib.get_close_matches(name, [t.name for t in TARGETS], n=1)
        hint = f"did you mean {close[0]}?" if close else "see: fse-convert targets"
        raise UsageError(Problem("target-unknown", f"no target {name!r}", "--target", hint))
    return target


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a documented code; bad input never shows a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(_run(args))


def _run(args: list[str]) -> int:
    as_json = "--json" in args
    try:
        cli.main(args, standalone_mode=False, prog_name="fse-convert")
    except FseConvertError as e:
        return _fail(e, as_json=as_json)
    except click.exceptions.Exit as e:
        return e.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as e:
        return _fail(UsageError(Problem("usage", e.format_message(), hint="see: fse-convert --help")), as_json=as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(ExitCode.OK)


def _fail(error: FseConvertError, *, as_json: bool) -> int:
    from fse_convert.report import common

    if os.environ.get(DEBUG):
        raise error
    if as_json:
        click.echo(common.dump(common.failure_json(error)))
    for problem in error.problems:
        for line in common.problem_lines(problem):
            click.echo(line, err=True)
    return int(error.exit_code)
