"""Small checkpoints on disk, headers and configs true and values a hole, and what servers make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.plan.changes.change import FormatChange
from fse_convert.plan.changes.heal import heals
from fse_convert.plan.changes.routed_fp8 import routed_fp8
from fse_convert.plan.changes.shared_mxfp4 import shared_mxfp4
from fse_convert.plan.source import Source, open_source
from fse_convert.servers.judge import judge
from fse_convert.servers.subject import Subject
from fse_convert.testing.checkpoints import make_checkpoint, make_spec
from fse_convert.testing.memory import Tensors, W, expert, subject_of
from tests.releases import AITER

SMALL: Mapping[str, Any] = {"hidden": 512, "width": 256, "layers": 3, "experts": 2, "vocab": 64, "sparse": True}
RECODINGS = {"routed-fp8": routed_fp8, "shared-mxfp4": shared_mxfp4}


def made(root: Path, kind: str, **knobs: Any) -> Path:
    """Write a small checkpoint."""
    extra = {"engram_rows": 64} if kind == "v4.1-flash" else {}
    return make_checkpoint(root, kind, **{**SMALL, **extra, **knobs})


def fused_by_quark(exclude: list[str]) -> Subject:
    """Return a MiniMax-M3 whose routed experts AMD Quark quantised, gate and up of the shared MLP in one BF16 matrix."""
    quark = {**make_spec("kimi-k2-quark").config["quantization_config"], "exclude": exclude}
    sizes = {"hidden_size": 128, "intermediate_size": 64, "shared_intermediate_size": 64, "num_local_experts": 2}
    tensors: Tensors = {}
    for block in ("model.layers.0.mlp", "model.layers.1.mlp"):
        tensors |= {n: info for e in range(2) for n, info in expert(f"{block}.experts.{e}", "mxfp4-u8", 64, 128, W).items()}
        tensors[f"{block}.shared_experts.gate_up_proj.weight"] = ("BF16", (128, 128))
        tensors[f"{block}.shared_experts.down_proj.weight"] = ("BF16", (128, 64))
    config = {"model_type": "minimax_m3_text", "num_hidden_layers": 2, "n_shared_experts": 1, **sizes}
    return subject_of({**config, "quantization_config": quark}, tensors)


def opened(root: Path) -> Source:
    """Open a folder."""
    return open_source(LocalFolder(root))


def changes_of(source: Source, names: Iterable[str]) -> tuple[FormatChange, ...]:
    """Return the recoding that is named, which must fit, or else every mend that the checkpoint needs."""
    found = tuple(RECODINGS[name](source.subject) for name in names if name in RECODINGS)
    made = tuple(change for change in found if isinstance(change, FormatChange))
    assert made == found
    return made or heals(source.subject)


def letters(source: Source, targets: Sequence[str] = AITER) -> tuple[str, ...]:
    """Return a letter per layer for each target: (f)used, (u)nfused, (e)rror, (r)efused, unsafe (x), unknown (?)."""
    short = {"unsafe": "x", "unknown": "?"}
    layers = {answer.name: answer.layers for answer in judge(source.subject)}
    return tuple("".join(short.get(v.outcome.value, v.outcome.value[0]) for v in layers[name]) for name in targets)
