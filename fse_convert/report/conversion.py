"""The report of a plan and of a finished conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.costs import Serving, padding
from fse_convert.errors import Problem
from fse_convert.fusion.megamoe import kernel_verdict
from fse_convert.fusion.targets import MEGAMOE_128
from fse_convert.plan import Plan
from fse_convert.report.common import SCHEMA_VERSION, console, fold, layer_json, shown, size
from fse_convert.report.proof import proof_json

if TYPE_CHECKING:
    from rich.table import Table

    from fse_convert.pipeline import Outcome

EXAMPLE_EP = 8
"""Expert-parallel size for which costs per rank are shown: DeepSeek-V4.1 on one node of 8 GPUs."""
CURRENT_SERVERS = "vLLM >= 0.31 and SGLang >= 0.5.23"


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: what each shard holds, bytes, verdicts."""
    contract = plan.options.contract
    shards = [
        {
            "name": s.name,
            "action": "rewrite" if s.rewritten else "carry",
            "bytes_in": s.source.size,
            "bytes_out": s.size,
        }
        for s in plan.shards
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "family": plan.description.family.name if plan.description.family else None,
        "model_type": plan.description.model_type,
        "target": plan.options.target.name,
        "contract": contract.name,
        "experts": plan.options.experts.value,
        "width": {"source": plan.source_width, "main": plan.main_width, "kernel": plan.width},
        "n_shared_experts": plan.n_shared,
        "layers": [layer_json(v) for v in plan.verdicts],
        "shards": shards,
        "sidecar": [{"name": s.name, "bytes_out": s.size, "tensors": len(s.tensors)} for s in plan.sidecar],
        "config_edits": [{"section": e.section, "key": e.key, "from": e.old, "to": e.new} for e in plan.config_edits],
        "notes": [{"code": n.code, "message": n.message, "where": n.where} for n in notes(plan)],
    }


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """A finished conversion as JSON."""
    files = dict(sorted(outcome.written.files.items()))
    proof = proof_json(outcome.proof) if outcome.proof else None
    return {**plan_json(outcome.plan), "files": files, "bytes": dict(sorted(outcome.written.bytes.items())), "proof": proof}


def notes(plan: Plan) -> list[Problem]:
    """What the user should know though nothing is wrong: config conflicts, and padding that buys nothing."""
    found = [*plan.checkpoint.notes, *plan.description.conflicts]
    without = [kernel_verdict(v.layer, MEGAMOE_128, plan.options.target.pairings) for v in plan.verdicts]
    if plan.padded and without and all(v.fused for v in without):
        message = f"{padding_cost(plan)} {CURRENT_SERVERS} fuse the source as it is: --target megamoe-128 pads nothing"
        found.append(Problem("padding-not-needed", message))
    return found


def padding_cost(plan: Plan) -> str:
    """What padding costs, in a sentence: bytes on disk and per rank."""
    cost = padding(plan.description, plan.width)
    rank = cost.per_rank(Serving(ep=EXAMPLE_EP))
    return (
        f"Padding {plan.source_width} to {plan.width} costs {size(cost.disk)} on disk and {size(rank)} per rank at EP {EXAMPLE_EP}."
    )


def print_plan(plan: Plan, *, title: str) -> None:
    """Print what a conversion does to layers and shards."""
    out = console()
    out.print(_headline(plan, title))
    out.print(_layer_table(plan))
    rewritten = [s for s in plan.shards if s.rewritten]
    out.print(
        f"shards: {len(rewritten)} of {len(plan.shards)} rewritten, {len(plan.shards) - len(rewritten)} carried over;"
        f" {size(sum(s.source.size for s in plan.shards))} in, {size(sum(s.size for s in plan.shards))} out;"
        f" kernel layout {size(sum(s.size for s in plan.sidecar))}"
    )
    for edit in plan.config_edits:
        out.print(f"config.json: {edit.section + '.' if edit.section else ''}{edit.key} {edit.old} -> {edit.new}")


def print_notes(plan: Plan) -> None:
    """Print notes to stderr."""
    err = console(stderr=True)
    for note in notes(plan):
        err.print(f"note[{note.code}]: {note}", markup=False)


def _headline(plan: Plan, title: str) -> str:
    family = plan.description.family
    widths = (
        f"width {plan.source_width} -> {plan.width}" if plan.width != plan.source_width else f"width {plan.width}, nothing to pad"
    )
    fused = f"{plan.fused_layers} of {len(plan.verdicts)} MoE layers fuse"
    return f"{title}: {family.name if family else '?'}, {plan.options.contract.name}, {widths}; {fused}"


def _layer_table(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layers", "routed experts", "shared expert", "after conversion"):
        table.add_column(column)
    for names, judged in fold(plan.verdicts):
        layer = judged.layer
        routed = f"{len(layer.layer.routed)} x {layer.routed.label}" if layer.routed else "-"
        verdict = judged.verdict
        text = verdict.outcome.value + "".join(f"\n{r.code}: {r.message}" for r in verdict.reasons)
        table.add_row(names, routed, layer.shared.label if layer.shared else "-", text)
    return table


def print_written(outcome: Outcome, out: Path) -> None:
    """Print what was written, by the way it came to be."""
    ways = ", ".join(f"{how} {size(n)}" for how, n in sorted(outcome.written.bytes.items()))
    console().print(f"written to {shown(out)}: {ways}", markup=False, soft_wrap=True)
