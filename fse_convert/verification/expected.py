"""What an output must hold, derived from the source, its widths, and the names of the changes of format.

Verdicts, widths and which changes are made are the plan's, storage formats the description's. Names, shapes, padding, edits of
widths and headers are worked out here a second time, on purpose without the planner's and the writer's code: a mistake there shows
as a mismatch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from fse_convert.checkpoint.encoding import encode_header, encode_json, header_entries
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.checkpoint.names import CONFIG, INDEX
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.model.description import Description, ExpertGroup
from fse_convert.model.families.family import SECTIONS, place
from fse_convert.model.formats import StorageKind
from fse_convert.plan.changes.change import ConfigChange, changed_config
from fse_convert.plan.plan import LayerVerdict, Plan
from fse_convert.plan.planner import tripwire
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import Computed, Recoded, Rule, SharedExpert
from fse_convert.sidecar.manifest import FUSED, ConfigEdit
from fse_convert.sidecar.tensors import kernel_prefix, kernel_shapes, original_name, originals_file, shard_metadata
from fse_convert.verification.findings import SEED, LayerCoverage
from fse_convert.verification.padded import Padded, padded_tensors
from fse_convert.verification.sample import Sample, choose
from fse_convert.verification.stand_ins import Tensors, kept_originals, stand_ins

TORCH = {"format": "pt"}
"""Metadata that loaders ask for in a file that is written."""

Holds = TensorInfo | Padded | Recoded | Computed | None
"""What a tensor of the output must hold: a source tensor's bytes, these at the head of a larger matrix, values coded again, a part
of a shared expert in the kernel layout, or nothing (the tripwire)."""


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
class ExpectedFile:
    """A safetensors file that the output must have: its tensors in order, and the metadata of its header.

    ``source``: the shard of the same name, where the file is one.
    """

    tensors: tuple[ExpectedTensor, ...]
    metadata: Mapping[str, str]
    source: Shard | None = None

    @property
    def as_is(self) -> bool:
        """Whether it is the source's file, all names and dtypes included."""
        return self.source is not None and all(t.as_is for t in self.tensors)

    def header(self, source: Folder) -> bytes:
        """Return the header as it must be. ``source``: the folder that holds the source's shards."""
        if self.source and self.as_is:
            return raw_header(source, self.source)
        return encode_header(header_entries((t.name, t.dtype, t.shape) for t in self.tensors), self.metadata)


def raw_header(folder: Folder, shard: Shard) -> bytes:
    """Return a header as it lies in the file."""
    return folder.read(shard.name, 0, shard.header.data_start)


@dataclass(frozen=True, slots=True)
class RecodedExpert:
    """An expert in another format: expert ``number`` of a group of ``layer``. ``lossless``: whether all values stay."""

    prefix: str
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


@dataclass(frozen=True)
class ExpectedOutput:
    """What a plan's output must hold.

    ``standard``: files of the standard layout, by name; ``kernel`` and ``originals``: files of ``fse/``, with the kernel layout and
    with source tensors as they were. ``experts``: shared experts that must be in ``kernel``. ``left_out``: (name, reason) of every
    MoE layer that has none there, where there is a kernel layout at all.
    """

    plan: Plan
    standard: Mapping[str, ExpectedFile]
    kernel: Mapping[str, ExpectedFile]
    originals: Mapping[str, ExpectedFile]
    experts: tuple[SharedExpert, ...]
    left_out: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, plan: Plan) -> ExpectedOutput:
        """Derive it from a plan."""
        decision, source = plan.decision, plan.source
        judged = decision.verdicts if plan.options.contract else ()
        verdicts = {v.layer.layer.name: v.verdict.outcome.value for v in judged}
        experts = tuple(kernel_experts(source.description, verdicts, decision.at_kernel.shared))
        held = {e.prefix for e in experts}
        names = [(v.layer.layer.name, v) for v in judged]
        recoded = stand_ins(source, [change.name for change in decision.changes])
        padded = padded_tensors(source.description, decision.at_source, decision.at_main)
        kept = set() if plan.options.drop_originals else kept_originals(recoded)
        shards = source.checkpoint.shards
        return cls(
            plan=plan,
            standard={s.name: _file(s, padded, recoded) for s in shards},
            kernel=_kernel(plan, experts),
            originals={originals_file(s.name): ExpectedFile(found, TORCH) for s in shards if (found := tuple(_originals(s, kept)))},
            experts=experts,
            left_out=tuple((name, _why(v)) for name, v in names if kernel_prefix(name) not in held),
        )

    @property
    def tensors(self) -> Iterator[ExpectedTensor]:
        """The tensors of the standard layout."""
        return (t for file in self.standard.values() for t in file.tensors)

    @property
    def source(self) -> Source:
        """The checkpoint that the output is made from."""
        return self.plan.source

    @property
    def config_edits(self) -> list[ConfigEdit]:
        """Every key of config.json that must have changed, wherever the family states widths."""
        decision, config = self.plan.decision, self.source.checkpoint.config
        description, source, main = self.source.description, decision.at_source, decision.at_main
        if description.family is None or source == main:
            return []
        edits = []
        for section in SECTIONS:
            for width_key in description.family.widths:
                old, new = (width_key.of(w.routed, w.shared, description.n_shared) for w in (source, main))
                value = place(config, section).get(width_key.key)
                if old is None or new is None:
                    continue
                if type(value) is int and value == old:
                    edits.append(ConfigEdit(section=section, key=width_key.key, old=old, new=new))
                elif isinstance(value, list) and value and value == [old] * len(value):
                    edits.append(ConfigEdit(section=section, key=width_key.key, old=value, new=[new] * len(value)))
        return edits

    @cached_property
    def texts(self) -> dict[str, bytes]:
        """The bytes of config.json and the index: the source's, edited as changes of format and padding ask."""
        source, edits = self.source, self.config_edits
        changes = [change for c in self.plan.decision.changes for change in c.config]
        edited = encode_json(_edited(source.checkpoint.config, changes, edits)) if edits or changes else None
        texts = {CONFIG: edited or source.folder.read(CONFIG)}
        if INDEX in source.folder.files:
            texts[INDEX] = self._index()
        return texts

    def _index(self) -> bytes:
        """Return the source's index where that is right as it is, else one with the output's names and true totals."""
        source, tensors = self.source, list(self.tensors)
        kept = source.checkpoint.index_metadata or {}
        metadata = {**kept, "total_size": sum(t.nbytes for t in tensors)}
        if isinstance(kept.get("total_parameters"), int):
            padded = ((t.shape, t.holds.info.shape) for t in tensors if isinstance(t.holds, Padded))
            metadata["total_parameters"] += sum(prod(new) - prod(old) for new, old in padded)
        if all(t.as_is for t in tensors) and metadata == source.checkpoint.index_metadata:
            return source.folder.read(INDEX)
        places = {t.name: name for name, file in self.standard.items() for t in file.tensors}
        return encode_json({"metadata": metadata, "weight_map": dict(sorted(places.items()))})

    @property
    def recoded(self) -> Iterator[RecodedExpert]:
        """The experts whose format changes and that are computed: one routed expert of every layer, and the shared ones."""
        rules = {source.name: t.holds.rule for t in self.tensors if isinstance(t.holds, Recoded) for source in t.holds.sources}
        for d in self.source.description.layers:
            for group in (g for g in d.groups if g.experts):
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

    def coverage(self, sample: Sample | None = None) -> LayerCoverage:
        """Count the layers, for the answer of a level."""
        layers = len(self.plan.decision.verdicts)
        return LayerCoverage(of_layers=len(self.experts), moe_layers=layers, left_out=self.left_out, sample=sample)


def _why(judged: LayerVerdict) -> str:
    if judged.verdict.reasons:
        return judged.verdict.reasons[0].message
    return "it has no shared expert" if judged.layer.shared is None else "its shared expert is not FP8 with block scales"


def _file(shard: Shard, padded: Mapping[str, Padded], recoded: Tensors) -> ExpectedFile:
    return ExpectedFile(tuple(_standard(shard, padded, recoded)), {**TORCH, **shard.header.metadata}, shard)


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


def _kernel(plan: Plan, experts: Iterable[SharedExpert]) -> dict[str, ExpectedFile]:
    """Lay experts out in the files that the plan puts them in; one that it forgot is in a file without a name."""
    changes = ((shard.name, t.change) for shard in plan.sidecar for t in shard.kernel_tensors)
    places = {change.shared.prefix: name for name, change in changes if isinstance(change, Computed)}
    files: dict[str, list[ExpectedTensor]] = {}
    for expert in experts:
        first = [] if files else [wire(plan.source.checkpoint)]
        files.setdefault(places.get(expert.prefix, ""), first).extend(kernel_tensors(expert))
    metadata = shard_metadata(plan.options.goal)
    return {name: ExpectedFile(tuple(tensors), metadata) for name, tensors in files.items()}


def wire(checkpoint: Checkpoint) -> ExpectedTensor:
    """Return the tripwire, with which the first file of the kernel layout begins."""
    name, dtype, shape, _ = tripwire(checkpoint)
    return ExpectedTensor(name, dtype, shape, None)


def kernel_tensors(expert: SharedExpert) -> Iterator[ExpectedTensor]:
    """Yield a shared expert's four tensors of the kernel layout."""
    for name, (dtype, shape) in kernel_shapes(expert.group.hidden, expert.width).items():
        yield ExpectedTensor(f"{expert.prefix}.{name.value}", dtype, shape, Computed(name, expert))


def kernel_experts(description: Description, verdicts: Mapping[str, str], width: int) -> list[SharedExpert]:
    """Return the shared experts of the ``fused`` layers that are FP8 with block scales: what ``fse/`` must hold.

    ``verdicts`` by layer name come from the source's plan; without a source, from the manifest.
    """
    return [
        SharedExpert(prefix=kernel_prefix(d.layer.name), group=d.shared, width=width)
        for d in description.layers
        if d.shared
        and verdicts.get(d.layer.name) == FUSED
        and {f.kind for f in d.shared.formats.values()} == {StorageKind.FP8_BLOCK}
    ]


def _edited(config: Mapping[str, Any], changes: Iterable[ConfigChange], edits: Iterable[ConfigEdit]) -> dict[str, Any]:
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
    return float(value) if 0 < value <= sys.float_info.max else None
