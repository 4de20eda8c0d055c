"""Which known family an unknown model is named like: a hint for people, who then decide with ``--family``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.families.width_keys import Share
from fse_convert.model.formats import WEIGHTS
from fse_convert.model.grouping import Seen, group_layers
from fse_convert.model.moe import MoELayer, Role
from fse_convert.model.stacked import find_stack


def resembling(config: Mapping[str, Any], names: Iterable[Seen]) -> Family | None:
    """Find the family under whose names all experts stand and whose keys config.json has, of several the one with most of them.

    ``names``: every pattern of names that look like experts, with one example of each. None where there is no such family, and
    where two families have stacks of such names and shapes, but in different layouts.
    """
    examples = {s.example.name: s.example for s in names}
    alike = [family for family in FAMILIES if _states(family, config) and _explains(family, examples, config)]
    stacks = {stack for family in alike for stack in family.stacked if any(f".{stack.name}" in name for name in examples)}
    if len({stack.name for stack in stacks}) < len(stacks):
        return None
    return max(alike, key=lambda family: sum(1 for _ in family.stated(config, *(w.key for w in family.widths))), default=None)


def _states(family: Family, config: Mapping[str, Any]) -> bool:
    needed = [(w.key,) for w in family.widths if w.assumed and not w.optional]
    return all(any(family.stated(config, *keys)) for keys in (*needed, family.n_routed_keys))


def _explains(family: Family, examples: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> bool:
    found = group_layers(family, examples, None)
    widths = {s.number for s in family.stated(config, *(w.key for w in family.widths if w.share is Share.ROUTED))}
    return bool(found.layers) and not found.strays and all(_whole(family, layer, widths) for layer in found.layers)


def _whole(family: Family, layer: MoELayer, widths: set[int | None]) -> bool:
    """Tell whether a layer has all that the family's layers have: experts with each projection, a shared one, its gate.

    Stacked experts have them in the family's layout where a projection then has one of the ``widths`` that the config states.
    """
    members = [member for t in layer.stacked if (member := find_stack(family.stacked, t.name.removeprefix(f"{layer.name}."), t, 1))]
    roles = {frozenset(expert.projections) for expert in layer.routed}
    if members:
        roles.add(frozenset(role for member in members for role in member.stack.roles))
    shared, gate = layer.shared is not None, layer.gate_tensor is not None
    up = (member for member in members if member.part in WEIGHTS and Role.UP in member.stack.roles)
    wide = all(member.slice().shape[0] in {w * len(member.stack.roles) for w in widths if w} for member in up)
    understood = not layer.unknown and len(members) == len(layer.stacked) and not (members and layer.routed) and wide
    expected = ({frozenset(family.routed_names.values())}, bool(family.shared), family.gated)
    return understood and (roles, shared, gate) == expected
