"""The manifest against the source: what it states must follow from the source's headers and config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.plan.manifest import shard_identities, small_digests
from fse_convert.plan.source import Source
from fse_convert.sidecar.claims import Claims
from fse_convert.verification.expected import Padded, config_edits
from fse_convert.verification.findings import Mismatch, StorageResult
from fse_convert.verification.texts import difference


def identity_mismatches(claims: Claims, source: Source) -> list[Mismatch]:
    """Whether this is the source that the output was made from, by the digests of its small files and headers."""
    shards = {n: msgspec.to_builtins(s) for n, s in shard_identities(source.checkpoint).items()}
    actual: dict[str, Any] = {"files": small_digests(source.checkpoint), "shards": shards}
    found: list[Mismatch] = []
    for part in ("files", "shards"):
        unlike = difference(claims.source.get(part), actual[part])
        if unlike:
            path, stated, real = unlike
            found.append(Mismatch("source-differs", MANIFEST, expected=f"source.{part}.{path} {stated}", found=real))
    for name, text in claims.originals.items():
        raw = text.encode("utf-8")
        header = actual["shards"].get(name, {}).get("header_sha256")
        if sha256(raw) != actual["files"].get(name) and sha256(len(raw).to_bytes(LENGTH_BYTES, "little") + raw) != header:
            where = f"source.originals: {name} as the source has it"
            found.append(Mismatch("source-differs", MANIFEST, expected=where, found="another text"))
    return found


def claim_mismatches(claims: Claims, source: Source, padded: Mapping[str, Padded]) -> list[Mismatch]:
    """Compare padding and config edits with what `fse_convert.verification.expected` derives, apart from the planner."""
    edits = config_edits(source, claims.n_shared, *claims.widths[:2])
    expected: dict[str, Any] = {
        "config_edits": [{"section": s, "key": k, "from": a, "to": b} for s, k, a, b in edits],
        "padded": {n: list(p.info.shape) for n, p in sorted(padded.items())},
    }
    stated = {"config_edits": claims.raw.get("config_edits"), "padded": dict(sorted(claims.raw["padded"].items()))}
    unlike = difference(expected, stated)
    if unlike is None:
        return []
    path, want, got = unlike
    return [Mismatch("manifest", MANIFEST, expected=f"{path} {want}", found=got)]


def digest_mismatches(claims: Claims, result: StorageResult) -> list[Mismatch]:
    """Compare the digests of what was read with those that the manifest keeps, if it does, and the names in both directions."""
    found: list[Mismatch] = []
    whole = result.sample is None
    if claims.tensors is not None:
        unlike = _unlike(claims.tensors, result.tensors, whole=whole)
        found += [Mismatch("tensor-digest", MANIFEST, name, None, stated, actual) for name, stated, actual in unlike]
    if claims.files is not None:
        unlike = _unlike(_spelled(claims.files), _spelled(result.files), whole=whole)
        found += [Mismatch("file-digest", name, "", None, stated, actual) for name, stated, actual in unlike]
    return found


def _spelled(files: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    return {name: f"{size} bytes, SHA-256 {digest}" for name, (size, digest) in files.items()}


def _unlike(stated: Mapping[str, str], actual: Mapping[str, str], *, whole: bool) -> list[tuple[str, str, str]]:
    names = sorted(stated.keys() | actual.keys() if whole else actual.keys())
    pairs = ((n, stated.get(n, "no digest stated"), actual.get(n, "nothing to read")) for n in names)
    return [(name, a, b) for name, a, b in pairs if a != b]
