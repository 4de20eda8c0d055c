"""The widths of experts: those that a checkpoint has, and the smallest ones that a target takes."""

from __future__ import annotations

from math import lcm

from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.sizes import round_up
from fse_convert.model.description import Description
from fse_convert.model.families.width_keys import Share
from fse_convert.plan.plan import Options
from fse_convert.servers.load_padding import needed_contract
from fse_convert.servers.native import LaunchWidths
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import CONTRACTS, Target, find_target
from fse_convert.servers.tensor_parallel import ENGINES, Multiples, rank_multiples


def stored_widths(description: Description) -> LaunchWidths:
    """Return the widths of one routed expert and of the whole shared MLP (0: there is none); the same in every layer."""
    shared = sorted({d.shared.width for d in description.layers if d.shared})
    for widths, whose in ((description.widths, "routed experts"), (shared or [0], "shared experts")):
        if len(widths) != 1:
            found = ", ".join(map(str, widths)) or "none"
            raise InvalidCheckpoint(Problem("widths-differ", f"{whose} of different layers differ in width: {found}"))
    return LaunchWidths(description.widths[0], *(shared or [0]))


def needed_widths(checkpoint: Subject, options: Options, stored: LaunchWidths) -> LaunchWidths:
    """Return the smallest widths that contract, server, scale blocks and tensor-parallel size accept, at least the source's.

    A shared MLP of n routed widths keeps its n for a target, as servers fuse experts of one width, and where no other config key
    has its width. Any other grows by itself: for a contract to a multiple of the routed width, as the kernel runs it as so many
    experts.
    """
    own = _own_keys(checkpoint)
    multiples = _multiples(checkpoint, options, own)
    n_shared, rest = divmod(stored.shared, stored.routed)
    if not rest and (options.target or not own):
        routed = _grown(checkpoint, stored.routed, multiples.of_one(n_shared))
        return LaunchWidths(routed, n_shared * routed)
    routed = _grown(checkpoint, stored.routed, multiples.routed)
    return LaunchWidths(routed, round_up(stored.shared, lcm(multiples.shared, routed if options.contract else 1)))


def _multiples(checkpoint: Subject, options: Options, own: set[Share]) -> Multiples:
    """Return what ranks, target and config ask of the widths. ``own``: what keys for shared experts alone state."""
    ranks = Multiples() if options.tp == 1 else rank_multiples(checkpoint, options.tp, _engines(options))
    target = options.target if options.contract and isinstance(options.target, Target) else None
    routed = lcm(ranks.routed, _target_multiple(checkpoint, target, options.tp)) if target else ranks.routed
    parts = checkpoint.description.n_shared if Share.ONE_SHARED in own else 1
    return Multiples(routed, lcm(ranks.shared, parts or 1))


def _target_multiple(checkpoint: Subject, target: Target, tp: int) -> int:
    """Return what a target asks of a routed width: its contract, a rule of its own for the format, whole scale blocks per rank."""
    layers = checkpoint.description.layers
    own = (target.multiples.get(d.routed.gate.kind, (1, 1))[0] for d in layers if d.routed)
    blocks = (f.width_block(role) for d in layers for group in d.groups for role, f in group.formats.items())
    return lcm(needed_contract(target).width_multiple, *own, tp * lcm(*blocks))


def _grown(checkpoint: Subject, width: int, multiple: int) -> int:
    """Return the next width of routed experts that is a multiple, and at which no loader mistakes a stack that it turns."""
    family, layers = checkpoint.description.family, checkpoint.description.layers
    stacks = [s for s in family.stacked if s.by_shape] if family and any(d.layer.stacked for d in layers) else []
    turned = {d.routed.hidden / len(stack.roles) for stack in stacks for d in layers if d.routed}
    grown = round_up(width, multiple)
    while grown in turned - {width}:
        grown += multiple
    return grown


def _own_keys(checkpoint: Subject) -> set[Share]:
    """Tell whose width keys for shared experts alone state; empty too where a loader takes a routed expert's for it."""
    family = checkpoint.description.family
    if family is None:
        return set()
    if any(r.key == w.key for r in family.readings for w in family.widths if w.share is Share.ROUTED):
        return set()
    return {w.share for w in family.widths if w.share is not Share.ROUTED and any(family.stated(checkpoint.config, w.key))}


def _engines(options: Options) -> tuple[str, ...]:
    """Return the servers whose ranks must hold whole blocks: the one that was named, else all whose rules are known."""
    named = options.server.engine.partition(" ")[0] if options.server else ""
    return (named,) if named in ENGINES else ENGINES


def contract_widths(checkpoint: Subject, tp: int) -> dict[str, LaunchWidths]:
    """Return the widths that each kernel contract needs of this checkpoint; empty where experts have no one width."""
    try:
        stored = stored_widths(checkpoint.description)
    except InvalidCheckpoint:
        return {}
    targets = ((name, find_target(name)) for name in CONTRACTS)
    return {name: needed_widths(checkpoint, Options(t, tp=tp), stored) for name, t in targets if t}
