"""The manifest against the source: what it states must follow from the source's headers and config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.source import MANIFEST
from fse_convert.claims import Claims
from fse_convert.fusion.targets import CONTRACTS, find_target, needed_contract
from fse_convert.fusion.verdict import Outcome
from fse_convert.manifest import source_identity
from fse_convert.originals import sha256
from fse_convert.verify.expected import Padded, Source, config_edits, source_widths
from fse_convert.verify.findings import Mismatch, StorageResult
from fse_convert.verify.texts import difference, short

LAYOUT = {"name": "megamoe-fp8-shared", "version": 1, "mma_types": ["fp8xfp4", "fp8xfp8"]}
VERDICTS = tuple(o.value for o in Outcome)


def identity_mismatches(claims: Claims, source: Source) -> list[Mismatch]:
    """Whether this is the source that the output was made from, by the digests of its small files and headers."""
    actual = source_identity(source.checkpoint, source.folder)
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
    """Compare everything else that a manifest states with what the source and the arguments lead to."""
    expected = {
        **_contract(claims),
        **_model(claims, source),
        "config_edits": [
            {"section": s, "key": k, "from": a, "to": b} for s, k, a, b in config_edits(source, claims.n_shared, *claims.widths[:2])
        ],
        "padded": {n: list(p.info.shape) for n, p in padded.items()},
        "layers": _layers(claims, source),
    }
    found = []
    for key, value in expected.items():
        stated: Any = claims.raw.get(key)
        if isinstance(value, dict) and key == "padded" and isinstance(stated, dict):
            value, stated = dict(sorted(value.items())), dict(sorted(stated.items()))  # noqa: PLW2901 - order means nothing here
        unlike = difference(value, stated, key)
        if unlike:
            path, want, got = unlike
            found.append(Mismatch("manifest", MANIFEST, expected=f"{path} {want}", found=got))
    return found + _width_mismatches(claims)


def _contract(claims: Claims) -> dict[str, Any]:
    arguments = claims.raw["arguments"]
    target = find_target(str(arguments.get("target")))
    contract = needed_contract(target) if target else None
    return {
        "contract": {
            "name": contract.name,
            "width_multiple": contract.width_multiple,
            "hidden_multiple": contract.hidden_multiple,
        }
        if contract
        else None,
        "layout": LAYOUT,
    }


def _model(claims: Claims, source: Source) -> dict[str, Any]:
    description = source.description
    width, n_shared = source_widths(description) or (0, 0)
    return {
        "model": {
            "family": description.family.name if description.family else "",
            "model_type": description.model_type,
            "n_shared_experts": n_shared,
            "width": {"source": width, "main": claims.widths[1], "kernel": claims.widths[2]},
        }
    }


def _layers(claims: Claims, source: Source) -> list[dict[str, Any]]:
    """The layers as the source has them, with the verdict and the reasons that are stated."""
    stated = claims.raw["layers"]
    layers = []
    for i, d in enumerate(source.description.layers):
        at = stated[i] if i < len(stated) else {}
        layers.append(
            {
                "name": d.layer.name,
                "kind": d.layer.kind.value,
                "verdict": at.get("verdict") if at.get("verdict") in VERDICTS else " or ".join(VERDICTS),
                "reasons": at.get("reasons"),
                "routed": {"count": len(d.layer.routed), "format": d.routed.label} if d.routed else None,
                "shared": {"width": d.shared.width, "format": d.shared.label} if d.shared else None,
            }
        )
    return layers


def _width_mismatches(claims: Claims) -> list[Mismatch]:
    """Widths must meet the contract, and the standard layout has the source's or the kernel's."""
    width, main, kernel = claims.widths
    contract = CONTRACTS.get(claims.contract)
    found = []
    if contract is None or kernel < width or kernel % contract.width_multiple:
        multiple = contract.width_multiple if contract else "?"
        where = f"model.width.kernel a multiple of {multiple}, at least {width}"
        found.append(Mismatch("manifest", MANIFEST, expected=where, found=short(kernel)))
    wanted = {"all": kernel, "shared": width}.get(claims.experts)
    if main != wanted:
        where = f"model.width.main {wanted} with --experts {claims.experts}"
        found.append(Mismatch("manifest", MANIFEST, expected=where, found=short(main)))
    return found


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
