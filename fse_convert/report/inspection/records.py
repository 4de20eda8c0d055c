"""An inspection as one JSON object; reasons are said once per target, with the layers that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import field

from fse_convert.errors import Problem
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.costs import Costs, Serving, Stored
from fse_convert.report.console import gathered
from fse_convert.report.inspection.view import View
from fse_convert.report.records import ExpertsRecord, ReasonRecord, Record, Response, fill
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.tensor_parallel import Load
from fse_convert.servers.verdict import Outcome


class InspectionRecord(Response, kw_only=True):
    """What ``inspect`` prints. ``mends``: what the command ``heal`` would do."""

    exit_code: int
    checkpoint: CheckpointRecord
    model_type: str
    family: str | None
    quantization: QuantizationRecord | None
    n_shared: int = field(name="n_shared_experts")
    layers: list[LayerRecord]
    seen: list[SeenRecord]
    targets: list[TargetRecord]
    required: list[RequiredRecord]
    costs: CostsRecord | None
    advice: AdviceRecord
    offers: list[OfferRecord]
    mends: Sequence[str]
    heal: str | None
    ranks: RanksRecord | None
    problems: Sequence[Problem]
    unsupported: Sequence[Problem]
    conflicts: Sequence[Problem]
    notes: Sequence[Problem]


class CheckpointRecord(Record):
    """The folder."""

    label: str
    shards: int
    tensors: int
    bytes: int
    converted: bool


class QuantizationRecord(Record):
    """What the config says of storage."""

    source: str
    method: str | None
    quant_algo: str | None
    moe_quant_algo: str | None
    block: tuple[int, int] | None = field(name="weight_block_size")
    expert_dtype: str | None
    ignore: Sequence[str]


class LayerRecord(Record):
    """One MoE layer as stored."""

    name: str
    kind: LayerKind
    index: int
    routed: ExpertsRecord | None
    shared: ExpertsRecord | None
    gated: bool
    stacked: list[str]
    problems: list[str]


class SeenRecord(Record):
    """Tensor names that look like experts, in a model of no known family."""

    pattern: str
    count: int
    dtype: str
    shape: Sequence[int]


class TargetRecord(Record):
    """What one target makes of the checkpoint. ``layers``: their names by verdict."""

    name: str = field(name="target")
    question: Question
    engine: str
    release: str
    started_with: str = field(name="needs")
    source: str
    verdict: Outcome
    fused: bool
    layers: dict[Outcome, list[str]]
    reasons: list[ReasonRecord]
    notes: list[ReasonRecord]


class RequiredRecord(Record):
    """Whether a required target fuses, and whether it passes."""

    target: str
    fused: bool
    passed: bool


class CostsRecord(Record):
    """Bytes, for one way of serving; ``padding`` is by kernel contract. Null per rank: experts cannot be spread evenly."""

    serving: Serving
    stored: dict[str, Any]
    shared_per_rank: dict[str, int]
    padding: dict[str, PaddingRecord]
    duplicates_per_rank: dict[str, int | None]


class PaddingRecord(Record):
    """What padding costs: bytes, and ``work``, the arithmetic afterwards (before: 1)."""

    width: int
    new_width: int
    disk: int
    per_rank: int | None
    decoder: Stored
    mtp: Stored
    work: float


class OfferRecord(Record):
    """Changes of format after which ``targets`` would fuse the checkpoint. ``bytes``: by which the standard layout grows."""

    targets: list[str]
    does: Sequence[str]
    lossless: bool
    bytes: int
    originals: int
    drafter: str
    command: str


class SliceRecord(Record):
    """One kind of experts on one server's ranks: widths of all, of one rank, and what that must be a multiple of."""

    engine: str
    shared: bool
    width: int
    rank: int
    multiple: int
    load: Load


class RanksRecord(Record):
    """What servers make of the experts on ``tp`` ranks; ``needed``: the smallest width that all known loaders take as it is."""

    tp: int
    slices: list[SliceRecord]
    width: int
    needed: int
    bytes: int
    command: str


class AdviceRecord(Record):
    """What to do."""

    sentences: Sequence[str]
    command: str | None


def inspection_record(view: View) -> InspectionRecord:
    """Describe an inspection; it is not ``ok`` when the checkpoint is broken or a required target does not fuse."""
    found = view.found
    checkpoint, description, quantization = found.checkpoint, found.description, found.subject.quantization
    shards, tensors = len(checkpoint.shards), len(checkpoint.tensors)
    return fill(
        InspectionRecord,
        found,
        description,
        ok=not view.exit_code,
        exit_code=view.exit_code,
        checkpoint=fill(CheckpointRecord, found, checkpoint.folder, shards=shards, tensors=tensors, bytes=checkpoint.total_size),
        family=description.family and description.family.name,
        quantization=quantization if quantization.quantized else None,
        layers=[_layer(d) for d in description.layers],
        seen=[fill(SeenRecord, s, s.example) for s in description.seen],
        targets=[_target(a, description) for a in found.answers],
        required=[RequiredRecord(target=row.label, fused=row.fused, passed=row.fused) for row in view.required],
        costs=_costs(found.costs) if found.costs else None,
        advice=AdviceRecord(sentences=found.advice.sentences, command=found.advice.command or None),
        offers=[fill(OfferRecord, offer, targets=[t.name for t in offer.targets]) for offer in found.offers.offers],
        mends=found.offers.mends,
        heal=found.offers.heal if found.offers.mends else None,
    )


def _layer(d: LayerDescription) -> LayerRecord:
    return fill(
        LayerRecord,
        d.layer,
        routed=d.routed and fill(ExpertsRecord, d.routed, count=d.layer.count),
        shared=d.shared and fill(ExpertsRecord, d.shared, count=1),
        gated=d.layer.gate_tensor is not None,
        stacked=[t.name for t in d.layer.stacked],
        problems=[p.code for p in d.problems],
    )


def _target(a: Answer, description: Description) -> TargetRecord:
    judged = [(d.layer.name, v) for d, v in zip(description.layers, a.layers, strict=True)]
    layers = gathered((reason, name) for name, v in judged for reason in v.reasons)
    return fill(
        TargetRecord,
        a,
        verdict=a.model.outcome,
        layers=gathered((v.outcome, name) for name, v in judged),
        reasons=[fill(ReasonRecord, r, layers=layers.get(r, [])) for r in dict.fromkeys((*layers, *a.model.reasons))],
    )


def _costs(c: Costs) -> CostsRecord:
    def rank(n: float) -> int | None:
        """Return bytes per rank, of what is spread over expert-parallel ranks; None where it cannot be."""
        return None if c.uneven else round(n)

    stored, d = c.decoder.per_rank(c.serving) + c.mtp.per_rank(c.serving), c.duplicates
    return CostsRecord(
        serving=c.serving,
        stored={"decoder": c.decoder, "mtp": c.mtp, "per_rank": rank(stored)},
        shared_per_rank={"once": c.shared_kernel, "twice": 2 * c.shared_kernel, "sharded": round(c.shared_sharded)},
        padding={
            name: fill(PaddingRecord, p, per_rank=rank(p.per_rank(c.serving)), work=round(p.work, 4))
            for name, p in c.paddings.items()
        },
        duplicates_per_rank={
            # the second, padded copy that vllm-project/vllm#56568 made, in no release; a key that this schema has
            "seed": round(c.shared_kernel * max((p.work for p in c.paddings.values()), default=1)),
            "sglang_scales": rank(d.sglang_scales),
            "sglang_shared": d.sglang_shared,
            "sglang_loading": rank(d.sglang_loading),
        },
    )
