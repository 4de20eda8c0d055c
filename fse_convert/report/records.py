"""Every JSON object that the program prints, as typed records: the fields of a record are its keys, in this order.

A field that is UNSET is a key that is left out. What `inspect` and `targets` print is in `inspection.records` and `targets`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Struct, UnsetType, convert, field, to_builtins
from msgspec.structs import replace

from fse_convert.checkpoint.hub import source_name
from fse_convert.conversion.estimate import FileEstimate
from fse_convert.errors import Problem
from fse_convert.model.moe import LayerKind
from fse_convert.plan.plan import Experts
from fse_convert.servers.verdict import Outcome
from fse_convert.sidecar.manifest import ConfigEdit
from fse_convert.verification.findings import SEED, TOKENS, Level

if TYPE_CHECKING:
    from fse_convert.conversion.run import ConversionResult
    from fse_convert.plan.plan import LayerVerdict, Plan
    from fse_convert.restoration.run import Restored
    from fse_convert.verification.findings import StorageResult
    from fse_convert.verification.layers import KernelSummary, NumericsSummary
    from fse_convert.verification.proof import Proof


class Record(Struct):
    """An object within a response. A field that is called otherwise than its key is called as the attribute that it comes from."""


class Response(Record, kw_only=True):
    """What a command prints with ``--json``."""

    schema_version: int = 1
    ok: bool = True


R = TypeVar("R", bound=Record)


def fill(record: type[R], *values: object, **fields: Any) -> R:
    """Make a record of ``fields``, and for its others of the first value that has an attribute of that name; its parts likewise.

    A field that is UNSET, or that nothing has, gets the record's default.
    """
    for name in record.__struct_fields__:
        having = (getattr(value, name) for value in values if hasattr(value, name))
        fields.setdefault(name, next(having, UNSET))
    known = SimpleNamespace(**{name: value for name, value in fields.items() if value is not UNSET})
    return convert(known, record, from_attributes=True)


def dump(response: Response | ProofRecord) -> str:
    """Return a response as JSON text."""
    return json.dumps(to_builtins(response), indent=2, ensure_ascii=True)


class Failure(Response, kw_only=True):
    """What a command prints that fails."""

    exit_code: int
    problems: Sequence[Problem]


class ReasonRecord(Record):
    """Why a verdict is what it is, or what to know of it; of a target also the layers that it is about."""

    code: str
    message: str
    hint: str
    layers: list[str] | UnsetType = UNSET


class NoteRecord(Record):
    """What to know of a plan, and the place that it is about."""

    code: str
    message: str
    where: str


class ExpertsRecord(Record, kw_only=True):
    """Experts of one layer that are stored alike."""

    count: int | UnsetType = UNSET
    width: int
    hidden: int | UnsetType = UNSET
    label: str = field(name="format")


class ConversionRecord(Response, kw_only=True):
    """What ``convert`` prints: the plan, then what a dry run ``needs``, or what was done.

    ``source``: its path, or repository and commit where it lies in the Hub's cache.
    ``width``: of one expert in the ``source``, in the standard layout (``main``) and in the ``kernel`` layout.
    """

    source: str
    family: str | None
    model_type: str
    target: str | None
    contract: str | None
    experts: Experts
    width: dict[str, int]
    n_shared: int = field(name="n_shared_experts")
    layers: list[LayerRecord]
    shards: list[ShardRecord]
    sidecar: list[SidecarRecord]
    config_edits: Sequence[ConfigEdit]
    changes: list[ChangeRecord]
    server: ServerRecord | None
    notes: list[NoteRecord]
    needs: EstimateRecord | UnsetType = UNSET
    files: dict[str, str] | UnsetType = UNSET
    bytes: dict[str, int] | UnsetType = UNSET
    proof: ProofRecord | UnsetType | None = UNSET


class ChangeRecord(Record):
    """One change of format; it may edit config.json, too."""

    name: str
    does: str
    lossless: bool


class LayerRecord(Record):
    """What becomes of a layer: ``verdict`` by the kernel contract, ``server`` by the target."""

    name: str
    kind: LayerKind
    verdict: Outcome
    reasons: list[ReasonRecord]
    server: Outcome
    routed: ExpertsRecord | None
    shared: ExpertsRecord | None


class ShardRecord(Record):
    """One shard of the standard layout."""

    name: str
    action: str
    bytes_in: int
    size: int = field(name="bytes_out")


class SidecarRecord(Record):
    """One file of the kernel layout."""

    name: str
    size: int = field(name="bytes_out")
    tensors: int


class ServerRecord(Record):
    """What the server that is converted for makes of the output."""

    target: str
    outcome: Outcome = field(name="verdict")
    fused: bool
    fused_layers: int
    reasons: list[ReasonRecord]


class EstimateRecord(Record):
    """What a conversion takes of the machine, in bytes."""

    disk: int
    free: int
    fits: bool
    memory: int
    read: int
    written: int
    files: Sequence[FileEstimate]


def plan_record(plan: Plan, notes: Sequence[Problem], **done: Any) -> ConversionRecord:
    """Describe a plan, and what a dry run ``needs`` or what was ``done``."""
    description, options, decision = plan.source.description, plan.options, plan.decision
    fused = sum(v.server.fused for v in decision.verdicts)
    return fill(
        ConversionRecord,
        decision,
        options,
        description,
        source=source_name(plan.source.folder.root),
        family=description.family and description.family.name,
        target=options.target.name if options.target else None,
        contract=options.contract.name if options.contract else None,
        width={"source": decision.source_width, "main": decision.main_width, "kernel": decision.width},
        layers=[_layer(v) for v in decision.verdicts],
        shards=[
            fill(ShardRecord, s, action="carry" if s.carried else "rewrite", bytes_in=s.source.size if s.source else 0)
            for s in plan.shards
        ],
        sidecar=[fill(SidecarRecord, s, tensors=len(s.kernel_tensors) or len(s.tensors)) for s in (*plan.sidecar, *plan.originals)],
        server=options.server and fill(ServerRecord, decision.server, target=options.server.name, fused_layers=fused),
        notes=notes,
        **done,
    )


def conversion_record(result: ConversionResult, notes: Sequence[Problem]) -> ConversionRecord:
    """Describe a finished conversion."""
    files, by_way = dict(sorted(result.files.items())), dict(sorted(result.bytes.items()))
    return plan_record(result.plan, notes, files=files, bytes=by_way, proof=result.proof and proof_record(result.proof))


def _layer(judged: LayerVerdict) -> LayerRecord:
    d, verdict = judged.layer, judged.verdict
    return fill(
        LayerRecord,
        d.layer,
        verdict,
        verdict=verdict.outcome,
        server=judged.server.outcome,
        routed=d.routed and fill(ExpertsRecord, d.routed, count=d.layer.count, hidden=UNSET),
        shared=d.shared and fill(ExpertsRecord, d.shared, hidden=UNSET),
    )


class ProofRecord(Record, kw_only=True):
    """What each level of a proof covered and found; what ``verify`` prints has the head of a response."""

    schema_version: int | UnsetType = UNSET
    ok: bool | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    level: Level
    against: str
    source: str | UnsetType = UNSET
    storage: StorageRecord
    numerics: NumericsRecord | None
    kernel: KernelRecord | None


class StorageRecord(Record, kw_only=True):
    """The level of bytes. ``layers``: how many the source has, how many have the kernel layout, and why the others have not."""

    status: str
    tensors: dict[str, int]
    of_tensors: int
    sample: int | None
    seed: int | None = None
    bytes: int
    files: int
    digests: bool
    layers: dict[str, Any] | None
    notes: Sequence[str]
    kernel_stated: str | None
    mismatch_count: int
    mismatches: list[MismatchRecord]


class MismatchRecord(Record):
    """One thing that is not as it must be. ``bytes``: how many are wrong, where it is a matter of bytes."""

    code: str
    file: str
    tensor: str | None
    offset: int | None
    expected: str
    found: str
    bytes: int | None


class NumericsRecord(Record):
    """The level of computed experts. ``layers``: those that must compute the same bits; ``losses``: those that were rounded."""

    status: str
    of_layers: int
    moe_layers: int
    tokens: int
    seed: int
    limit: float | None = field(name="swiglu_limit")
    layers: list[NumericsLayerRecord]
    losses: list[LossRecord] | UnsetType = UNSET


class LossRecord(Record):
    """The error of a rounded expert: of its matrices by name, and of its output. ``unusual``: figures unlike ordinary weights."""

    name: str
    output: float = field(name="output_relative_l2")
    matrices: dict[str, dict[str, float]]
    unusual: dict[str, dict[str, float]]


class NumericsLayerRecord(Record):
    """One layer's computed expert; without figures where its tensors could not be read as the kernel does."""

    name: str
    status: str
    reason: str
    bit_equal: bool | None = None
    relative_l2: float | None = None
    bound: float | None = None
    device: str | None = None


class KernelRecord(Record):
    """The level of the GPU kernel itself."""

    status: str
    reason: str
    of_layers: int
    moe_layers: int
    relative_l2: float | None
    device_name: str | None = field(name="device")
    version: str | None = field(name="deep_gemm")
    layers: list[KernelLayerRecord]


class KernelLayerRecord(Record):
    """One layer's run of the kernel."""

    name: str
    status: str
    reason: str
    figures: dict[str, Any]


def verify_record(proof: Proof, source: Path | None = None) -> ProofRecord:
    """Describe a proof as what ``verify`` prints. ``source``: the checkpoint that the output was compared with."""
    name = source_name(source) if source else UNSET
    return replace(proof_record(proof), schema_version=1, ok=not proof.exit_code, exit_code=int(proof.exit_code), source=name)


def proof_record(proof: Proof) -> ProofRecord:
    """Describe a proof as a part of what ``convert`` prints."""
    return fill(
        ProofRecord,
        proof,
        exit_code=UNSET,
        against=proof.storage.against,
        storage=_storage(proof.storage),
        numerics=proof.numerics and _numerics(proof.numerics),
        kernel=proof.kernel and _kernel(proof.kernel),
    )


def _storage(result: StorageResult) -> StorageRecord:
    layers = None
    if result.layers:
        total, unfit = result.layers.moe_layers, [{"name": name, "reason": reason} for name, reason in result.layers.left_out]
        layers = {"moe": total, "in_kernel_layout": total - len(unfit), "left_out": unfit}
    return fill(
        StorageRecord,
        result.coverage,
        result.sample,
        result,
        sample=result.sample and result.sample.count,
        layers=layers,
        kernel_stated=result.kernel_in_manifest or None,
        mismatch_count=result.findings.count,
        mismatches=[fill(MismatchRecord, m, tensor=m.tensor or None, bytes=m.count or None) for m in result.findings.listed],
    )


def _numerics(summary: NumericsSummary) -> NumericsRecord:
    layers = [fill(NumericsLayerRecord, n, n.result, status="passed" if n.passed else "failed") for n in summary.layers]
    losses = [fill(LossRecord, loss, matrices={name: m._asdict() for name, m in loss.matrices.items()}) for loss in summary.losses]
    return fill(NumericsRecord, summary, summary.coverage, tokens=TOKENS, seed=SEED, layers=layers, losses=losses or UNSET)


def _kernel(summary: KernelSummary) -> KernelRecord:
    layers = [fill(KernelLayerRecord, result, name=name) for name, result in summary.layers]
    return fill(KernelRecord, summary, summary.coverage, summary.probe, layers=layers)


class RestorationRecord(Response, kw_only=True):
    """What ``restore`` prints."""

    files: dict[str, str]
    bytes: int
    tensors: int
    unpadded: int
    headers_identical: bool = True
    digests: bool
    edited: Sequence[str] | UnsetType = UNSET


def restoration_record(done: Restored) -> RestorationRecord:
    """Describe a restoration."""
    return fill(RestorationRecord, done, files=dict(sorted(done.files.items())), edited=done.edited or UNSET)
