"""The checkpoint factory as a command.

A demonstration: ``python -m fse_convert.testing OUT --kind v4.1-flash --layers 2``; all 96,085 tensors of the published
checkpoint, headers only: ``python -m fse_convert.testing OUT --kind v4.1-flash --real --sparse``.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from fse_convert.testing.checkpoints import make_checkpoint, make_spec, shards, size
from fse_convert.testing.kinds import KINDS

COUNTS = {
    "layers": "decoder layers",
    "mtp": "MTP layers",
    "experts": "routed experts of a decoder layer",
    "mtp-experts": "routed experts of an MTP layer",
    "hidden": "hidden size",
    "width": "width of one expert (moe_intermediate_size)",
    "shared": "shared experts; their MLP is this many times the width",
    "dense": "V3: leading layers without experts",
    "vocab": "rows of the embedding",
    "engram-rows": "V4.1: rows of an engram's table",
    "vision-layers": "V4.1: blocks of the vision tower",
}
"""Integer knobs, and what the help says about them."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        "python -m fse_convert.testing", description="Write a synthetic MoE checkpoint into the folder OUT."
    )
    p.add_argument("out", metavar="OUT", type=Path)
    p.add_argument("--kind", choices=list(KINDS), default="v4.1-flash")
    p.add_argument("--real", action="store_true", help="every shape that is not given as published, not as in the demonstration")
    for name, text in COUNTS.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--seed", type=int)
    p.add_argument("--shard-size", metavar="SIZE", help='cut shards at this size, e.g. "2GiB", not as published')
    p.add_argument("--single-file", action="store_true", help="one model.safetensors, no index")
    p.add_argument("--sparse", action="store_true", help="true headers, values left a hole in the file")
    p.add_argument("--power-of-two", action=argparse.BooleanOptionalAction, help="F32 scales: only powers of two, or none")
    p.add_argument("--header-metadata", action=argparse.BooleanOptionalAction, help='headers say {"format": "pt"}')
    return p


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoint and say in a line what it holds."""
    start = time.monotonic()
    knobs = {name: value for name, value in vars(parser().parse_args(arguments)).items() if value is not None}
    out, kind = knobs.pop("out"), knobs["kind"]
    try:
        spec = make_spec(**knobs)
        make_checkpoint(out, **knobs)
    except (FileExistsError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    files = shards(spec)
    sizes = [size(entry) for entries in files.values() for entry in entries]
    c = spec.text
    sys.stdout.write(
        f"{kind} in {out}: {c['num_hidden_layers']} layers with {c.get('n_routed_experts', c.get('num_experts'))} routed and "
        f"{c.get('n_shared_experts', 1)} shared experts of width {c['moe_intermediate_size']} (hidden {c['hidden_size']}), "
        f"{spec.mtp} MTP layers with {spec.mtp_experts}: {len(sizes):,} tensors, {sum(sizes):,} bytes"
        f"{' (a hole: sparse)' if spec.sparse else ''}, {len(files)} shards, {time.monotonic() - start:.1f} s.\n"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    main()
