"""The report of a plan and of a finished conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.output.copying import Link
from fse_convert.plan.notes import notes
from fse_convert.plan.plan import Plan
from fse_convert.report.common import SCHEMA_VERSION, console, fold, layer_json, shown, size
from fse_convert.report.log import Log
from fse_convert.report.proof import proof_json
from fse_convert.servers.verdict import Outcome as Kind

if TYPE_CHECKING:
    from rich.table import Table

    from fse_convert.conversion.estimate import Estimate
    from fse_convert.conversion.run import ConversionResult
    from fse_convert.output.jobs import Part

RATES = (200 << 20, 2 << 30)
"""Bytes per second of a network file system and of a fast local disk, for which a dry run says how long it takes."""
FITS, FITS_NOT = "fits", "does not fit"
"""What a layer is to the kernel contract."""


def plan_json(plan: Plan, needs: Estimate | None = None) -> dict[str, Any]:
    """A plan as JSON: what each shard holds, bytes, verdicts; and of a dry run what it ``needs``."""
    contract = plan.options.contract
    shards = [
        {
            "name": s.name,
            "action": "carry" if s.carried else "rewrite",
            "bytes_in": s.source.size if s.source else 0,
            "bytes_out": s.size,
        }
        for s in plan.shards
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "family": plan.source.description.family.name if plan.source.description.family else None,
        "model_type": plan.source.description.model_type,
        "target": plan.options.target.name,
        "contract": contract.name,
        "experts": plan.options.experts.value,
        "width": {"source": plan.decision.source_width, "main": plan.decision.main_width, "kernel": plan.decision.width},
        "n_shared_experts": plan.decision.n_shared,
        "layers": [layer_json(v) for v in plan.decision.verdicts],
        "shards": shards,
        "sidecar": [{"name": s.name, "bytes_out": s.size, "tensors": len(s.kernel_tensors)} for s in plan.sidecar],
        "config_edits": [{"section": e.section, "key": e.key, "from": e.old, "to": e.new} for e in plan.decision.config_edits],
        "server": server_json(plan),
        "notes": [{"code": n.code, "message": n.message, "where": n.where} for n in notes(plan, size=size)],
        **({"needs": needs_json(needs)} if needs else {}),
    }


def result_json(result: ConversionResult) -> dict[str, Any]:
    """A finished conversion as JSON."""
    files = dict(sorted(result.files.items()))
    proof = proof_json(result.proof) if result.proof else None
    return {**plan_json(result.plan), "files": files, "bytes": dict(sorted(result.bytes.items())), "proof": proof}


def print_plan(plan: Plan, *, title: str) -> None:
    """Print what a conversion does to layers and shards."""
    out = console()
    out.print(_headline(plan, title))
    out.print(_layer_table(plan))
    rewritten = [s for s in plan.shards if not s.carried]
    out.print(
        f"shards: {len(rewritten)} of {len(plan.shards)} rewritten, {len(plan.shards) - len(rewritten)} carried over;"
        f" {size(sum(s.source.size for s in plan.shards if s.source))} in, {size(sum(s.size for s in plan.shards))} out;"
        f" kernel layout {size(sum(s.size for s in plan.sidecar))}"
    )
    for edit in plan.decision.config_edits:
        out.print(f"config.json: {edit.section + '.' if edit.section else ''}{edit.key} {edit.old} -> {edit.new}")


def print_notes(plan: Plan, link: Link, log: Log) -> None:
    """Print notes to stderr."""
    for note in notes(plan, size=size, linked=link is Link.HARD):
        log.line("note", shown(f"note[{note.code}]: {note}"), code=note.code, message=note.message, where=note.where)


def print_estimate(needs: Estimate) -> None:
    """Print what happens to every file, and what a conversion takes of the machine."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("file", "what", "in", "out"):
        number = column in ("in", "out")
        table.add_column(column, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in needs.files:
        table.add_row(shown(row.name), row.what, size(row.read) if row.read else "-", size(row.written) if row.written else "-")
    out = console()
    out.print(table)
    out.print(f"disk: {size(needs.disk)} needed, {size(needs.free)} free{'' if needs.fits else ': NOT ENOUGH'}")
    out.print(f"memory: at most {size(needs.memory)} beside the interpreter and torch")
    moved = needs.read + needs.written
    times = ", ".join(f"{duration(moved / rate)} at {size(rate)}/s" for rate in RATES)
    out.print(f"time: reads {size(needs.read)} and writes {size(needs.written)}: about {times}")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def needs_json(needs: Estimate) -> dict[str, Any]:
    """The same as JSON, in bytes."""
    files = [{"name": f.name, "what": f.what, "read": f.read, "written": f.written} for f in needs.files]
    found = {"disk": needs.disk, "free": needs.free, "fits": needs.fits, "memory": needs.memory}
    return {**found, "read": needs.read, "written": needs.written, "files": files}


def print_part(result: ConversionResult, out: Path, share: Part) -> None:
    """Print what a part of a conversion wrote, and what comes next."""
    ways = ", ".join(f"{how} {size(n)}" for how, n in sorted(result.bytes.items()))
    part = f"part {share.index} of {share.count}: {len(result.files)} files are there for {shown(out)}: {ways or 'none'}"
    hint = "when every part is done, the same command without --shards proves them and publishes"
    console().print(f"{part}\n{hint}", markup=False, soft_wrap=True)


def _headline(plan: Plan, title: str) -> str:
    family, decision = plan.source.description.family, plan.decision
    old, new = decision.source_width, decision.width
    widths = f"width {old} -> {new}" if new != old else f"width {new}, nothing to pad"
    fit = f"{decision.fused_layers} of {len(decision.verdicts)} layers fit {plan.options.contract.name}"
    server = server_sentence(plan)
    return f"{title}: {family.name if family else '?'}, {widths}; {fit}" + (f"; {server}" if server else "")


def server_sentence(plan: Plan) -> str:
    """What the server that was converted for makes of the output; empty for a bare contract."""
    target, verdict = plan.options.target, plan.decision.server
    if target.is_contract:
        return ""
    fused = sum(v.server.fused for v in plan.decision.verdicts)
    if verdict.outcome is Kind.REFUSED:
        return f"{target.title} refuses MegaMoE ({verdict.reasons[0].code})"
    if fused or target.fuses:
        why = f" ({verdict.reasons[0].code})" if verdict.reasons else ""
        return f"{target.title} fuses {fused} of {len(plan.decision.verdicts)}{why}"
    return f"{target.title} runs MegaMoE, with the shared expert beside it"


def server_json(plan: Plan) -> dict[str, Any] | None:
    """The same as JSON; None for a bare contract."""
    target, verdict = plan.options.target, plan.decision.server
    if target.is_contract:
        return None
    reasons = [{"code": r.code, "message": r.message, "hint": r.hint} for r in verdict.reasons]
    fused = sum(v.server.fused for v in plan.decision.verdicts)
    found = {"target": target.name, "verdict": verdict.outcome.value, "fused": verdict.fused, "fused_layers": fused}
    return {**found, "reasons": reasons}


def _layer_table(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layers", "routed experts", "shared expert", plan.options.contract.name):
        table.add_column(column)
    for names, judged in fold(plan.decision.verdicts):
        layer = judged.layer
        routed = f"{len(layer.layer.routed)} x {layer.routed.label}" if layer.routed else "-"
        verdict = judged.verdict
        text = (FITS if verdict.fused else FITS_NOT) + "".join(f"\n{r.code}: {r.message}" for r in verdict.reasons)
        table.add_row(names, routed, layer.shared.label if layer.shared else "-", text)
    return table


def print_written(result: ConversionResult, out: Path) -> None:
    """Print what was written, by the way it came to be."""
    ways = ", ".join(f"{how} {size(n)}" for how, n in sorted(result.bytes.items()))
    console().print(f"written to {shown(out)}: {ways}", markup=False, soft_wrap=True)
