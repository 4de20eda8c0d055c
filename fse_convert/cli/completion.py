"""``fse-convert completion``."""

from __future__ import annotations

import click

from fse_convert.cli.app import cli


@cli.command(
    examples=(
        "fse-convert completion bash > ~/.local/share/bash-completion/completions/fse-convert",
        'fse-convert completion zsh > "${fpath[1]}/_fse-convert"',
        "fse-convert completion fish > ~/.config/fish/completions/fse-convert.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell completion script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(cli, {}, "fse-convert", "_FSE_CONVERT_COMPLETE").source())
