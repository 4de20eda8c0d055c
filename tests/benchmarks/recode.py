#!/usr/bin/env python3
"""Changes of format on one core: the writer against `cp` of what it wrote, and against what SGLang computes at load.

    python -m tests.benchmarks.recode [--mib 512] [--folder DIR] [--repeat N]

``write / cp``: both from the page cache to the disk, synced, in one run in turn; medians. ``stream``: reading and coding without
writing, and ``SGLang``: its published function on tensors in memory, both on one thread; the best of all repeats, as GiB of
output in a second of the CPU, which other work on the machine changes little. SGLang's column is empty where its environment
is not set up (`make peers`).
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import torch
from safetensors.torch import save_file

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import parse_header
from fse_convert.checkpoint.reader import Shard
from fse_convert.conversion.recoding import recoded_bands
from fse_convert.conversion.source_rows import open_reader
from fse_convert.conversion.writer import write_shard
from fse_convert.plan.tensors import OutputShard, Recoded, Rule, TensorSpec, placed
from tests.peers import published, wheels

K = 7168
"""Columns of DeepSeek-V4-Pro's gate and up."""
PEER_ROWS = 1024
"""What SGLang gets: about the rows of one expert."""
SGLANG = Path(os.environ.get("FSE_PEERS_SGLANG") or wheels.cache_dir() / "sglang")


class Case(NamedTuple):
    """One change: its rule, the block of FP8, and how SGLang computes it from weight and scale."""

    label: str
    rule: Rule
    block: tuple[int, int] | None
    peer: Callable[[torch.Tensor, torch.Tensor], object] | None = None

    @property
    def weight_bits(self) -> int:
        """Bits of a weight in the output."""
        return 8 if self.rule is Rule.FP8 else 4

    def source(self, rows: int) -> dict[str, torch.Tensor]:
        """Random tensors, with scales as spread as real ones."""
        if self.block is None:
            return {"w": torch.randn(rows, K).bfloat16()}
        if self.rule is Rule.FP8:
            scale = torch.randint(115, 121, (rows, K // 32), dtype=torch.uint8)
            return {"w": torch.randint(256, (rows, K // 2), dtype=torch.uint8).view(torch.int8), "s": e8m0(scale)}
        grid = torch.randint(115, 121, (-(-rows // self.block[0]), K // self.block[1]), dtype=torch.uint8)
        return {"w": torch.randn(rows, K).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn), "s": e8m0(grid)}

    def output(self, rows: int, shard: Shard) -> OutputShard:
        """The change of both tensors, as a plan has it."""
        places = {t.name: t for t in shard.header.tensors}
        fp8 = self.rule is Rule.FP8
        scales = (-(-rows // self.block[0]), K // self.block[1]) if fp8 and self.block else (rows, K // 32)
        shapes = {"w": (rows, K * self.weight_bits // 8), "s": scales}
        dtypes = {"w": "F8_E4M3", "s": "F32"} if fp8 else {"w": "U8", "s": "U8"}
        specs = [
            TensorSpec(
                name,
                dtypes[name],
                shapes[name],
                Recoded(
                    rule=self.rule,
                    weight=places["w"],
                    scale=places.get("s"),
                    shape=(rows, K),
                    block=self.block,
                    is_scale=name == "s",
                ),
            )
            for name in ("w", "s")
        ]
        return OutputShard(name="out.safetensors", tensors=placed(specs), metadata={})


def e8m0(byte: torch.Tensor) -> torch.Tensor:
    """Label bytes as scales."""
    return byte.view(torch.float8_e8m0fnu)


def cases() -> list[Case]:
    """The changes, with SGLang's functions where they are at hand."""
    cast = to_fp4 = None
    for path in SGLANG.glob("lib/python3*/site-packages/sglang/srt/layers/quantization/fp8.py"):
        cast = published.sglang_fp8(path).cast_e2m1fn_to_e4m3fn
        encode = published.sglang().fp8_utils._quantize_block_fp8_weight_to_mxfp4_rne
        to_fp4 = lambda w, s, encode=encode: encode(w, s, [128, 128], 32)  # noqa: E731
    return [
        Case("MXFP4 to FP8, 128x128", Rule.FP8, (128, 128), cast),
        Case("MXFP4 to FP8, 32x32", Rule.FP8, (32, 32)),
        Case("FP8 to MXFP4", Rule.MXFP4, (128, 128), to_fp4),
        Case("BF16 to MXFP4", Rule.MXFP4, None),
    ]


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes, its output on disk included."""
    os.sync()
    start = time.perf_counter()
    call()
    os.sync()
    return time.perf_counter() - start


def measure(case: Case, root: Path, mib: int, repeat: int) -> str:
    """Measure one change; returns a row of the table."""
    rows = mib * 2**20 * 8 // case.weight_bits // K // 128 * 128
    root.mkdir()
    path, out = root / "source.safetensors", root / "out.safetensors"
    save_file(case.source(rows), path)
    with path.open("rb") as f:
        head = f.read(int.from_bytes(f.read(8), "little"))
    shard = Shard(path.name, path.stat().st_size, parse_header(head, path.stat().st_size, path.name))
    plan = case.output(rows, shard)
    times: dict[str, list[float]] = {"write": [], "cp": [], "stream": [], "peer": []}
    few = case.source(PEER_ROWS)
    for _ in range(repeat):
        out.unlink(missing_ok=True)
        with open_reader(LocalFolder(root), (shard,)) as reader:
            times["write"].append(timed(lambda reader=reader: write_shard(plan, reader, out, lambda _: None)))  # type: ignore[misc]
            start = time.process_time()
            deque(recoded_bands(plan.tensors[0].change, reader), maxlen=0)
            times["stream"].append(time.process_time() - start)
        times["cp"].append(timed(lambda: subprocess.run(["cp", out, root / "copy"], check=True)))
        (root / "copy").unlink()
        if case.peer:
            start = time.process_time()
            case.peer(few["w"], few["s"])
            times["peer"].append((time.process_time() - start) * rows / PEER_ROWS)
    gib = plan.payload / 2**30
    write, cp = (statistics.median(times[name]) for name in ("write", "cp"))
    stream = gib / min(times["stream"])
    theirs = f"{gib / min(times['peer']):6.2f} {min(times['peer']) / min(times['stream']):6.1f}" if times["peer"] else ""
    return f"{case.label:24} {f'{write:.2f} / {cp:.2f} = {write / cp:.2f}':>22} {stream:8.2f} {theirs}"


@click.command()
@click.option("--mib", default=512, show_default=True, help="Size of the weight that is written.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
def main(mib: int, folder: Path | None, repeat: int) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    click.echo(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {mib} MiB, {repeat} repeats; one core"
    )
    click.echo(f"{'':24} {'write / cp (s)':>22} {'stream':>8} {'SGLang':>6} {'ratio':>6}   GiB/s of output")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for i, case in enumerate(cases()):
            click.echo(measure(case, Path(work) / str(i), mib, repeat))


if __name__ == "__main__":
    main()
