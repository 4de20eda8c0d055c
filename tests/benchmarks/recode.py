#!/usr/bin/env python3
"""Changes of format on one core: the writer against `cp` of what it wrote and against what SGLang computes at load; the proof.

    python -m tests.benchmarks.recode [--mib 256] [--folder DIR] [--repeat N]

``write / cp``: both from the page cache to the disk, synced, in one run in turn; medians. All else is on one thread, the best of
all repeats by seconds of the CPU, which other work on the machine changes less. ``stream``: reading and coding without writing;
``proof``: reading both sides, SHA-256 and XXH3 included; ``SGLang``: its published function on tensors in memory, and how often
``stream`` does as much; empty where its environment is not set up (`make peers`).
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
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.conversion.recoding import recoded_bands
from fse_convert.conversion.source_rows import open_reader
from fse_convert.conversion.writer import write_shard
from fse_convert.plan.tensors import OutputShard, Recoded, Rule, TensorSpec, placed
from fse_convert.torch_threads import one_torch_thread
from fse_convert.verification.compare import InputFiles, SourceTensors, walk
from fse_convert.verification.expected_bytes import Comparison, shard_pieces
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
    cast = encode = None
    for path in SGLANG.glob("lib/python3*/site-packages/sglang/srt/layers/quantization/fp8.py"):
        cast = published.sglang_fp8(path).cast_e2m1fn_to_e4m3fn
        encode = published.sglang().fp8_utils._quantize_block_fp8_weight_to_mxfp4_rne
    return [
        Case("MXFP4 to FP8, 128x128", Rule.FP8, (128, 128), cast),
        Case("MXFP4 to FP8, 32x32", Rule.FP8, (32, 32)),
        Case("FP8 to MXFP4", Rule.MXFP4, (128, 128), encode and (lambda w, s: encode(w, s, [128, 128], 32))),
        Case("BF16 to MXFP4", Rule.MXFP4, None, encode and (lambda w, s: encode(w, torch.ones(1, 1), [*w.shape], 32))),
    ]


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes, its output on disk included."""
    os.sync()
    start = time.perf_counter()
    call()
    os.sync()
    return time.perf_counter() - start


def on_cpu(call: Callable[[], object]) -> float:
    """Seconds of the CPU that a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def opened(path: Path) -> Shard:
    """Read a file's header."""
    size = path.stat().st_size
    with path.open("rb") as f:
        return Shard(path.name, size, parse_header(f.read(int.from_bytes(f.read(8), "little")), size, path.name))


def prove(root: Path, plan: OutputShard, source: Shard) -> None:
    """Compare an output with its source, as `verify` does."""
    out, tensors = opened(root / plan.name), {t.name: t for t in source.header.tensors}
    checkpoint = Checkpoint(
        folder=LocalFolder(root),
        config={},
        quant_config=None,
        shards=(source,),
        tensors=tensors,
        index_metadata=None,
        others=(),
        notes=(),
    )
    changes = {t.name: t.change for t in plan.tensors if isinstance(t.change, Recoded)}
    comparison = Comparison(checkpoint, root, holds={out.name: changes})
    with InputFiles(root) as ours, InputFiles(root) as theirs:
        pieces = shard_pieces(comparison, out, None, SourceTensors.of(checkpoint, theirs))
        if walk(ours, out.name, pieces, lambda _: None).mismatches:
            raise SystemExit("the output does not pass")


def measure(case: Case, root: Path, mib: int, repeat: int) -> str:
    """Measure one change; returns a row of the table."""
    rows = mib * 2**20 * 8 // case.weight_bits // K // 128 * 128
    root.mkdir()
    path, out = root / "source.safetensors", root / "out.safetensors"
    save_file(case.source(rows), path)
    shard = opened(path)
    plan = case.output(rows, shard)
    times: dict[str, list[float]] = {"write": [], "cp": [], "stream": [], "proof": [], "peer": []}
    few = case.source(PEER_ROWS)
    change = next(t.change for t in plan.tensors if isinstance(t.change, Recoded))
    for _ in range(repeat):
        out.unlink(missing_ok=True)
        with open_reader(LocalFolder(root), (shard,)) as reader:
            times["write"].append(timed(lambda reader=reader: write_shard(plan, reader, out, lambda _: None)))  # type: ignore[misc]
            times["stream"].append(on_cpu(lambda reader=reader: deque(recoded_bands(change, reader), maxlen=0)))  # type: ignore[misc]
        times["cp"].append(timed(lambda: subprocess.run(["cp", out, root / "copy"], check=True)))
        (root / "copy").unlink()
        times["proof"].append(on_cpu(lambda: prove(root, plan, shard)))
        if case.peer:
            times["peer"].append(on_cpu(lambda: case.peer(few["w"], few.get("s"))) * rows / PEER_ROWS)  # type: ignore[misc, arg-type]
    write, cp = (statistics.median(times[name]) for name in ("write", "cp"))
    stream, proof = min(times["stream"]), min(times["proof"])
    speeds = [f"{size / 2**30 / t:6.2f}" for t in (stream, proof) for size in (plan.payload, shard.header.payload)]
    theirs = f"{plan.payload / 2**30 / min(times['peer']):6.2f} {min(times['peer']) / stream:6.1f}" if times["peer"] else ""
    return f"{case.label:22} {f'{write:.2f} / {cp:.2f} = {write / cp:.2f}':>20} {' '.join(speeds)} {theirs}"


@click.command()
@click.option("--mib", default=256, show_default=True, help="Size of the weight that is written.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work (default: the temporary folder).")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
def main(mib: int, folder: Path | None, repeat: int) -> None:
    """Measure and print the table."""
    click.echo(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {mib} MiB, {repeat} repeats; one core; "
        "GiB/s of output and of source"
    )
    click.echo(f"{'':22} {'write / cp (s)':>20} {'stream':>13} {'proof':>13} {'SGLang':>6} {'ratio':>6}")
    with tempfile.TemporaryDirectory(dir=folder) as work, one_torch_thread():
        for i, case in enumerate(cases()):
            click.echo(measure(case, Path(work) / str(i), mib, repeat))


if __name__ == "__main__":
    main()
