"""Which known family an unknown model is named like: a hint for people, who then decide with ``--family``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.families import FAMILIES
from fse_convert.model.family import Family
from fse_convert.model.grouping import Seen, group_layers
from fse_convert.model.moe import MoELayer


def resembling(config: Mapping[str, Any], names: Iterable[Seen]) -> Family | None:
    """Find the family under whose names all experts stand and whose keys config.json has, of several the one with most of them.

    ``names``: every pattern of names that look like experts, with one example of each. None where there is no such family.
    """
    examples = {s.example.name: s.example for s in names}
    alike = [family for family in FAMILIES if _states(family, config) and _explains(family, examples)]
    return max(alike, key=lambda family: sum(1 for _ in family.stated(config, *(w.key for w in family.widths))), default=None)


def _states(family: Family, config: Mapping[str, Any]) -> bool:
    needed = [(w.key,) for w in family.widths if w.assumed and not w.optional]
    return all(any(family.stated(config, *keys)) for keys in (*needed, family.n_routed_keys))


def _explains(family: Family, examples: Mapping[str, TensorInfo]) -> bool:
    found = group_layers(family, examples, None)
    return bool(found.layers) and not found.strays and all(_whole(family, layer) for layer in found.layers)


def _whole(family: Family, layer: MoELayer) -> bool:
    """Tell whether a layer has all that the family's layers have: experts with each projection, a shared one, its gate."""
    roles = {frozenset(expert.projections) for expert in layer.routed}
    shared, gate = layer.shared is not None, layer.gate_tensor is not None
    understood = not layer.unknown and not layer.stacked
    expected = ({frozenset(family.routed_names.values())}, bool(family.shared), family.gated)
    return understood and (roles, shared, gate) == expected
