#!/usr/bin/env python3
"""Conversion against its floor: `cp` and `sync` of the same output bytes, and the script that a user would write.

    python tests/benchmarks/convert.py [--gib 1 2 4 8] [--folder DIR] [--repeat N]

Every row is a ratio of two times measured in the same run on the same disk. Between runs the caches are as the run
before left them; the order is shuffled with a fixed seed and the median of the repeats is shown. CPU seconds (user and system)
per GiB of output follow, which other work on the machine changes less: ``--folder /dev/shm --gib 2`` leaves the disk out.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
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
NAIVE = """
import json, sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
source, out, old, new = Path(sys.argv[1]), Path(sys.argv[2]), 2304, 2560
out.mkdir()
for path in sorted(source.glob("*.safetensors")):
    tensors = {}
    with safe_open(path, "pt") as f:
        for name in f.keys():
            t = f.get_tensor(name)
            if "experts" in name and t.ndim == 2:
                dtype, one = t.dtype, 127 if name.endswith("scale") else 0
                b = t.view(torch.uint8)
                down = ".w2." in name
                n = b.shape[1 if down else 0]
                pad = n * new // old - n
                t = torch.nn.functional.pad(b, (0, pad) if down else (0, 0, 0, pad), value=one).view(dtype)
            tensors[name] = t
    save_file(tensors, out / path.name, metadata={"format": "pt"})
"""


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, its output on disk included, and CPU seconds of its processes."""
    os.sync()
    start, before = time.perf_counter(), os.times()
    call()
    os.sync()
    after = os.times()
    return time.perf_counter() - start, after.children_user + after.children_system - before.children_user - before.children_system


def command(*args: object) -> None:
    """Run a command quietly."""
    subprocess.run([str(a) for a in args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def convert(source: Path, out: Path, *args: str) -> None:
    """Run the converter in a process of its own, start-up included."""
    command(sys.executable, "-m", "fse_convert", source, out, *args)


def measure(root: Path, gib: float, repeat: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds, and CPU seconds per GiB of output, by what was done, for a V4.1-shaped checkpoint of about ``gib`` GiB."""
    layers = 2  # so that there are shards for two workers; a real layer of V4.1 has 5 GiB of experts, too
    experts = max(1, round(gib * 2**30 / layers / EXPERT_BYTES))
    source = make_checkpoint(root / "source", "v4.1-flash", layers=layers, mtp=0, experts=experts)
    padded, carried = root / "padded", root / "carried"
    convert(source, padded)
    convert(source, carried, "--target", "megamoe-128")
    jobs: dict[str, tuple[Path, Callable[[Path], None]]] = {
        "cp padded": (padded, lambda out: command("cp", "-r", padded, out)),
        "pad, no proof": (padded, lambda out: convert(source, out, "--verify", "none")),
        "pad, 1 worker": (padded, lambda out: convert(source, out, "--verify", "none", "--workers", "1")),
        "pad, storage proved": (padded, lambda out: convert(source, out, "--verify", "storage")),
        "pad, default": (padded, lambda out: convert(source, out)),
        "cp carried": (carried, lambda out: command("cp", "-r", carried, out)),
        "carry, no proof": (carried, lambda out: convert(source, out, "--target", "megamoe-128", "--verify", "none")),
        "naive script": (padded, lambda out: command(sys.executable, "-c", NAIVE, source, out)),
    }
    sizes = {made: sum(p.stat().st_size for p in made.rglob("*") if p.is_file()) / 2**30 for made in (padded, carried)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    order = random.Random(0)
    for _ in range(repeat):
        for name in order.sample(list(jobs), len(jobs)):
            out = root / "out"
            times[name].append(timed(lambda out=out, job=jobs[name][1]: job(out)))  # type: ignore[misc]
            shutil.rmtree(out)
    shutil.rmtree(root)
    seconds = {name: statistics.median(wall for wall, _ in t) for name, t in times.items()}
    return seconds, {name: statistics.median(cpu for _, cpu in t) / sizes[jobs[name][0]] for name, t in times.items()}


ROWS = (
    ("pad, no proof", "cp padded", "1.5 1.2 1.05"),
    ("pad, default", "cp padded", "3.0 2.0 1.5"),
    ("carry, no proof", "cp carried", ""),
    ("naive script", "pad, no proof", ">= 1.5"),
    ("pad, 1 worker", "pad, no proof", ""),
)


def line(label: str, t: dict[str, float]) -> str:
    """One row of the table."""
    return f"{label:>5} " + " ".join(f"{f'{t[a]:.2f} / {t[b]:.2f} = {t[a] / t[b]:.2f}':>32}" for a, b, _ in ROWS)


@click.command()
@click.option("--gib", type=float, multiple=True, default=(1, 2, 4, 8), help="Sizes of the source.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
@click.option("--repeat", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(gib: tuple[float, ...], folder: Path | None, repeat: int, *, as_json: bool) -> None:
    """Measure and print the table."""
    results, processors = {}, {}
    for size in gib:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            results[size], processors[size] = measure(Path(work) / "bench", size, repeat)
        click.echo(f"{size} GiB done", err=True)
    if as_json:
        click.echo(json.dumps({"seconds": results, "cpu_seconds_per_gib": processors}))
        return
    click.echo(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; median of {repeat}; seconds and ratios")
    click.echo(f"{'GiB':>5} " + " ".join(f"{what + ' / ' + floor:>32}" for what, floor, _ in ROWS))
    click.echo(f"{'most':>5} " + " ".join(f"{aim:>32}" for *_, aim in ROWS) + "   at 1, 2, and from 4 GiB")
    for size, t in results.items():
        click.echo(line(f"{size:g}", t))
    if len(results) > 1:
        first, last = min(results), max(results)
        slope = {name: (results[last][name] - results[first][name]) / (last - first) for name in results[first]}
        click.echo(line("each", slope) + "   seconds per further GiB: without start-up and torch's import")
    for size, cpu in processors.items():
        click.echo(f"{size:g} GiB, CPU seconds per GiB of output: " + ", ".join(f"{name} {x:.2f}" for name, x in cpu.items()))


if __name__ == "__main__":
    main()
