#!/usr/bin/env python3
"""How long `inspect` and planning (`--dry-run`) take on checkpoints of published size, and how much memory.

Headers are real, values a hole in the file.

    python tests/benchmarks/inspect_speed.py [--runs 5] [--keep DIR]

Not called inspect.py: as a script it would stand in for the standard library's module. Prints the best and the median of
several runs of the whole command in a process of its own, beside reading the same header bytes and parsing their JSON,
which no inspection can do without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fse_convert.testing.checkpoints import make_checkpoint

SIZES = {
    "v4.1-flash": {"kind": "v4.1-flash"},  # 96,085 tensors
    "v4-pro": {"kind": "v4-pro", "mtp": 3},  # as many as 0813 has: about 150,000
}
CHILD = """
import resource, sys
from fse_convert.cli import main
try:
    main(sys.argv[1:])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss, which counts what the parent held when it began this process.
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(used.ru_utime + used.ru_stime, peak, "torch" in sys.modules, file=sys.stderr)
"""


def run(arguments: list[str]) -> tuple[float, float, float, bool]:
    """Run the command line: seconds, CPU seconds (what counts on a busy machine), peak MiB, whether torch was imported."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 4):  # 4: a plan for which there is no room here, printed all the same
        raise SystemExit(done.stderr)
    seconds = time.perf_counter() - start
    cpu, peak, torch = done.stderr.splitlines()[-1].split()
    return seconds, float(cpu), int(peak) / 1024, torch == "True"


def floor(root: Path) -> float:
    """Seconds to read and to parse the JSON of every header and of the index, in this process."""
    start = time.perf_counter()
    json.loads((root / "model.safetensors.index.json").read_bytes())
    for shard in root.glob("*.safetensors"):
        with shard.open("rb") as f:
            json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder for the checkpoints, reused when they are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = options.keep or Path(scratch)
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}, {options.runs} runs")
        helps = [run(["--help"])[0] for _ in range(options.runs)]
        print(f"{'--help':14} {'':16} best {min(helps):.2f} s, median {statistics.median(helps):.2f} s")
        for name, knobs in SIZES.items():
            root = base / name
            if not root.exists():
                make_checkpoint(root, real=True, sparse=True, **knobs)
            tensors = len(json.loads((root / "model.safetensors.index.json").read_bytes())["weight_map"])
            print(f"{name:14} {tensors:8,} tensors, JSON alone {floor(root):.2f} s")
            for what, arguments in (("inspect", ["inspect", root]), ("plan", [root, base / "out", "--dry-run", "-q"])):
                found = [run([str(a) for a in arguments]) for _ in range(options.runs)]
                seconds, cpu, peaks, torch = zip(*found, strict=True)
                print(
                    f"{what:>14} best {min(seconds):.2f} s, median {statistics.median(seconds):.2f} s "
                    f"(CPU {min(cpu):.2f} s), peak {max(peaks):.0f} MiB, torch {'imported' if any(torch) else 'not imported'}"
                )


if __name__ == "__main__":
    main()
