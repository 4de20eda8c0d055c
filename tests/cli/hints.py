"""What tests of hints share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from fse_convert.testing.patch import ShardPatch

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
Change = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
STEP = 30
"""The file operation at which a fault comes: the conversion has begun by then."""
FIRST = "model-00001-of-00005.safetensors"
"""A shard that padding leaves alone."""
EXPERTS = "layers.0.ffn.experts"
SHARED = "layers.0.ffn.shared_experts"
KNOBS = {"layers": 1, "experts": 2}


def tensors(root: Path) -> dict[str, str]:
    """Digest by name of every tensor that the shards of a folder hold."""
    return {
        name: hashlib.sha256(repr((stored.dtype, stored.shape)).encode() + stored.data).hexdigest()
        for path in sorted(root.glob("*.safetensors"))
        for name, stored in ShardPatch(path).tensors.items()
    }


def said(text: str) -> dict[str, str]:
    """Hint by code of every problem and note of a JSON answer; of a note it is the message."""
    answer = json.loads(text)
    return {p["code"]: f"{p['message']} {p.get('hint', '')}" for key in ("problems", "notes") for p in answer.get(key, [])}
