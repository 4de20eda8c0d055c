"""Whether all layers and experts are there that the config speaks of: what a lost shard or an interrupted save leaves out.

A gap *inside* of a layer's experts shows by itself; a lost last expert or a lost layer shows only beside the other layers
and the config. The config is believed where the tensors bear it out somewhere, never against all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fse_convert.errors import Problem
from fse_convert.model.families import Family
from fse_convert.model.moe import LayerKind, MoELayer

HINT = "is the checkpoint complete?"
SHOWN = 4
"""How many layers a message names."""


def gaps(family: Family, config: Mapping[str, Any], layers: Sequence[MoELayer]) -> Iterator[Problem]:
    """Find MoE layers that are not there, and layers that have another number of routed experts than they should."""
    decoder = [m for m in layers if m.kind is LayerKind.DECODER]
    missing = sorted(expected_layers(family, config, decoder) - {m.index for m in decoder})
    if missing:
        which = f"{_some(map(str, missing))} ({len(missing)} of {len(missing) + len(decoder)})"
        yield Problem(
            "layers-missing", f"no experts in decoder layers {which}, which the config says have some", "config.json", HINT
        )
    yield from _count_gaps(decoder, family.value(config, family.routed_per_layer_key), family.number(config, family.n_routed_key))
    mtp = [m for m in layers if m.kind is LayerKind.MTP]
    stated = family.number(config, family.mtp_routed_key)
    yield from _count_gaps(mtp, [stated] * (max((m.index for m in mtp), default=0) + 1) if stated else None, None)


def expected_layers(family: Family, config: Mapping[str, Any], decoder: Sequence[MoELayer]) -> set[int]:
    """Numbers of the decoder layers that have experts by the config; empty where it does not say.

    Where the key of the first such layer is left out, the first one that is there counts as the first.
    """
    rule, count = family.sparse, family.number(config, "num_hidden_layers")
    types = family.value(config, "mlp_layer_types")
    if not decoder or count is None:
        return set()
    if isinstance(types, list) and len(types) >= count:
        return {i for i in range(count) if types[i] != "dense"}
    if rule is None:
        return set()
    step = family.value(config, rule.step)
    if isinstance(step, list):
        return {i for i in range(min(count, len(step))) if step[i]}
    if step is not None and (type(step) is not int or step < 1):
        return set()
    first = family.number(config, rule.first) if rule.first else 0
    last = family.number(config, rule.last)
    dense = family.value(config, rule.dense)
    start = min(m.index for m in decoder) if first is None else first
    end = count if last is None or last < 0 else min(last + 1, count)
    kept = set(dense) if isinstance(dense, list) else set()
    return {i for i in range(start, end) if (i + rule.ahead) % (step or 1) == 0 and i not in kept}


def _count_gaps(layers: Sequence[MoELayer], per_layer: object, stated: int | None) -> Iterator[Problem]:
    """Compare how many routed experts each layer has with what the config says of it, else with what most layers have.

    Layers with a gap between their experts are left out: it is told as one.
    """
    told = [m for m in layers if not m.stacked and _contiguous(m)]
    counts = Counter(len(m.routed) for m in told)
    if not counts:
        return
    usual = stated if stated is not None and stated in counts else counts.most_common(1)[0][0]
    wanted = ((m, _at(per_layer, m.index, usual)) for m in told)
    odd = [(m, count) for m, count in wanted if count != len(m.routed)]
    if odd:
        first, count = odd[0]
        where = f"{len(first.routed)} routed experts in {_some(m.name for m, _ in odd)}, expected {count}"
        kind = "MTP" if first.kind is LayerKind.MTP else "decoder"
        message = f"{len(odd)} of {len(told)} {kind} layers have another number of routed experts: {where}"
        yield Problem("experts-missing", message, first.name, HINT)


def _at(values: object, index: int, otherwise: int) -> int:
    if isinstance(values, list) and index < len(values) and type(values[index]) is int:
        return int(values[index])
    return otherwise


def _contiguous(layer: MoELayer) -> bool:
    return not layer.routed or layer.routed[-1].name.endswith(f".{len(layer.routed) - 1}")


def _some(names: Iterator[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
