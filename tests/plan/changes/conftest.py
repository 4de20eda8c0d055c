"""Checkpoints of the recipes, made in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.plan.source import Source
from tests.plan.changes.models import made, opened
from tests.plan.changes.recipes import Damage

Make = Callable[..., Source]


@pytest.fixture
def small(tmp_path: Path) -> Make:
    """Make a small checkpoint of a kind, damage it, and open it."""

    def make(kind: str, damage: Damage = lambda _: None, **knobs: Any) -> Source:
        root = made(tmp_path / "source", kind, **knobs)
        damage(root)
        return opened(root)

    return make
