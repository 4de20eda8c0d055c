"""Every JSON object that the program prints, as typed records: the fields of a record are its keys, in this order.

A field that is UNSET is a key that is left out. What `inspect` and `targets` print is in `inspection.records` and `targets`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Struct, UnsetType, to_builtins
from msgspec.structs import replace

from fse_convert.conversion.estimate import Estimate, FileEstimate
from fse_convert.errors import Problem
from fse_convert.report.console import size
from fse_convert.servers.verdict import Outcome, Reason
from fse_convert.sidecar.manifest import ConfigEdit
from fse_convert.verification.findings import SEED, TOKENS

if TYPE_CHECKING:
    from fse_convert.conversion.run import ConversionResult
    from fse_convert.plan.plan import LayerVerdict, Plan
    from fse_convert.restoration import Restored
    from fse_convert.verification.findings import StorageResult
    from fse_convert.verification.proof import Proof


class Record(Struct):
    """An object within a response."""


class Response(Record, kw_only=True):
    """What a command prints with ``--json``."""

    schema_version: int = 1
    ok: bool = True


R = TypeVar("R", bound=Record)


def fill(record: type[R], value: object, **fields: Any) -> R:
    """Make a record of ``fields``, and for the others of the value's attributes of the same name."""
    same = {name: getattr(value, name) for name in record.__struct_fields__ if name not in fields and hasattr(value, name)}
    return record(**same, **fields)


def dump(response: Response | ProofRecord) -> str:
    """Return a response as JSON text."""
    return json.dumps(to_builtins(response), indent=2, ensure_ascii=True)


class Failure(Response, kw_only=True):
    """What a command prints that fails."""

    exit_code: int
    problems: Sequence[Problem]


class ReasonRecord(Record):
    """Why a verdict is what it is, with the layers that have it; or a note, with the place that it is about."""

    code: str
    message: str
    hint: str | UnsetType = UNSET
    where: str | UnsetType = UNSET
    layers: list[str] | UnsetType = UNSET


def reasons_of(reasons: Sequence[Reason]) -> list[ReasonRecord]:
    """Describe reasons."""
    return [ReasonRecord(code=r.code, message=r.message, hint=r.hint) for r in reasons]


class ExpertsRecord(Record, kw_only=True):
    """Experts of one layer that are stored alike."""

    count: int | UnsetType = UNSET
    width: int
    hidden: int | UnsetType = UNSET
    format: str


class ConversionRecord(Response, kw_only=True):
    """What ``convert`` prints: the plan, then what a dry run ``needs``, or what was done.

    ``width``: of one expert in the ``source``, in the standard layout (``main``) and in the ``kernel`` layout.
    """

    family: str | None
    model_type: str
    target: str
    contract: str
    experts: str
    width: dict[str, int]
    n_shared_experts: int
    layers: list[LayerRecord]
    shards: list[ShardRecord]
    sidecar: list[SidecarRecord]
    config_edits: Sequence[ConfigEdit]
    server: ServerRecord | None
    notes: list[ReasonRecord]
    needs: EstimateRecord | UnsetType = UNSET
    files: dict[str, str] | UnsetType = UNSET
    bytes: dict[str, int] | UnsetType = UNSET
    proof: ProofRecord | UnsetType | None = UNSET


class LayerRecord(Record):
    """What becomes of a layer: ``verdict`` by the kernel contract, ``server`` by the target."""

    name: str
    kind: str
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
    bytes_out: int


class SidecarRecord(Record):
    """One file of the kernel layout."""

    name: str
    bytes_out: int
    tensors: int


class ServerRecord(Record):
    """What the server that is converted for makes of the output."""

    target: str
    verdict: Outcome
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


def plan_record(plan: Plan, needs: Estimate | None = None) -> ConversionRecord:
    """Describe a plan, and of a dry run what it ``needs``."""
    from fse_convert.plan.notes import notes

    description, options, decision = plan.source.description, plan.options, plan.decision
    return ConversionRecord(
        family=description.family.name if description.family else None,
        model_type=description.model_type,
        target=options.target.name,
        contract=options.contract.name,
        experts=options.experts.value,
        width={"source": decision.source_width, "main": decision.main_width, "kernel": decision.width},
        n_shared_experts=decision.n_shared,
        layers=[_layer(v) for v in decision.verdicts],
        shards=[
            ShardRecord(
                name=s.name, action="carry" if s.carried else "rewrite", bytes_in=s.source.size if s.source else 0, bytes_out=s.size
            )
            for s in plan.shards
        ],
        sidecar=[SidecarRecord(name=s.name, bytes_out=s.size, tensors=len(s.kernel_tensors)) for s in plan.sidecar],
        config_edits=decision.config_edits,
        server=None
        if options.target.is_contract
        else ServerRecord(
            target=options.target.name,
            verdict=decision.server.outcome,
            fused=decision.server.fused,
            fused_layers=sum(v.server.fused for v in decision.verdicts),
            reasons=reasons_of(decision.server.reasons),
        ),
        notes=[ReasonRecord(code=n.code, message=n.message, where=n.where) for n in notes(plan, size=size)],
        needs=fill(EstimateRecord, needs) if needs else UNSET,
    )


def conversion_record(result: ConversionResult) -> ConversionRecord:
    """Describe a finished conversion."""
    files, by_way = dict(sorted(result.files.items())), dict(sorted(result.bytes.items()))
    proof = proof_record(result.proof) if result.proof else None
    return replace(plan_record(result.plan), files=files, bytes=by_way, proof=proof)


def _layer(judged: LayerVerdict) -> LayerRecord:
    d, verdict = judged.layer, judged.verdict
    return LayerRecord(
        name=d.layer.name,
        kind=d.layer.kind.value,
        verdict=verdict.outcome,
        reasons=reasons_of(verdict.reasons),
        server=judged.server.outcome,
        routed=ExpertsRecord(count=len(d.layer.routed), width=d.routed.width, format=d.routed.label) if d.routed else None,
        shared=ExpertsRecord(width=d.shared.width, format=d.shared.label) if d.shared else None,
    )


class ProofRecord(Record, kw_only=True):
    """What each level of a proof covered and found; what ``verify`` prints has the head of a response."""

    schema_version: int | UnsetType = UNSET
    ok: bool | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    level: str
    against: str
    storage: StorageRecord
    numerics: NumericsRecord | None
    kernel: KernelRecord | None


class StorageRecord(Record):
    """The level of bytes. ``layers``: how many the source has, how many have the kernel layout, and why the others have not."""

    status: str
    tensors: dict[str, int]
    of_tensors: int
    sample: int | None
    seed: int | None
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
    """The level of computed experts."""

    status: str
    of_layers: int
    moe_layers: int
    tokens: int
    seed: int
    swiglu_limit: float | None
    layers: list[NumericsLayerRecord]


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
    device: str | None
    deep_gemm: str | None
    layers: list[KernelLayerRecord]


class KernelLayerRecord(Record):
    """One layer's run of the kernel."""

    name: str
    status: str
    reason: str
    figures: dict[str, Any]


def verify_record(proof: Proof) -> ProofRecord:
    """Describe a proof as what ``verify`` prints."""
    return replace(proof_record(proof), schema_version=1, ok=not proof.exit_code, exit_code=int(proof.exit_code))


def proof_record(proof: Proof) -> ProofRecord:
    """Describe a proof as a part of what ``convert`` prints."""
    numerics, kernel = proof.numerics, proof.kernel
    return ProofRecord(
        level=proof.level.value,
        against=proof.storage.against,
        storage=_storage(proof.storage),
        numerics=fill(
            NumericsRecord,
            numerics.coverage,
            status=numerics.status,
            tokens=TOKENS,
            seed=SEED,
            swiglu_limit=numerics.limit,
            layers=[
                fill(NumericsLayerRecord, n.result, name=n.name, status="passed" if n.passed else "failed", reason=n.reason)
                for n in numerics.layers
            ],
        )
        if numerics
        else None,
        kernel=fill(
            KernelRecord,
            kernel.coverage,
            status=kernel.status,
            reason=kernel.reason,
            relative_l2=kernel.relative_l2,
            device=kernel.probe.device_name,
            deep_gemm=kernel.probe.version,
            layers=[fill(KernelLayerRecord, result, name=name) for name, result in kernel.layers],
        )
        if kernel
        else None,
    )


def _storage(result: StorageResult) -> StorageRecord:
    layers = None
    if result.layers:
        total, unfit = result.layers.moe_layers, [{"name": name, "reason": reason} for name, reason in result.layers.left_out]
        layers = {"moe": total, "in_kernel_layout": total - len(unfit), "left_out": unfit}
    return fill(
        StorageRecord,
        result,
        tensors=result.coverage.tensors,
        sample=result.sample and result.sample.count,
        seed=result.sample and result.sample.seed,
        bytes=result.coverage.bytes,
        files=result.coverage.files,
        layers=layers,
        kernel_stated=result.kernel_in_manifest or None,
        mismatch_count=result.findings.count,
        mismatches=[fill(MismatchRecord, m, tensor=m.tensor or None, bytes=m.count or None) for m in result.findings.listed],
    )


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
