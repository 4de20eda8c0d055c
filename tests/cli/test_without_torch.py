"""A gate needs no torch: what reads headers and config works where torch cannot be imported, and what needs it says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
from fse_convert.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def run_without(made: Callable[..., Path], converted: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run a command without torch; CHECKPOINT and OUTPUT stand for folders of those."""
    places = {"CHECKPOINT": str(made()), "OUTPUT": str(converted("vllm-0.30")), "NEW": str(tmp_path / "new")}

    def run(*args: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", SCRIPT, *(places.get(a, a) for a in args)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("inspect", "CHECKPOINT", "--require", "vllm-0.33", "--format", "github"), 0),
        (("inspect", "CHECKPOINT", "--require", "vllm-0.30"), 1),
        (("inspect", "OUTPUT", "--json"), 0),
        (("targets",), 0),
        (("explain", "nan"), 0),
        (("convert", "CHECKPOINT", "NEW", "--target", "vllm-0.30", "--dry-run"), 0),
        (("convert", "CHECKPOINT", "NEW", "--target", "vllm-0.30", "--verify", "none"), 0),
        (("convert", "CHECKPOINT", "NEW", "--routed", "fp8", "--dry-run"), 0),
        (("card", "OUTPUT"), 0),
        (("doctor",), 0),
        (("--version", "-v"), 0),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_what_needs_no_torch(args: tuple[str, ...], code: int, run_without: Callable[..., tuple[int, str, str]]) -> None:
    got, out, err = run_without(*args)
    assert got == code, err
    assert out


@pytest.mark.parametrize(
    "args", [("convert", "CHECKPOINT", "NEW", "-q"), ("verify", "OUTPUT", "-q"), ("restore", "OUTPUT", "NEW", "-q")]
)
def test_what_needs_it_says_so(args: tuple[str, ...], tmp_path: Path, run_without: Callable[..., tuple[int, str, str]]) -> None:
    got, out, err = run_without(*args, "-q")
    assert (got, out) == (4, "")
    assert err.startswith("error[torch-missing]: torch is not installed\n  hint:  pip install torch")
    assert len(err.splitlines()) == 2
    assert not (tmp_path / "new").exists()
