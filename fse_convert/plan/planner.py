"""Decide what a conversion will write: pure, and the same for everyone who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

from fse_convert.checkpoint.header import TensorInfo, element_bytes
from fse_convert.checkpoint.names import SIDECAR
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.errors import InvalidCheckpoint, NotConvertible, Problem, folded
from fse_convert.model.consistency import LOAD_CONFLICTS
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.formats import Format, StorageKind, Tile
from fse_convert.model.moe import LayerKind, Role
from fse_convert.plan.edits import config_edits
from fse_convert.plan.plan import (
    Computed,
    Copied,
    Decision,
    Experts,
    LayerVerdict,
    Options,
    OutputShard,
    OutputTensor,
    Padded,
    Plan,
    SharedExpert,
    TensorSpec,
    Tripwire,
    matrix,
)
from fse_convert.plan.source import Source
from fse_convert.plan.widths import needed_width, stored_widths
from fse_convert.servers.judge import native_layer
from fse_convert.servers.native import LaunchWidths, kernel_verdict
from fse_convert.servers.scales import INEXACT, Scales, with_scales
from fse_convert.servers.targets import Contract
from fse_convert.servers.verdict import Reason
from fse_convert.sidecar.manifest import ConfigEdit
from fse_convert.sidecar.tensors import kernel_prefix, kernel_shapes, shard_metadata

SIDECAR_SHARD_BYTES = 1 << 30
"""Layers are added to a sidecar shard until it holds this many bytes."""
EMBEDDINGS = (".embed.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".wte.weight")


def make_plan(source: Source, options: Options) -> Plan:
    """Decide what to write.

    Raises InvalidCheckpoint for what is broken or not understood, NotConvertible for layers that would not fuse.
    """
    decision = decide(source, options)
    checkpoint = source.checkpoint
    padding = _padding(source.description, decision) if decision.main_width != decision.source_width else {}
    shards = tuple(_shard(s, padding) for s in checkpoint.shards)
    fused = [v.layer for v in decision.verdicts if v.verdict.fused]
    sidecar = _sidecar(fused, decision.n_shared * decision.width, options.contract, tripwire(checkpoint))
    return Plan(source=source, options=options, decision=decision, shards=shards, sidecar=sidecar)


def decide(source: Source, options: Options) -> Decision:
    """Decide whether a conversion can run as asked, and at which width; raises as `make_plan` does."""
    checkpoint, description, scales = source.checkpoint, source.description, source.scales
    _check_understood(checkpoint, description)
    source_width, n_shared = stored_widths(description)
    width = needed_width(description, options, source_width)
    main = width if options.experts is Experts.ALL else source_width
    kernel_widths, main_widths = LaunchWidths(width, n_shared * width), LaunchWidths(main, n_shared * main)
    verdicts = tuple(
        LayerVerdict(
            layer=d,
            verdict=with_scales(d, kernel_verdict(d, options.contract, options.target.pairings, kernel_widths), scales),
            server=native_layer(source.subject, options.target, d, main_widths),
        )
        for d in description.layers
    )
    _check_verdicts(verdicts, options, scales)
    edits: tuple[ConfigEdit, ...] = ()
    if main != source_width:
        edits = config_edits(checkpoint, description, LaunchWidths(source_width, n_shared * source_width), main_widths)
    return Decision(
        n_shared=n_shared, source_width=source_width, main_width=main, width=width, verdicts=verdicts, config_edits=edits
    )


def planner(source: Source) -> Callable[[Options], Decision | None]:
    """Make a function that returns what a conversion with some options would decide, None where it would refuse."""

    def plans(options: Options) -> Decision | None:
        try:
            return decide(source, options)
        except (InvalidCheckpoint, NotConvertible):
            return None

    return plans


def tripwire(checkpoint: Checkpoint) -> OutputTensor:
    """Return the tripwire of ``fse/``: the text model's embedding, which its loaders know, else the first tensor by name."""
    names = [n for n in checkpoint.tensors if f".{n}".endswith(EMBEDDINGS)] or [min(checkpoint.tensors)]
    name = min(names, key=lambda n: (len(n), n))  # a vision tower's has a longer one
    return OutputTensor(name=name, dtype=checkpoint.tensors[name].dtype, shape=(0,), start=0, end=0, change=Tripwire())


def _check_understood(checkpoint: Checkpoint, description: Description) -> None:
    problems = [*description.problems, *(c for c in description.conflicts if c.code in LOAD_CONFLICTS)]
    if description.family is None and description.unknown:
        problems.append(description.unknown)
    elif description.family and not any(d.shared for d in description.layers) and not problems:
        message = f"no shared experts under the names of {description.family.name}"
        problems.append(Problem("no-shared-experts", message, checkpoint.folder.label))
    if problems:
        raise InvalidCheckpoint(*folded(problems))


def _check_verdicts(verdicts: tuple[LayerVerdict, ...], options: Options, scales: Scales) -> None:
    for kind in LayerKind:
        states = [v for v in verdicts if v.layer.layer.kind is kind]
        fused = [v for v in states if v.verdict.fused]
        if fused and len(fused) < len(states):
            odd = [v for v in states if not v.verdict.fused]
            counts = f"{len(fused)} of {len(states)} {kind.value} layers would fuse"
            message = f"the layers disagree: {counts}, these not: {_layer_list(odd)}"
            hint = "servers fuse all layers of a model or none (vllm-project/vllm#51695)"
            raise NotConvertible(Problem("layers-mixed", message, hint=hint), *_unfused_problems(odd, scales))
    unfused = [v for v in verdicts if not v.verdict.fused]
    if unfused and not options.allow_unfused:
        message = f"{len(unfused)} of {len(verdicts)} layers do not fit {options.contract.name}, they would not fuse"
        hint = "--allow-unfused writes such layers in the standard layout only"
        raise NotConvertible(Problem("not-fusable", message, hint=hint), *_unfused_problems(unfused, scales))


def _unfused_problems(unfused: list[LayerVerdict], scales: Scales) -> list[Problem]:
    """Return one problem per distinct reason, naming the layers that have it, and of inexact scales one value."""
    by_reason: dict[Reason, list[LayerVerdict]] = {}
    for v in unfused:
        for reason in v.verdict.reasons:
            by_reason.setdefault(reason, []).append(v)
    return [Problem(r.code, _message(r, vs, scales), _layer_list(vs), r.hint) for r, vs in by_reason.items()]


def _message(reason: Reason, verdicts: list[LayerVerdict], scales: Scales) -> str:
    if reason.code != INEXACT:
        return reason.message
    name = scales.inexact_of(verdicts[0].layer)[0]
    return f"F32 scales are not powers of two in {len(verdicts)} layers, e.g. {name}: {scales.inexact[name]}"


def _layer_list(verdicts: list[LayerVerdict]) -> str:
    names = [v.layer.layer.name for v in verdicts]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"


def _padding(description: Description, decision: Decision) -> dict[str, tuple[tuple[int, ...], Padded]]:
    """Return every expert tensor that grows in the standard layout, with its new shape."""
    padding: dict[str, tuple[tuple[int, ...], Padded]] = {}
    for layer in description.layers:
        for group, width in ((layer.routed, decision.main_width), (layer.shared, decision.n_shared * decision.main_width)):
            if group is None:
                continue
            for expert in group.experts:
                for role, projection in expert.projections.items():
                    f = group.formats[role]
                    for suffix, info in projection.parts.items():
                        padded = _pad(info, f, f.tiles[suffix], role, width)
                        if padded:
                            padding[info.name] = padded
    return padding


def _pad(info: TensorInfo, f: Format, tile: Tile | None, role: Role, width: int) -> tuple[tuple[int, ...], Padded] | None:
    if tile is None:
        return None
    n, k = (f.shape[0], width) if role is Role.DOWN else (width, f.shape[1])
    shape = tile.stored(n, k, len(info.shape))
    if shape == info.shape:
        return None
    rows, row_bytes = matrix(info)
    return shape, Padded(
        source=info,
        rows=rows,
        row_bytes=row_bytes,
        new_rows=shape[0],
        new_row_bytes=prod(shape[1:]) * element_bytes(info.dtype),
        fill=tile.fill,
        nan=tile.nan,
    )


def _shard(shard: Shard, padding: Mapping[str, tuple[tuple[int, ...], Padded]]) -> OutputShard:
    """Plan one shard of the standard layout, in the source's tensor order."""
    changes: list[TensorSpec] = []
    for info in shard.header.tensors:
        shape, padded = padding.get(info.name, (info.shape, None))
        changes.append(TensorSpec(info.name, info.dtype, shape, padded or Copied(info)))
    # Loaders ask for `format: pt`.
    metadata = {"format": "pt", **shard.header.metadata}
    return OutputShard(name=shard.name, tensors=_placed(changes), metadata=metadata, source=shard)


def _placed(tensors: Iterable[TensorSpec]) -> tuple[OutputTensor, ...]:
    """Lay tensors out one after the other."""
    placed: list[OutputTensor] = []
    at = 0
    for name, dtype, shape, change in tensors:
        end = at + (change.source.nbytes if isinstance(change, Copied) else prod(shape) * element_bytes(dtype))
        placed.append(OutputTensor(name=name, dtype=dtype, shape=shape, start=at, end=end, change=change))
        at = end
    return tuple(placed)


def _sidecar(layers: Iterable[LayerDescription], width: int, contract: Contract, wire: OutputTensor) -> tuple[OutputShard, ...]:
    """Plan ``fse/``: layers are added to a shard until it is full. ``width``: of all shared experts of a layer together."""
    files: list[list[SharedExpert]] = []
    room = 0
    for layer in layers:
        if layer.shared is None or any(f.kind is not StorageKind.FP8_BLOCK for f in layer.shared.formats.values()):
            continue
        size = 3 * width * layer.shared.hidden
        if room < size:
            files.append([])
            room = SIDECAR_SHARD_BYTES
        files[-1].append(SharedExpert(prefix=kernel_prefix(layer.layer.name), group=layer.shared, width=width))
        room -= size
    return tuple(
        OutputShard(
            name=f"{SIDECAR}/shared-{i:05d}-of-{len(files):05d}.safetensors",
            tensors=((wire,) if i == 1 else ()) + _placed(_kernel_tensors(experts)),
            metadata=shard_metadata(contract.name),
        )
        for i, experts in enumerate(files, 1)
    )


def _kernel_tensors(experts: Iterable[SharedExpert]) -> Iterator[TensorSpec]:
    for shared in experts:
        for name, (dtype, shape) in kernel_shapes(shared.group.hidden, shared.width).items():
            yield TensorSpec(f"{shared.prefix}.{name.value}", dtype, shape, Computed(name, shared))
