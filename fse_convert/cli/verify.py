"""``fse-convert verify``."""

from __future__ import annotations

from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import CHECKPOINT, FOLDER, json_option, local, log_options
from fse_convert.errors import Problem, UsageError
from fse_convert.exit_codes import ExitCode
from fse_convert.report.log import Log
from fse_convert.verification.findings import Level
from fse_convert.verification.sample import Sample


@cli.command(
    examples=(
        "fse-convert verify out --source DeepSeek-V4.1-Flash",
        "fse-convert verify out --source DeepSeek-V4.1-Flash --level kernel",
        "fse-convert verify out --source DeepSeek-V4.1-Flash --sample 100 --seed 7",
    )
)
@click.argument("out", type=FOLDER)
@click.option(
    "--source", type=CHECKPOINT, metavar="CHECKPOINT", help="The checkpoint that OUT was made from: a folder or hf://org/name."
)
@click.option(
    "--level", type=click.Choice([level.value for level in Level if level is not Level.NONE]),
    help="Verification level; each includes those before it.  [default: numerics; storage without --source]",
)  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Compare N tensors instead of all, for a quick look.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S",
    help="Repeat the sample of an earlier run.  [default: another sample every time]",
)  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where numerics run.")
@click.option("--strict", is_flag=True, help="Also fail for what hubs add and people edit: model card, licences, pictures.")
@log_options
@json_option
def verify(
    out: Path,
    source: str | None,
    level: str | None,
    sample: int | None,
    seed: int | None,
    device: str,
    *,
    strict: bool,
    log: Log,
    as_json: bool,
) -> ExitCode:
    """Prove OUT against its source.

    storage: every byte, mapped by the kernel's addresses, or by the rule of the format that it got, to the source's. numerics:
    the fused expert computed from both sides, bit for bit; of shared experts that were rounded, the error measured. kernel: the
    real DeepGEMM kernel, on a GPU that has it (SM100); exit code 4 where it cannot run. A level that was asked for and has
    nothing to run on has not passed: exit code 1. Without --source, OUT is only compared with the digests in its own manifest,
    which anyone who edits OUT can compute again. Files that hubs add and people edit once OUT is published, and that no server
    reads (.gitattributes, README.md, licences, pictures), may differ: they are noted.
    """
    from fse_convert.output.overwrite import left_behind
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof
    from fse_convert.report.records import dump, verify_record
    from fse_convert.torch_threads import keep_freed_memory
    from fse_convert.verification.proof import Check
    from fse_convert.verification.proof import verify as prove_again

    if source is None and level not in (None, Level.STORAGE.value):
        message = f"--level {level} compares with the source"
        raise UsageError(Problem("source-needed", message, "--level", "give --source CHECKPOINT"))
    part = None if sample is None else Sample(sample) if seed is None else Sample(sample, seed)
    folder = local(source, log) if source else None
    check = Check(out=out, source=folder, level=Level(level) if level else None, sample=part, device=device, strict=strict)
    keep_freed_memory()
    with progress(check.workload(), log) as observe:
        proof = prove_again(check, observe)
    for left in left_behind(out):
        log.note(left)
    if as_json:
        click.echo(dump(verify_record(proof, folder)))
    else:
        print_proof(proof)
    log.done()
    return proof.exit_code
