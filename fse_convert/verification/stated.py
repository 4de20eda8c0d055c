"""What a manifest says of the proof at conversion: whether it can be so. It is never this run's own result."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from fse_convert.checkpoint.names import MANIFEST
from fse_convert.sidecar.claims import Claims
from fse_convert.sidecar.manifest import DIGEST
from fse_convert.verification.findings import BOUND, KERNEL_REASONS, NO_LAYERS, NOT_ASKED, SEED, TOKENS, Mismatch, StorageResult
from fse_convert.verification.texts import difference, short

NOTHING_TO_RUN_ON: Mapping[str, str] = {"status": "not-run", "reason": NO_LAYERS}


def proof_mismatches(
    claims: Claims, result: StorageResult, tensors: Mapping[str, int], layers: int, limit: float | None
) -> list[Mismatch]:
    """Compare ``proof`` with what a conversion can have found: counts that this source has, and only what was asked for.

    ``tensors``: comparable ones by sort. ``layers``: those with the kernel layout. ``limit``: the model's swiglu limit.
    Bytes and files are compared exactly where this run covered everything.
    """
    if DIGEST not in claims.raw:  # a draft: nothing was proved yet
        return []
    proof = claims.raw.get("proof")
    if not isinstance(proof, dict):
        return [Mismatch("manifest", MANIFEST, expected="proof an object", found=short(proof))]
    proved = claims.raw.get("files") is not None
    expected = {
        "storage": _storage(proof.get("storage"), result, tensors) if proved else NOT_ASKED,
        "numerics": _numerics(proof.get("numerics"), layers, limit) if proved else NOT_ASKED,
        "kernel": _kernel(proof.get("kernel"), layers) if proof.get("numerics") != NOT_ASKED else NOT_ASKED,
    }
    unlike = difference(expected, proof, "proof")
    return [Mismatch("manifest", MANIFEST, expected=f"{unlike[0]} {unlike[1]}", found=unlike[2])] if unlike else []


def _storage(stated: Any, result: StorageResult, tensors: Mapping[str, int]) -> dict[str, Any]:
    size, files = result.coverage.bytes, result.coverage.files
    if isinstance(stated, dict) and (result.sample is not None or not result.passed):
        size, files = (_count(stated.get(key), known) for key, known in (("bytes", size), ("files", files)))
    return {"status": "passed", "tensors": dict(tensors), "bytes": size, "files": files}


def _count(stated: Any, known: int) -> int:
    """A stated count where this run, of a part, cannot tell it from a right one: at least what was seen here."""
    return stated if type(stated) is int and stated >= known else known


def _numerics(stated: Any, layers: int, limit: float | None) -> Mapping[str, Any]:
    if stated == NOT_ASKED:
        return NOT_ASKED
    if not layers:
        return NOTHING_TO_RUN_ON
    return {"status": "passed", "layers": layers, "tokens": TOKENS, "seed": SEED, "swiglu_limit": limit, "criterion": BOUND}


def _kernel(stated: Any, layers: int) -> Mapping[str, Any]:
    if stated == NOT_ASKED:
        return NOT_ASKED
    if not layers:
        return NOTHING_TO_RUN_ON
    if not isinstance(stated, dict) or stated.get("status") != "passed":
        reason = stated.get("reason") if isinstance(stated, dict) else None
        return {"status": "not-run", "reason": reason if reason in KERNEL_REASONS else " or ".join(KERNEL_REASONS)}
    error, names = stated.get("relative_l2"), {key: stated.get(key) for key in ("device", "deep_gemm")}
    return {
        "status": "passed",
        "layers": layers,
        "relative_l2": error if isinstance(error, float) and isfinite(error) and 0 <= error < 1 else "a number from 0 to 1",
        **{key: value if value is None or isinstance(value, str) else "a text" for key, value in names.items()},
    }


def kernel_statement(claims: Claims) -> str:
    """What a manifest says of the kernel level if it says that it passed, for people; empty otherwise."""
    proof = claims.raw.get("proof")
    kernel = proof.get("kernel") if isinstance(proof, dict) else None
    if not isinstance(kernel, dict) or kernel.get("status") != "passed":
        return ""
    layers, device, version = (short(kernel.get(key)).strip('"') for key in ("layers", "device", "deep_gemm"))
    return f"passed for {layers} layers on {device}, DeepGEMM {version}"
