"""What a conversion of this source with the stated arguments must lead to: verdicts, widths, names, and the manifest itself.

Verdicts and widths are judged again by the rules that the converter uses (`fse_convert.plan.planner` and `fse_convert.servers`):
a manifest is not believed about its own layers. The proof's independence is about bytes and addresses, and padding, shapes
and config are derived by `fse_convert.verification.expected` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import fse_convert
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import InvalidCheckpoint, NotConvertible
from fse_convert.plan.manifest import draft_manifest
from fse_convert.plan.plan import Computed, Experts, LayerVerdict, Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import Source
from fse_convert.servers.targets import find_target
from fse_convert.sidecar.claims import Claims
from fse_convert.sidecar.manifest import DIGEST
from fse_convert.verification.expected import KernelExpert, kernel_experts
from fse_convert.verification.findings import Mismatch
from fse_convert.verification.texts import ABSENT, difference, short

FINISHED = ("proof", "files", "tensors", DIGEST)
"""Keys that `fse_convert.plan.manifest.finish` adds, in its order; `fse_convert.verification.stated` looks at them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the source demands under the stated arguments.

    ``experts``: shared experts that must be in ``fse/``. ``places``: the file of each one's tensors, by prefix, in the
    order in which they are written. ``left_out``: (name, reason) of every MoE layer that has none there.
    """

    source: Source
    plan: Plan
    experts: tuple[KernelExpert, ...]
    places: Mapping[str, str]
    left_out: tuple[tuple[str, str], ...]

    @property
    def moe_layers(self) -> int:
        """MoE layers of the source: the denominator of every count of layers."""
        return len(self.plan.decision.verdicts)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Width of one expert: source, main, kernel."""
        return self.plan.decision.source_width, self.plan.decision.main_width, self.plan.decision.width

    def files(self) -> dict[str, list[KernelExpert]]:
        """Experts by file of ``fse/``, both in the order in which a conversion writes them."""
        known = {e.prefix: e for e in self.experts}
        found: dict[str, list[KernelExpert]] = {}
        for prefix, name in self.places.items():
            found.setdefault(name, []).extend([known[prefix]] if prefix in known else [])
        return found


def replan(source: Source, claims: Claims) -> Plan | Mismatch:
    """Plan the conversion that a manifest says was made; a mismatch when there is none."""
    arguments = claims.raw["arguments"]
    target = find_target(claims.target)
    try:
        options = Options(target or _unknown(claims.target), Experts(claims.experts), arguments["tp"], arguments["allow_unfused"])
        return make_plan(source, options)
    except (InvalidCheckpoint, NotConvertible, ValueError) as e:
        why = str(e).partition("\n")[0]
        return Mismatch("manifest", MANIFEST, expected="arguments by which the source converts", found=f"{short(arguments)}: {why}")


def demand(plan: Plan) -> Demand:
    """Derive what the source demands of an output."""
    verdicts = {v.layer.layer.name: v.verdict.outcome.value for v in plan.decision.verdicts}
    experts = tuple(kernel_experts(plan.source.description, verdicts, plan.decision.n_shared * plan.decision.width))
    places = {t.change.shared.prefix: s.name for s in plan.sidecar for t in s.kernel_tensors if isinstance(t.change, Computed)}
    return Demand(plan.source, plan, experts, places, tuple(_left_out(plan, experts)))


def _unknown(target: str) -> NoReturn:
    raise ValueError(f"no target {target!r}")


def _left_out(plan: Plan, experts: tuple[KernelExpert, ...]) -> Iterator[tuple[str, str]]:
    held = {e.prefix for e in experts}
    for v in plan.decision.verdicts:
        if f"{v.layer.layer.name}.experts" not in held:
            yield v.layer.layer.name, _why(v)


def _why(v: LayerVerdict) -> str:
    if v.verdict.reasons:
        return v.verdict.reasons[0].message
    return "it has no shared expert" if v.layer.shared is None else "its shared expert is not FP8 with block scales"


def model_mismatches(claims: Claims, demanded: Demand) -> list[Mismatch]:
    """Compare family and widths: unless these agree there is no telling which bytes to expect."""
    plan, (source, main, kernel) = demanded.plan, demanded.widths
    family = plan.source.description.family
    expected = {
        "family": family.name if family else "",
        "model_type": plan.source.description.model_type,
        "n_shared_experts": plan.decision.n_shared,
        "width": {"source": source, "main": main, "kernel": kernel},
    }
    return _compare("model", expected, claims.raw.get("model"))


def manifest_mismatches(claims: Claims, demanded: Demand, texts: Mapping[str, bytes]) -> list[Mismatch]:
    """Compare a manifest, key by key, with the one that a conversion of this source with these arguments writes.

    ``texts``: config.json and index as the output must have them. Keys that are unknown here are mismatches. What only
    reading the output back can tell (`FINISHED`) and the tool's version are left to the caller.
    """
    stated = claims.raw
    expected: dict[str, Any] = {k: v for k, v in draft_manifest(demanded.plan, texts).value().items() if k not in FINISHED}
    if tool_note(claims):
        expected["tool"] = {**expected["tool"], "version": stated["tool"]["version"]}
    keys = [*expected, *(FINISHED if DIGEST in stated else ())]
    found: list[Mismatch] = []
    for key, value in expected.items():
        if key == "layers" and isinstance(stated.get(key), list) and len(stated[key]) == len(value):
            for i, (want, got) in enumerate(zip(value, stated[key], strict=True)):
                found += _compare(f"layers[{i}]", want, got)
        else:
            found += _compare(key, value, stated.get(key, ABSENT))
    extra, missing = [k for k in stated if k not in keys], [k for k in keys if k not in stated]
    found += [Mismatch("manifest", MANIFEST, expected=f"no key {key}", found=short(stated[key])) for key in extra]
    found += [Mismatch("manifest", MANIFEST, expected=f"a key {key}", found=ABSENT) for key in missing if key not in expected]
    if not found and list(stated) != keys:
        found = _compare("", dict.fromkeys(keys), dict.fromkeys(stated))
    return found


def tool_note(claims: Claims) -> str:
    """What to say of a manifest that another version wrote; empty where this version did."""
    tool = claims.raw.get("tool")
    version = tool.get("version") if isinstance(tool, Mapping) else None
    if not isinstance(version, str) or version == fse_convert.__version__:
        return ""
    return f"written by fse-convert {short(version)}, compared with what {fse_convert.__version__} would write"


def _compare(path: str, expected: Any, found: Any) -> list[Mismatch]:
    unlike = difference(expected, found, path)
    if unlike is None:
        return []
    at, want, got = unlike
    return [Mismatch("manifest", MANIFEST, expected=f"{at} {want}".strip(), found=got)]
