"""Notes on a plan: what the user should know though nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from fse_convert.errors import Problem, size
from fse_convert.model.moe import LayerKind
from fse_convert.plan.advice import NO_PATH, TOPICS, releases, said_of, size_notes
from fse_convert.plan.changes.search import Unfused, left_unfused
from fse_convert.plan.commands import inspection_command
from fse_convert.plan.costs import Serving, padding, uneven
from fse_convert.plan.edits import config_notes
from fse_convert.plan.plan import Experts, Options, Plan
from fse_convert.plan.width_rounding import needed_widths
from fse_convert.servers.judge import Question, answer, judge, native_layer
from fse_convert.servers.targets import CONTRACT, MEGAMOE_128, TARGETS, Target, find_target
from fse_convert.servers.verdict import Outcome, Verdict, whole

SERVED = (Outcome.FUSED, Outcome.UNFUSED, Outcome.UNSAFE)
"""What becomes of a model that a server would start on."""
EXAMPLE_EP = 8
"""Expert-parallel size for which costs per rank are shown: DeepSeek-V4.1 on one node of 8 GPUs."""


def notes(plan: Plan) -> list[Problem]:
    """Collect them."""
    own = (_needless(plan), _fuses_nothing(plan), _beside(plan), _nothing_to_pad(plan), refusal(plan), _drafter(plan),
           _served(plan))  # fmt: skip
    found = [n for n in own if n]
    about = (*found, *_unused(plan), *_of_server(plan), *config_notes(plan), *_stale(plan))
    return [*plan.source.checkpoint.notes, *plan.decision.after.description.conflicts, *about]


def padding_cost(plan: Plan) -> str:
    """Say what padding costs: bytes on disk and per rank."""
    decision = plan.decision
    cost = padding(plan.source.description, decision.at_kernel)
    per_rank = f" and {size(cost.per_rank(Serving(ep=EXAMPLE_EP)))} per rank at EP {EXAMPLE_EP}"
    even = not uneven(plan.source.description, EXAMPLE_EP)
    return f"Padding {decision.source_width} to {decision.width} costs {size(cost.disk)} on disk{per_rank if even else ''}."


def _source_verdict(plan: Plan, name: str) -> Verdict:
    """Return what a target makes of the source."""
    decision = plan.decision
    target = find_target(name)
    if target is None:
        raise ValueError(name)
    return whole(tuple(native_layer(plan.source.subject, target, v.layer) for v in decision.verdicts))


def _needless(plan: Plan) -> Problem | None:
    """Note when every server that fuses the padded output fuses the source too, unless --tp or the server asked for it."""
    decision = plan.decision
    narrow = find_target(MEGAMOE_128.name)
    target, tp = plan.options.target, plan.options.tp
    if not decision.pads or narrow is None or not isinstance(target, Target):
        return None
    narrowest = needed_widths(plan.source.subject, Options(narrow, tp=tp), decision.at_source)
    wanted = not target.is_contract and _source_verdict(plan, target.name).outcome is not decision.server.outcome
    rows = [t for t in TARGETS if not t.is_contract]
    fusing = [t for t in rows if _source_verdict(plan, t.name).fused]
    if narrowest != decision.at_source or wanted or not fusing:
        return None
    fuse = f"{releases(fusing, rows)} fuse the source as is: --target {narrow.name} pads nothing"
    return Problem("padding-not-needed", f"{padding_cost(plan)} {fuse}")


def _fuses_nothing(plan: Plan) -> Problem | None:
    decision = plan.decision
    if not decision.pads or decision.fused_layers or not plan.options.target:
        return None
    message = f"padding fuses nothing here: no layer fits {plan.options.goal}, at {decision.source_width} or at {decision.width}"
    return Problem("padding-fuses-nothing", message)


def _beside(plan: Plan) -> Problem | None:
    """With --experts shared the padded width is in ``fse/`` alone, where no released server looks by itself."""
    decision = plan.decision
    if plan.options.experts is Experts.ALL or decision.at_kernel == decision.at_source or not plan.sidecar:
        return None
    message = (
        f"only fse/ has the shared experts at {decision.width}: only a server with the plugin of fse_convert.serving (vLLM:"
        f" --load-format fse) uses them; without it, verdicts are those of the source"
    )
    return Problem("sidecar-only", message)


def _nothing_to_pad(plan: Plan) -> Problem | None:
    decision = plan.decision
    changed = plan.rewritten or decision.changes or decision.at_kernel != decision.at_source
    if changed or not decision.fused_layers or not plan.options.contract:
        return None
    server = plan.options.server
    whose = server.title if isinstance(server, Target) and decision.server.fused else plan.options.goal
    message = f"{decision.fused_layers} of {len(decision.verdicts)} layers fit {whose} as is: only fse/ is new"
    copied = sum(s.source.size for s in plan.shards if s.source)
    return Problem("nothing-to-pad", f"{message}; --link hard copies none of the other {size(copied)}")


def refusal(plan: Plan) -> Problem | None:
    """Say why the server that was converted for would not run the output on this path; None where it would."""
    decision = plan.decision
    target = plan.options.server
    if not isinstance(target, Target) or decision.server.outcome in (Outcome.FUSED, Outcome.UNFUSED):
        return None
    reasons = "; ".join(r.message for r in decision.server.reasons)
    verb = {Outcome.UNKNOWN: "is not known to run", Outcome.UNSAFE: "fails, or computes wrong numbers, when it runs"}
    does = verb.get(decision.server.outcome, "refuses to run")
    message = f"{target.title} {does} MegaMoE on the output's standard layout: {reasons}"
    checkpoint = plan.source.checkpoint
    command = inspection_command(checkpoint.folder.label, checkpoint.config, plan.source.description.family_name)
    hint = f"--allow-unfused converts anyway; {command} says which servers fuse it"
    return Problem("server-refuses", message, hint=hint)


def _drafter(plan: Plan) -> Problem | None:
    """Note where the drafter does not fuse, though all decoder layers do: no change of format helps it in some releases."""
    if plan.options.contract or left_unfused(plan.decision) not in (Unfused.DRAFTER_RUNS, Unfused.DRAFTER_FAILS):
        return None
    layers = [v.server for v in plan.decision.verdicts if v.layer.layer.kind is LayerKind.MTP]
    worst = whole(tuple(layers))
    reasons = "; ".join(r.message for r in worst.reasons)
    if worst.outcome is Outcome.UNSAFE:
        return Problem("drafter-unsafe", f"{plan.options.goal} fuses the decoder layers, but not with the drafter: {reasons}",
                       hint="serve without speculative decoding, or without fusion")  # fmt: skip
    return Problem("drafter-unfused", f"{plan.options.goal} fuses the decoder layers; the drafter's run unfused: {reasons}")


def _served(plan: Plan) -> Problem | None:
    """Say which servers fuse the output, where a change of format was asked for and no server was named."""
    if plan.options.target or not plan.decision.changes:
        return None
    after = plan.decision.after
    decoder = [i for i, d in enumerate(after.description.layers) if d.layer.kind is LayerKind.DECODER]
    answers = [
        a
        for a in judge(after.subject)
        if a.engine != CONTRACT
        and a.model.outcome in (*SERVED, Outcome.UNKNOWN)
        and not NO_PATH & {r.code for r in a.model.reasons}
    ]
    asked = ([a for a in answers if a.question is q] for q in Question)
    said = [
        f"{TOPICS[rows[0].question]}: {said_of(rows, decoder)}" for rows in asked if any(a.model.outcome in SERVED for a in rows)
    ]
    return Problem("output-served", f"of the output: {' '.join(said) or 'no server that is known fuses it.'}")


def _unused(plan: Plan) -> Iterator[Problem]:
    """Note permissions that no change makes use of."""
    changes = plan.decision.changes
    if plan.options.lossy and all(change.lossless for change in changes):
        yield Problem("option-unused", "no change that is made loses precision", "--lossy", "leave it out")
    if plan.options.drop_originals and not any(change.originals for change in changes):
        message = "no change that is made keeps originals, so there are none to leave out"
        yield Problem("option-unused", message, "--drop-originals", "leave it out")


def _of_server(plan: Plan) -> Iterator[Problem]:
    """Note what the server that was named needs, and where it does not compute with the output's own values."""
    target = plan.options.server
    if target and not isinstance(target, Target):
        answered = answer(plan.decision.after.subject, target)
        yield from (*answered.notes, *size_notes([answered], plan.options.tp))


def _stale(plan: Plan) -> Iterator[Problem]:
    """Note files that are carried over as is, though they state the width that was padded away."""
    decision = plan.decision
    if decision.main_width == decision.source_width:
        return
    for name, width in sorted(plan.source.stated_widths.items()):
        if width == decision.source_width:
            message = (
                f"still says moe_inter_dim {width} and is copied as is; servers read config.json, which says {decision.main_width};"
                f" DeepSeek's own inference code reads this file and would not load the padded experts"
            )
            yield Problem("width-beside", message, name)
