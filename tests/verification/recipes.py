"""Outputs whose format changed, one of every kind of change, from small checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fse_convert.testing.patch import ShardPatch

KNOBS = {"hidden": 256, "width": 160, "layers": 1, "mtp": 1, "experts": 2, "vocab": 32}


@dataclass(frozen=True)
class Recipe:
    """A kind of checkpoint, what is done to it, and the options of its conversion.

    ``change``: the manifest's name of the change. ``counts``: tensors that are coded again, relabelled or renamed, and kept.
    """

    name: str
    kind: str
    change: str
    options: tuple[str, ...]
    counts: tuple[int, int, int]
    damage: Callable[[Path], object] = lambda _: None


def mislabelled(root: Path) -> None:
    """Type MXFP4 as SGLang does not load it from a checkpoint of AMD Quark: scales F8_E8M0, packed weights I8."""
    for path in root.glob("*.safetensors"):
        with ShardPatch(path) as shard:
            for name, weight in list(shard.tensors.items()):
                scale = f"{name}_scale"
                if weight.dtype == "U8" and scale in shard.tensors:
                    shard.tensors[name] = weight._replace(dtype="I8")
                    shard.tensors[scale] = shard.tensors[scale]._replace(dtype="F8_E8M0")


FP8, MXFP4 = ("--routed", "fp8"), ("--shared", "mxfp4", "--lossy")
RECIPES = (
    Recipe("routed FP8 in 128x128", "v4-flash", "routed-fp8", FP8, (30, 0, 12)),
    Recipe("routed FP8 in 32x32", "v4.1-flash", "routed-fp8", FP8, (24, 0, 9)),
    Recipe("shared MXFP4 from FP8", "v4-flash", "shared-mxfp4", MXFP4, (6, 39, 6)),
    Recipe("shared MXFP4 from BF16", "kimi-k2-quark", "shared-mxfp4", MXFP4, (6, 0, 3)),
    Recipe("F32 scales", "v4-flash-fp8", "heal-fp8-scales", ("--target", "vllm-0.33-aiter"), (18, 0, 0)),
    Recipe("labels", "quark-mxfp4", "heal-quark-scale-labels", ("--target", "sglang-0.5.23-slots"), (0, 15, 0), mislabelled),
    Recipe("config alone", "v4-pro", "heal-expert-dtype", ("--heal",), (0, 0, 0)),
)
