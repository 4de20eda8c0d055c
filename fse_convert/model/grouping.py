"""Grouping of tensor names into MoE layers, experts and projections, in one pass over the names.

A V4-Pro checkpoint has 150,000 names, so most of them are taken apart by splitting at ``.experts.``; the family's
regular expression is asked once per block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.families import Family
from fse_convert.model.moe import Expert, LayerKind, MoELayer, Projection, Role

ROUTED = ".experts."
EXPERT_MODULE = re.compile(r"(?:^|\.)(?:[a-z]+_)*(?:experts?|shared_mlp)(?:\.|$)")
"""A module of experts anywhere in a name; not a router's ``expert_bias`` or a latent ``routed_expert_norm``."""
ROUTER_TENSORS = frozenset({"e_score_correction_bias", "expert_bias"})
"""Tensors of the router that some releases put under ``experts``."""
STACKED = re.compile(r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w[123])(?:_|\.|$)")
"""Names, below ``experts``, of a tensor that holds all experts of a layer."""

Parts = dict[str, dict[str, TensorInfo]]
"""An expert's tensors by projection and suffix."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The MoE layers of a model, decoder layers first, and expert tensors that belong to none of them."""

    layers: tuple[MoELayer, ...]
    strays: tuple[str, ...]


@dataclass(slots=True)
class _Block:
    """One MoE block while its tensors come in."""

    kind: LayerKind
    index: int
    name: str
    routed: dict[str, Parts] = field(default_factory=dict)
    shared: Parts = field(default_factory=dict)
    shared_name: str = ""
    gate: str | None = None
    unknown: list[str] = field(default_factory=list)
    stacked: list[TensorInfo] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.routed or self.shared or self.gate or self.unknown or self.stacked)


def group_layers(family: Family, tensors: Mapping[str, TensorInfo], num_layers: int | None) -> Grouping:
    """Group a checkpoint's tensors by the names of its family.

    ``num_layers`` decides where MTP layers begin for families that number them on.
    """
    return _Grouper(family, num_layers).run(tensors)


class _Grouper:
    def __init__(self, family: Family, num_layers: int | None) -> None:
        self.family = family
        self.num_layers = num_layers
        self.heads: dict[str, _Block | None] = {}
        self.blocks: dict[str, _Block] = {}
        self.strays: list[str] = []

    def run(self, tensors: Mapping[str, TensorInfo]) -> Grouping:
        heads, names = self.heads, self.family.routed_names
        for name, info in tensors.items():
            head, routed, tail = name.partition(ROUTED)
            if not routed:
                self._other(name, info)
                continue
            block = heads[head] if head in heads else self._block(head)
            if block is None:
                self.strays.append(name)
                continue
            parts = tail.split(".")
            if len(parts) != 3 or parts[1] not in names:
                self._odd(block, info, tail)
                continue
            expert, projection, suffix = parts
            try:
                block.routed[expert][projection][suffix] = info
            except KeyError:
                self._first(block, expert, projection, suffix, info)
        order = sorted(self.blocks.values(), key=lambda b: (b.kind is LayerKind.MTP, b.index, b.name))
        return Grouping(tuple(self._layer(b) for b in order if not b.empty), tuple(self.strays))

    @staticmethod
    def _first(block: _Block, expert: str, projection: str, suffix: str, info: TensorInfo) -> None:
        if expert.isdecimal() and expert.isascii() and (expert == "0" or expert[0] != "0"):
            block.routed.setdefault(expert, {}).setdefault(projection, {})[suffix] = info
        else:
            block.unknown.append(info.name)

    def _block(self, head: str) -> _Block | None:
        """Find or make the block that a prefix names; None where the family has no MoE block."""
        m = self.family.pattern.fullmatch(head)
        if m is None:
            self.heads[head] = None
            return None
        name = head if m["block"] else f"{head}.{self.family.block}"
        block = self.blocks.get(name)
        if block is None:
            number = int(m["number"])
            beyond = self.num_layers is not None and self.family.mtp is None and number >= self.num_layers
            index = number - (self.num_layers or 0) if beyond else number
            block = self.blocks[name] = _Block(LayerKind.MTP if m["mtp"] or beyond else LayerKind.DECODER, index, name)
        self.heads[head] = block
        return block

    def _odd(self, block: _Block, info: TensorInfo, tail: str) -> None:
        """Sort a tensor below ``experts`` that is not a single expert's matrix."""
        first = tail.partition(".")[0]
        if STACKED.match(tail):
            block.stacked.append(info)
        elif first not in ROUTER_TENSORS:
            block.unknown.append(info.name)

    def _other(self, name: str, info: TensorInfo) -> None:
        """Sort a tensor that is not below ``experts``: of the shared expert, of its gate, stacked, or one that no rule explains."""
        shared = self.family.shared
        head, of_shared, tail = name.partition(f".{shared}.")
        if of_shared:
            self._shared(head, tail, info)
            return
        head, of_gate, _ = name.partition(f".{shared}_gate.")
        if of_gate and (block := self._known(head)):
            block.gate = name
        elif self.family.stacked and (block := self._stacked(name)):
            block.stacked.append(info)
        elif EXPERT_MODULE.search(name):
            self._unknown(name)

    def _shared(self, head: str, tail: str, info: TensorInfo) -> None:
        block = self._known(head)
        if block is None:
            self.strays.append(info.name)
            return
        projection, _, suffix = tail.partition(".")
        if projection in self.family.shared_names and suffix and "." not in suffix:
            block.shared.setdefault(projection, {})[suffix] = info
            block.shared_name = f"{head}.{self.family.shared}"
        else:
            block.unknown.append(info.name)

    def _stacked(self, name: str) -> _Block | None:
        head, _, rest = name.rpartition(".")
        head, _, projection = head.rpartition(".")
        return self._known(head) if projection in self.family.stacked and rest and self._is_block(head) else None

    def _is_block(self, head: str) -> bool:
        m = self.family.pattern.fullmatch(head)
        return bool(m and m["block"])

    def _known(self, head: str) -> _Block | None:
        return self.heads[head] if head in self.heads else self._block(head)

    def _unknown(self, name: str) -> None:
        """File an expert tensor under the block whose prefix it has, else among the strays."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            head = ".".join(parts[:end])
            if self._is_block(head) and (block := self._known(head)):
                block.unknown.append(name)
                return
        self.strays.append(name)

    def _layer(self, b: _Block) -> MoELayer:
        names, shared_names = self.family.routed_names, self.family.shared_names
        experts = ((int(e), parts) for e, parts in b.routed.items())
        routed = tuple(_expert(f"{b.name}.experts.{e}", parts, names) for e, parts in sorted(experts, key=lambda pair: pair[0]))
        shared = _expert(b.shared_name, b.shared, shared_names) if b.shared else None
        return MoELayer(b.name, b.kind, b.index, routed, shared, b.gate, tuple(b.unknown), tuple(b.stacked))


def _expert(name: str, parts: Parts, names: Mapping[str, Role]) -> Expert:
    return Expert(name, {role: Projection(f"{name}.{p}", parts[p]) for p, role in names.items() if p in parts})


@dataclass(frozen=True, slots=True)
class Seen:
    """A pattern of expert tensor names, with ``N`` for every number: how many there are, and one of them."""

    pattern: str
    count: int
    example: TensorInfo


def seen_experts(tensors: Iterable[TensorInfo]) -> tuple[Seen, ...]:
    """List the patterns of names in which experts occur, for a model that no family explains."""
    by_pattern: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        if "expert" in info.name or "shared_mlp" in info.name:
            by_pattern.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "N", info.name), []).append(info)
    return tuple(Seen(pattern, len(infos), infos[0]) for pattern, infos in sorted(by_pattern.items()))
