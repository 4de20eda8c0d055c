"""From tensor names and headers to layers: which experts there are, how each is stored, and where the configs disagree.

Layers come from the tensor names. Config values are hints: ``num_nextn_predict_layers`` says 1 in DeepSeek's 0731 and
0813 releases that hold mtp.0 to mtp.2 (vllm-project/vllm#41834).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from fse_convert.checkpoint.reader import Checkpoint, garbage_collection_paused
from fse_convert.errors import Problem, some
from fse_convert.model.consistency import conflicts, gaps
from fse_convert.model.description import Description, ExpertGroup, LayerDescription, first_of
from fse_convert.model.families import find_family
from fse_convert.model.formats import Format, FormatError, read_format
from fse_convert.model.grouping import group_layers, seen_experts
from fse_convert.model.moe import Expert, MoELayer, Role
from fse_convert.model.quantization import Quantization

KERNEL_TENSOR = re.compile(r"\.shared_l[12]_weight(?:_scale)?$")
"""Names of the kernel layout: a checkpoint that has them is converted already."""
INCOMPLETE = "is the checkpoint complete?"


def kernel_tensors(names: Iterable[str]) -> list[str]:
    """List the names of the kernel layout among a checkpoint's tensors."""
    return [n for n in names if ".shared_l" in n and KERNEL_TENSOR.search(n)]


def describe(checkpoint: Checkpoint, quantization: Quantization) -> Description:
    """Describe the MoE layers of a checkpoint; never raises for what it does not understand, but records it.

    ``quantization``: what `read_quantization` made of the checkpoint's configs.
    """
    with garbage_collection_paused():
        return _describe(checkpoint, quantization)


def _describe(checkpoint: Checkpoint, quantization: Quantization) -> Description:
    config = checkpoint.config
    family = find_family(config)
    model_type = str(config.get("model_type", ""))
    if family is None:
        return Description(None, model_type, seen=seen_experts(checkpoint.tensors.values()))
    grouping = group_layers(family, checkpoint.tensors, family.number(config, "num_hidden_layers"))
    reader = _Reader(quantization.block_hint, gated=family.gated)
    layers = tuple(reader.describe(layer) for layer in grouping.layers)
    n_shared = family.shared_count(config) if any(d.shared for d in grouping.layers) else 0
    return Description(
        family=family,
        model_type=model_type,
        section=family.section(config),
        n_shared=n_shared,
        layers=layers,
        conflicts=tuple(conflicts(family, config, quantization, layers, n_shared)),
        strays=grouping.strays,
        gaps=tuple(gaps(family, config, grouping.layers)),
    )


class _Reader:
    """Reads formats of expert groups; remembers them by signature, since a layer's experts share one."""

    def __init__(self, block_hint: tuple[int, int] | None, *, gated: bool) -> None:
        self.block_hint = block_hint
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
        missing = _missing_experts(layer)
        if missing:
            message = f"no routed expert {some(map(str, missing))}"
            problems.add(Problem("expert-missing", message, layer.name, INCOMPLETE))
        if self.gated and layer.shared and layer.gate_tensor is None:
            problems.add(Problem("gate-missing", "no gate of the shared expert", layer.shared.name, INCOMPLETE))
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
                problems.add(Problem("projection-missing", f"no {role.value} projection", expert.name, INCOMPLETE))
                continue
            try:
                formats[role] = read_format(projection.parts, self.block_hint)
            except FormatError as e:
                problems.add(replace(e.problem, where=f"{projection.name}.{e.problem.where}"))
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
        self.places: dict[Problem, list[str]] = {}

    def add(self, problem: Problem) -> None:
        self.places.setdefault(replace(problem, where=""), []).append(problem.where)

    def folded(self) -> tuple[Problem, ...]:
        return tuple(replace(problem, where=first_of(places)) for problem, places in self.places.items())


def _missing_experts(layer: MoELayer) -> list[int]:
    numbers = {int(e.name.rsplit(".", 1)[1]) for e in layer.routed}
    return sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
