from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def converted(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small output; never write into it."""
    from fse_convert.cli import main

    out = tmp_path_factory.mktemp("sidecar") / "out"
    with pytest.raises(SystemExit) as stopped:
        main([str(made("v4-flash", layers=1, experts=1)), str(out), "--verify", "storage"])
    assert not stopped.value.code
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A private copy of a small output, to be damaged."""
    return Path(shutil.copytree(converted, tmp_path / "out"))
