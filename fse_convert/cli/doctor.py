"""``fse-convert doctor``."""

from __future__ import annotations

from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import FOLDER, json_option


@cli.command(examples=("fse-convert doctor", "fse-convert doctor /data/models", "fse-convert doctor --json"))
@click.argument("path", type=FOLDER, default=Path())
@json_option
def doctor(path: Path, *, as_json: bool) -> None:
    """Show what this machine has to work with.

    Looks for Python, torch, the GPU, DeepGEMM, vLLM, SGLang and AITER, the plugins for both servers, and for space and
    reflinks in PATH, where an output would lie (by default the current folder). No server is imported.
    """
    from fse_convert.doctor import examine
    from fse_convert.report.lists import DoctorRecord, print_findings
    from fse_convert.report.records import dump

    findings = list(examine(path))
    if as_json:
        click.echo(dump(DoctorRecord(findings=findings)))
    else:
        print_findings(findings)
