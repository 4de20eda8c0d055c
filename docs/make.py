#!/usr/bin/env python3
"""Makes the pages that come from the program itself: docs/targets.md, and docs/inspect.svg from a real run.

python docs/make.py [CHECKPOINT]     without one, a DeepSeek-V4.1-shaped checkpoint is made for the screen
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fse_convert.report.targets_markdown import targets_markdown
from fse_convert.testing.checkpoints import make_checkpoint

DOCS = Path(__file__).resolve().parent
COLUMNS = 118
NAME = "DeepSeek-V4.1-Flash"


def screen(checkpoint: Path) -> str:
    """What ``fse-convert inspect`` prints about a checkpoint on a terminal, as SVG."""
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "fse_convert", "inspect", checkpoint.name]
    shown = subprocess.run(command, cwd=checkpoint.parent, env=env, check=True, capture_output=True, text=True).stdout
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(f"$ fse-convert inspect {checkpoint.name}"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="fse-convert inspect", unique_id="inspect")
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)  # a picture fetches nothing


def example(folder: Path) -> Path:
    """A checkpoint with the shapes of DeepSeek-V4.1-Flash, headers and config only: inspect reads no weights."""
    return make_checkpoint(folder / NAME, "v4.1-flash", real=True, sparse=True)


def main() -> None:
    """Write both."""
    (DOCS / "targets.md").write_text(targets_markdown(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as work:
        checkpoint = Path(sys.argv[1]) if len(sys.argv) > 1 else example(Path(work))
        (DOCS / "inspect.svg").write_text(screen(checkpoint), encoding="utf-8")


if __name__ == "__main__":
    main()
