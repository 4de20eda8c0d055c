#!/usr/bin/env python3
"""Make a small checkpoint shaped like DeepSeek-V4.1-Flash, ask which servers fuse it, convert it, and prove the output again."""

import subprocess
import sys
import tempfile
from pathlib import Path

from fse_convert.testing.checkpoints import make_checkpoint


def fse_convert(*arguments: str | Path) -> None:
    """Run the command line; CalledProcessError where it does not exit with 0."""
    subprocess.run([sys.executable, "-m", "fse_convert", *arguments], check=True)


with tempfile.TemporaryDirectory() as folder:
    checkpoint = make_checkpoint(Path(folder, "checkpoint"), "v4.1-flash", layers=2, experts=2, hidden=512, width=384)
    out = Path(folder, "out")
    fse_convert("inspect", checkpoint)
    fse_convert(checkpoint, out, "--target", "vllm-0.30")
    fse_convert("verify", out, "--source", checkpoint)
