"""From the experts of every layer to how they are stored: their formats, read once per shape, and every problem with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fse_convert.errors import Problem, some
from fse_convert.model.config_against_tensors import INCOMPLETE
from fse_convert.model.description import EXPERTS_STACKED, ExpertGroup, LayerDescription, first_of
from fse_convert.model.families.family import Family, Stack
from fse_convert.model.formats import Format, FormatError, StorageKind, read_format
from fse_convert.model.misfits import Formats, Misfits, Read
from fse_convert.model.moe import Expert, LayerKind, MoELayer, Projection, Role
from fse_convert.model.stacked import BIAS, StackTensor, find_stack, odd_biases, repeated, single, straddling, unbiased

NO_MATRIX = "adapters, biases, and projections fused into one matrix are not supported"
TWO_NAMES = "find out which of them is right, and take the other out"
TWICE = "servers load whichever they read last: export the model again, with each layer once"

ROUTERS = (".gate.", ".router")
"""How the name of a router begins, below its block."""


class LayerReader:
    """Reads formats of expert groups; remembers them by signature, since a layer's experts share one."""

    def __init__(self, block_hint: tuple[int, int] | None, family: Family) -> None:
        self.block_hint = block_hint
        self.family = family
        self.known: dict[tuple[object, ...], Formats] = {}
        self.understood: tuple[set[Role], set[Role]] = set(), set()
        self.biased: tuple[set[tuple[LayerKind, Stack]], ...] = set(), set()

    def describe(self, layers: Sequence[MoELayer]) -> tuple[LayerDescription, ...]:
        """Describe layers, with every problem of every expert; equal problems of a layer are counted together.

        All are read before any is described: what fits no format is damage where others like it do, and so is a bias that is not
        there where others have one.
        """
        read = [(m, self._read(self._routed(m)), self._read(self._shared(m))) for m in layers]
        for _, *groups in read:
            for understood, group in zip(self.understood, groups, strict=True):
                understood.update(role for _, formats in group for role, f in formats.items() if isinstance(f, Format))
        for m in layers:
            for biased, members in zip(self.biased, (self._members(m), self._fused(m)), strict=True):
                biased.update((m.kind, member.stack) for member in members if member.part == BIAS or member.stack.biased)
        return tuple(self._layer(*entry) for entry in read)

    def _layer(self, layer: MoELayer, routed: Read, shared: Read) -> LayerDescription:
        problems = _Problems(layer)
        self._add_odd_names(layer, problems)
        of_routed, of_shared = self.understood
        roles = frozenset(self.family.routed_names.values())
        of_experts, of_one = _group(routed, roles, of_routed, problems), _group(shared, roles, of_shared, problems)
        stated, of_own = self.block_hint, tuple(filter(None, (layer.shared,)))
        groups = (
            _stacked(of_experts, (), self._members(layer), stated, problems) if layer.stacked else of_experts,
            _stacked(of_one, of_own, self._fused(layer), stated, problems) if layer.fused else of_one,
        )
        return LayerDescription(layer, *groups, problems.folded())

    def _add_odd_names(self, layer: MoELayer, problems: _Problems) -> None:
        """Add what the names alone show: tensors that are not understood, that are there twice, or missing."""
        for twin in layer.twins:
            problems.add(Problem("layer-twice", f"this layer is there twice, {_difference(layer.name, twin)}", layer.name, TWICE))
        _add_odd_stacks(layer, self._members(layer), problems)
        for name in layer.unknown:
            problems.add(Problem("expert-unknown", "an expert tensor that is not understood", name, NO_MATRIX))
        own = layer.shared.projections if layer.shared else {}
        again = (*repeated(self._members(layer)), *repeated(self._fused(layer), own))
        for name in (*layer.doubled, *(member.info.name for member in again)):
            problems.add(Problem("part-ambiguous", "a projection that is there under another name too", name, TWO_NAMES))
        missing = _missing_experts(layer)
        if missing:
            message = f"no routed expert {some(map(str, missing))}"
            problems.add(Problem("expert-missing", message, layer.name, INCOMPLETE))
        for biased, members in zip(self.biased, (self._members(layer), self._fused(layer)), strict=True):
            for member in unbiased(members, {stack for kind, stack in biased if kind is layer.kind}):
                problems.add(Problem("bias-missing", "no bias of it, which the model has", member.info.name, INCOMPLETE))
        if self.family.gated and layer.shared and layer.gate_tensor is None:
            problems.add(Problem("gate-missing", "no gate of the shared expert", layer.shared.name, INCOMPLETE))

    def _routed(self, layer: MoELayer) -> tuple[Expert, ...]:
        """Return the routed experts; one in place of all where they are stacked."""
        members = self._members(layer)
        return (single(layer.name, members),) if members and not layer.routed else layer.routed

    def _shared(self, layer: MoELayer) -> tuple[Expert, ...]:
        if layer.shared is None:
            return ()
        fused = single(layer.shared.name, self._fused(layer)).projections
        return (layer.shared._replace(projections={**layer.shared.projections, **fused}),)

    def _members(self, layer: MoELayer) -> list[StackTensor]:
        found = (find_stack(self.family.stacked, t.name.removeprefix(f"{layer.name}."), t, 1) for t in layer.stacked)
        return [member for member in found if member]

    def _fused(self, layer: MoELayer) -> list[StackTensor]:
        names = f"{layer.shared.name}." if layer.shared else ""
        found = (find_stack(self.family.fused, t.name.removeprefix(names), t, 0) for t in layer.fused)
        return [member for member in found if member]

    def _read(self, experts: Iterable[Expert]) -> Read:
        return [(expert, self._formats(expert)) for expert in experts]

    def _formats(self, expert: Expert) -> Formats:
        key = tuple(
            (role, projection.of, suffix, info.dtype, info.shape)
            for role, projection in expert.projections.items()
            for suffix, info in projection.parts.items()
        )
        if key not in self.known:
            self.known[key] = {role: self._format(p) for role, p in expert.projections.items()}
        return self.known[key]

    def _format(self, projection: Projection) -> Format | FormatError:
        try:
            return read_format(projection.parts, self.block_hint).shared_by(projection.of)
        except FormatError as e:
            return e


def _group(read: Read, roles: frozenset[Role], understood: set[Role], problems: _Problems) -> ExpertGroup | None:
    misfits, experts = Misfits(read, understood), tuple(expert for expert, _ in read)
    first: dict[Role, Format] | None = None
    like: tuple[Expert, Formats] | None = None
    whole = True
    for expert, found in read:
        if like and found is like[1]:
            continue
        formats = _whole(expert, roles, found, misfits, problems)
        if formats is None:
            whole = False
        elif first is None or like is None:
            first, like = formats, (expert, found)
        elif formats != first:
            whole = False
            role = next(r for r in formats if formats[r] != first[r])
            other = f"{like[0].projections[role].name} is {_stored(first[role])}"
            message = f"{_stored(formats[role])}, but {other}: a layer's experts must be stored alike"
            problems.add(Problem("experts-differ", message, expert.projections[role].name))
    if first is None or not whole:
        return None
    width, hidden = first[Role.UP].shape
    return ExpertGroup(experts, first, hidden, width)


def _add_odd_stacks(layer: MoELayer, members: Sequence[StackTensor], problems: _Problems) -> None:
    """Add what of the stacked tensors is not understood, and numbers of experts that differ between them."""
    known = {member.info.name for member in members}
    for name in sorted(known) if layer.routed else ():
        problems.add(Problem("layer-twice", "experts are there twice, stacked and each by itself", name, TWICE))
    odd = [t for t in layer.stacked if t.name not in known]
    routers = [t for t in odd if t.name.removeprefix(layer.name).startswith(ROUTERS)]
    for t in routers:
        message = f"a router of {len(t.shape)} dimensions, {t.dtype} {list(t.shape)}: servers load a matrix"
        problems.add(Problem("router-shape", message, t.name, "export it as [experts, hidden size]"))
    if odd := [t for t in odd if t not in routers]:
        message = f"experts in one {len(odd[0].shape)}-D tensor, {odd[0].dtype} {list(odd[0].shape)}"
        hint = "beside experts of their own" if layer.routed else "not in the layout that this family has"
        problems.add(Problem(EXPERTS_STACKED, message, first_of(t.name for t in odd), hint))
    whole = [s for s in members if 0 not in s.info.shape]
    for member in (s for s in whole if s.info.shape[0] != layer.count and not layer.routed):
        message = f"it holds {member.info.shape[0]} experts, another tensor of the layer {layer.count}"
        problems.add(Problem("expert-shape", message, member.info.name, INCOMPLETE))


def _stacked(
    group: ExpertGroup | None,
    own: tuple[Expert, ...],
    members: Sequence[StackTensor],
    stated: tuple[int, int] | None,
    problems: _Problems,
) -> ExpertGroup | None:
    """Return a group of the tensors that hold matrices of experts.

    ``own``: experts with what they have by themselves; ``stated``: the FP8 block that the config states.
    """
    if group is None:
        return None
    for member, message in straddling(members, group.formats, stated):
        problems.add(Problem("scale-straddles", message, member.info.name))
    for member, rows in odd_biases(members, group.formats):
        message = f"a bias of {list(member.info.shape)} beside matrices of {rows} rows"
        problems.add(Problem("expert-shape", message, member.info.name, INCOMPLETE))
    return replace(group, experts=own, stacked=tuple(member.stacked(group.formats[member.stack.roles[-1]]) for member in members))


def _whole(
    expert: Expert, roles: frozenset[Role], read: Formats, misfits: Misfits, problems: _Problems
) -> dict[Role, Format] | None:
    """Return the formats of an expert that is complete and understood; what keeps it from that is added to ``problems``.

    ``roles``: the projections that the family's experts have.
    """
    formats: dict[Role, Format] = {}
    unclear = any(name.startswith(f"{expert.name}.") for name in problems.layer.unknown)
    for role in Role:
        found = read.get(role)
        if isinstance(found, Format):
            formats[role] = found
        elif isinstance(found, FormatError):
            problems.add(misfits.problem(found, role, expert.projections[role]))
        elif role in roles and not unclear:
            problems.add(Problem("projection-missing", f"no {role.value} projection", expert.name, INCOMPLETE))
    if formats.keys() != roles:
        return None
    up, down = formats[Role.UP].shape, formats[Role.DOWN].shape
    if formats.get(Role.GATE, formats[Role.UP]).shape != up or down != up[::-1]:
        problems.add(_shapes(expert, formats, problems.layer))
        return None
    if len({f.weight_dtype for f in formats.values() if f.kind is StorageKind.PLAIN}) > 1:
        stored = _listed(f"{role.value} {f.weight_dtype}" for role, f in formats.items())
        problems.add(Problem("experts-differ", f"{stored}: an expert's matrices must be stored alike", expert.name))
        return None
    return formats


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}"


def _shapes(expert: Expert, formats: Mapping[Role, Format], layer: MoELayer) -> Problem:
    """Return the problem that matrices are which make no MLP; of stacked ones it names the tensors that are stored."""
    stacks = {t.name: t for t in (*layer.stacked, *layer.fused)}
    weights = {t.name: t for t in (expert.projections[role].parts[f.weight] for role, f in formats.items())}
    shapes = [f"{name} {list(stacks.get(name, t).shape)}" for name, t in weights.items()]
    hint = "does the family store rows and columns the other way round? export the model as its publisher does"
    if stacks.keys().isdisjoint(weights):
        shapes = [f"{role.value} {list(f.shape)}" for role, f in formats.items()]
        hint = "is the checkpoint sharded by tensor parallelism?"
    return Problem("expert-shape", f"{_listed(shapes)} do not make one MLP", expert.name, hint)


def _stored(f: Format) -> str:
    """Say all in which two formats may differ."""
    scale = [f"{f.scale} {f.scale_dtype}"] if f.scale else []
    others = sorted(f.tiles.keys() - {f.weight, f.scale})
    return f"{f.label} {list(f.shape)} ({', '.join((f'{f.weight} {f.weight_dtype}', *scale, *others))})"


class _Problems:
    """Problems of one layer; those that differ only in where they are become one."""

    def __init__(self, layer: MoELayer) -> None:
        self.layer = layer
        self.places: dict[Problem, list[str]] = {}

    def add(self, problem: Problem) -> None:
        self.places.setdefault(replace(problem, where=""), []).append(problem.where)

    def folded(self) -> tuple[Problem, ...]:
        return tuple(replace(problem, where=first_of(dict.fromkeys(places))) for problem, places in self.places.items())


def _missing_experts(layer: MoELayer) -> list[int]:
    numbers = {int(e.name.rsplit(".", 1)[1]) for e in layer.routed}
    return sorted(set(range(max(numbers, default=-1) + 1)) - numbers)


def _difference(name: str, twin: str) -> str:
    """Say in what two names of one layer differ: what stands before its number, behind it, or the number itself."""
    (before, after), (other_before, other_after) = (re.split(r"\.\d+(?:\.|$)", n, maxsplit=1) for n in (name, twin))
    if before != other_before:
        return f"under two prefixes: {before} and {other_before}"
    return f"under two names: {f'{after} and {other_after}' if after != other_after else f'{name} and {twin}'}"
