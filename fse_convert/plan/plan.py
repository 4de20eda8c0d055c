"""What a conversion will write, as values: every output shard, tensor by tensor, with its exact size.

A plan says for every output shard which tensors are copied by byte range and which grow, and for the sidecar which
tensors are computed in the kernel layout. `fse_convert.plan.planner` decides; nothing here opens a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from fse_convert.checkpoint.header import LENGTH_BYTES, METADATA, TensorInfo
from fse_convert.checkpoint.reader import Checkpoint, Shard
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.model.formats import NaN
from fse_convert.model.moe import Expert
from fse_convert.servers.scales import UNREAD, Scales
from fse_convert.servers.targets import Contract, Target, needed_contract
from fse_convert.servers.verdict import Verdict, whole

LAYOUT = "megamoe-fp8-shared"
"""Name of the kernel layout that the sidecar holds."""
LAYOUT_VERSION = 1
EMBEDDINGS = (".embed.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".wte.weight")


class Experts(str, Enum):
    """Which experts are padded in the standard layout: all of them, or none (the kernel layout is padded either way)."""

    ALL = "all"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for: target, experts, the serving side's tensor-parallel size, and whether unfused layers may pass."""

    target: Target
    experts: Experts = Experts.ALL
    tp: int = 1
    allow_unfused: bool = False

    @property
    def contract(self) -> Contract:
        """The kernel contract that the output must meet."""
        return needed_contract(self.target)


@dataclass(frozen=True, slots=True)
class Contents:
    """What only files and tensors say, not headers.

    ``scales``: what the F32 scales showed. ``widths``: the width of an expert that JSON files beside config.json state, by name.
    """

    scales: Scales = UNREAD
    widths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """How a stored matrix grows, in rows and bytes per row; ``fill`` is the element that pads, ``nan`` the codes to look for."""

    rows: int
    row_bytes: int
    new_rows: int
    new_row_bytes: int
    fill: bytes
    nan: NaN | None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of a standard-layout shard, with offsets of the output payload; without ``growth`` it is the source's bytes."""

    source: TensorInfo
    shape: tuple[int, ...]
    start: int
    end: int
    growth: Growth | None


@dataclass(frozen=True)
class ShardPlan:
    """One standard-layout shard of the output, in the source's tensor order."""

    source: Shard
    tensors: tuple[OutputTensor, ...]

    @property
    def name(self) -> str:
        """File name, the same as the source's."""
        return self.source.name

    @property
    def rewritten(self) -> bool:
        """Whether any tensor grows; otherwise the whole file is carried over."""
        return any(t.growth for t in self.tensors)

    @property
    def payload(self) -> int:
        """Bytes of payload."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def header(self) -> bytes:
        """The header of the rewritten shard: length, JSON, spaces up to 8 bytes."""
        entries = {t.source.name: entry(t.source.dtype, t.shape, t.start, t.end) for t in self.tensors}
        return encode_header(entries, self.source.header.metadata)

    @cached_property
    def size(self) -> int:
        """Bytes of the file; encoding a header of thousands of tensors to learn its length is done once."""
        return len(self.header) + self.payload if self.rewritten else self.source.size


class Part(str, Enum):
    """The four kernel-layout tensors of a fused layer, by the names that vLLM 0.33 registers."""

    L1_WEIGHT = "shared_l1_weight"
    L1_SCALE = "shared_l1_weight_scale"
    L2_WEIGHT = "shared_l2_weight"
    L2_SCALE = "shared_l2_weight_scale"


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A layer's shared expert on its way into the kernel layout: stored at ``group.width``, written at ``width``."""

    prefix: str
    group: ExpertGroup
    width: int

    @property
    def expert(self) -> Expert:
        """The shared MLP's tensors."""
        return self.group.experts[0]


@dataclass(frozen=True, slots=True)
class KernelTensor:
    """One kernel-layout tensor of the sidecar. Scales are int32, stored transposed: ``[K / 128, N]``."""

    name: str
    part: Part
    shared: SharedExpert
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tripwire:
    """A tensor of the model, by name, with no element: a loader that takes ``fse/`` for a checkpoint stops at its shape.

    SGLang 0.5.23 only warns of names that it does not know (models/deepseek_v4.py, load_weights): without this it would serve
    uninitialised weights when somebody puts a config.json there.
    """

    name: str
    dtype: str

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in the header of the first shard of ``fse/``."""
        return entry(self.dtype, (0,), 0, 0)


def tripwire(checkpoint: Checkpoint) -> Tripwire:
    """The embedding of the text model, which every loader of it knows; without one, the first tensor by name."""
    names = [n for n in checkpoint.tensors if f".{n}".endswith(EMBEDDINGS)] or [min(checkpoint.tensors)]
    name = min(names, key=lambda n: (len(n), n))  # a vision tower's has a longer one
    return Tripwire(name, checkpoint.tensors[name].dtype)


@dataclass(frozen=True, slots=True)
class SidecarPlan:
    """One shard of ``fse/``; the first has the `Tripwire`."""

    name: str
    tensors: tuple[KernelTensor, ...]
    metadata: Mapping[str, str]
    tripwire: Tripwire | None = None

    @property
    def payload(self) -> int:
        """Bytes of payload."""
        return self.tensors[-1].end

    @property
    def header(self) -> bytes:
        """The shard's header."""
        first = {self.tripwire.name: self.tripwire.entry} if self.tripwire else {}
        return encode_header({**first, **{t.name: entry(t.dtype, t.shape, t.start, t.end) for t in self.tensors}}, self.metadata)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.payload


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """One integer of config.json that changes: ``section`` is empty for the top level."""

    section: str
    key: str
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What comes of a layer, by two questions that are never mixed.

    ``verdict``: whether it fits the kernel contract at the width of ``fse/``: decides what is written there and what is refused.
    ``server``: what the target makes of it as the output's standard layout holds it: what `inspect` says of the output.
    """

    layer: LayerDescription
    verdict: Verdict
    server: Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion will do.

    ``width``: of one expert in the source and in the output (for the kernel layout; the standard layout has ``main_width``).
    ``contents``: what was read of files and tensors beyond headers.
    """

    checkpoint: Checkpoint
    description: Description
    options: Options
    n_shared: int
    source_width: int
    width: int
    verdicts: tuple[LayerVerdict, ...]
    shards: tuple[ShardPlan, ...]
    sidecar: tuple[SidecarPlan, ...]
    config_edits: tuple[ConfigEdit, ...]
    contents: Contents = field(default_factory=Contents)

    @property
    def padded(self) -> bool:
        """Whether the standard layout changes at all."""
        return any(s.rewritten for s in self.shards)

    @property
    def main_width(self) -> int:
        """Width of one expert in the output's standard layout."""
        return self.width if self.options.experts is Experts.ALL else self.source_width

    @property
    def fused_layers(self) -> int:
        """How many layers fit the contract: those are written to ``fse/``."""
        return sum(v.verdict.fused for v in self.verdicts)

    @property
    def server(self) -> Verdict:
        """What the target makes of the output's standard layout as a whole."""
        return whole(tuple(v.server for v in self.verdicts))


def encode_header(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """Encode a safetensors header: ``format: pt`` is kept or added, since loaders ask for it; padded with spaces to 8 bytes."""
    full = {METADATA: {"format": "pt", **metadata}, **entries}
    raw = json.dumps(full, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    """One tensor's entry in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def matrix(info: TensorInfo) -> tuple[int, int]:
    """Rows and bytes per row of a stored tensor; one-dimensional tensors are columns."""
    rows = info.shape[0] if info.shape else 1
    return rows, info.nbytes // rows if rows else 0
