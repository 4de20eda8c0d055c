"""What an output must hold, derived from the source, its widths, and the names of the changes of format.

Verdicts, widths and which changes are made are the plan's. Names, shapes, padding, edits of widths and headers are worked out here
a second time, on purpose without the planner's and the writer's code: a mistake there shows as a mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.model.family import SECTIONS, place
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.plan.changes.change import ConfigChange, changed_config
from fse_convert.plan.plan import LayerVerdict, Plan
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Computed, Recoded, Rule
from fse_convert.sidecar.manifest import FUSED, ConfigEdit
from fse_convert.sidecar.tensors import kernel_prefix, original_name, originals_file
from fse_convert.verification.findings import SEED, LayerCoverage, Sample, choose
from fse_convert.verification.stand_ins import Tensors, kept_originals, stand_ins

PACKED = 128
"""Columns under one int32 word of scales."""
ONES = {"F8_E8M0": b"\x7f", "U8": b"\x7f", "F32": b"\0\0\x80\x3f", "F8_E4M3": b"\x38", "BF16": b"\x80\x3f"}
"""The code of 1.0, which pads scales, by their dtype; weights are padded with zero bytes."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A stored matrix at the head of a larger one of ``shape``, ``fill`` (one element) in all the rest."""

    info: TensorInfo
    shape: tuple[int, ...]
    fill: bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a row, and of a row of the larger one."""
        old, new = (prod(shape[1:]) * len(self.fill) for shape in (self.info.shape, self.shape))
        return old, new


Holds = TensorInfo | Padded | Recoded
"""What a tensor of the output must hold: a source tensor's bytes, these at the head of a larger matrix, or values coded again."""


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that the output must have."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    holds: Holds

    @property
    def as_is(self) -> bool:
        """Whether it is a tensor of the source, its name and dtype included."""
        h = self.holds
        return isinstance(h, TensorInfo) and (self.name, self.dtype, self.shape) == (h.name, h.dtype, h.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class KernelExpert:
    """A shared expert that must be in the sidecar, at padded ``width``; ``prefix`` of its four tensors' names."""

    prefix: str
    group: ExpertGroup
    width: int

    def tensor(self, role: Role, *, scale: bool) -> TensorInfo:
        """Return a projection's weight or scale in the source."""
        f = self.group.formats[role]
        return self.group.experts[0].projections[role].parts[(f.scale or "") if scale else f.weight]

    @property
    def name(self) -> str:
        """The name under which the proof tells of it."""
        return self.prefix

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and stored shape by name, as vLLM 0.33 registers them; scales are stored transposed (MN-major)."""
        h, s = self.group.hidden, self.width
        return {
            f"{self.prefix}.shared_l1_weight": ("F8_E4M3", (2 * s, h)),
            f"{self.prefix}.shared_l1_weight_scale": ("I32", (h // PACKED, 2 * s)),
            f"{self.prefix}.shared_l2_weight": ("F8_E4M3", (h, s)),
            f"{self.prefix}.shared_l2_weight_scale": ("I32", (s // PACKED, h)),
        }


@dataclass(frozen=True, slots=True)
class RecodedExpert:
    """An expert in another format: expert ``number`` of a group of ``layer``. ``lossless``: whether all values stay."""

    name: str
    layer: str
    group: ExpertGroup
    number: int
    lossless: bool

    @property
    def width(self) -> int:
        """Width of the expert."""
        return self.group.width

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of its matrices."""
        return tuple(p.name for p in self.group.experts[self.number].projections.values())


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """What a plan's output must hold.

    ``shards``: the tensors of the standard layout, by file, in order. ``originals``: those that files of ``fse/`` keep as they
    were. ``experts``: shared experts that must be in ``fse/``. ``left_out``: (name, reason) of every MoE layer that has none there,
    where there is a kernel layout at all.
    """

    plan: Plan
    shards: Mapping[str, tuple[ExpectedTensor, ...]]
    originals: Mapping[str, tuple[ExpectedTensor, ...]]
    experts: tuple[KernelExpert, ...]
    left_out: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, plan: Plan) -> ExpectedOutput:
        """Derive it from a plan."""
        decision, source = plan.decision, plan.source
        judged = decision.verdicts if plan.options.contract else ()
        verdicts = {v.layer.layer.name: v.verdict.outcome.value for v in judged}
        experts = tuple(kernel_experts(source.description, verdicts, decision.n_shared * decision.width))
        held = {e.prefix for e in experts}
        names = [(v.layer.layer.name, v) for v in judged]
        recoded = stand_ins(source, [change.name for change in decision.changes])
        padded = padded_tensors(source.description, decision.source_width, decision.main_width)
        kept = set() if plan.options.drop_originals else kept_originals(recoded)
        return cls(
            plan=plan,
            shards={s.name: tuple(_standard(s, padded, recoded)) for s in source.checkpoint.shards},
            originals={originals_file(s.name): found for s in source.checkpoint.shards if (found := tuple(_originals(s, kept)))},
            experts=experts,
            left_out=tuple((name, _why(v)) for name, v in names if kernel_prefix(name) not in held),
        )

    @property
    def tensors(self) -> Iterator[ExpectedTensor]:
        """The tensors of the standard layout."""
        return (t for tensors in self.shards.values() for t in tensors)

    @property
    def source(self) -> Source:
        """The checkpoint that the output is made from."""
        return self.plan.source

    @property
    def config_edits(self) -> list[ConfigEdit]:
        """Every key of config.json that must have changed, wherever the family states widths."""
        decision, config = self.plan.decision, self.source.checkpoint.config
        description, width, main = self.source.description, decision.source_width, decision.main_width
        if description.family is None or width == main:
            return []
        edits = []
        for section in SECTIONS:
            for width_key in description.family.widths:
                old, new = (width_key.of(w, decision.n_shared * w, description.n_shared) for w in (width, main))
                value = place(config, section).get(width_key.key)
                if old is None or new is None:
                    continue
                if type(value) is int and value == old:
                    edits.append(ConfigEdit(section=section, key=width_key.key, old=old, new=new))
                elif isinstance(value, list) and value and value == [old] * len(value):
                    edits.append(ConfigEdit(section=section, key=width_key.key, old=value, new=[new] * len(value)))
        return edits

    @property
    def recoded(self) -> Iterator[RecodedExpert]:
        """The experts whose format changes and that are computed: one routed expert of every layer, and the shared ones."""
        rules = {source.name: t.holds.rule for t in self.tensors if isinstance(t.holds, Recoded) for source in t.holds.sources}
        for d in self.source.description.layers:
            for group in d.groups:
                chosen = choose(Sample(1, SEED), {"": [e.name for e in group.experts]})
                number, expert = next((i, e) for i, e in enumerate(group.experts) if e.name in chosen)
                parts = (info.name for projection in expert.projections.values() for info in projection.parts.values())
                used = {rules[name] for name in parts if name in rules}
                if used:
                    yield RecodedExpert(expert.name, d.layer.name, group, number, Rule.MXFP4 not in used)

    @property
    def computed_layers(self) -> int:
        """How many layers have an expert that is computed from both sides."""
        return len({e.prefix for e in self.experts} | {kernel_prefix(e.layer) for e in self.recoded})

    @property
    def files(self) -> dict[str, list[KernelExpert]]:
        """Experts by file of ``fse/``, both in the order in which a conversion writes them."""
        known = {e.prefix: e for e in self.experts}
        files: dict[str, list[KernelExpert]] = {}
        for shard in self.plan.sidecar:
            changes = (t.change for t in shard.kernel_tensors)
            prefixes = dict.fromkeys(change.shared.prefix for change in changes if isinstance(change, Computed))
            files[shard.name] = [known[prefix] for prefix in prefixes if prefix in known]
        return files

    def coverage(self, sample: Sample | None = None) -> LayerCoverage:
        """Count the layers, for the answer of a level."""
        layers = len(self.plan.decision.verdicts)
        return LayerCoverage(of_layers=len(self.experts), moe_layers=layers, left_out=self.left_out, sample=sample)


def _why(judged: LayerVerdict) -> str:
    if judged.verdict.reasons:
        return judged.verdict.reasons[0].message
    return "it has no shared expert" if judged.layer.shared is None else "its shared expert is not FP8 with block scales"


def _standard(shard: Shard, padded: Mapping[str, Padded], recoded: Tensors) -> Iterator[ExpectedTensor]:
    for t in shard.header.tensors:
        if t.name in padded:
            yield ExpectedTensor(t.name, t.dtype, padded[t.name].shape, padded[t.name])
        elif t.name in recoded:
            for name, dtype, shape, change in recoded[t.name]:
                yield ExpectedTensor(name, dtype, shape, change if isinstance(change, Recoded) else t)
        else:
            yield ExpectedTensor(t.name, t.dtype, t.shape, t)


def _originals(shard: Shard, kept: Collection[str]) -> Iterator[ExpectedTensor]:
    return (ExpectedTensor(original_name(t.name), t.dtype, t.shape, t) for t in shard.header.tensors if t.name in kept)


def padded_tensors(description: Description, width: int, main: int) -> dict[str, Padded]:
    """Find every tensor that must have grown when experts of ``width`` are stored ``main`` wide.

    Gate and up grow in rows, down in columns.
    """
    if width == main:
        return {}
    return {p.info.name: p for layer in description.layers for p in _padded_of(layer, width, main)}


def _padded_of(layer: LayerDescription, width: int, main: int) -> Iterator[Padded]:
    for group in filter(None, (layer.routed, layer.shared)):
        for expert in group.experts:
            for role, projection in expert.projections.items():
                f = group.formats[role]
                n, k = f.shape
                new = (n, k // width * main) if role is Role.DOWN else (n // width * main, k)
                for suffix, info in projection.parts.items():
                    cell = _cell(f, suffix)
                    shape = _stored(new, cell, len(info.shape)) if cell else info.shape
                    if shape != info.shape:
                        yield Padded(info, shape, ONES[info.dtype] if suffix == f.scale else bytes(BITS[info.dtype] // 8))


def _cell(f: Format, suffix: str) -> tuple[int, int] | None:
    """Return rows and columns of the logical matrix that one stored element stands for (0 columns: all); None for scalars."""
    if suffix == f.weight:
        return (1, 2) if f.weight_dtype in ("I8", "U8") else (1, 1)
    if suffix != f.scale or f.kind is StorageKind.FP8_TENSOR:
        return None
    if f.kind is StorageKind.FP8_CHANNEL:
        return 1, 0
    return {StorageKind.MXFP4: (1, 32), StorageKind.NVFP4: (1, 16)}.get(f.kind, f.block)


def _stored(logical: tuple[int, int], cell: tuple[int, int], dimensions: int) -> tuple[int, ...]:
    rows, columns = -(-logical[0] // cell[0]), -(-logical[1] // cell[1]) if cell[1] else 1
    return (rows, 1, columns, 1) if dimensions == 4 else (rows, columns)[:dimensions]


def kernel_experts(description: Description, verdicts: Mapping[str, str], width: int) -> list[KernelExpert]:
    """Return the shared experts of the ``fused`` layers that are FP8 with block scales: what ``fse/`` must hold.

    ``verdicts`` by layer name come from the source's plan; without a source, from the manifest.
    """
    return [
        KernelExpert(kernel_prefix(d.layer.name), d.shared, width)
        for d in description.layers
        if d.shared
        and verdicts.get(d.layer.name) == FUSED
        and {f.kind for f in d.shared.formats.values()} == {StorageKind.FP8_BLOCK}
    ]


def edited(config: Mapping[str, Any], changes: Iterable[ConfigChange], edits: Iterable[ConfigEdit]) -> dict[str, Any]:
    """Return a config after changes of format and edits of widths, keys in the source's order."""
    result = changed_config(config, changes)
    for edit in edits:
        (result[edit.section] if edit.section else result)[edit.key] = edit.new
    return result


def swiglu_limit(source: Source) -> float | None:
    """Return the model's clamp of gate and up, from the config section that holds the widths; None for none that clamps."""
    value = place(source.checkpoint.config, source.description.section).get("swiglu_limit")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
