"""From tensor names and headers to layers: which experts there are, how each is stored, and where the config disagrees.

Layers come from the tensor names. Config values are hints: ``num_nextn_predict_layers`` says 1 in DeepSeek's 0731 and
0813 releases that hold mtp.0 to mtp.2 (vllm-project/vllm#41834).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.source import Checkpoint, some
from fse_convert.errors import Problem
from fse_convert.models.families import Family, find_family
from fse_convert.models.moe import Expert, LayerKind, MoELayer, Projection, Role
from fse_convert.quantization.formats import Format, FormatError, read_format

KERNEL_TENSOR = re.compile(r"\.shared_l[12]_weight(?:_scale)?$")
"""Names of the kernel layout: a checkpoint that has them is converted already."""
WIDTH_CONFLICT = "config-width"
"""Code of conflicts about a width: a server that believes the config would not load the tensors."""


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

    ``family`` None: no row knows this model type, and ``layers`` is empty. ``n_shared``: shared experts per layer, by
    which the shared width is divided. ``conflicts``: where the config says something else than the headers.
    """

    family: Family | None
    model_type: str
    section: str
    n_shared: int
    layers: tuple[LayerDescription, ...]
    conflicts: tuple[Problem, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of all layers, in layer order."""
        return tuple(p for layer in self.layers for p in layer.problems)

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct widths of one routed expert over all layers, ascending."""
        return tuple(sorted({d.routed.width for d in self.layers if d.routed}))


def describe(checkpoint: Checkpoint) -> Description:
    """Describe the MoE layers of a checkpoint; never raises for what it does not understand, but records it."""
    config = checkpoint.config
    family = find_family(config)
    model_type = str(config.get("model_type", ""))
    if family is None:
        return Description(None, model_type, "", 0, (), ())
    layers = _Layers(family, family.number(config, "num_hidden_layers")).read(checkpoint.tensors)
    reader = _Reader(block_hint(config))
    described = tuple(reader.describe(layer) for layer in layers)
    n_shared = family.fixed_shared or family.number(config, family.n_shared_key) or 1
    conflicts = tuple(_conflicts(family, config, described, n_shared))
    return Description(family, model_type, family.section(config), n_shared, described, conflicts)


def block_hint(config: Mapping[str, object]) -> tuple[int, int] | None:
    """The config's FP8 ``weight_block_size``, if it has a sensible one."""
    quant = config.get("quantization_config")
    size = quant.get("weight_block_size") if isinstance(quant, Mapping) and quant.get("quant_method") == "fp8" else None
    if isinstance(size, list) and len(size) == 2 and all(type(b) is int and b > 0 for b in size):
        return size[0], size[1]
    return None


class _Layers:
    """Groups tensor names into layers, experts and projections, in one pass."""

    def __init__(self, family: Family, num_layers: int | None) -> None:
        self.family = family
        self.num_layers = num_layers
        self.groups: dict[tuple[LayerKind, int, str], dict[int, dict[str, dict[str, TensorInfo]]]] = {}
        self.unknown: dict[str, list[str]] = {}
        self.gates: dict[str, str] = {}
        self.keys: dict[str, tuple[LayerKind, int, str]] = {}

    def read(self, tensors: Mapping[str, TensorInfo]) -> list[MoELayer]:
        matches = self.family.pattern.fullmatch
        for name, info in tensors.items():
            m = matches(name)
            if m is not None:
                key = self._key(m)
                expert = -1 if m["shared"] else int(m["expert"])
                self.groups.setdefault(key, {}).setdefault(expert, {}).setdefault(m["projection"], {})[m["suffix"]] = info
            elif "expert" in name:
                self._other(name)
        return [self._layer(key) for key in sorted(set(self.keys.values()), key=lambda k: (k[0] is LayerKind.MTP, k[1], k[2]))]

    def _key(self, m: re.Match[str]) -> tuple[LayerKind, int, str]:
        layer = m["layer"]
        if layer not in self.keys:
            number = int(m["number"])
            beyond = self.num_layers is not None and self.family.mtp is None and number >= self.num_layers
            index = number - (self.num_layers or 0) if beyond else number
            self.keys[layer] = (LayerKind.MTP if m["mtp"] or beyond else LayerKind.DECODER, index, layer)
        return self.keys[layer]

    def _other(self, name: str) -> None:
        m = self.family.block_pattern.fullmatch(name)
        if m is None:
            return
        self._key(m)
        if self.family.shared_gate and m["rest"].startswith(self.family.shared_gate + "."):
            self.gates[m["layer"]] = name
        else:
            self.unknown.setdefault(m["layer"], []).append(name)

    def _layer(self, key: tuple[LayerKind, int, str]) -> MoELayer:
        kind, index, name = key
        experts = self.groups.get(key, {})
        routed = tuple(self._expert(f"{name}.experts.{e}", experts[e], self.family.routed_names) for e in sorted(experts) if e >= 0)
        shared = self._expert(f"{name}.{self.family.shared}", experts[-1], self.family.shared_names) if -1 in experts else None
        return MoELayer(name, kind, index, routed, shared, self.gates.get(name), tuple(self.unknown.get(name, ())))

    def _expert(self, name: str, found: dict[str, dict[str, TensorInfo]], names: Mapping[str, Role]) -> Expert:
        return Expert(name, {role: Projection(f"{name}.{p}", found[p]) for p, role in names.items() if p in found})


class _Reader:
    """Reads formats of expert groups; remembers them by signature, since a layer's experts share one."""

    def __init__(self, hint: tuple[int, int] | None) -> None:
        self.hint = hint
        self.known: dict[tuple[tuple[str, str, tuple[int, ...]], ...], Format | FormatError] = {}

    def describe(self, layer: MoELayer) -> LayerDescription:
        problems: list[Problem] = []
        if layer.unknown:
            message = f"expert tensors that are not understood: {some(layer.unknown)}"
            problems.append(Problem("expert-unknown", message, layer.name, "fused 3-D experts and adapters are not supported"))
        problems += _missing_experts(layer)
        routed = self._group(layer.routed, problems)
        shared = self._group((layer.shared,), problems) if layer.shared else None
        return LayerDescription(layer, routed, shared, tuple(problems))

    def _group(self, experts: tuple[Expert, ...], problems: list[Problem]) -> ExpertGroup | None:
        first: dict[Role, Format] | None = None
        for expert in experts:
            formats = self._expert(expert, problems)
            if formats is None:
                return None
            if first is None:
                first = formats
            elif formats != first:
                where = next(expert.projections[r].name for r in formats if formats[r] != first[r])
                message = f"stored otherwise than {experts[0].name}: every expert of a layer must be stored alike"
                problems.append(Problem("experts-differ", message, where))
                return None
        if first is None:
            return None
        width, hidden = first[Role.GATE].shape
        return ExpertGroup(experts, first, hidden, width)

    def _expert(self, expert: Expert, problems: list[Problem]) -> dict[Role, Format] | None:
        formats: dict[Role, Format] = {}
        for role in Role:
            projection = expert.projections.get(role)
            if projection is None:
                problems.append(
                    Problem("projection-missing", f"no {role.value} projection", expert.name, "is the checkpoint complete?")
                )
                continue
            found = self._format(projection)
            if isinstance(found, FormatError):
                problems.append(Problem(found.code, found.message, f"{projection.name}.{found.suffix}", found.hint))
            else:
                formats[role] = found
        if len(formats) < len(Role):
            return None
        gate, up, down = (formats[r].shape for r in Role)
        if gate != up or down != gate[::-1]:
            message = f"gate {list(gate)}, up {list(up)} and down {list(down)} do not make one MLP"
            problems.append(Problem("expert-shape", message, expert.name, "is the checkpoint sharded by tensor parallelism?"))
            return None
        return formats

    def _format(self, projection: Projection) -> Format | FormatError:
        key = tuple((suffix, t.dtype, t.shape) for suffix, t in sorted(projection.parts.items()))
        found = self.known.get(key)
        if found is None:
            try:
                found = read_format(projection.parts, self.hint)
            except FormatError as e:
                found = e
            self.known[key] = found
        return found


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
    counts = {len(d.layer.routed) for d in decoder if d.layer.routed}
    compare(family.n_routed_key, counts.pop() if len(counts) == 1 else None, "routed experts per decoder layer")
    shared = {d.shared.width for d in layers if d.shared}
    if len(shared) == 1:
        width = shared.pop()
        compare(family.shared_width_key, width, "as the width of the shared expert", WIDTH_CONFLICT)
        routed = family.number(config, family.width_key)
        if family.shared_width_key is None and routed and width != routed * n_shared:
            message = f"{family.width_key} x {n_shared} shared is {routed * n_shared}, the shared experts are {width} wide"
            found.append(Problem(WIDTH_CONFLICT, message, "config.json"))
    return found + _expert_dtype_conflict(config, decoder)


def _expert_dtype_conflict(config: Mapping[str, object], layers: list[LayerDescription]) -> list[Problem]:
    quant = config.get("quantization_config")
    stated = config.get("expert_dtype") or (quant.get("expert_dtype") if isinstance(quant, Mapping) else None)
    kinds = {d.routed.formats[Role.GATE].kind.value for d in layers if d.routed}
    expected = {"fp4": {"mxfp4", "nvfp4"}, "fp8": {"fp8-block", "fp8-channel", "fp8-tensor"}}.get(str(stated))
    if stated is None or expected is None or not kinds or kinds <= expected:
        return []
    return [
        Problem(
            "config-conflict",
            f"expert_dtype is {stated!r}, the routed experts are stored as {', '.join(sorted(kinds))}",
            "config.json",
        )
    ]
