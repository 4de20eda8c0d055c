"""From tensor names and headers to layers: which experts there are, how each is stored, and where the config disagrees.

Layers come from the tensor names. Config values are hints: ``num_nextn_predict_layers`` says 1 in DeepSeek's 0731 and
0813 releases that hold mtp.0 to mtp.2 (vllm-project/vllm#41834).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fse_convert.checkpoint.reader import Checkpoint, no_collection
from fse_convert.errors import Problem, some
from fse_convert.model.completeness import gaps
from fse_convert.model.families import Family, find_family
from fse_convert.model.formats import MXFP4_GROUP, Format, FormatError, Kind, read_format
from fse_convert.model.grouping import Seen, group_layers, seen_experts
from fse_convert.model.moe import Expert, LayerKind, MoELayer, Role

KERNEL_TENSOR = re.compile(r"\.shared_l[12]_weight(?:_scale)?$")
"""Names of the kernel layout: a checkpoint that has them is converted already."""
WIDTH_CONFLICT = "config-width"
BLOCK_CONFLICT = "config-block"
HIDDEN_CONFLICT = "config-hidden"
COUNT_CONFLICT = "config-experts"
DTYPE_CONFLICT = "config-expert-dtype"
METHOD_CONFLICT = "quantization-method"
NOT_UNDERSTOOD = frozenset({
    "experts-stacked", "expert-unknown", "expert-outside", "experts-differ", "dtype-unsupported", "weight-shape",
    "part-ambiguous", "part-unknown", "format-unknown", "scale-dtype",
})  # fmt: skip
"""Codes of problems with a checkpoint that is whole, but of a kind that is not supported; all others mean that it is broken."""
FP8_KINDS = (Kind.FP8_BLOCK, Kind.FP8_CHANNEL, Kind.FP8_TENSOR)
LOAD_CONFLICTS = frozenset({
    WIDTH_CONFLICT, BLOCK_CONFLICT, HIDDEN_CONFLICT, COUNT_CONFLICT, DTYPE_CONFLICT, METHOD_CONFLICT,
})  # fmt: skip
"""Codes of conflicts by which a server that believes the config would not load the tensors."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of one layer that are stored alike: their formats by role, hidden size, and the width of one of them."""

    experts: tuple[Expert, ...]
    formats: Mapping[Role, Format]
    hidden: int
    width: int

    @property
    def label(self) -> str:
        """The storage format in a few words."""
        return " / ".join(dict.fromkeys(f.label for f in self.formats.values()))


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """One MoE layer with its routed and shared experts, or the problems that keep them from being understood."""

    layer: MoELayer
    routed: ExpertGroup | None
    shared: ExpertGroup | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A MoE model as its headers show it.

    ``family`` None: no row knows this model type, ``layers`` is empty, and ``seen`` lists the names that look like
    experts. ``n_shared``: shared experts per layer, by which the shared width is divided. ``conflicts``: where the config
    says something else than the headers. ``strays``: expert tensors outside the family's MoE blocks. ``gaps``: layers and experts
    that are not there.
    """

    family: Family | None
    model_type: str
    section: str
    n_shared: int
    layers: tuple[LayerDescription, ...]
    conflicts: tuple[Problem, ...]
    strays: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()
    gaps: tuple[Problem, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of all layers, in layer order, what is missing between them, and experts outside of any layer."""
        return (*(p for layer in self.layers for p in layer.problems), *self.gaps, *self.outside)

    @property
    def outside(self) -> tuple[Problem, ...]:
        """The problem that ``strays`` are, if there are any."""
        if not self.strays:
            return ()
        hint = "padding would leave them at their old width"
        return (Problem("expert-outside", "experts outside the known MoE blocks", _places(list(self.strays)), hint),)

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct widths of one routed expert over all layers, ascending."""
        return tuple(sorted({d.routed.width for d in self.layers if d.routed}))


def kernel_tensors(names: Iterable[str]) -> list[str]:
    """Names of the kernel layout among a checkpoint's tensors."""
    return [n for n in names if ".shared_l" in n and KERNEL_TENSOR.search(n)]


def describe(checkpoint: Checkpoint) -> Description:
    """Describe the MoE layers of a checkpoint; never raises for what it does not understand, but records it."""
    with no_collection():
        return _describe(checkpoint)


def _describe(checkpoint: Checkpoint) -> Description:
    config = checkpoint.config
    family = find_family(config)
    model_type = str(config.get("model_type", ""))
    if family is None:
        return Description(None, model_type, "", 0, (), (), (), seen_experts(checkpoint.tensors.values()))
    grouping = group_layers(family, checkpoint.tensors, family.number(config, "num_hidden_layers"))
    hint = block_hint(config)
    reader = _Reader(hint, gated=family.gated)
    described = tuple(reader.describe(layer) for layer in grouping.layers)
    n_shared = family.fixed_shared or family.number(config, family.n_shared_key) or 1
    conflicts = (*_conflicts(family, config, described, n_shared), *_block_conflicts(described, hint))
    missing = tuple(gaps(family, config, grouping.layers))
    section = family.section(config)
    return Description(family, model_type, section, n_shared, described, conflicts, grouping.strays, gaps=missing)


def block_hint(config: Mapping[str, object]) -> tuple[int, int] | None:
    """The config's FP8 ``weight_block_size``, if it has a sensible one."""
    quant = config.get("quantization_config")
    size = quant.get("weight_block_size") if isinstance(quant, Mapping) and quant.get("quant_method") == "fp8" else None
    if isinstance(size, list) and len(size) == 2 and all(type(b) is int and b > 0 for b in size):
        return size[0], size[1]
    return None


class _Reader:
    """Reads formats of expert groups; remembers them by signature, since a layer's experts share one."""

    def __init__(self, hint: tuple[int, int] | None, *, gated: bool) -> None:
        self.hint = hint
        self.gated = gated
        self.known: dict[tuple[object, ...], dict[Role, Format]] = {}

    def describe(self, layer: MoELayer) -> LayerDescription:
        """Describe one layer, with every problem of every expert; equal problems are counted together."""
        problems = _Problems()
        if layer.stacked:
            stored = layer.stacked[0]
            message = f"routed experts in one {len(stored.shape)}-D tensor, {stored.dtype} {list(stored.shape)}"
            problems.add(Problem("experts-stacked", message, stored.name, "only experts of their own, one by one, are supported"))
        for name in layer.unknown:
            problems.add(Problem("expert-unknown", "an expert tensor that is not understood", name, "adapters are not supported"))
        for problem in _missing_experts(layer):
            problems.add(problem)
        if self.gated and layer.shared and layer.gate_tensor is None:
            problems.add(Problem("gate-missing", "no gate of the shared expert", layer.shared.name, "is the checkpoint complete?"))
        routed = self._group(layer.routed, problems)
        shared = self._group((layer.shared,), problems) if layer.shared else None
        return LayerDescription(layer, routed, shared, problems.folded())

    def _group(self, experts: tuple[Expert, ...], problems: _Problems) -> ExpertGroup | None:
        first: dict[Role, Format] | None = None
        whole = True
        for expert in experts:
            formats = self._expert(expert, problems)
            if formats is None:
                whole = False
            elif first is None:
                first = formats
            elif formats is not first and formats != first:
                whole = False
                where = next(expert.projections[r].name for r in formats if formats[r] != first[r])
                message = f"stored otherwise than {experts[0].name}: every expert of a layer must be stored alike"
                problems.add(Problem("experts-differ", message, where))
        if first is None or not whole:
            return None
        width, hidden = first[Role.GATE].shape
        return ExpertGroup(experts, first, hidden, width)

    def _expert(self, expert: Expert, problems: _Problems) -> dict[Role, Format] | None:
        key = tuple(
            (role, suffix, info.dtype, info.shape)
            for role, projection in expert.projections.items()
            for suffix, info in projection.parts.items()
        )
        formats = self.known.get(key)
        if formats is None:
            formats = self._read(expert, problems)
            if formats is not None:
                self.known[key] = formats
        return formats

    def _read(self, expert: Expert, problems: _Problems) -> dict[Role, Format] | None:
        formats: dict[Role, Format] = {}
        for role in Role:
            projection = expert.projections.get(role)
            if projection is None:
                hint = "is the checkpoint complete?"
                problems.add(Problem("projection-missing", f"no {role.value} projection", expert.name, hint))
                continue
            try:
                formats[role] = read_format(projection.parts, self.hint)
            except FormatError as e:
                problems.add(Problem(e.code, e.message, f"{projection.name}.{e.suffix}", e.hint))
        if len(formats) < len(Role):
            return None
        gate, up, down = (formats[r].shape for r in Role)
        if gate != up or down != gate[::-1]:
            message = f"gate {list(gate)}, up {list(up)} and down {list(down)} do not make one MLP"
            problems.add(Problem("expert-shape", message, expert.name, "is the checkpoint sharded by tensor parallelism?"))
            return None
        return formats


class _Problems:
    """Problems of one layer; those that differ only in where they are become one."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, str, str], list[str]] = {}

    def add(self, problem: Problem) -> None:
        self.places.setdefault((problem.code, problem.message, problem.hint), []).append(problem.where)

    def folded(self) -> tuple[Problem, ...]:
        return tuple(Problem(code, message, _places(w), hint) for (code, message, hint), w in self.places.items())


def _places(where: list[str]) -> str:
    return where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"


def _missing_experts(layer: MoELayer) -> list[Problem]:
    numbers = [int(e.name.rsplit(".", 1)[1]) for e in layer.routed]
    if numbers == list(range(len(numbers))):
        return []
    missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
    return [Problem("expert-missing", f"no routed expert {some(map(str, missing))}", layer.name, "is the checkpoint complete?")]


def _conflicts(family: Family, config: Mapping[str, object], layers: tuple[LayerDescription, ...], n_shared: int) -> list[Problem]:
    """Compare what config.json says with what the headers hold."""
    found: list[Problem] = []

    def compare(key: str | None, actual: int | None, what: str, code: str = "config-conflict") -> None:
        stated = family.number(config, key)
        if key and stated is not None and actual is not None and stated != actual:
            found.append(Problem(code, f"{key} is {stated}, the tensors show {actual} {what}", "config.json"))

    decoder = [d for d in layers if d.layer.kind is LayerKind.DECODER]
    mtp = [d for d in layers if d.layer.kind is LayerKind.MTP]
    compare(family.mtp_key, len(mtp) if mtp else None, "MTP layers")
    widths = {d.routed.width for d in layers if d.routed}
    compare(family.width_key, widths.pop() if len(widths) == 1 else None, "as the width of a routed expert", WIDTH_CONFLICT)
    found += _count_conflicts(family, config, decoder)
    hidden = {d.shared.hidden for d in layers if d.shared}
    compare("hidden_size", hidden.pop() if len(hidden) == 1 else None, "as the input of the shared experts", HIDDEN_CONFLICT)
    shared = {d.shared.width for d in layers if d.shared}
    if len(shared) == 1:
        width = shared.pop()
        compare(family.shared_width_key, width, "as the width of the shared expert", WIDTH_CONFLICT)
        routed = family.number(config, family.width_key)
        if family.shared_width_key is None and routed and width != routed * n_shared:
            message = f"{family.width_key} x {n_shared} shared is {routed * n_shared}, the shared experts are {width} wide"
            found.append(Problem(WIDTH_CONFLICT, message, "config.json"))
    return found + _expert_dtype_conflict(config, decoder)


def _count_conflicts(family: Family, config: Mapping[str, object], decoder: list[LayerDescription]) -> Iterator[Problem]:
    """Tell where every decoder layer has another number of routed experts than stated; single ones are gaps."""
    stated = family.number(config, family.n_routed_key)
    counts = {len(d.layer.routed) for d in decoder if d.layer.routed}
    if stated is not None and len(counts) == 1 and stated not in counts:
        message = f"{family.n_routed_key} is {stated}, the tensors show {counts.pop()} routed experts per decoder layer"
        yield Problem(COUNT_CONFLICT, message, "config.json")


def _block_conflicts(layers: tuple[LayerDescription, ...], hint: tuple[int, int] | None) -> Iterator[Problem]:
    """Compare ``weight_block_size`` with the FP8 blocks that the scales show; 1x32 (MXFP8) comes beside any other."""
    if hint is None:
        return
    formats = (f for d in layers for g in (d.routed, d.shared) if g for f in g.formats.values() if f.kind in FP8_KINDS)
    for label in sorted({f.label for f in formats if f.block not in (hint, (1, MXFP4_GROUP))}):
        message = f"weight_block_size is {list(hint)}, experts are stored as {label}"
        yield Problem(BLOCK_CONFLICT, message, "config.json", "servers believe the config and would not load these scales")


def _expert_dtype_conflict(config: Mapping[str, object], layers: list[LayerDescription]) -> list[Problem]:
    quant = config.get("quantization_config")
    stated = config.get("expert_dtype") or (quant.get("expert_dtype") if isinstance(quant, Mapping) else None)
    kinds = {d.routed.formats[Role.GATE].kind.value for d in layers if d.routed}
    expected = {"fp4": {"mxfp4", "nvfp4"}, "fp8": {"fp8-block", "fp8-channel", "fp8-tensor"}}.get(str(stated))
    if stated is None or expected is None or not kinds or kinds <= expected:
        return []
    return [
        Problem(
            DTYPE_CONFLICT,
            f"expert_dtype is {stated!r}, the routed experts are stored as {', '.join(sorted(kinds))}",
            "config.json",
        )
    ]
