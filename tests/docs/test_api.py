"""docs/api.md: every block runs, and every name of the API is in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fse_convert

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_block_runs(made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").symlink_to(made())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Path": Path}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert (tmp_path / "original" / "config.json").read_bytes() == (tmp_path / "checkpoint" / "config.json").read_bytes()


@pytest.mark.parametrize("name", fse_convert.__all__)
def test_the_api_is_what_it_says(name: str) -> None:
    assert getattr(fse_convert, name) is not None


def test_what_is_not_in_it_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pipeline'"):
        fse_convert.pipeline  # noqa: B018


def output_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_loads_nothing() -> None:
    heavy = "m.startswith('fse_convert.') or m in ('torch', 'click', 'rich')"
    assert output_of(f"import sys, fse_convert; print(*(m for m in sys.modules if {heavy}))") == ""


def test_modules_do_not_hide_functions() -> None:
    """A submodule named like a function would replace it once it is imported."""
    names = ("inspect", "convert", "verify", "restore")
    code = f"import fse_convert, fse_convert.cli, fse_convert.api; print(*(callable(getattr(fse_convert, n)) for n in {names}))"
    assert output_of(code) == "True True True True"
