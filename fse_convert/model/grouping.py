"""Grouping of tensor names into MoE layers, experts and projections, in one pass over the names.

A V4-Pro checkpoint has 150,000 names, so most of them are taken apart by splitting at ``.experts.``; the family's
regular expression is asked once per block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.names import natural_key
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import MTP_LAYERS
from fse_convert.model.moe import Expert, LayerKind, MoELayer, Projection, Role
from fse_convert.model.stacked import find_stack

ROUTED = ".experts."
EXPERT_MODULE = re.compile(r"(?:^|\.)(?:[a-z]+_)*(?:experts?|(?:shared|switch)_mlp)(?:\.|$)")
"""A module of experts anywhere in a name, MLX's ``switch_mlp`` too; not a router's ``expert_bias`` or a ``routed_expert_norm``."""
OTHERS = re.compile(r"(?:^|\.)(?:(?:vision|visual|image|video|audio|speech)[a-z_]*|self_attn)\.")
"""Names of another model beside the language model, and of attention: their experts have widths of their own.

dots3-note's vision encoder; K2-Horizon's ``self_attn.v_experts`` (vLLM 0.33 model_executor/models/k2_horizon.py:810).
"""
CONVOLUTION = ".conv1d.weight"
"""Ends the name of a 3-D tensor that stands where experts may (Nemotron-H's mixers), and holds none."""
TEXT_LAYERS = rf"(?:(?:model|language_model|text_model|module|transformer|backbone|llm)\.)*(?P<at>layers|{MTP_LAYERS})"
"""What stands before a layer's number in any spelling of a text model."""
MTP_TENSOR = re.compile(r"(?P<layer>.+\.\d+)\.(?:enorm|hnorm|eh_proj|e_proj|h_proj|shared_head)\.")
"""Tensors that only an MTP layer has, where it is numbered on from the decoder layers (vLLM 0.32, every ``*mtp.py``)."""
MTP_MODULE = re.compile(rf"(?P<layer>(?:^|.*\.)(?:{MTP_LAYERS})\.(?P<number>\d+))\.")
"""Names of an MTP layer that has a prefix of its own."""
MLP_TENSOR = re.compile(r"(?P<layer>(?:.*\.)?\d+)\.(?:.*\.)?(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w[123])\.")
"""Matrices of an MLP that is none of experts."""
BESIDE = frozenset({"e_score_correction_bias", "expert_bias", "post_expert_norm"})
"""Tensors under ``experts`` that are none of theirs: of the router, and a norm of their outputs (Muse Spark)."""
STACKED_NAME = re.compile(r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w[123])(?:_|\.|$)")
"""Names, below ``experts``, of a tensor that holds all experts of a layer."""

Parts = dict[str, dict[str, TensorInfo]]
"""An expert's tensors by projection and suffix."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The MoE layers of a model, decoder layers first, and expert tensors that belong to none of them.

    ``depth``: how many decoder layers there are, with those that have no experts. ``beyond``: decoder layers numbered from
    ``num_hidden_layers`` on, ``early``: MTP layers numbered below it. ``mtp``: the numbers of MTP layers that have any tensor;
    ``drafts``: whether one of them has experts, or an MLP.
    """

    layers: tuple[MoELayer, ...]
    strays: tuple[TensorInfo, ...]
    depth: int
    beyond: tuple[str, ...]
    early: tuple[str, ...]
    mtp: frozenset[int]
    drafts: bool


@dataclass(slots=True)
class _Block:
    """One MoE block while its tensors come in. ``layer``: the prefix of its layer; ``own``: whether that is one of MTP layers."""

    layer: str
    number: int
    own: bool
    name: str
    routed: dict[str, Parts] = field(default_factory=dict)
    shared: Parts = field(default_factory=dict)
    shared_name: str = ""
    gate: str | None = None
    unknown: list[str] = field(default_factory=list)
    stacked: list[TensorInfo] = field(default_factory=list)
    fused: list[TensorInfo] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.routed or self.shared or self.gate or self.unknown or self.stacked or self.fused)


def group_layers(family: Family, tensors: Mapping[str, TensorInfo], num_layers: int | None) -> Grouping:
    """Group a checkpoint's tensors by the names of its family.

    ``num_layers``: the config's number of decoder layers, by which MTP layers that are numbered on are counted.
    """
    return _Grouper(family, num_layers).run(tensors)


class _Grouper:
    """Sorts tensors by name.

    ``heads``: the block of every prefix that was asked for, None where the family has none; ``elsewhere``: layers in other
    spellings; ``marked``: prefixes of layers with MTP tensors; ``own``: MTP layers that have a prefix of their own, with their
    numbers; ``dense``: prefixes of layers with an MLP.
    """

    def __init__(self, family: Family, num_layers: int | None) -> None:
        self.family = family
        self.num_layers = num_layers
        self.heads: dict[str, _Block | None] = {}
        self.blocks: dict[str, _Block] = {}
        self.strays: list[TensorInfo] = []
        self.elsewhere: dict[str, tuple[LayerKind, int]] = {}
        self.stacks = tuple(f".{stack.name}" for stack in family.stacked)
        self.elsewhere_pattern = re.compile(rf"(?P<layer>{TEXT_LAYERS}\.(?P<number>\d+))\.(?:{family.block})")
        self.marked: set[str] = set()
        self.own: dict[str, int] = {}
        self.dense: set[str] = set()

    def run(self, tensors: Mapping[str, TensorInfo]) -> Grouping:
        heads, names = self.heads, self.family.routed_names
        parts: dict[str, tuple[str, str] | None] = {}  # most experts have the same few
        for name, info in tensors.items():
            head, routed, tail = name.partition(ROUTED)
            if not routed:
                self._other(name, info)
                continue
            block = heads[head] if head in heads else self._block(head)
            if block is None:
                self.strays.append(info)
                continue
            expert, _, rest = tail.partition(".")
            if rest not in parts:
                projection, _, suffix = rest.partition(".")
                parts[rest] = (projection, suffix) if projection in names and _is_part(suffix) else None
            part = parts[rest]
            if part is None:
                self._odd(block, info, tail)
            elif expert in block.routed or _is_number(expert):
                block.routed.setdefault(expert, {}).setdefault(part[0], {})[part[1]] = info
            else:
                block.unknown.append(name)
        return self._grouping()

    def _grouping(self) -> Grouping:
        """Put the layers in order, and name those whose number contradicts the config's number of decoder layers."""
        blocks = [b for b in self.blocks.values() if not b.empty]
        decoder = [b for b in blocks if not self._is_mtp(b)]
        deepest = max([self.num_layers or 0, *(b.number + 1 for b in decoder)])
        depth = min([deepest, *(int(layer.rpartition(".")[2]) for layer in self.marked)])  # MTP layers may be numbered on
        layers = self._numbered(blocks, depth)
        twins = tuple(f"{twin}." for m in layers.values() for twin in m.twins)
        limit = self.num_layers
        beyond = (b.layer for b in decoder if limit is not None and b.number >= limit)
        numbers = (*self.own.values(), *(b.number for b in blocks if b.own))
        early = (m for m in self.marked if limit is not None and int(m.rpartition(".")[2]) < limit)
        return Grouping(
            layers=tuple(m for _, m in sorted(layers.items(), key=lambda pair: (pair[0][0] is LayerKind.MTP, pair[0][1]))),
            strays=tuple(t for t in self.strays if not t.name.startswith(twins) and not OTHERS.search(t.name)),
            depth=depth,
            beyond=tuple(sorted(beyond, key=natural_key)),
            early=tuple(sorted(early, key=natural_key)),
            mtp=frozenset((*numbers, *(int(m.rpartition(".")[2]) - depth for m in self.marked))),
            drafts=any(map(self._is_mtp, blocks)) or not self.dense.isdisjoint((*self.own, *self.marked)),
        )

    def _is_mtp(self, block: _Block) -> bool:
        return block.own or block.layer in self.marked

    def _numbered(self, blocks: Iterable[_Block], depth: int) -> dict[tuple[LayerKind, int], MoELayer]:
        """Return the layers by kind and number, of MTP layers from 0; another one of the same number is a twin of the first.

        ``depth``: where the numbers of MTP layers begin that are numbered on from the decoder layers.
        """
        layers: dict[tuple[LayerKind, int], MoELayer] = {}
        for b in sorted(blocks, key=lambda b: (b.number, b.name)):
            kind = LayerKind.MTP if self._is_mtp(b) else LayerKind.DECODER
            at = (kind, b.number - depth if kind is LayerKind.MTP and not b.own else b.number)
            first = layers.get(at)
            layers[at] = replace(first, twins=(*first.twins, b.name)) if first else self._layer(b, *at)
        for layer, at in sorted(self.elsewhere.items()):
            if at in layers:
                layers[at] = replace(layers[at], twins=(*layers[at].twins, layer))
        return layers

    def _block(self, head: str) -> _Block | None:
        """Find or make the block that a prefix names; None where the family has no MoE block."""
        m = self.family.pattern.fullmatch(head)
        if m is None:
            self.heads[head] = None
            if other := self.elsewhere_pattern.fullmatch(head):
                kind = LayerKind.DECODER if other["at"] == "layers" else LayerKind.MTP
                self.elsewhere[other["layer"]] = kind, int(other["number"])
            return None
        name = f"{head}.{self.family.block}" if m["block"] is None else head
        block = self.blocks.get(name)
        if block is None:
            block = self.blocks[name] = _Block(m["layer"], int(m["number"]), bool(m["mtp"]), name)
        self.heads[head] = block
        return block

    def _odd(self, block: _Block, info: TensorInfo, tail: str) -> None:
        """Sort a tensor below ``experts`` that is not a single expert's matrix."""
        first = tail.partition(".")[0]
        if STACKED_NAME.match(tail) or (len(info.shape) > 2 and not first.isdecimal()):
            block.stacked.append(info)
        elif first not in BESIDE:
            block.unknown.append(info.name)

    def _other(self, name: str, info: TensorInfo) -> None:
        """Sort a tensor that is not below ``experts``: of the shared expert, of its gate, stacked, or one that no rule explains."""
        shared = self.family.shared
        head, of_shared, tail = name.partition(f".{shared}.")
        if shared and of_shared:
            self._shared(head, tail, info)
            return
        head, of_gate, _ = name.partition(f".{shared}_gate.")
        if shared and of_gate and (block := self._known(head)):
            block.gate = name
        elif self._may_be_stacked(name, info) and (block := self._around(name)):
            block.stacked.append(info)
        elif EXPERT_MODULE.search(name):
            block = self._around(name)
            if block:
                block.unknown.append(name)
            else:
                self.strays.append(info)
        else:
            self._beside_experts(name)

    def _beside_experts(self, name: str) -> None:
        """Note what a tensor that has nothing to do with experts tells of its layer."""
        if m := MTP_MODULE.match(name):
            self.own[m["layer"]] = int(m["number"])
        elif m := MTP_TENSOR.match(name):
            self.marked.add(m["layer"])
        if m := MLP_TENSOR.match(name):
            self.dense.add(m["layer"])

    def _may_be_stacked(self, name: str, info: TensorInfo) -> bool:
        if len(info.shape) > 2:
            return not name.endswith(CONVOLUTION)
        return any(stack in name for stack in self.stacks)

    def _shared(self, head: str, tail: str, info: TensorInfo) -> None:
        block = self._known(head)
        if block is None:
            self.strays.append(info)
            return
        projection, _, suffix = tail.partition(".")
        if projection in self.family.shared_names and _is_part(suffix):
            block.shared.setdefault(projection, {})[suffix] = info
            block.shared_name = f"{head}.{self.family.shared}"
        elif find_stack(self.family.fused, tail, info, 0):
            block.fused.append(info)
            block.shared_name = f"{head}.{self.family.shared}"
        else:
            block.unknown.append(info.name)

    def _known(self, head: str) -> _Block | None:
        return self.heads[head] if head in self.heads else self._block(head)

    def _around(self, name: str) -> _Block | None:
        """Return the block whose prefix a name has."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            m = self.family.pattern.fullmatch(head := ".".join(parts[:end]))
            if m and m["block"] is not None:
                return self._known(head)
        return None

    def _layer(self, b: _Block, kind: LayerKind, index: int) -> MoELayer:
        names, shared_names = self.family.routed_names, self.family.shared_names
        experts = ((int(e), parts) for e, parts in b.routed.items())
        routed = tuple(_expert(f"{b.name}.experts.{e}", parts, names) for e, parts in sorted(experts, key=lambda pair: pair[0]))
        shared = _expert(b.shared_name, b.shared, shared_names) if b.shared or b.fused else None
        kept = {p.name for p in shared.projections.values()} if shared else set()
        doubled = tuple(name for name in (f"{b.shared_name}.{p}" for p in b.shared) if name not in kept)
        unknown = sorted(b.unknown, key=natural_key)
        stacked, fused = (sorted(found, key=lambda t: natural_key(t.name)) for found in (b.stacked, b.fused))
        return MoELayer(
            name=b.name,
            kind=kind,
            index=index,
            routed=routed,
            shared=shared,
            gate_tensor=b.gate,
            unknown=tuple(unknown),
            stacked=tuple(stacked),
            fused=tuple(fused),
            doubled=doubled,
        )


def _is_number(expert: str) -> bool:
    return expert.isdecimal() and expert.isascii() and (expert == "0" or expert[0] != "0")


def _is_part(suffix: str) -> bool:
    """Tell whether a suffix is of one of a matrix's own tensors; bitsandbytes hangs its own below ``weight``."""
    return bool(suffix) and ("." not in suffix or suffix.startswith("weight."))


def _expert(name: str, parts: Parts, names: Mapping[str, Role]) -> Expert:
    return Expert(name, {role: Projection(f"{name}.{p}", parts[p]) for p, role in names.items() if p in parts})


@dataclass(frozen=True, slots=True)
class Seen:
    """A pattern of expert tensor names, with ``N`` for every number: how many there are, and one of them."""

    pattern: str
    count: int
    example: TensorInfo


def seen(tensors: Iterable[TensorInfo]) -> tuple[Seen, ...]:
    """Put names together that differ in their numbers only."""
    by_pattern: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        by_pattern.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "N", info.name), []).append(info)
    first = {pattern: min(infos, key=lambda t: (len(t.name), t.name)) for pattern, infos in by_pattern.items()}
    return tuple(Seen(pattern, len(infos), first[pattern]) for pattern, infos in sorted(by_pattern.items()))
