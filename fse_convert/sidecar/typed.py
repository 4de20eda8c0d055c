"""Values of JSON that somebody else wrote, passed on only if they are what they must be."""

from __future__ import annotations

import json


def natural(value: object) -> int:
    """A whole number, not negative; JSON's true, 1.0 and Infinity are none. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"a whole number was expected, not {json.dumps(value)[:40]}")
    return value


def text(value: object) -> str:
    """A string. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {json.dumps(value)[:40]}")
    return value
