"""A change of format as a value: tensors that stand in the place of others, keys of config.json, and whether anything is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

from fse_convert.errors import Problem
from fse_convert.plan.tensors import TensorSpec


class _Removed(Enum):
    REMOVED = "removed"


REMOVED: Final = _Removed.REMOVED
"""The value of a key that is taken out."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One key of config.json, by its path from the top level, and the JSON value that it gets."""

    path: tuple[str, ...]
    value: Any | Literal[_Removed.REMOVED]


@dataclass(frozen=True, slots=True)
class FormatChange:
    """One change of format of a whole checkpoint.

    ``name``: how it is recorded, such as ``routed-fp8``. ``does``: one sentence for people, without a full stop. ``tensors``: by
    the name of a source tensor, what stands in its place, in file order; all others stay. ``config``: keys of config.json.
    ``originals``: source tensors that do not follow from the output, which ``restore`` needs as they are.
    """

    name: str
    does: str
    lossless: bool = True
    tensors: Mapping[str, tuple[TensorSpec, ...]] = field(default_factory=dict)
    config: tuple[ConfigChange, ...] = ()
    originals: frozenset[str] = frozenset()


Result = FormatChange | Problem
"""What comes of asking for a change: the change, or why this checkpoint cannot have it."""


def changed_config(config: Mapping[str, Any], changes: Iterable[ConfigChange]) -> dict[str, Any]:
    """Return a config with changes made, every other key as it is and in its place; sections that are missing are added."""
    result: dict[str, Any] = json.loads(json.dumps(config))
    for change in changes:
        *sections, key = change.path
        scope = result
        for section in sections:
            if change.value is REMOVED and not isinstance(scope.get(section), dict):
                break
            scope = scope.setdefault(section, {})
        else:
            if change.value is REMOVED:
                scope.pop(key, None)
            else:
                scope[key] = change.value
    return result
