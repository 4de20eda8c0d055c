"""The manifest of a planned output: the same bytes on every machine, without clock time or absolute path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod

from msgspec import UNSET

import fse_convert
from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.header import LENGTH_BYTES
from fse_convert.checkpoint.names import CONFIG, INDEX
from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.plan.plan import Decision, LayerVerdict, Options, Plan, grows_apart
from fse_convert.plan.tensors import Copied, Padded
from fse_convert.servers.targets import Contract
from fse_convert.servers.verdict import Reason
from fse_convert.sidecar import manifest as record
from fse_convert.sidecar.originals import config_candidates, header_candidates, index_candidates, pick
from fse_convert.sidecar.tensors import LAYOUT, LAYOUT_VERSION, MMA_TYPES


def draft_manifest(plan: Plan, texts: Mapping[str, bytes]) -> record.Manifest:
    """Describe a planned output before it is proved. ``texts``: the output's config.json and index.

    Reads the source's config, index and headers. Raises OSError.
    """
    decision, description, contract = plan.decision, plan.source.description, plan.options.contract
    renamed, stretches = renamed_tensors(plan), stacked_stretches(plan)
    return record.Manifest(
        format_version=1 if contract and not decision.changes and not stretches else 2,
        tool=record.Tool(name="fse-convert", version=fse_convert.__version__),
        arguments=arguments_record(plan.options),
        contract=_contract(contract) if contract else None,
        layout=record.Layout(name=LAYOUT, version=LAYOUT_VERSION, mma_types=list(MMA_TYPES)) if contract else None,
        model=record.Model(
            family=description.family_name,
            model_type=description.model_type,
            n_shared_experts=decision.n_shared,
            width=record.ExpertWidths(source=decision.source_width, main=decision.main_width, kernel=decision.width),
            shared_width=_shared_width(decision) if grows_apart(decision.at_source, decision.at_kernel) else UNSET,
        ),
        config_edits=list(decision.config_edits),
        changes=[record.ChangeRecord(name=c.name, lossless=c.lossless) for c in decision.changes] or UNSET,
        renamed=renamed or UNSET,
        layers=[_layer(v) for v in decision.verdicts],
        server=_server(plan),
        padded={t.name: list(t.change.source.shape) for s in plan.shards for t in s.tensors if isinstance(t.change, Padded)},
        stretches=stretches or UNSET,
        source=record.SourceIdentity(
            files=small_digests(plan.source.checkpoint),
            shards=shard_identities(plan.source.checkpoint),
            originals=_originals(plan, texts),
        ),
        proof=record.ProofRecord(storage=record.NOT_ASKED, numerics=record.NOT_ASKED, kernel=record.NOT_ASKED),
        files=None,
        tensors=None,
    )


def _shared_width(decision: Decision) -> record.ExpertWidths:
    widths = (decision.at_source, decision.at_main, decision.at_kernel)
    return record.ExpertWidths(**{name: w.shared for name, w in zip(("source", "main", "kernel"), widths, strict=True)})


def _contract(contract: Contract) -> record.ContractRecord:
    multiples = {"width_multiple": contract.width_multiple, "hidden_multiple": contract.hidden_multiple}
    return record.ContractRecord(name=contract.name, **multiples)


def arguments_record(options: Options) -> record.Arguments:
    """Return the arguments that decide about bytes, as the manifest keeps them."""
    return record.Arguments(
        target=options.target.name if options.target else "",
        experts=options.experts.value,
        tp=options.tp,
        allow_unfused=options.allow_unfused,
        **{name: True for name in record.CHANGE_ARGUMENTS if getattr(options, name)},
    )


def small_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of config.json and of the index."""
    folder = checkpoint.folder
    return {n: sha256(folder.read(n)) for n in (CONFIG, INDEX) if n in folder.files}


def shard_identities(checkpoint: Checkpoint) -> dict[str, record.SourceShard]:
    """Return size and header digest of every shard: they tell one source from another without its weights."""
    return {
        s.name: record.SourceShard(size=s.size, header_sha256=sha256(checkpoint.folder.read(s.name, 0, s.header.data_start)))
        for s in checkpoint.shards
    }


def _originals(plan: Plan, texts: Mapping[str, bytes]) -> dict[str, str]:
    """Return the text of the source's config, index and headers where `fse_convert.sidecar.originals` cannot derive it."""
    folder, decision = plan.source.checkpoint.folder, plan.decision
    derivable: list[tuple[str, bytes, Iterable[bytes]]] = []
    if (raw := folder.read(CONFIG)) != texts[CONFIG]:
        edits = [(e.section, e.key, e.old) for e in decision.config_edits]
        derivable.append((CONFIG, raw, config_candidates(json.loads(texts[CONFIG]), edits)))
    if INDEX in folder.files and (raw := folder.read(INDEX)) != texts[INDEX]:
        candidates = index_candidates(json.loads(texts[INDEX]), plan.source.checkpoint.total_size, added_elements(plan))
        derivable.append((INDEX, raw, candidates))
    for shard in plan.shards:
        if shard.source and not shard.carried:
            header = shard.source.header
            tensors = [(t.name, t.dtype, t.shape) for t in header.tensors]
            derivable_header = all(t.as_is or isinstance(t.change, Padded) for t in shard.tensors)
            header_bytes = folder.read(shard.name, 0, header.data_start)
            derivable.append((shard.name, header_bytes, header_candidates(tensors, shard.metadata) if derivable_header else ()))
    kept = {name: raw for name, raw, candidates in derivable if pick(candidates, sha256(raw)) is None}
    return {name: raw[0 if name in (CONFIG, INDEX) else LENGTH_BYTES :].decode("utf-8") for name, raw in kept.items()}


def renamed_tensors(plan: Plan) -> dict[str, str]:
    """Return the source's name of every tensor whose elements are the source's, under another name."""
    copied = ((t.name, t.change) for s in plan.shards for t in s.tensors)
    return {name: change.source.name for name, change in copied if isinstance(change, Copied) and name != change.source.name}


def stacked_stretches(plan: Plan) -> dict[str, int]:
    """Return the stretches of every padded tensor with several matrices, where its shapes alone would tell other ones."""
    padded = ((t.name, t.shape, t.change) for s in plan.shards for t in s.tensors if isinstance(t.change, Padded))
    of_each = ((name, c.growth.stretches, record.stretches(c.source.shape, shape)) for name, shape, c in padded)
    return {name: count for name, count, told in of_each if count != told}


def added_elements(plan: Plan) -> int:
    """Return how many elements padding adds to the standard layout, as the index's ``total_parameters`` counts them."""
    padded = ((t.shape, t.change) for s in plan.shards for t in s.tensors)
    return sum(prod(shape) - prod(change.source.shape) for shape, change in padded if isinstance(change, Padded))


def _server(plan: Plan) -> record.Server | None:
    """Return what the server that was converted for makes of the standard layout; None for a bare contract."""
    target, verdict = plan.options.server, plan.decision.server
    if target is None:
        return None
    return record.Server(
        target=target.name,
        engine=target.engine,
        release=target.release,
        verdict=verdict.outcome.value,
        reasons=_reasons(verdict.reasons),
        layers={v.layer.layer.name: v.server.outcome.value for v in plan.decision.verdicts},
    )


def _layer(judged: LayerVerdict) -> record.Layer:
    layer, verdict = judged.layer, judged.verdict
    routed, shared = layer.routed, layer.shared
    return record.Layer(
        name=layer.layer.name,
        kind=layer.layer.kind.value,
        verdict=verdict.outcome.value,
        reasons=_reasons(verdict.reasons),
        routed=record.RoutedExperts(count=layer.layer.count, format=routed.label) if routed else None,
        shared=record.SharedExpert(width=shared.width, format=shared.label) if shared else None,
    )


def _reasons(reasons: Iterable[Reason]) -> list[record.Reason]:
    return [record.Reason(code=r.code, message=r.message) for r in reasons]
