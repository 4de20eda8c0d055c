"""DeepSeek-V4.1-Flash at its real width, hidden 5120 and width 2304, as `make demo` has it: every byte, and the memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.checkpoints import make_checkpoint
from tests.conversion.expected import check_kernel, check_standard

pytestmark = pytest.mark.slow
LIMIT = 600 << 20
"""Bytes above the interpreter with torch loaded that one worker may take."""
MEASURED = """
import resource, sys, torch
from fse_convert.cli import main
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try: main(sys.argv[1:])
except SystemExit as e: code = e.code
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base, file=sys.stderr)
sys.exit(code)
"""


def convert(*args: object) -> tuple[str, int]:
    """Convert in a process of its own; what it printed, and bytes of peak memory above torch."""
    command = [sys.executable, "-c", MEASURED, *map(str, args)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    return result.stdout, int(result.stderr.split()[-1]) * 1024


def shown_in_docs() -> list[str]:
    """The lines that the page says the demonstration prints."""
    block = (
        (Path(__file__).parents[1] / "docs/converting.md").read_text().split("<!-- demo -->\n```console\n", 1)[1].split("```", 1)[0]
    )
    return block.splitlines()[1:]


@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single file"])
def test_real_width(single_file: bool, tmp_path: Path) -> None:
    root = make_checkpoint(tmp_path / "source", "v4.1-flash", layers=2, mtp=1, experts=8, single_file=single_file)
    text, peak = convert(root, tmp_path / "out", "--workers", "1")
    print(f"peak memory above torch: {peak >> 20} MiB, single file: {single_file}")
    assert "width 2304 -> 2560; 3 of 3 layers fit megamoe-512" in text
    assert "storage: passed" in text
    assert "numerics: passed: 3 of 3 layers bit-equal" in text
    assert peak < LIMIT
    if not single_file:
        assert check_standard(root, tmp_path / "out", 2304, 2560) == 126
        assert check_kernel(root, tmp_path / "out", 2560) == 3
        assert shown_in_docs() == [line.rstrip() for line in text.replace(str(tmp_path / "out"), "demo/converted").splitlines()]


def test_megamoe_128_takes_the_real_width_as_it_is(tmp_path: Path, digest: Callable[[Path], dict[str, str]]) -> None:
    root = make_checkpoint(tmp_path / "source", "v4.1-flash", layers=1, mtp=0, experts=2)
    text, _ = convert(root, tmp_path / "out", "--target", "megamoe-128")
    assert "width 2304, nothing to pad; 1 of 1 layers fit megamoe-128" in text
    assert {n: d for n, d in digest(tmp_path / "out").items() if not n.startswith("fse/")} == digest(root)
    assert check_kernel(root, tmp_path / "out", 2304) == 1


def test_memory_at_the_largest_size_there_is(tmp_path: Path) -> None:
    """DeepSeek-V4-Pro's experts, hidden 7168 and width 3072: the default command with its proofs keeps to the limit."""
    root = make_checkpoint(tmp_path / "source", "v4-pro", layers=3, experts=2)
    text, peak = convert(root, tmp_path / "out")
    print(f"peak memory above torch at V4-Pro's size: {peak >> 20} MiB")
    assert "numerics: passed" in text
    assert peak < LIMIT
