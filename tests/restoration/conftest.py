"""Outputs whose formats changed, made once per session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = {"hidden": 320, "width": 160, "layers": 2, "experts": 2}
"""Blocks of 128 are partial at the end of rows and of columns."""


@pytest.fixture(scope="session")
def changed(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Convert a small checkpoint with options, once per session; returns source and output. Never write into them."""
    from fse_convert.cli import main

    known: dict[str, tuple[Path, Path]] = {}

    def convert(kind: str, *options: str, **knobs: Any) -> tuple[Path, Path]:
        key = json.dumps([kind, options, knobs], sort_keys=True)
        if key not in known:
            root, out = made(kind, **{**SMALL, **knobs}), tmp_path_factory.mktemp("changed") / "out"
            with pytest.raises(SystemExit) as stopped:
                main([str(root), str(out), *options, "--verify", "storage", "-q"])
            assert not stopped.value.code
            known[key] = root, out
        return known[key]

    return convert


@pytest.fixture
def out(changed: Callable[..., tuple[Path, Path]], tmp_path: Path) -> Path:
    """A private copy of an output with FP8 experts that were MXFP4, with digests, to be damaged."""
    return Path(shutil.copytree(changed("v4-flash", "--routed", "fp8")[1], tmp_path / "out"))
