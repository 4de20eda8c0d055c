"""What writes or proves: convert, verify, restore."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from fse_convert.cli.app import cli
from fse_convert.cli.options import complete_target, json_option, link_option, log_options, share_option
from fse_convert.cli.options import target as find
from fse_convert.errors import ExitCode, Problem, UsageError
from fse_convert.output.copying import Link
from fse_convert.output.parts import Share
from fse_convert.plan.plan import Experts, Options
from fse_convert.report.log import Log
from fse_convert.verification.findings import Level


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target", default="megamoe-512", show_default=True, metavar="NAME", shell_complete=complete_target,
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
@link_option("OUT")
@click.option("--allow-unfused", is_flag=True, help="Also write layers that would not fuse, in the standard layout only.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is an earlier output of fse-convert or an empty folder.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=min(4, os.cpu_count() or 1), show_default="up to 4, one per core",
    help="Shards written at a time.",
)  # fmt: skip
@click.option(
    "--restart", is_flag=True, help="Start anew instead of going on where an interrupted run of the same conversion stopped."
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be done to every shard and what it needs, and write nothing."
    " Exit code 4 where there is no room.",
)  # fmt: skip
@click.option(
    "--shards", "share", callback=share_option, metavar="I/N",
    help="Write part I of N and publish nothing; parts may run at once, on machines that share the file system."
    " The same command without --shards then writes what is missing, proves and publishes.",
)  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Write the shards on a Ray cluster (HOST:PORT or auto) that shares the file system.")
@click.option(
    "--verify", "level", type=click.Choice([level.value for level in Level]), default=Level.NUMERICS.value, show_default=True,
    help="How far OUT is proved against CHECKPOINT before it appears; each level includes those before it. Where there is no"
    " SM100 GPU, the kernel level is recorded as not run.",
)  # fmt: skip
@log_options
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
    share: Share | None,
    ray: str | None,
    level: str,
    log: Log,
    as_json: bool,
) -> None:
    """Convert CHECKPOINT into OUT (the default command)."""
    from fse_convert.conversion import run as pipeline
    from fse_convert.output.staging import check_output
    from fse_convert.report import common, conversion
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof

    if ray == "":
        raise UsageError(Problem("ray-address", "no address", "--ray", "auto, or HOST:PORT"))
    if share and (ray is not None or restart):
        other, hint = ("--ray", "leave one of them away") if ray is not None else ("--restart", "start anew without --shards")
        raise UsageError(Problem("parts-alone", f"--shards and {other} exclude each other", "--shards", hint))
    options = Options(find(target), Experts(experts), tp, allow_unfused)
    request = pipeline.Request(checkpoint, out, options, Link(link), overwrite, Level(level), workers, restart, share, ray)
    with pipeline.environment(out):
        check_output(checkpoint, out, overwrite=overwrite)
    plan, folder = pipeline.plan_conversion(checkpoint, options)
    if not as_json:
        conversion.print_notes(plan, request.link, log)
    if dry_run:
        needs = pipeline.needs(request, plan, folder)
        if as_json:
            click.echo(common.dump(conversion.plan_json(plan, needs)))
        else:
            conversion.print_plan(plan, title="plan")
            conversion.print_needs(needs)
        if not needs.fits:
            raise click.exceptions.Exit(int(ExitCode.ENVIRONMENT))
        return
    with progress(*pipeline.workload(plan, folder, request), log) as observe:
        outcome = pipeline.run(request, plan, folder, observe)
    if as_json:
        click.echo(common.dump(conversion.outcome_json(outcome)))
    elif share:
        conversion.print_part(outcome, out, share)
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
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S",
    help="Choose the sample that a run with this seed chose.  [default: another one every time]",
)  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where numerics run.")
@log_options
@json_option
def verify(
    out: Path, source: Path | None, level: str | None, sample: int | None, seed: int | None, device: str, *, log: Log, as_json: bool
) -> None:
    """Prove OUT against the checkpoint that it was made from.

    storage: every byte, mapped by the kernel's addresses to the source's. numerics: the fused expert computed from both
    sides, bit for bit. kernel: the real DeepGEMM kernel, on a GPU that has it (SM100); exit code 4 where it cannot run.
    A level that is asked for and finds nothing to run on has not passed: exit code 1. Without --source, OUT is only
    compared with the digests in its own manifest, which whoever edits OUT can make again.
    """
    from fse_convert.conversion import run as pipeline
    from fse_convert.report import common
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof, verify_json

    if source is None and level not in (None, Level.STORAGE.value):
        message = f"--level {level} compares with the source"
        raise UsageError(Problem("source-needed", message, "--level", "give --source CHECKPOINT"))
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    check = pipeline.Check(out, source, Level(level) if level else None, sample, chosen, device)
    with progress(*pipeline.reading(check), log) as observe:
        proof = pipeline.verify(check, observe)
    code = ExitCode.NO if proof.failed or proof.empty else ExitCode.ENVIRONMENT if proof.missing else ExitCode.OK
    if as_json:
        click.echo(common.dump(verify_json(proof, int(code))))
    else:
        print_proof(proof)
    if code:
        raise click.exceptions.Exit(int(code))


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("original", type=click.Path(path_type=Path))
@link_option("ORIGINAL")
@log_options
@json_option
def restore(out: Path, original: Path, link: str, *, log: Log, as_json: bool) -> None:
    """Take padding and the kernel layout out of OUT again: ORIGINAL is the source, bit for bit, and needs no source."""
    from fse_convert.conversion import run as pipeline
    from fse_convert.report import common
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_restored, restored_json

    with progress(*pipeline.reading(pipeline.Check(out, None)), log) as observe:
        done = pipeline.restore(out, original, Link(link), observe)
    if as_json:
        click.echo(common.dump(restored_json(done)))
    else:
        print_restored(done, original)
