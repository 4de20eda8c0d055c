"""The width of one expert: the one that a checkpoint has, and the smallest one that a target takes."""

from __future__ import annotations

from math import lcm

from fse_convert.errors import InvalidCheckpoint, NotConvertible, Problem
from fse_convert.layout.sizes import round_up
from fse_convert.model.description import Description
from fse_convert.model.formats import Format
from fse_convert.model.moe import Role
from fse_convert.plan.plan import Options
from fse_convert.servers.sharding import ENGINES, rank_multiple
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import CONTRACTS, Target, find_target, width_multiple


def stored_widths(description: Description) -> tuple[int, int]:
    """Return the width of one expert, and how many of them the shared MLP is wide (0: there is none); the same in every layer."""
    widths = description.widths
    if len(widths) != 1:
        found = ", ".join(map(str, widths)) or "none"
        raise InvalidCheckpoint(Problem("widths-differ", f"routed experts of different layers differ in width: {found}"))
    if not any(d.shared for d in description.layers):
        return widths[0], 0
    ratios = {d.shared.width / widths[0] for d in description.layers if d.shared}
    if len(ratios) != 1 or not (ratio := ratios.pop()).is_integer() or ratio < 1:
        shared = sorted({d.shared.width for d in description.layers if d.shared})
        stored = ", ".join(map(str, shared))
        message = f"shared width {stored} is not a multiple of the routed width {widths[0]}, or differs between layers"
        raise NotConvertible(Problem("width-ratio", message, hint="the kernel runs n shared experts of the routed width"))
    return widths[0], int(ratio)


def needed_width(checkpoint: Subject, options: Options, source_width: int, n_shared: int) -> int:
    """Return the smallest width that contract, server, scale blocks and tensor-parallel size accept, at least the source's."""
    multiple = 1 if options.tp == 1 else rank_multiple(checkpoint, n_shared, options.tp, _engines(options))
    if options.contract and isinstance(options.target, Target):
        granularity = 1
        for layer in checkpoint.description.layers:
            if layer.routed:
                multiple = lcm(multiple, width_multiple(options.target, layer.routed.gate.kind))
            for group in layer.groups:
                granularity = lcm(granularity, *(_width_block(r, f) for r, f in group.formats.items()))
        multiple = lcm(multiple, granularity * options.tp)
    return round_up(source_width, multiple)


def _engines(options: Options) -> tuple[str, ...]:
    """Return the servers whose ranks must hold whole blocks: the one that was named, else all whose rules are known."""
    named = options.server.engine.partition(" ")[0] if options.server else ""
    return (named,) if named in ENGINES else ENGINES


def _width_block(role: Role, f: Format) -> int:
    if f.block is None:
        return 1
    return f.block[1] if role is Role.DOWN else f.block[0]


def contract_widths(checkpoint: Subject, tp: int) -> dict[str, int]:
    """Return the width of one expert that each kernel contract needs of this checkpoint; empty where experts have no one width."""
    description = checkpoint.description
    if len(description.widths) != 1:
        return {}
    (width,), targets = description.widths, ((name, find_target(name)) for name in CONTRACTS)
    return {name: needed_width(checkpoint, Options(t, tp=tp), width, description.n_shared) for name, t in targets if t}
