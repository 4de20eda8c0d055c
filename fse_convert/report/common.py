"""What every report shares: consoles, sizes, folded layers, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fse_convert.errors import FseConvertError, Problem
from fse_convert.model.moe import LayerKind
from fse_convert.plan.plan import LayerVerdict

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def console(*, stderr: bool = False) -> Console:
    """A rich console for results (stdout) or everything else (stderr)."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty())


def shown(path: object) -> str:
    """A path for people: bytes that are no Unicode as escapes, so that any terminal can print it."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def size(n: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def problem_lines(problem: Problem) -> list[str]:
    """An error in at most three lines: what, where, hint."""
    lines = [f"error[{problem.code}]: {problem.message}"]
    if problem.where:
        lines.append(f"  where: {problem.where}")
    if problem.hint:
        lines.append(f"  hint:  {problem.hint}")
    return lines


def failure_json(error: FseConvertError) -> dict[str, Any]:
    """What ``--json`` prints when a command fails."""
    problems = [{"code": p.code, "message": p.message, "where": p.where, "hint": p.hint} for p in error.problems]
    return {"schema_version": SCHEMA_VERSION, "ok": False, "exit_code": int(error.exit_code), "problems": problems}


def dump(value: Mapping[str, Any]) -> str:
    """One JSON object as text."""
    return json.dumps(value, indent=2, ensure_ascii=True)


def layer_json(judged: LayerVerdict) -> dict[str, Any]:
    """One layer's verdict as JSON."""
    layer = judged.layer
    return {
        "name": layer.layer.name,
        "kind": layer.layer.kind.value,
        "verdict": judged.verdict.outcome.value,
        "reasons": [{"code": r.code, "message": r.message, "hint": r.hint} for r in judged.verdict.reasons],
        "server": judged.server.outcome.value,
        "routed": {"count": len(layer.layer.routed), "width": layer.routed.width, "format": layer.routed.label}
        if layer.routed
        else None,
        "shared": {"width": layer.shared.width, "format": layer.shared.label} if layer.shared else None,
    }


def fold(verdicts: Iterable[LayerVerdict]) -> list[tuple[str, LayerVerdict]]:
    """Fold neighbouring layers that look alike into one row each, named ``layers.0.ffn .. layers.39.ffn (40)``."""

    def alike(v: LayerVerdict) -> tuple[object, ...]:
        d = v.layer
        return (
            d.layer.kind is LayerKind.MTP,
            len(d.layer.routed),
            d.routed and d.routed.label,
            d.shared and d.shared.label,
            v.verdict,
        )

    rows = []
    for _, group in groupby(verdicts, alike):
        layers = list(group)
        first, last = layers[0].layer.layer.name, layers[-1].layer.layer.name
        rows.append((first if len(layers) == 1 else f"{first} .. {last} ({len(layers)})", layers[0]))
    return rows
