#!/usr/bin/env python3
"""Peak memory of a conversion by workers and by proof, above an interpreter with torch loaded.

    python tests/benchmarks/memory.py [--folder DIR]

The widths are those of DeepSeek-V4.1 and V4-Pro; it depends on nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from fse_convert.testing.checkpoints import make_checkpoint

CHILD = """
import resource, sys, torch
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
from fse_convert.cli import main
try:
    main(sys.argv[1:])
except SystemExit as e:
    code = e.code
print(peak() - before, file=sys.stderr)
sys.exit(code)
"""


def peak(source: Path, out: Path, *options: str) -> int:
    """Bytes of peak resident memory of one conversion, above torch."""
    command = [sys.executable, "-c", CHILD, str(source), str(out), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(options)}: {done.stderr}")
    return int(done.stderr.splitlines()[-1])


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
def main(folder: Path | None) -> None:
    """Measure, and print a table."""
    shapes = {"V4.1 (5120 x 2304)": (5120, 2304), "V4-Pro (7168 x 3072)": (7168, 3072)}
    print("MiB above the interpreter with torch; workers 1, 2, 4, 8")
    for name, (hidden, width) in shapes.items():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            root = Path(work)
            source = make_checkpoint(
                root / "source", "v4.1-flash", layers=8, mtp=0, experts=4, hidden=hidden, width=width, vocab=4096
            )
            for level in ("none", "storage", "numerics"):
                found = []
                for workers in (1, 2, 4, 8):
                    out = root / f"{level}-{workers}"
                    options = ("--verify", level, "--workers", str(workers))
                    found.append(peak(source, out, *options) >> 20)
                    subprocess.run(["rm", "-r", out], check=True)
                print(f"{name:>22} {level:>9} " + " ".join(f"{f:>5}" for f in found))


if __name__ == "__main__":
    main()
