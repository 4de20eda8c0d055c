#!/usr/bin/env python3
"""`inspect` and planning (`--dry-run`) of a million tensors in about 5,000 shards: headers alone, values are holes in the files.

    python -m tests.benchmarks.plan [--experts 4096] [--folder DIR] [--repeat N]

DeepSeek-V4.1-Flash's names and shapes with more experts in a layer, every one of which is padded. CPU seconds (user and system) and
peak memory are those of the whole command in a process of its own: the median, and the greatest.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click

from fse_convert.testing.checkpoints import make_checkpoint, make_spec, shards, size
from tests.benchmarks.inspect_speed import run

SHARDS = 5280  # cut where the next tensor would not fit: about 5,000


def make(root: Path, experts: int) -> tuple[int, int]:
    """Write the headers; return how many tensors they have, and how many shards there are."""
    files = shards(make_spec("v4.1-flash", real=True, experts=experts))
    total = sum(size(entry) for entries in files.values() for entry in entries)
    make_checkpoint(root, "v4.1-flash", real=True, experts=experts, sparse=True, shard_size=total // SHARDS)
    return sum(map(len, files.values())), sum(1 for _ in root.glob("*.safetensors"))


@click.command()
@click.option("--experts", default=4096, show_default=True, help="In a layer; 4096 make a million tensors.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
@click.option("--repeat", default=3, show_default=True)
def main(experts: int, folder: Path | None, repeat: int) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        root = Path(work) / "source"
        tensors, count = make(root, experts)
        print(f"{tensors:,} tensors in {count:,} shards; median of {repeat}")
        print("| command | seconds | CPU seconds | peak MiB |\n| --- | --- | --- | --- |")
        for name, *arguments in (
            ("inspect", "inspect", root),
            ("convert --dry-run", "convert", root, root.parent / "out", "--dry-run"),
        ):
            seconds, cpu, peaks, _ = zip(*(run([str(a) for a in arguments]) for _ in range(repeat)), strict=True)
            print(f"| `{name}` | {statistics.median(seconds):.1f} | {statistics.median(cpu):.1f} | {max(peaks):.0f} |", flush=True)


if __name__ == "__main__":
    main()
