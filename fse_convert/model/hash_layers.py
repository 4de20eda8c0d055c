"""The layers of DeepSeek-V4 that route by a table, ``tid2eid``, instead of scores: by the tensors, and by config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fse_convert.errors import Problem
from fse_convert.model.families.family import Family
from fse_convert.model.values import unexpected

V4 = "deepseek_v4"
STATED = "num_hash_layers"
GATE = re.compile(r"(?:^|\.)layers\.(\d+)\.ffn\.gate\.(weight|bias|tid2eid)$")


def hash_layers(family: Family, config: Mapping[str, Any], tensors: Iterable[str]) -> tuple[frozenset[int], bool]:
    """Return the decoder layers whose gate has a table, and whether the gate of every decoder layer is there.

    A gate has a table or a bias (vLLM 0.33 models/deepseek_v4/nvidia/model.py:288-312): one without either has lost a tensor.
    """
    parts: dict[str, set[int]] = {"weight": set(), "bias": set(), "tid2eid": set()}
    for found in filter(None, map(GATE.search, tensors)):
        parts[found[2]].add(int(found[1]))
    gates = parts["weight"] & (parts["bias"] | parts["tid2eid"])
    depth = family.number(config, *family.depth_keys)
    return frozenset(parts["tid2eid"]), depth is not None and len(gates) >= depth


def table_conflicts(family: Family, config: Mapping[str, Any], tensors: Iterable[str]) -> Iterator[Problem]:
    """Compare the number of layers that route by a table with the tables; where gates lack tensors, a table may be lost too."""
    stated = list(family.stated(config, STATED)) if config.get("model_type") == V4 else []
    tables, whole = hash_layers(family, config, tensors) if stated else (frozenset(), False)
    for s in stated:
        if s.number is not None and (s.number < len(tables) or (whole and s.number > len(tables))):
            yield unexpected(s.path, s.value, f"{len(tables)}, the layers whose gate has a tid2eid")


def built_hash_layers(family: Family, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers that transformers' config class, as vLLM 0.33 reads it, counts as routed by a table.

    ``mlp_layer_types`` decides, else ``num_hash_layers``, else there are 3 (5.20 to 5.24 configuration_deepseek_v4.py:264-268).
    """
    depth, stated = (family.number(config, *keys) for keys in (family.depth_keys, (STATED,)))
    words = family.value(config, "mlp_layer_types")
    count = words[:depth].count("hash_moe") if isinstance(words, list) else 3 if stated is None else stated
    return frozenset(range(count if depth is None else min(count, depth)))
