"""The report of a plan and of a finished conversion, as text."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert.errors import counted, printable, size
from fse_convert.plan.advice import told_family
from fse_convert.plan.commands import inspection_command
from fse_convert.plan.plan import LayerVerdict, Plan
from fse_convert.report.console import console, duration, grid, runs, say
from fse_convert.servers.commands import serve_command
from fse_convert.servers.judge import answer
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fse_convert.conversion.estimate import Estimate
    from fse_convert.conversion.run import ConversionResult
    from fse_convert.output.parts import Part

RATES = (200 << 20, 2 << 30)
"""Bytes per second of a network file system and of a fast local disk, for which a dry run says how long it takes."""


def print_plan(plan: Plan, *, title: str) -> None:
    """Print what a conversion does to layers and shards."""
    rewritten = sum(not s.carried for s in plan.shards)
    beside = "kernel layout" if plan.options.contract else "originals"
    shards = (
        f"shards: {rewritten} of {len(plan.shards)} rewritten, {len(plan.shards) - rewritten} carried over;"
        f" {size(sum(s.source.size for s in plan.shards if s.source))} in, {size(sum(s.size for s in plan.shards))} out;"
        f" {beside} {size(sum(s.size for s in (*plan.sidecar, *plan.originals)))}"
    )
    edits = (
        f"config.json: {edit.section + '.' if edit.section else ''}{edit.key} {edit.old} -> {edit.new}"
        for edit in plan.decision.config_edits
    )
    say([_headline(plan, title), _layers(plan), shards, *edits])


def _headline(plan: Plan, title: str) -> str:
    family, decision = told_family(plan.source.description), plan.decision
    grows = decision.at_kernel != decision.at_source
    width = f"width {decision.growth}" if grows else f"width {decision.width}, nothing to pad"
    widths = "; ".join([width, *_format_changes(plan)])
    if not plan.options.contract:
        return f"{title}: {family}, {_changes(plan)}"
    fit = f"{decision.fused_layers} of {len(decision.verdicts)} layers fit {plan.options.contract.name}"
    server = f"; {_server(plan, plan.options.server)}" if isinstance(plan.options.server, Target) else ""
    return f"{title}: {family}, {widths}; {fit}{server}"


def _changes(plan: Plan) -> str:
    """Say what changes, and how many layers the server fuses afterwards."""
    decision = plan.decision
    does = [f"width {decision.growth}, for tensor parallelism {plan.options.tp}"] * decision.pads
    does += _format_changes(plan)
    fuses = f"; {plan.options.goal} fuses {decision.fused_layers} of {len(decision.verdicts)} layers"
    return ("; ".join(does) or "nothing to change") + (fuses if plan.options.target else "")


def _format_changes(plan: Plan) -> list[str]:
    return [f"{c.does} ({'lossless' if c.lossless else 'lossy'})" for c in plan.decision.changes]


def _server(plan: Plan, target: Target) -> str:
    """Say what the server that was converted for makes of the output."""
    verdict, verdicts = plan.decision.server, plan.decision.verdicts
    fused, fit = sum(v.server.fused for v in verdicts), plan.decision.fused_layers
    if verdict.outcome is Outcome.REFUSED:
        return f"{target.title} refuses MegaMoE ({verdict.reasons[0].code})"
    if fused or target.fuses:
        why = f" ({verdict.reasons[0].code})" if verdict.reasons else ""
        by_width = {r.code for r in verdict.reasons} == {"width-ratio"} and target.engine == "vLLM"
        plugin = f" without the plugin, {fit} of {len(verdicts)} with --load-format fse" if by_width and fused < fit else ""
        return f"{target.title} fuses {fused} of {len(verdicts)}{why}{plugin}"
    return f"{target.title} runs MegaMoE, with the shared expert beside it"


def _layers(plan: Plan) -> RenderableType:
    def alike(v: LayerVerdict) -> tuple[object, ...]:
        d = v.layer
        return (d.layer.kind, d.layer.count, d.routed and d.routed.label, d.shared and d.shared.label, v.verdict)

    goal = [plan.options.goal] if plan.options.goal else []
    said = ("does not fit", "fits") if plan.options.contract else ("not fused", "fused")
    rows = []
    for names, judged in runs(plan.decision.verdicts, alike, lambda v: v.layer.layer.name):
        d, verdict = judged.layer, judged.verdict
        routed = f"{d.layer.count} x {d.routed.label}" if d.routed else "-"
        fit = [said[verdict.fused], *(f"{r.code}: {r.message}" for r in verdict.reasons)]
        rows.append((names, routed, d.shared.label if d.shared else "-", *(["; ".join(fit)] if goal else [])))
    head = ("layers", "routed experts", "shared expert", *goal)
    return grid(rows, console().width, flexible=(len(head) - 1,), head=head)


def print_estimate(needs: Estimate) -> None:
    """Print what happens to every file, and what a conversion takes of the machine."""
    rows = [(printable(f.name), f.what, *(size(n) if n else "-" for n in (f.read, f.written))) for f in needs.files]
    table = grid(rows, console().width, flexible=(), head=("file", "what", "in", "out"), numbers=(2, 3))
    moved = needs.read + needs.written
    times = ", ".join(f"{duration(moved / rate)} at {size(rate)}/s" for rate in RATES)
    disk = f"disk: {size(needs.disk)} needed, {size(needs.free)} free{'' if needs.fits else ': NOT ENOUGH'}"
    memory = f"memory: at most {size(needs.memory)} on top of the interpreter and torch"
    say([table, disk, memory, f"time: reads {size(needs.read)} and writes {size(needs.written)}: about {times}"])


def next_steps(plan: Plan, out: Path) -> list[str]:
    """Return the commands to go on with: serve what was written, publish it, and prove it again where it has arrived."""
    place = shlex.quote(str(out))
    target, model_type = plan.options.target, plan.source.description.model_type
    server = answer(plan.decision.after.subject, target) if target else None
    serve = serve_command(server, place, model_type, fse=bool(plan.sidecar), tp=plan.options.tp) if server else ""
    return [
        serve or inspection_command(str(out), plan.source.checkpoint.config, plan.source.description.family_name),
        f"hf upload {shlex.quote(out.name)} {place}",
        f"fse-convert verify {place} --source {shlex.quote(str(plan.source.checkpoint.folder.label))}",
    ]


def print_part(result: ConversionResult, out: Path, part: Part) -> None:
    """Print what a part of a conversion wrote, and what comes next."""
    files = f"{counted(len(result.files), 'file')} {'is' if len(result.files) == 1 else 'are'} there for {printable(out)}"
    next_step = "when every part is done, the same command without --part proves them and publishes"
    say([f"part {part.index} of {part.count}: {files}: {_ways(result) or 'none'}", next_step])


def print_written(result: ConversionResult, out: Path) -> None:
    """Print what was written."""
    unproved = ["NOT proved: --verify none was given"] if result.proof is None else []
    say([f"written to {printable(out)}: {_ways(result)}", *unproved])


def _ways(result: ConversionResult) -> str:
    """Return the bytes of all files, and by the way they came to be, the most first."""
    ways = sorted(result.bytes.items(), key=lambda way: -way[1])
    return f"{size(sum(result.bytes.values()))} ({', '.join(f'{size(n)} {how}' for how, n in ways)})" if ways else ""
