"""Names of the files of a checkpoint and of an output."""

from __future__ import annotations

import re

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
SIDECAR = "fse"
"""Folder of an output that holds the kernel layout and the manifest."""
MANIFEST = f"{SIDECAR}/manifest.json"
SIDECAR_INDEX = f"{SIDECAR}/{INDEX}"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key that puts shard 2 before shard 10, as vLLM's loader orders files."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]
