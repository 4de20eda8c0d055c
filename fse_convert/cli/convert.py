"""``fse-convert convert``, the default command."""

from __future__ import annotations

import gc
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fse_convert.checkpoint.reader import garbage_collection_paused
from fse_convert.cli.app import cli
from fse_convert.cli.options import (
    CHECKPOINT,
    FOLDER,
    complete_target,
    family_option,
    interruptible,
    json_option,
    link_option,
    local,
    log_options,
    part_option,
)
from fse_convert.errors import Problem, UsageError
from fse_convert.exit_codes import ExitCode, of_dry_run
from fse_convert.output.lock import staging_root
from fse_convert.plan.plan import Experts, Options
from fse_convert.report.log import Log
from fse_convert.verification.findings import Level

if TYPE_CHECKING:
    from fse_convert.conversion.run import Request


def _is_given(_ctx: click.Context, _param: click.Parameter, value: str | None) -> bool:
    return value is not None


@cli.command(
    examples=(
        "fse-convert DeepSeek-V4.1-Flash out --target vllm-0.30",
        "fse-convert DeepSeek-V4.1-Flash out --target vllm-0.30 --dry-run",
        "fse-convert DeepSeek-V4.1-Flash out --target sglang-0.5.21 --workers 8",
    )
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("out", type=FOLDER)
@click.option(
    "--target", default="megamoe-512", show_default=True, metavar="NAME", shell_complete=complete_target,
    help="Kernel contract or server to convert for; see `fse-convert targets`. Formats change where it needs that.",
)  # fmt: skip
@click.option(
    "--routed", "routed_fp8", type=click.Choice(["fp8"]), callback=_is_given,
    help="Store routed MXFP4 experts as block FP8: exact, or refused.",
)  # fmt: skip
@click.option(
    "--shared", "shared_mxfp4", type=click.Choice(["mxfp4"]), callback=_is_given,
    help="Store shared experts as MXFP4, as servers would; needs --lossy.",
)  # fmt: skip
@click.option("--heal", is_flag=True, help="Mend every defect of config.json and of labels that the headers prove.")
@click.option("--lossy", is_flag=True, help="Permit changes that lose precision.")
@click.option("--drop-originals", is_flag=True, help="Leave out of OUT/fse what `restore` needs of experts whose format changed.")
@click.option(
    "--experts", type=click.Choice([e.value for e in Experts]), default=Experts.ALL.value, show_default=True,
    callback=lambda _ctx, _param, value: Experts(value),
    help="all: pad every expert in the standard layout. shared: leave the shards alone, pad the shared experts in OUT/fse only.",
)  # fmt: skip
@click.option(
    "--tp", type=click.IntRange(min=1, max=1024), default=1, show_default=True,
    help="Also make the width divisible by this tensor-parallel size.",
)  # fmt: skip
@family_option
@link_option("OUT")
@click.option(
    "--allow-unfused", is_flag=True,
    help="Also write layers that would not fuse, in the standard layout only, and for a server that refuses the output.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is an earlier output of fse-convert or an empty folder.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=min(4, os.cpu_count() or 1), show_default="up to 4, one per core",
    help="Shards written at a time.",
)  # fmt: skip
@click.option("--restart", is_flag=True, help="Start anew instead of resuming an interrupted run of the same conversion.")
@click.option(
    "--dry-run", is_flag=True, help="Print what would be done to every file and what it needs, and write nothing."
    " Exit code 4 where there is no room.",
)  # fmt: skip
@click.option(
    "--part", "--shards", "part", callback=part_option, metavar="I/N",
    help="Write part I of N and publish nothing; parts may run at once, on machines that share the file system."
    " The same command without --part then writes what is missing, proves and publishes. --shards is its older name.",
)  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Write the shards on a Ray cluster (HOST:PORT or auto) that shares the file system.")
@click.option(
    "--verify", type=click.Choice([level.value for level in Level]), default=Level.NUMERICS.value, show_default=True,
    callback=lambda _ctx, _param, value: Level(value),
    help="Verification level that OUT must pass before it appears; each level includes those before it. Where there is no"
    " SM100 GPU, the kernel level is recorded as not run.",
)  # fmt: skip
@log_options
@json_option
@click.pass_context
def convert(
    ctx: click.Context, /, checkpoint: str, out: Path, target: str, *, dry_run: bool, log: Log, as_json: bool, **asked: Any
) -> ExitCode:
    """Convert CHECKPOINT into OUT (default command).

    CHECKPOINT is a folder or hf://org/name[@revision], which is downloaded into the Hub's own cache first.
    """
    from fse_convert.conversion.run import Conversion, Request
    from fse_convert.report import conversion
    from fse_convert.report.progress import progress
    from fse_convert.report.proof import print_proof
    from fse_convert.report.records import conversion_record, dump, plan_record
    from fse_convert.servers.judge import find_any
    from fse_convert.servers.targets import CONTRACT
    from fse_convert.torch_threads import keep_freed_memory

    options = Options(None, **{f.name: asked.pop(f.name) for f in fields(Options) if f.name in asked})
    request = Request(Path(checkpoint), out, options, **asked)  # options of the command are called as fields of either
    _check_parts(request)
    recodes = options.routed_fp8 or options.shared_mxfp4 or options.heal
    named = ctx.get_parameter_source("target") is not click.core.ParameterSource.DEFAULT
    row = find_any(target) if named or not (recodes or options.tp > 1) else None
    if row and row.engine == CONTRACT and recodes:
        message = "a kernel contract is about widths; a change of format is made for a server, or for none"
        raise UsageError(Problem("contract-format", message, "--target", "name a server, or leave --target out"))
    request = replace(request, source=local(checkpoint, log), options=replace(options, target=row))
    with garbage_collection_paused():
        job = Conversion(request)
        gc.freeze()  # the plan lives as long as the process: a million tensors are not to be walked again and again
    notes = job.notes  # they may refuse the source, so also before JSON, which has them
    for note in () if as_json else notes:
        log.note(note)
    if dry_run:
        estimate = job.estimate()
        if as_json:
            click.echo(dump(plan_record(job.plan, notes, needs=estimate)))
        else:
            conversion.print_plan(job.plan, title="plan")
            conversion.print_estimate(estimate)
        log.done()
        return of_dry_run(fits=estimate.fits)
    found = "" if request.restart else job.kept()
    if found:
        log.note(Problem("resuming", f"{found} are there from an earlier run; their content is checked", str(staging_root(out))))
    keep_freed_memory()
    with interruptible(out, job.kept), progress(job.workload(), log) as observe:
        result = job.run(observe)
    if as_json:
        click.echo(dump(conversion_record(result, notes)))
    elif request.part:
        conversion.print_part(result, out, request.part)
    else:
        conversion.print_plan(result.plan, title="converted")
        conversion.print_written(result, out)
        if result.proof:
            print_proof(result.proof, written=True)
    log.done(*([] if request.part else conversion.next_steps(result.plan, out)))
    return ExitCode.OK


def _check_parts(request: Request) -> None:
    if request.ray == "":
        raise UsageError(Problem("ray-address", "no address", "--ray", "auto, or HOST:PORT"))
    if request.part and (request.ray is not None or request.restart):
        other, hint = ("--ray", "leave one of them out") if request.ray is not None else ("--restart", "start anew without --part")
        raise UsageError(Problem("parts-alone", f"--part and {other} exclude each other", "--part", hint))
