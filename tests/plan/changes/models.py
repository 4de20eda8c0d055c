"""Small checkpoints on disk and what changes of format make of them: the source as the rules see it, and the output, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import BITS
from fse_convert.plan.changes.change import FormatChange, changed_config
from fse_convert.plan.plan import Copied, TensorSpec
from fse_convert.plan.source import open_source
from fse_convert.servers.judge import judge
from fse_convert.servers.subject import Subject
from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.memory import Tensors, subject_of

SMALL: Mapping[str, Any] = {"hidden": 512, "width": 256, "layers": 3, "experts": 2, "vocab": 64, "sparse": True}
AITER = tuple(f"vllm-0.{minor}-aiter" for minor in range(29, 34))
"""vLLM's releases on ROCm, oldest first."""


def made(root: Path, kind: str, **knobs: Any) -> Path:
    """Write a small checkpoint, headers and configs true and values a hole."""
    extra = {"engram_rows": 64} if kind == "v4.1-flash" else {}
    return make_checkpoint(root, kind, **{**SMALL, **extra, **knobs})


def opened(root: Path) -> Subject:
    """Return what the rules see of a folder."""
    return open_source(LocalFolder(root)).subject


def after(source: Subject, *changes: FormatChange) -> Subject:
    """Return what the rules see of the output of changes made one after the other, each from the source's tensors."""
    config = changed_config(source.config, (edit for change in changes for edit in change.config))
    tensors: Tensors = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
    for change in changes:
        for name, specs in change.tensors.items():
            del tensors[name]  # a KeyError: two changes of one tensor, or of none
            for spec in specs:
                check(spec)
                assert spec.name not in tensors or spec.name in change.tensors
                tensors[spec.name] = spec.dtype, spec.shape
    return subject_of(config, tensors, source.quant_config)


def check(spec: TensorSpec) -> None:
    """Hold a relabelled tensor to its bytes: the same shape, and a dtype as wide."""
    if isinstance(spec.change, Copied):
        assert (spec.shape, BITS[spec.dtype]) == (spec.change.source.shape, BITS[spec.change.source.dtype])
        assert (spec.name, spec.dtype) != (spec.change.source.name, spec.change.source.dtype)


def letters(subject: Subject, targets: tuple[str, ...] = AITER) -> dict[str, str]:
    """Return a letter per layer and target: (f)used, (u)nfused, (e)rror, (r)efused, unsafe (x), unknown (?)."""
    short = {"unsafe": "x", "unknown": "?"}
    found = {answer.name: answer.layers for answer in judge(subject) if answer.name in targets}
    return {name: "".join(short.get(v.outcome.value, v.outcome.value[0]) for v in found[name]) for name in targets}
