"""The top of the command line, whose command ``convert`` may be left out."""

from __future__ import annotations

import difflib
import os
from itertools import takewhile

import click
from click.shell_completion import CompletionItem

import fse_convert
from fse_convert.cli.command import Command, shown
from fse_convert.exit_codes import HELP

EXAMPLES = (
    "fse-convert inspect DeepSeek-V4.1-Flash",
    "fse-convert DeepSeek-V4.1-Flash out --target vllm-0.30",
    "fse-convert verify out --source DeepSeek-V4.1-Flash",
)
SYNONYMS = {"version": "--version", "-V": "--version", "help": "--help"}


LOG_FLAGS = ("-q", "--quiet", "-v", "-vv", "--verbose", "--log-json")


class DefaultGroup(click.Group):
    """A group whose command ``convert`` may be left out: ``fse-convert CHECKPOINT OUT``."""

    default = "convert"
    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command unless one is named; a mistyped command or option is not taken for a path or for its."""
        while args[:1] and args[0].partition("=")[0] == "--color":  # before a command as behind it
            n = 1 if "=" in args[0] else 2
            args = [*args[n:], *args[:n]]
        quiet = list(takewhile(LOG_FLAGS.__contains__, args))
        if quiet and args[len(quiet) :][:1] and args[len(quiet)] in self.commands:
            args = [*args[len(quiet) :], *quiet]
        if args and args[0] in SYNONYMS and not os.path.lexists(args[0]):
            args = [*args[1:2], SYNONYMS[args[0]]]
        own = [o for p in self.get_params(ctx) for o in p.opts if o != "-v"]  # which says nothing without --version
        if args and args[0] not in {*self.commands, *own}:
            its = [o for p in self.commands[self.default].params for o in (*p.opts, *p.secondary_opts)]
            known = [] if args[0].partition("=")[0] in its else own if args[0].startswith("--") else [*self.commands]
            close = difflib.get_close_matches(args[0], known, n=1, cutoff=0.75)
            if close and not os.path.lexists(args[0]):
                raise click.UsageError(f"no command, option or folder {args[0]!r}. Did you mean {close[0]!r}?", ctx)
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands and the default command's options; where no command begins so, paths: it may be a checkpoint."""
        offered = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            default = self.commands[self.default]
            offered += default.shell_complete(click.Context(default, parent=ctx), incomplete)
        return offered or [CompletionItem(incomplete, type="file")]  # bash drops every other item beside a file


@click.group(
    cls=DefaultGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{shown(EXAMPLES)}\n{HELP}",
)
@click.option("--version", is_flag=True, help="Show the version; with -v also those of Python, torch, servers and the rest.")
@click.option("-v", "verbose", is_flag=True, hidden=True)
@click.pass_context
def cli(ctx: click.Context, *, version: bool, verbose: bool) -> None:
    """Rewrite a MoE checkpoint offline so that servers run its shared experts fused, and prove the result.

    `fse-convert CHECKPOINT OUT --target NAME` changes what keeps that server from fusing: the width of the experts, or their
    format; OUT/fse has the kernel layout, and what the way back needs. The source is never written; OUT is created atomically.
    """
    if version:
        from fse_convert.doctor import versions

        for name, number in versions().items() if verbose else (("fse-convert", fse_convert.__version__),):
            click.echo(f"{name} {number or 'is not installed'}")
        ctx.exit()
