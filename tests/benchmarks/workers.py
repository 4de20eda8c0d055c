#!/usr/bin/env python3
"""Conversion by workers, from a slow store and from memory: MB/s of output, a table for docs/performance.md.

    python -m tests.benchmarks.workers [--mib 64] [--slow 40]

Both sides lie in /dev/shm. The slow store is this process's own reads of the source, each of which waits as long as it would
take at ``--slow`` MB/s; streams do not slow each other, as on object stores and parallel file systems. Nothing is proved.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from fse_convert.testing.checkpoints import make_checkpoint

WORKERS = (1, 2, 4, 8)
SHARED_MEMORY = Path("/dev/shm")
CHILD = """
import os, sys, time
source, rate = os.path.realpath(sys.argv[1]), float(sys.argv[2]) * 1e6

def slow(name):
    real = getattr(os, name)
    def call(fd, *args):
        start = time.perf_counter()
        done = real(fd, *args)
        if os.readlink(f"/proc/self/fd/{fd}").startswith(source):
            moved = len(done) if isinstance(done, bytes) else done
            time.sleep(max(0.0, moved / rate - (time.perf_counter() - start)))
        return done
    setattr(os, name, call)

if rate:
    for name in ("preadv", "pread", "copy_file_range"):
        slow(name)
from pathlib import Path
from fse_convert.conversion.run import Conversion, Request
from fse_convert.plan.plan import Options
from fse_convert.progress import ignore
from fse_convert.servers.judge import find_any
from fse_convert.verification.findings import Level
request = Request(Path(source), Path(sys.argv[3]), Options(find_any("megamoe-512")), verify=Level.NONE, workers=int(sys.argv[4]))
conversion = Conversion(request)
start = time.perf_counter()
done = conversion.run(ignore)
print(sum(done.bytes.values()) / 1e6 / (time.perf_counter() - start))
"""


def speed(source: Path, out: Path, rate: float, workers: int) -> float:
    """MB/s of output, from the plan to the published folder."""
    command = [sys.executable, "-c", CHILD, str(source), str(rate), str(out), str(workers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(out)
    return float(done.stdout)


@click.command()
@click.option("--mib", default=64, show_default=True, help="Size of each of 16 shards.")
@click.option("--slow", default=40.0, show_default=True, help="MB/s of one stream of the slow store.")
@click.option("--repeat", default=3, show_default=True)
def main(mib: int, slow: float, repeat: int) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as work:
        source, out = Path(work) / "source", Path(work) / "out"
        experts = max(1, mib * 2**20 // (3 * 2304 * 512 * 17 // 32))
        make_checkpoint(source, "v4.1-flash", layers=16, mtp=0, experts=experts, hidden=512, width=2304, vocab=1024)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"{size / 1e9:.2f} GB of source, {os.cpu_count()} cores; MB/s of output, median of {repeat}\n")
        print(f"| store | {' | '.join(f'{n} workers' for n in WORKERS)} |\n| --- {'| --- ' * len(WORKERS)}|")
        for name, rate in ((f"slow, {slow:g} MB/s a stream", slow), ("memory", 0.0)):
            found = [statistics.median(speed(source, out, rate, n) for _ in range(repeat if not rate else 1)) for n in WORKERS]
            print(f"| {name} | {' | '.join(f'{x:.0f}' for x in found)} |", flush=True)


if __name__ == "__main__":
    main()
