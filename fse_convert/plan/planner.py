"""Decides what a conversion will write, from headers alone: pure, and the same for everyone who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from fse_convert.checkpoint.header import TensorInfo, element_bytes
from fse_convert.checkpoint.reader import SIDECAR, Checkpoint, Shard
from fse_convert.errors import InvalidCheckpoint, NotConvertible, Problem
from fse_convert.layout.sizes import ceil_div, round_up
from fse_convert.model.consistency import LOAD_CONFLICTS
from fse_convert.model.describe import kernel_tensors
from fse_convert.model.description import Description, LayerDescription
from fse_convert.model.families import FAMILIES
from fse_convert.model.formats import Format, StorageKind, Tile
from fse_convert.model.moe import LayerKind, Role
from fse_convert.plan.plan import (
    LAYOUT,
    LAYOUT_VERSION,
    ConfigEdit,
    Contents,
    Experts,
    Growth,
    KernelTensor,
    LayerVerdict,
    Options,
    OutputTensor,
    Part,
    Plan,
    ShardPlan,
    SharedExpert,
    SidecarPlan,
    Tripwire,
    matrix,
    tripwire,
)
from fse_convert.servers.native import LaunchWidths, kernel_verdict, target_verdict
from fse_convert.servers.scales import INEXACT, UNREAD, Scales, with_scales
from fse_convert.servers.targets import Contract, Target, width_multiple
from fse_convert.servers.verdict import Reason, Verdict, whole

SIDECAR_SHARD_BYTES = 1 << 30
"""Layers are added to a sidecar shard until it holds this many bytes."""
PACKED_K = 128
"""K elements per int32 word of packed scales."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is decided before any shard is looked at: widths, verdicts and config edits."""

    n_shared: int
    source_width: int
    width: int
    verdicts: tuple[LayerVerdict, ...]
    edits: tuple[ConfigEdit, ...]

    @property
    def server(self) -> Verdict:
        """What the target makes of the output's standard layout as a whole."""
        return whole(tuple(v.server for v in self.verdicts))


def make_plan(checkpoint: Checkpoint, description: Description, options: Options, contents: Contents | None = None) -> Plan:
    """Decide what to write.

    ``contents``: what was read beyond headers; known only to whoever read the data.
    Raises InvalidCheckpoint for what is broken or not understood, NotConvertible for layers that would not fuse.
    """
    contents = contents or Contents()
    d = decide(checkpoint, description, options, contents.scales)
    padded = options.experts is Experts.ALL and d.width != d.source_width
    growing = _growing(description, d.width, d.n_shared) if padded else {}
    shards = tuple(_shard_plan(s, growing) for s in checkpoint.shards)
    fused = [v.layer for v in d.verdicts if v.verdict.fused]
    sidecar = _sidecar(fused, d.n_shared * d.width, options.contract, tripwire(checkpoint))
    decided = (d.n_shared, d.source_width, d.width, d.verdicts)
    return Plan(checkpoint, description, options, *decided, shards, sidecar, d.edits, contents)


def decide(checkpoint: Checkpoint, description: Description, options: Options, scales: Scales = UNREAD) -> Decision:
    """Decide whether a conversion can run as asked, and at which width; raises as `make_plan` does."""
    _check_understood(checkpoint, description)
    source_width, n_shared = _widths(description)
    width = needed_width(description, options, source_width)
    main = width if options.experts is Experts.ALL else source_width
    verdicts = tuple(
        LayerVerdict(
            d,
            with_scales(
                d, kernel_verdict(d, options.contract, options.target.pairings, LaunchWidths(width, n_shared * width)), scales
            ),
            _standard_verdict(d, options.target, checkpoint.config, LaunchWidths(main, n_shared * main), scales),
        )
        for d in description.layers
    )
    _check_verdicts(verdicts, options, scales)
    edits: tuple[ConfigEdit, ...] = ()
    if main != source_width:
        edits = _config_edits(checkpoint.config, description, source_width, width, n_shared)
        _check_edits(checkpoint.config, description, edits)
    return Decision(n_shared, source_width, width, verdicts, edits)


def planner(checkpoint: Checkpoint, description: Description, scales: Scales = UNREAD) -> Callable[[Options], Decision | None]:
    """Make a function that says what a conversion with some options would decide, None where it would refuse."""

    def plans(options: Options) -> Decision | None:
        try:
            return decide(checkpoint, description, options, scales)
        except (InvalidCheckpoint, NotConvertible):
            return None

    return plans


def needed_width(description: Description, options: Options, source_width: int) -> int:
    """Smallest width that contract, server, scale blocks and tensor-parallel size accept, at least the source's."""
    granularity, multiple = 1, options.contract.width_multiple
    for layer in description.layers:
        if layer.routed:
            multiple = lcm(multiple, width_multiple(options.target, layer.routed.formats[Role.GATE].kind))
        for group in (layer.routed, layer.shared):
            if group:
                granularity = lcm(granularity, *(_width_block(r, f) for r, f in group.formats.items()))
    return round_up(source_width, lcm(multiple, granularity * options.tp))


def _width_block(role: Role, f: Format) -> int:
    if f.block is None:
        return 1
    return f.block[1] if role is Role.DOWN else f.block[0]


def _check_understood(checkpoint: Checkpoint, description: Description) -> None:
    problems = [*description.problems, *(c for c in description.conflicts if c.code in LOAD_CONFLICTS)]
    kernel = kernel_tensors(checkpoint.tensors)
    if kernel:
        problems.append(Problem("already-converted", "tensors in the kernel layout", kernel[0], "convert the original checkpoint"))
    if description.family is None:
        hint = f"known families: {', '.join(f.name for f in FAMILIES)}"
        problems.append(Problem("family-unknown", f"model type {description.model_type!r} is not known", "config.json", hint))
    elif not any(d.shared for d in description.layers) and not problems:
        problems.append(
            Problem(
                "no-shared-experts",
                f"no shared experts under the names of {description.family.name}",
                checkpoint.folder.label,
            )
        )
    if problems:
        raise InvalidCheckpoint(*problems)


def _widths(description: Description) -> tuple[int, int]:
    """Width of one expert, and how many of them the shared MLP is wide; both must be the same in every layer."""
    widths = description.widths
    if len(widths) != 1:
        found = ", ".join(map(str, widths)) or "none"
        raise InvalidCheckpoint(Problem("widths-differ", f"routed experts of different layers differ in width: {found}"))
    ratios = {d.shared.width / widths[0] for d in description.layers if d.shared}
    if len(ratios) != 1 or not (ratio := ratios.pop()).is_integer() or ratio < 1:
        shared = sorted({d.shared.width for d in description.layers if d.shared})
        message = (
            f"shared width {', '.join(map(str, shared))} is no multiple of the routed width {widths[0]}, or differs between layers"
        )
        raise NotConvertible(Problem("width-ratio", message, hint="the kernel runs n shared experts of the routed width"))
    return widths[0], int(ratio)


def _standard_verdict(
    layer: LayerDescription, target: Target, config: Mapping[str, Any], widths: LaunchWidths, scales: Scales
) -> Verdict:
    """Judge a layer of the output's standard layout as `fse_convert.servers.judge` judges that folder."""
    verdict = target_verdict(layer, target, config, widths)
    return with_scales(layer, verdict, scales) if target.is_contract else verdict


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
    """One problem per distinct reason, naming the layers that have it, and of inexact scales one value."""
    by_reason: dict[Reason, list[LayerVerdict]] = {}
    for v in unfused:
        for reason in v.verdict.reasons:
            by_reason.setdefault(reason, []).append(v)
    return [Problem(r.code, _message(r, vs, scales), _layer_list(vs), r.hint) for r, vs in by_reason.items()]


def _message(reason: Reason, verdicts: list[LayerVerdict], scales: Scales) -> str:
    if reason.code != INEXACT:
        return reason.message
    name = scales.inexact_of(verdicts[0].layer)[0]
    return f"F32 scales are no powers of two in {len(verdicts)} layers, e.g. {name}: {scales.inexact[name]}"


def _layer_list(verdicts: list[LayerVerdict]) -> str:
    names = [v.layer.layer.name for v in verdicts]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"


def _growing(description: Description, width: int, n_shared: int) -> dict[str, tuple[tuple[int, ...], Growth]]:
    """Every expert tensor that grows, with its new shape."""
    growing: dict[str, tuple[tuple[int, ...], Growth]] = {}
    for layer in description.layers:
        for group, new in ((layer.routed, width), (layer.shared, n_shared * width)):
            if group is None:
                continue
            for expert in group.experts:
                for role, projection in expert.projections.items():
                    f = group.formats[role]
                    for suffix, info in projection.parts.items():
                        grown = _grow(info, f, f.tiles[suffix], role, new)
                        if grown:
                            growing[info.name] = grown
    return growing


def _grow(info: TensorInfo, f: Format, tile: Tile | None, role: Role, width: int) -> tuple[tuple[int, ...], Growth] | None:
    if tile is None:
        return None
    n, k = (f.shape[0], width) if role is Role.DOWN else (width, f.shape[1])
    shape = (ceil_div(n, tile.rows), ceil_div(k, tile.cols) if tile.cols else 1)[: len(info.shape)]
    if shape == info.shape:
        return None
    rows, row_bytes = matrix(info)
    new_row_bytes = prod(shape[1:]) * element_bytes(info.dtype)
    return shape, Growth(rows, row_bytes, shape[0], new_row_bytes, tile.fill, tile.nan)


def _shard_plan(shard: Shard, growing: Mapping[str, tuple[tuple[int, ...], Growth]]) -> ShardPlan:
    tensors: list[OutputTensor] = []
    at = 0
    for info in shard.header.tensors:
        shape, growth = growing.get(info.name, (info.shape, None))
        size = growth.new_rows * growth.new_row_bytes if growth else info.nbytes
        tensors.append(OutputTensor(info, shape, at, at + size, growth))
        at += size
    return ShardPlan(shard, tuple(tensors))


def _sidecar(layers: Iterable[LayerDescription], width: int, contract: Contract, wire: Tripwire) -> tuple[SidecarPlan, ...]:
    files: list[list[SharedExpert]] = []
    room = 0
    for layer in layers:
        if layer.shared is None or any(f.kind is not StorageKind.FP8_BLOCK for f in layer.shared.formats.values()):
            continue
        size = 3 * width * layer.shared.hidden
        if room < size:
            files.append([])
            room = SIDECAR_SHARD_BYTES
        files[-1].append(SharedExpert(f"{layer.layer.name}.experts", layer.shared, width))
        room -= size
    metadata = {
        "format": "pt",
        "fse_contract": contract.name,
        "fse_layout": LAYOUT,
        "fse_layout_version": str(LAYOUT_VERSION),
    }
    return tuple(
        SidecarPlan(
            f"{SIDECAR}/shared-{i:05d}-of-{len(files):05d}.safetensors",
            _kernel_tensors(experts),
            metadata,
            wire if i == 1 else None,
        )
        for i, experts in enumerate(files, 1)
    )


def _kernel_tensors(experts: Iterable[SharedExpert]) -> tuple[KernelTensor, ...]:
    tensors: list[KernelTensor] = []
    at = 0
    for shared in experts:
        h, s = shared.group.hidden, shared.width
        shapes = {
            Part.L1_WEIGHT: ("F8_E4M3", (2 * s, h)),
            Part.L1_SCALE: ("I32", (h // PACKED_K, 2 * s)),
            Part.L2_WEIGHT: ("F8_E4M3", (h, s)),
            Part.L2_SCALE: ("I32", (s // PACKED_K, h)),
        }
        for part, (dtype, shape) in shapes.items():
            end = at + prod(shape) * element_bytes(dtype)
            tensors.append(KernelTensor(f"{shared.prefix}.{part.value}", part, shared, dtype, shape, at, end))
            at = end
    return tuple(tensors)


def _config_edits(config: Mapping[str, Any], description: Description, old: int, new: int, n_shared: int) -> tuple[ConfigEdit, ...]:
    family = description.family
    if family is None:
        return ()
    edits: list[ConfigEdit] = []
    for section in family.sections:
        place = config.get(section) if section else config
        if not isinstance(place, Mapping):
            continue
        if place.get(family.width_key) == old:
            edits.append(ConfigEdit(section, family.width_key, old, new))
        if family.shared_width_key and place.get(family.shared_width_key) == n_shared * old:
            edits.append(ConfigEdit(section, family.shared_width_key, n_shared * old, n_shared * new))
    return tuple(edits)


def _check_edits(config: Mapping[str, Any], description: Description, edits: Iterable[ConfigEdit]) -> None:
    """Refuse to pad where config.json does not say the width in one number that can be edited.

    Ernie-4.5-VL and Hunyuan write a list, one width per modality or layer; a key left to its default is in no file.
    """
    family = description.family
    edited = {edit.key for edit in edits}
    for key in (family.width_key, family.shared_width_key) if family else ():
        if family and key and key not in edited:
            stated = family.value(config, key)
            what = f"there is no {key}" if stated is None else f"{key} is {stated!r}"
            message = f"{what}: padding needs one number to edit, or the output would not load"
            raise NotConvertible(Problem("config-key", message, "config.json", "write the width there as one integer"))
