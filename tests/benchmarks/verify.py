#!/usr/bin/env python3
"""Level 1 of the proof against its floor: `cat` of both sides to /dev/null, once.

    python tests/benchmarks/verify.py [--gib 3] [--folder DIR] [--repeat N]

Both are measured in one run on one disk, in turn, either with nothing of the files in the page cache (as for a
checkpoint that is larger than memory) or with all of it. CPU seconds tell how much of the time was waiting.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from fse_convert.testing.checkpoints import make_checkpoint

EXPERT_BYTES = 3 * 2304 * 5120 * 17 // 32  # packed MXFP4 and a scale byte per 32 elements


def drop(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, by the clock and on the CPU, this process's and its children's."""
    start, before = time.perf_counter(), os.times()
    call()
    after = os.times()
    return time.perf_counter() - start, sum(after[:4]) - sum(before[:4])


def prove(source: Path, out: Path) -> None:
    """Level 1, from opening both folders on."""
    from fse_convert.checkpoint.folder import LocalFolder
    from fse_convert.plan.source import open_source
    from fse_convert.verification.manifest import OutputManifest
    from fse_convert.verification.storage import Output, prove_storage

    folder = LocalFolder(out)
    result, _ = prove_storage(Output(folder, OutputManifest.read(folder)), open_source(LocalFolder(source)))
    if not result.passed:
        raise SystemExit("the output does not pass")


@click.command()
@click.option("--gib", type=float, default=3.0, show_default=True, help="Size of the source.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
def main(gib: float, folder: Path | None, repeat: int) -> None:
    """Measure, and print one line per state of the page cache."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, out = Path(work) / "source", Path(work) / "out"
        experts = max(1, round(gib * 2**30 / EXPERT_BYTES))
        make_checkpoint(source, "v4.1-flash", layers=1, mtp=0, experts=experts, hidden=5120, width=2304, vocab=4096)
        subprocess.run([sys.executable, "-m", "fse_convert", source, out, "--verify", "storage"], check=True, capture_output=True)
        files = [p for root in (source, out) for p in sorted(root.rglob("*")) if p.is_file()]
        total = sum(p.stat().st_size for p in files)
        calls = {
            "cat": lambda: subprocess.run(["sh", "-c", 'cat "$@" > /dev/null', "-", *map(str, files)], check=True),
            "level 1": lambda: prove(source, out),
        }
        prove(source, out)  # imports
        for state in ("not cached", "cached"):
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for name in random.Random(0).sample(list(calls) * repeat, 2 * repeat):
                if state == "not cached":
                    drop(files)
                times[name].append(timed(calls[name]))
            wall = {name: statistics.median(w for w, _ in found) for name, found in times.items()}
            cpu = {name: statistics.median(c for _, c in found) for name, found in times.items()}
            print(
                f"{total / 1e9:.1f} GB, {state}: "
                + ", ".join(f"{n} {wall[n]:.1f} s ({cpu[n]:.1f} s of CPU)" for n in calls)
                + f"; ratio {wall['level 1'] / wall['cat']:.2f} (best {min(times['level 1'])[0] / min(times['cat'])[0]:.2f})"
            )


if __name__ == "__main__":
    main()
