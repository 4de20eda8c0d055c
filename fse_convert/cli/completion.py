"""``fse-convert completion``."""

from __future__ import annotations

import click

from fse_convert.cli.app import cli


@cli.command(
    examples=(
        """echo 'eval "$(fse-convert completion bash)"' >> ~/.bashrc""",
        """echo 'eval "$(fse-convert completion zsh)"' >> ~/.zshrc  # behind compinit""",
        "echo 'fse-convert completion fish | source' >> ~/.config/fish/config.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell completion script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(cli, {}, "fse-convert", "_FSE_CONVERT_COMPLETE").source())
