"""The smallest checkpoints of every kind, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.patch import read_header

if TYPE_CHECKING:
    import torch

TINY: dict[str, Any] = {"hidden": 256, "width": 128, "experts": 3, "vocab": 64, "layers": 3}


def tiny(out: Path, kind: str, **knobs: Any) -> Path:
    extra = {"engram_rows": 40} if kind in ("v4.1-flash", "nvfp4") else {}
    return make_checkpoint(out, kind, **(TINY | extra | knobs))


def header(path: Path) -> dict[str, Any]:
    header, start = read_header(path)
    assert start % 8 == 0
    return header


def headers(folder: Path) -> dict[str, Any]:
    found = {name: entry for shard in sorted(folder.glob("*.safetensors")) for name, entry in header(shard).items()}
    found.pop("__metadata__", None)
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for shard in sorted(folder.glob("*.safetensors")) for name, value in load_file(shard).items()}
