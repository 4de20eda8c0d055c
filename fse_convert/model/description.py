"""A MoE model as its headers show it: layers, how their experts are stored, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from shlex import quote

from fse_convert.errors import Problem
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.formats import Format
from fse_convert.model.grouping import Seen
from fse_convert.model.moe import Expert, MoELayer, Role
from fse_convert.model.stacked import Stacked

EXPERTS_STACKED = "experts-stacked"
NOT_UNDERSTOOD = frozenset({
    EXPERTS_STACKED, "expert-unknown", "expert-outside", "experts-differ", "dtype-unsupported", "weight-shape",
    "router-shape", "part-ambiguous", "part-unknown", "format-unknown", "scale-dtype", "scale-straddles", "family-refused",
})  # fmt: skip
"""Codes of problems with a checkpoint that is whole, but of a kind that is not supported; all others mean that it is broken."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of one layer that are stored alike: their formats by role, hidden size, and the width of one of them.

    ``stacked``: the tensors that hold several of their matrices; ``experts`` have what is stored by itself.
    """

    experts: tuple[Expert, ...]
    formats: Mapping[Role, Format]
    hidden: int
    width: int
    stacked: tuple[Stacked, ...] = ()

    @property
    def label(self) -> str:
        """The storage format in a few words."""
        return " / ".join(dict.fromkeys(f.label for f in self.formats.values()))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the matrices of every expert, and of the tensors that hold several matrices."""
        own = (p.name for expert in self.experts for p in expert.projections.values())
        return tuple(dict.fromkeys((*own, *(stack.module for stack in self.stacked))))

    @property
    def gate(self) -> Format:
        """The format that tells the experts' kind: of the gate projections, or of up where the experts have no gate."""
        return self.formats.get(Role.GATE, self.formats[Role.UP])

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate projection."""
        return Role.GATE in self.formats

    def stored_like(self, other: ExpertGroup) -> bool:
        """Tell whether one kernel could read the experts of both groups."""
        mine, theirs = ({role: f.same_storage for role, f in group.formats.items()} for group in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """One MoE layer with its routed and shared experts, or the problems that keep them from being understood."""

    layer: MoELayer
    routed: ExpertGroup | None
    shared: ExpertGroup | None
    problems: tuple[Problem, ...]

    @property
    def groups(self) -> tuple[ExpertGroup, ...]:
        """The groups that are understood, routed experts first."""
        return tuple(group for group in (self.routed, self.shared) if group)


@dataclass(frozen=True, slots=True)
class Description:
    """All MoE layers of a model.

    ``family`` None: no row knows this model type, ``layers`` is empty, ``seen`` lists the names that look like experts, and
    ``like`` is the family whose names they have, if any. ``section``: the config section that holds the widths. ``n_shared``:
    shared experts per layer, by which the shared width is divided; 0 where there is none. ``conflicts``: where the configs
    contradict the headers or each other. ``gaps``: layers and experts that are missing. ``outside``: what is wrong outside of all
    layers.
    """

    family: Family | None
    model_type: str
    section: str = ""
    n_shared: int = 0
    layers: tuple[LayerDescription, ...] = ()
    conflicts: tuple[Problem, ...] = ()
    seen: tuple[Seen, ...] = ()
    gaps: tuple[Problem, ...] = ()
    outside: tuple[Problem, ...] = ()
    like: str = ""

    @property
    def family_name(self) -> str:
        """The name of its family; empty where no row knows it."""
        return self.family.name if self.family else ""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of all layers, in layer order, what is missing between them, and what is outside of them."""
        return (*(p for layer in self.layers for p in layer.problems), *self.gaps, *self.outside)

    @property
    def unknown(self) -> Problem | None:
        """Why nothing can be said of the model's layers: its family is not known, or its experts have other names."""
        if self.family is None:
            hint = f"known families: {', '.join(dict.fromkeys(f.name for f in FAMILIES))}"
            if self.like:
                fits = f"its experts have the names of {self.like}: if they are built alike"
                hint = f"{fits}, convert for a contract, or a server that runs this model type, and add --family {quote(self.like)}"
            return Problem("family-unknown", f"model type {self.model_type!r} is not known", "config.json", hint)
        return self.outside[0] if self.outside and not self.layers else None

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct widths of one routed expert over all layers, ascending."""
        return tuple(sorted({d.routed.width for d in self.layers if d.routed}))


def first_of(places: Iterable[str]) -> str:
    """Name the first of several places and count the others."""
    first, *others = places
    return f"{first} and {len(others)} more" if others else first
