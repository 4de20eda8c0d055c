"""What every command has: examples in its help, ``--color``, and options that may come from the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from fse_convert.report.console import Color, choose_color

PREFIX = "FSE_CONVERT_"
ENVIRONMENT = f"Options may come from the environment: {PREFIX}WORKERS=8 is --workers 8."


class Command(click.Command):
    """A command with ``examples``: lines that can be pasted."""

    def __init__(self, *, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(epilog=f"{shown(examples)}\n\n{ENVIRONMENT}", **kwargs)
        self.params.append(_color())
        for option in self.params:
            if isinstance(option, click.Option):
                option.envvar = variable(next(o for o in option.opts if o.startswith("--")))
                if isinstance(option.type, click.IntRange):
                    option.type.name, option.metavar = "whole number", option.metavar or "N"


def shown(examples: Sequence[str]) -> str:
    """Return examples as a part of a help text."""
    return "\n  ".join(["\b\nExamples:", *examples])


def variable(option: str) -> str:
    """Return the variable that an option may come from."""
    return PREFIX + option.lstrip("-").replace("-", "_").upper()


def is_given(option: str, args: Sequence[str]) -> bool:
    """Tell whether a flag is given, on the command line or in the environment: for errors that come before it is parsed."""
    return option in args or os.environ.get(variable(option), "").lower() in ("1", "true", "t", "yes", "y", "on")


def _color() -> click.Option:
    return click.Option(
        ["--color"],
        type=click.Choice([c.value for c in Color]),
        default=Color.AUTO.value,
        show_default=True,
        is_eager=True,
        expose_value=False,
        callback=lambda _ctx, _param, value: choose_color(Color(value)),
        help="Colours; auto: on a terminal, unless NO_COLOR is set.",
    )
