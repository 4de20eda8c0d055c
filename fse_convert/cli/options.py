"""Options that several commands have, and types of their values."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fse_convert.errors import Problem
from fse_convert.output.copying import Link
from fse_convert.output.lock import staging_root
from fse_convert.plan.source import FAMILY_NAMES
from fse_convert.report.log import Log, listening

if TYPE_CHECKING:
    from fse_convert.output.parts import Part

Command = Callable[..., Any]
MOST_PARTS = 10_000
FORMS = ("json", "markdown", "github", "junit")
"""Forms of an answer for programs; a failure has the same form."""
CHECKPOINT = click.Path(readable=False)
"""A folder, or ``hf://org/name[@revision]``; see `local`."""
FOLDER = click.Path(path_type=Path, readable=False)
"""A folder that may not be there yet; what is wrong with one is said by whoever opens it."""


def json_option(command: Command) -> Command:
    """Add ``--json`` and ``--json-schema``."""
    schema = click.option(
        "--json-schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
        help="Print the JSON Schema of that object, and exit.",
    )  # fmt: skip
    answer = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, also on failure.")
    return answer(schema(command))


def _print_schema(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from fse_convert.report.schemas import schema

        click.echo(schema(str(ctx.command.name)))
        ctx.exit()


def family_option(command: Command) -> Command:
    """Add ``--family``."""
    return click.option(
        "--family", type=click.Choice(FAMILY_NAMES, case_sensitive=False), metavar="NAME",
        callback=lambda _ctx, _param, value: value or "",
        help="For a model_type that is not known: the family that names its experts and config keys in the same way.",
    )(command)  # fmt: skip


def link_option(to: str) -> Callable[[Command], Command]:
    """Add ``--link``, for a command that writes a folder called ``to``."""
    return click.option(
        "--link", type=click.Choice([link.value for link in Link]), default=Link.AUTO.value, show_default=True,
        callback=lambda _ctx, _param, value: Link(value),
        help=f"How to put unchanged shards into {to}. auto: share blocks where the file system can, else copy."
        " copy: share none. hard: hard links.",
    )  # fmt: skip


def log_options(command: Command) -> Command:
    """Add ``-q``, ``-v`` and ``--log-json``; the command gets the ``log`` that they make."""

    @click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
    @click.option("-v", "--verbose", count=True, help="Also what the program does; -vv: and every decision.")
    @click.option("--log-json", is_flag=True, help="stderr as JSON, one object a line.")
    @functools.wraps(command)
    def run(*args: Any, quiet: bool, verbose: int, log_json: bool, **kwargs: Any) -> Any:
        with listening(Log(quiet, verbose, log_json)) as log:
            return command(*args, log=log, **kwargs)

    return run


def part_option(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Part | None:
    """Parse ``I/N``: part I of N, counted from 1. Raises BadParameter."""
    if value is None:
        return None
    index, slash, count = value.partition("/")
    if slash and value.isascii() and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= MOST_PARTS:
        from fse_convert.output.parts import Part

        return Part(index=int(index), count=int(count))
    raise click.BadParameter(f"{value!r} is not I/N with 1 <= I <= N <= {MOST_PARTS}, such as 2/8")


def local(checkpoint: str, log: Log) -> Path:
    """Return the folder of a checkpoint; a model of the Hub is downloaded into the Hub's own cache."""
    from fse_convert.checkpoint.hub import SCHEME, fetch, source_name

    if not checkpoint.startswith(SCHEME):
        return Path(checkpoint)
    log.line("fetch", f"{checkpoint}: downloading what the Hub's cache lacks", source=checkpoint)
    folder = fetch(checkpoint, bars=sys.stderr.isatty() and not (log.quiet or log.as_json))
    log.line("source", f"source: {source_name(folder)} in {folder}", source=source_name(folder), folder=str(folder))
    return folder


def hub_name(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    """Return a model's name on the Hub without ``hf://``, empty where none was given. Raises BadParameter."""
    from fse_convert.checkpoint.hub import REPOSITORY, SCHEME

    name = (value or "").removeprefix(SCHEME)
    if name and not REPOSITORY.fullmatch(name):
        raise click.BadParameter(f"{value!r} names no model of the Hub: ORG/NAME, or ORG/NAME@REVISION")
    return name


def complete_target(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Offer names of targets to the shell: to ``inspect`` all, else those that there is a conversion for."""
    from fse_convert.servers.judge import ALL_TARGETS
    from fse_convert.servers.targets import TARGETS

    rows = ALL_TARGETS if ctx.info_name == "inspect" else TARGETS
    return [t.name for t in rows if t.name.startswith(incomplete)]


@contextmanager
def interruptible(out: Path, finished: Callable[[], str]) -> Iterator[None]:
    """Tell whoever stops a run what is left beside ``out``, and how to go on from there or discard it.

    ``finished``: says what of it another run need not do again.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as stopped:
        root = staging_root(out)
        done = finished()
        resume = "the same command resumes from there" if done else "the same command begins again"
        if root.exists():
            message = f"stopped by a signal: {f'{done} are kept' if done else 'nothing is finished yet'}"
            left = Problem("interrupted", message, str(root), f"{resume}; to discard it: rm -r {shlex.quote(str(root))}")
            stopped.left = left  # type: ignore[attr-defined]
        raise
