"""What an editor of an output does: read, change, and make every digest again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.sidecar.manifest import DIGEST, own_digest
from fse_convert.testing.patch import read_shard

Manifest = dict[str, Any]
INDEX = "model.safetensors.index.json"
SIDECAR = "fse/shared-00001-of-00001.safetensors"
L1 = "layers.0.ffn.experts.shared_l1_weight"


def load(out: Path) -> Manifest:
    value: Manifest = json.loads((out / "fse/manifest.json").read_text())
    return value


def seal(out: Path, manifest: Manifest | None = None, *, digests: bool = True) -> None:
    """Make every digest of a manifest again, as an editor would."""
    value = load(out) if manifest is None else manifest
    if digests and value.get("files") is not None:
        names = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
        kept = [n for n in names if n != "fse/manifest.json" and not {".git", ".cache", "__pycache__"} & set(Path(n).parts)]
        contents = {n: (out / n).read_bytes() for n in kept}
        value["files"] = {n: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for n, raw in contents.items()}
        tensors = {}
        for name in kept:
            if name.endswith(".safetensors"):
                header, payload = read_shard(out / name)
                for tensor, entry in header.items():
                    if tensor != "__metadata__":
                        start, end = entry["data_offsets"]
                        tensors[tensor] = xxhash.xxh3_128_hexdigest(payload[start:end])
        value["tensors"] = dict(sorted(tensors.items()))
    value.pop(DIGEST, None)
    (out / "fse/manifest.json").write_bytes(encode_json({**value, DIGEST: own_digest(value)}))


def into(*path: str | int, **changes: Any) -> Callable[[Manifest], None]:
    """Change keys of the object at a path of a manifest; the change is named after them."""

    def edit(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path:
            place = place[key]
        place.update(changes)

    place = ".".join(map(str, path)) or "manifest"
    edit.__name__ = f"{place} with " + ", ".join(f"{ascii(key)[1:-1]} {value!a}" for key, value in changes.items())
    return edit
