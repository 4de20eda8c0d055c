"""The example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "convert.py"


def test_the_example_inspects_converts_and_proves() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "width 384 -> 512" in done.stdout
    assert done.stdout.count("numerics: passed: 3 of 3 layers bit-equal to the source") == 2
