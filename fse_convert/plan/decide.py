"""Decide whether a conversion can run as asked: which changes of format, at which width, and what comes of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.errors import FseConvertError, InvalidCheckpoint, NotConvertible, Problem, counted, folded
from fse_convert.model.config_against_tensors import LOAD_CONFLICTS
from fse_convert.model.description import Description
from fse_convert.model.moe import LayerKind
from fse_convert.plan.changes.search import Candidates, Changes, choose, left_unfused
from fse_convert.plan.commands import conversion_command, inspection_command
from fse_convert.plan.edits import config_edits
from fse_convert.plan.plan import Decision, Experts, LayerVerdict, Options
from fse_convert.plan.source import Source
from fse_convert.plan.width_rounding import needed_widths, stored_widths
from fse_convert.servers.f32_scales import INEXACT, Scales
from fse_convert.servers.judge import answer, kernel_layer, native_layer
from fse_convert.servers.native import LaunchWidths
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome, Reason, Verdict, because, whole
from fse_convert.sidecar.manifest import ConfigEdit

NOT_JUDGED = because(Outcome.UNKNOWN, "not-judged", "converted without a --target")


def decide(source: Source, options: Options) -> Decision:
    """Decide what a conversion does.

    Raises InvalidCheckpoint for what is broken or not understood, NotConvertible for layers that would not fuse.
    """
    if source.description.unknown:  # no change can be judged
        raise InvalidCheckpoint(source.description.unknown)
    candidates = Candidates(source)
    decision = _chosen(candidates, options)
    if not _suits(decision, options):
        raise NotConvertible(*_no_way(decision, candidates, options))
    return decision


def decider(source: Source) -> Callable[[Options], Decision | None]:
    """Make a function that returns what a conversion with some options would decide, None where it would refuse."""
    candidates = Candidates(source)

    def decided(options: Options) -> Decision | None:
        try:
            decision = choose(candidates, options, _decide_after)
        except NotConvertible:
            return None
        return decision if isinstance(decision, Decision) and _suits(decision, options) else None

    return decided


def _chosen(candidates: Candidates, options: Options) -> Decision:
    decision = choose(candidates, options, _decide_after)
    if isinstance(decision, FseConvertError):
        raise decision
    return decision


def _suits(decision: Decision, options: Options) -> bool:
    """Tell whether the target fuses enough; a contract has been asked already."""
    return bool(options.contract or not options.target or options.allow_unfused) or left_unfused(decision).usable


def _decide_after(after: Source, changes: Changes, options: Options) -> Decision:
    """Decide about a source as it is after some changes of format."""
    description = after.description
    _check_understood(after.checkpoint, description, options)
    at_source = stored_widths(description)
    at_kernel = needed_widths(after.subject, options, at_source)
    at_main = at_kernel if options.experts is Experts.ALL else at_source
    if at_main != at_source and any(change.tensors for change in changes):
        widths = f"{at_source.routed} to {at_main.routed}"
        message = f"one conversion cannot change a format and pad {widths}, and an output is not converted again"
        raise NotConvertible(Problem("changes-combined", message, "--tp", f"choose one of them: {_unpadded(after, options)}"))
    verdicts, server = _verdicts(after, options, at_kernel, at_main)
    edits: tuple[ConfigEdit, ...] = ()
    if at_main != at_source:
        edits = config_edits(after.checkpoint, description, at_source, at_main)
    return Decision(
        changes=changes,
        after=after,
        at_source=at_source,
        at_main=at_main,
        at_kernel=at_kernel,
        verdicts=verdicts,
        server=server,
        config_edits=edits,
    )


def _verdicts(
    after: Source, options: Options, at_kernel: LaunchWidths, at_main: LaunchWidths
) -> tuple[tuple[LayerVerdict, ...], Verdict]:
    """Judge every layer, and the model as a whole. Raises NotConvertible for layers that do not fit a contract."""
    layers, target, contract = after.description.layers, options.target, options.contract
    if target is None:
        return tuple(LayerVerdict(layer=d, verdict=NOT_JUDGED, server=NOT_JUDGED) for d in layers), NOT_JUDGED
    if not isinstance(target, Target):
        found = answer(after.subject, target)
        return tuple(LayerVerdict(layer=d, verdict=v, server=v) for d, v in zip(layers, found.layers, strict=True)), found.model
    servers = tuple(native_layer(after.subject, target, d, at_main) for d in layers)
    if contract is None:
        return tuple(LayerVerdict(layer=d, verdict=v, server=v) for d, v in zip(layers, servers, strict=True)), whole(servers)
    kernel = (kernel_layer(after.subject, target, contract, d, at_kernel) for d in layers)
    verdicts = tuple(LayerVerdict(layer=d, verdict=k, server=v) for d, k, v in zip(layers, kernel, servers, strict=True))
    _check_verdicts(verdicts, options, after, contract.name)
    return verdicts, whole(servers)


def _no_way(decision: Decision, candidates: Candidates, options: Options) -> list[Problem]:
    """Say why a target fuses nothing whatever may be changed, or which permission is lacking."""
    title = options.goal
    unpadded = _chosen(candidates, replace(options, tp=1))
    if left_unfused(unpadded).usable:
        message = (
            f"{title} fuses this checkpoint after a change of format, but one conversion cannot pad it for TP {options.tp} too"
        )
        return [Problem("changes-combined", message, "--tp", _unpadded(unpadded.after, options))]
    if not options.lossy:
        lossy = replace(options, lossy=True)
        with_loss = _chosen(candidates, lossy)
        if left_unfused(with_loss).usable:
            does = " and ".join(change.does for change in with_loss.changes)
            message = f"{title} fuses this checkpoint only after a change that loses precision: {does}"
            source = candidates.source
            command = conversion_command(source.subject, source.checkpoint.folder.label, lossy)
            return [Problem("lossy", message, "--target", f"{command} permits it")]
    reasons = [Problem(r.code, r.message, hint=r.hint) for r in decision.server.reasons]
    unfit = [change for change in candidates.recodings() if isinstance(change, Problem)]
    message = f"no change of format that is known makes {title} fuse this checkpoint"
    return [Problem("no-change-helps", message, "--target", "--allow-unfused converts anyway"), *folded([*reasons, *unfit])]


def _unpadded(source: Source, options: Options) -> str:
    """Say at which tensor-parallel size a change of format needs no padding."""
    widths = stored_widths(source.description)
    sizes = (tp for tp in range(options.tp - 1, 0, -1) if options.tp % tp == 0)
    fits = (tp for tp in sizes if needed_widths(source.subject, replace(options, tp=tp), widths) == widths)
    return f"--tp {next(fits, 1)} needs no padding"


def _check_understood(checkpoint: Checkpoint, description: Description, options: Options) -> None:
    problems = [*description.problems, *(c for c in description.conflicts if c.code in LOAD_CONFLICTS)]
    if description.family is None and description.unknown:
        problems.append(description.unknown)
    elif description.family and options.target and not any(d.shared for d in description.layers) and not problems:
        message = f"no shared experts under the names of {description.family.name}: there is nothing to fuse"
        hint = "--tp N without --target pads for tensor parallelism alone"
        problems.append(Problem("no-shared-experts", message, checkpoint.folder.label, hint))
    if problems:
        raise InvalidCheckpoint(*folded(problems))


def _check_verdicts(verdicts: tuple[LayerVerdict, ...], options: Options, after: Source, contract: str) -> None:
    for kind in LayerKind:
        states = [v for v in verdicts if v.layer.layer.kind is kind]
        fused = [v for v in states if v.verdict.fused]
        if fused and len(fused) < len(states):
            odd = [v for v in states if not v.verdict.fused]
            counts = f"{len(fused)} of {len(states)} {kind.value} layers would fuse"
            message = f"the layers disagree: {counts}, these not: {_layer_list(odd)}"
            hint = "servers fuse all layers of a model or none (vllm-project/vllm#51695)"
            raise NotConvertible(Problem("layers-mixed", message, hint=hint), *_unfused_problems(odd, after.scales))
    unfused = [v for v in verdicts if not v.verdict.fused]
    if unfused and not options.allow_unfused:
        message = f"{len(unfused)} of {len(verdicts)} layers do not fit {contract}, they would not fuse"
        command = inspection_command(after.checkpoint.folder.label, after.checkpoint.config, after.description.family_name)
        hint = f"{command} says which servers fuse it; --allow-unfused writes such layers in the standard layout only"
        raise NotConvertible(Problem("not-fusable", message, hint=hint), *_unfused_problems(unfused, after.scales))


def _unfused_problems(unfused: list[LayerVerdict], scales: Scales) -> list[Problem]:
    """Return one problem per distinct reason, naming the layers that have it, and of inexact scales one value.

    Of a server that refuses the model, its own reasons: what its kernel takes does not matter then.
    """
    by_reason: dict[Reason, list[LayerVerdict]] = {}
    for v in unfused:
        for reason in (v.server if v.server.outcome is Outcome.REFUSED else v.verdict).reasons:
            by_reason.setdefault(reason, []).append(v)
    return [Problem(r.code, _message(r, vs, scales), _layer_list(vs), r.hint) for r, vs in by_reason.items()]


def _message(reason: Reason, verdicts: list[LayerVerdict], scales: Scales) -> str:
    if reason.code != INEXACT:
        return reason.message
    name = scales.inexact_of(verdicts[0].layer)[0]
    return f"F32 scales are not powers of two in {counted(len(verdicts), 'layer')}, e.g. {name}: {scales.inexact[name]}"


def _layer_list(verdicts: list[LayerVerdict]) -> str:
    names = [v.layer.layer.name for v in verdicts]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"
