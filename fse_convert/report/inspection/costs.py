"""What padding and fusion cost, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

from fse_convert.errors import size
from fse_convert.inspection import Inspection
from fse_convert.plan.advice import releases
from fse_convert.plan.costs import Costs, Padding
from fse_convert.servers.targets import TARGETS, HeldTwice


@dataclass(frozen=True, slots=True)
class CostRow:
    """One figure: what, bytes on disk, bytes per rank, and a remark; empty where it does not apply."""

    what: str
    disk: str = ""
    rank: str = ""
    remark: str = ""


def cost_rows(found: Inspection) -> list[CostRow]:
    """Return the costs as rows: of the fusion that some server runs, and of padding that changes something."""
    c, advice = found.costs, found.advice
    if c is None:
        return []
    even, d, padding = not c.uneven, c.duplicates, advised_padding(found)
    stored = c.decoder.per_rank(c.serving) + c.mtp.per_rank(c.serving)
    rows = [CostRow("experts as stored", size(c.decoder.total + c.mtp.total), size(stored) if even else "")]
    if c.shared_kernel and advice.fuses:
        sharded = f", {size(c.shared_sharded)} sharded over TP {c.serving.tp}" if c.serving.tp > 1 else ""
        remark = f"kept twice {size(2 * c.shared_kernel)}{sharded}"
        rows.append(CostRow("shared experts in the kernel, decoder layers", "", size(c.shared_kernel), remark))
    if padding and advice.gain:
        what, rank = f"padding {padding.width} to {padding.new_width} ({advice.gain.contract})", size(padding.per_rank(c.serving))
        rows.append(CostRow(what, f"+{size(padding.disk)}", f"+{rank}" if even else "", f"{padding.work - 1:+.0%} expert work"))
    scales, loading = d.sglang_scales if even else 0, f"{size(d.sglang_loading)} while loading"
    for held, n, targets, remark in (
        (HeldTwice.ROUTED_SCALES, scales, advice.runs, loading),
        (HeldTwice.SHARED_GATE_UP, d.sglang_shared, advice.fuses, ""),
    ):
        holding = [t for t in targets if held in t.held_twice]
        if n and holding:
            rows.append(CostRow(f"duplicates, {releases(holding, TARGETS)}: {held.value}", "", f"+{size(n)}", remark))
    return rows


def advised_padding(found: Inspection) -> Padding | None:
    """Return what the padding costs that is advised, if any is."""
    return found.costs.paddings.get(found.advice.gain.contract) if found.costs and found.advice.gain else None


def cost_words(c: Costs) -> tuple[str, str]:
    """Return the title of the costs, and what keeps figures per rank from being true."""
    if not c.uneven:
        return f"Costs at EP {c.serving.ep}, TP {c.serving.tp}", ""
    counts = ", ".join(map(str, c.uneven))
    note = f"EP {c.serving.ep} does not divide {counts} routed experts: no figures per rank of them"
    return f"Costs at TP {c.serving.tp}", note


def advised_cost(found: Inspection) -> str:
    """Say in brackets what the advised padding costs."""
    p, c = advised_padding(found), found.costs
    if p is None or c is None:
        return ""
    rank = "" if c.uneven else f", +{size(p.per_rank(c.serving))} per rank at EP {c.serving.ep}"
    return f"(+{size(p.disk)} on disk{rank})"
