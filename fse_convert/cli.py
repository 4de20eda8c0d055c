"""The command line: parse, call, render, exit. No logic, and no torch until a command needs it."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

import fse_convert
from fse_convert.checkpoint.ranges import Link
from fse_convert.errors import Bug, EnvironmentFailure, ExitCode, FseConvertError, Interrupted, Problem, UsageError
from fse_convert.fusion.targets import TARGETS, find_target
from fse_convert.plan import Experts, Options
from fse_convert.verify.findings import Level

DEBUG = "FSE_CONVERT_DEBUG"
CLOSED_PIPE = 141
"""What a program that SIGPIPE ended would exit with."""
STOP_WITHIN = 0.7
"""Seconds that a stopped run has to end by itself."""
EXIT_CODES = """
\b
Exit codes:
  0  done, or the answer is yes
  1  the answer is no: a required target does not fuse, or a verification found a mismatch
  2  the arguments do not fit
  3  the checkpoint is broken, not understood, or not convertible as asked
  4  the machine said no: space, permission, I/O, no GPU for what was asked; what is finished is kept
  6  another run is writing the same output
  70  a bug in fse-convert: please report it
  130, 143, 129  stopped by SIGINT, SIGTERM, SIGHUP; what is finished is kept
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
    type=click.IntRange(min=1, max=1024),
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
@click.option(
    "--workers", type=click.IntRange(min=1), default=min(4, os.cpu_count() or 1), show_default="up to 4, one per core",
    help="Shards written at a time.",
)  # fmt: skip
@click.option(
    "--restart", is_flag=True, help="Start anew instead of going on where an interrupted run of the same conversion stopped."
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option(
    "--verify", "level", type=click.Choice([level.value for level in Level]), default=Level.NUMERICS.value, show_default=True,
    help="How far OUT is proved against CHECKPOINT before it appears; each level includes those before it. Where there is no"
    " SM100 GPU, the kernel level is recorded as not run.",
)  # fmt: skip
@json_option
def convert(
    checkpoint: Path,
    out: Path,
    target: str,
    experts: str,
    tp: int,
    link: str,
    *,
    workers: int,
    allow_unfused: bool,
    overwrite: bool,
    restart: bool,
    dry_run: bool,
    level: str,
    as_json: bool,
) -> None:
    """Convert CHECKPOINT into OUT (the default command)."""
    from fse_convert import pipeline
    from fse_convert.checkpoint.transaction import check_output
    from fse_convert.report import common, conversion
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof

    options = Options(_target(target), Experts(experts), tp, allow_unfused)
    request = pipeline.Request(checkpoint, out, options, Link(link), overwrite, Level(level), workers, restart)
    check_output(checkpoint, out, overwrite=overwrite)
    plan, folder = pipeline.plan_conversion(checkpoint, options)
    if not as_json:
        conversion.print_notes(plan, request.link)
    if dry_run:
        if as_json:
            click.echo(common.dump(conversion.plan_json(plan)))
        else:
            conversion.print_plan(plan, title="plan")
        return
    with progress(*pipeline.workload(plan, folder, request.verify)) as observe:
        outcome = pipeline.run(request, plan, folder, observe)
    if as_json:
        click.echo(common.dump(conversion.outcome_json(outcome)))
    else:
        conversion.print_plan(plan, title="converted")
        conversion.print_written(outcome, out)
        if outcome.proof:
            print_proof(outcome.proof, written=True)


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--source", type=click.Path(path_type=Path), metavar="CHECKPOINT", help="The checkpoint that OUT was made from.")
@click.option(
    "--level", type=click.Choice([level.value for level in Level if level is not Level.NONE]),
    help="How far to go; each level includes those before it.  [default: numerics; storage without --source]",
)  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Compare N tensors instead of all, for a quick look.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where numerics run.")
@json_option
def verify(out: Path, source: Path | None, level: str | None, sample: int | None, device: str, *, as_json: bool) -> None:
    """Prove OUT against the checkpoint that it was made from.

    storage: every byte, mapped by the kernel's addresses to the source's. numerics: the fused expert computed from both
    sides, bit for bit. kernel: the real DeepGEMM kernel, on a GPU that has it (SM100); exit code 4 where it cannot run.
    Without --source, OUT is only compared with the digests in its own manifest.
    """
    from fse_convert import pipeline
    from fse_convert.report import common
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof, verify_json

    if source is None and level not in (None, Level.STORAGE.value):
        message = f"--level {level} compares with the source"
        raise UsageError(Problem("source-needed", message, "--level", "give --source CHECKPOINT"))
    check = pipeline.Check(out, source, Level(level or Level.NUMERICS.value), sample, device)
    with progress(*pipeline.reading(check)) as observe:
        proof = pipeline.verify(check, observe)
    code = ExitCode.NO if proof.failed else ExitCode.ENVIRONMENT if proof.missing else ExitCode.OK
    if as_json:
        click.echo(common.dump(verify_json(proof, int(code))))
    else:
        print_proof(proof)
    if code:
        raise click.exceptions.Exit(int(code))


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("original", type=click.Path(path_type=Path))
@click.option(
    "--link", type=click.Choice([link.value for link in Link]), default=Link.AUTO.value, show_default=True,
    help="How untouched shards reach ORIGINAL. auto: share blocks where the file system can, else copy. hard: hard links.",
)  # fmt: skip
@json_option
def restore(out: Path, original: Path, link: str, *, as_json: bool) -> None:
    """Take padding and the kernel layout out of OUT again: ORIGINAL is the source, bit for bit, and needs no source."""
    from fse_convert import pipeline
    from fse_convert.report import common
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_restored, restored_json

    with progress(*pipeline.reading(pipeline.Check(out, None))) as observe:
        done = pipeline.restore(out, original, Link(link), observe)
    if as_json:
        click.echo(common.dump(restored_json(done)))
    else:
        print_restored(done, original)


@cli.command()
@click.argument("checkpoint")
@click.option("--target", "only", multiple=True, metavar="NAME", help="Judge this target only; may be given several times.")
@click.option("--require", multiple=True, metavar="NAME", help="Exit with 1 unless this target fuses every layer; repeatable.")
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
    from fse_convert import inspection, pipeline
    from fse_convert.costs import Serving
    from fse_convert.report.inspection_formats import Format, colored, complaints, render
    from fse_convert.report.inspection_html import html as page

    names = inspection.target_names((*only, *require))
    if html:
        pipeline.check_report(html, checkpoint)
    with pipeline.environment(checkpoint):
        folder = inspection.open_folder(checkpoint)
        found = inspection.inspect(folder, Serving(tp, ep), names if only else frozenset(), thorough=bool(require))
    code = found.exit_code(require)
    if printed := render(found, Format.JSON if as_json else Format(form), only, require, code):
        click.echo(printed, color=colored())
    if html:
        with pipeline.environment(html):
            html.write_bytes(page(found, only).encode("utf-8", "backslashreplace"))
    for line in complaints(found, require):
        click.echo(line, err=True)
    if code:
        raise click.exceptions.Exit(int(code))


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
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed by a daemon, for good
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with _stoppable():
        code = _run(args)
    sys.exit(code)


class Stopped(BaseException):
    """A signal asked the program to stop; no KeyboardInterrupt, which click turns into something of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


@contextmanager
def _stoppable() -> Iterator[None]:
    """Handle the signals that ask a program to stop, for as long as the command runs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, _stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Stop within a second, even while a thread waits for the disk: at every instant what is on disk can be gone on from."""
    timer = threading.Timer(STOP_WITHIN, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()
    raise Stopped(number)


def _run(args: list[str]) -> int:
    as_json = "--json" in args or "--format=json" in args or "--format json" in " ".join(args)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, and this tool needs no numpy
    try:
        code = cli.main(args or ["--help"], standalone_mode=False, prog_name="fse-convert")
        sys.stdout.flush()
    except FseConvertError as e:
        return _fail(e, as_json=as_json)
    except (Stopped, click.exceptions.Abort, KeyboardInterrupt) as e:
        code = e.code if isinstance(e, Stopped) else 130
        stopped = Problem("interrupted", "stopped by a signal", hint="the same command goes on with what is finished")
        return _fail(Interrupted(stopped), as_json=as_json, code=code)
    except click.ClickException as e:
        return _fail(UsageError(Problem("usage", e.format_message(), hint="see: fse-convert --help")), as_json=as_json)
    except (BrokenPipeError, SystemExit):  # click turns a closed pipe into an exit with 1
        _silence()
        return CLOSED_PIPE
    except OSError as e:
        _silence()
        problem = Problem(
            "output-lost", f"the result could not be printed: {e.strerror or e}", "stdout", "what was written to disk is there"
        )
        return _fail(EnvironmentFailure(problem), as_json=False)
    except Exception as e:
        if os.environ.get(DEBUG):
            raise
        hint = f"please report it with what {DEBUG}=1 shows; the source was not changed"
        return _fail(Bug(Problem("bug", f"{type(e).__name__}: {e}", hint=hint)), as_json=as_json)
    return code if isinstance(code, int) else int(ExitCode.OK)


def _silence() -> None:
    """Send what is still to be printed nowhere, so that the interpreter's last flush finds nothing to complain about."""
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())


def _fail(error: FseConvertError, *, as_json: bool, code: int | None = None) -> int:
    from fse_convert.report import common

    code = int(error.exit_code) if code is None else code
    if os.environ.get(DEBUG):
        raise error
    if as_json:
        click.echo(common.dump({**common.failure_json(error), "exit_code": code}))
    for problem in error.problems:
        for line in common.problem_lines(problem):
            click.echo(line, err=True)
    return code
