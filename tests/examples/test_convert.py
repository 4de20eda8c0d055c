"""The example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "convert.py"


def test_the_example_inspects_converts_proves_and_restores() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "vllm-0.31" in first
    assert "vllm-0.30" not in first.split()
    assert rest[:2] == ["width 384 -> 512", "exit code of verify: 0"]
    assert rest[2].startswith("restored ")
