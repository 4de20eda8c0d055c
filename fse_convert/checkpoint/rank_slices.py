"""Shards that are slices for the ranks of one server, whatever they are called: told from their headers and the config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fse_convert.checkpoint.header import TensorInfo

DOWN = re.compile(r".*expert.*\b(?:down_proj|w2)(?:\.weight)?")
"""Names of down projections, the only ones of which one side is the width and nothing else, stacked or not."""
WIDTH = re.compile(r".*(?:intermediate|inter_dim|ffn|expert\w*_dim).*")
"""Config keys of widths, of every family."""
HIDDEN = re.compile("hidden_size")
PACKED = ("I8", "U8")
"""Dtypes with two elements a byte: half a width is a whole one there."""


def are_slices(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> bool:
    """Tell whether an expert stands in several shards, each time with an equal part of the width that the config states."""
    by_name: dict[str, list[TensorInfo]] = {}
    for t in tensors:
        by_name.setdefault(t.name, []).append(t)
    several = [held for name, held in by_name.items() if len(held) > 1 and DOWN.fullmatch(name) and held[0].dtype not in PACKED]
    widths, hidden = set(_sizes(config, WIDTH)), set(_sizes(config, HIDDEN))
    sides = [(side, len(held)) for held in several for side in held[0].shape if side not in hidden]
    return all(side not in widths for side, _ in sides) and any(side * files in widths for side, files in sides)


def _sizes(config: Mapping[str, Any], key: re.Pattern[str]) -> Iterator[int]:
    """Yield the integers that stand under such keys, in sections and in lists too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, key)
        elif key.fullmatch(name):
            yield from (v for v in (value if isinstance(value, list) else [value]) if type(v) is int)
