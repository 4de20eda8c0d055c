"""Tensors that hold all experts of a layer, or gate and up of one MLP: what a single projection of them looks like, how they grow.

A slice of such a tensor is described as a projection of its own, so that formats, widths and servers are judged as elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.families.family import Stack
from fse_convert.model.formats import PLAIN_WEIGHTS, SCALARS, WEIGHTS, Format, Tile
from fse_convert.model.moe import Expert, Projection, Role
from fse_convert.model.padding_ends import halves, padded_shape

BIAS = "bias"
PARTS: Mapping[str, str] = {
    "": "weight",
    "_blocks": "weight_packed",
    "_scales": "weight_scale",
    "_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    "_bias": BIAS,
    ".bias": BIAS,
    **{f".{part}": part for part in (*WEIGHTS, "weight_scale", "weight_scale_inv", *SCALARS)},
}
"""What may stand behind a stack's name, and which part of a projection that is. ``_blocks``, ``_scales``: gpt-oss's MXFP4."""
PACKED = ("_blocks", "_scales")
"""Parts whose rows are the projection's even where floats are stored transposed (transformers 5.24 integrations/mxfp4.py)."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """A stored tensor with the matrices of several experts or projections.

    ``module``: its name without that of the part. ``role``: whose width it has, up for gate and up together; ``part``: of a
    projection. ``axis``: the dimension that grows with the width, in ``parts`` of equal size. ``tile``: how one projection's share
    tiles ``[N, K]``; None for what does not grow.
    """

    info: TensorInfo
    module: str
    role: Role
    part: str
    axis: int
    parts: int
    tile: Tile | None

    def shape(self, of_one: tuple[int, int], width: int) -> tuple[int, ...]:
        """Return the stored shape once experts are so wide. ``of_one``: the ``[N, K]`` of a single projection as it is."""
        stored = self.info.shape
        if self.tile is None:
            return stored
        along = 1 if self.role is Role.DOWN else 0
        was, will = (self.tile.stored(*shape, 2)[along] for shape in (of_one, padded_shape(self.role, of_one, width)))
        return stored if was == will else (*stored[: self.axis], stored[self.axis] * will // was, *stored[self.axis + 1 :])

    @property
    def stretches(self) -> int:
        """How many stretches of bytes grow, each at its end."""
        return prod(self.info.shape[: self.axis]) * self.parts


@dataclass(frozen=True, slots=True)
class StackTensor:
    """A tensor in its place: which stack it is of, as which part, and how many dimensions stand before ``[N, K]``."""

    info: TensorInfo
    stack: Stack
    suffix: str
    leading: int

    @property
    def part(self) -> str:
        """The part of a projection that it is."""
        return PARTS[self.suffix]

    @property
    def module(self) -> str:
        """Its name without that of the part."""
        return self.info.name.removesuffix(self.suffix)

    @property
    def transposed(self) -> bool:
        """Whether columns stand before rows."""
        return self.stack.transposed and self.suffix not in PACKED and len(self.info.shape) == self.leading + 2

    def slice(self) -> TensorInfo:
        """Return what one expert has of the tensor, as its header would say: gate and up together where they are one matrix.

        A tensor without elements is returned as it is.
        """
        if 0 in self.info.shape:
            return self.info
        shape = self.info.shape[self.leading :]
        if self.part in SCALARS or not shape:
            return self.info._replace(shape=shape)
        rows, *columns = shape[::-1] if self.transposed else shape
        return self.info._replace(shape=(rows, prod(columns)) if columns else (rows,))

    def stacked(self, f: Format) -> Stacked:
        """Return how it grows, given the format of its projections."""
        *_, role = self.stack.roles
        tile = f.tiles.get(self.part)
        if self.part == BIAS and role is not Role.DOWN:
            element = PLAIN_WEIGHTS[self.info.dtype]
            tile = Tile(1, 0, element.fill, element.nan)
        across = (role is Role.DOWN) != self.transposed
        return Stacked(
            info=self.info,
            module=self.module,
            role=role,
            part=self.part,
            axis=self.leading + across,
            parts=halves(self.stack),
            tile=tile,
        )


def find_stack(stacks: Iterable[Stack], tail: str, info: TensorInfo, leading: int) -> StackTensor | None:
    """Find the stack that a tensor is of, by its name below the block; None where the name or the dimensions are no stack's."""
    for stack in stacks:
        suffix = tail.removeprefix(stack.name)
        if tail.startswith(stack.name) and suffix in PARTS:
            member = StackTensor(info, stack, suffix, leading)
            least, most = _dimensions(member.part, suffix)
            fits = 0 in info.shape or leading + least <= len(info.shape) <= leading + most
            return member if fits and (member.part != BIAS or info.dtype in PLAIN_WEIGHTS) else None
    return None


def _dimensions(part: str, suffix: str) -> tuple[int, int]:
    """Return how many dimensions a part may have behind that of experts."""
    if part == BIAS:
        return 1, 1
    if part in WEIGHTS:
        return (3, 3) if suffix in PACKED else (2, 2)
    return 0, 1 if part in SCALARS else 2


def single(name: str, members: Iterable[StackTensor]) -> Expert:
    """Return one expert with its share of every tensor but biases, which no format knows."""
    parts: dict[Role, dict[str, TensorInfo]] = {}
    whole: dict[Role, tuple[str, int]] = {}
    for member in members:
        for role in member.stack.roles if member.part != BIAS else ():
            parts.setdefault(role, {})[member.part] = member.slice()
            whole[role] = member.module, len(member.stack.roles)
    return Expert(name, {role: Projection(whole[role][0], parts[role], whole[role][1]) for role in Role if role in parts})


def repeated(members: Iterable[StackTensor], own: Collection[Role] = ()) -> Iterator[StackTensor]:
    """Yield tensors that hold what another one holds too. ``own``: projections that are stored by themselves."""
    seen: set[tuple[Role, str]] = set()
    for member in members:
        held = {(role, member.part) for role in member.stack.roles}
        if seen & held or any(role in own for role in member.stack.roles):
            yield member
        seen |= held


def straddling(
    members: Iterable[StackTensor], formats: Mapping[Role, Format], stated: tuple[int, int] | None
) -> Iterator[tuple[StackTensor, str]]:
    """Yield scales of which one block holds rows of gate and of up, or may hold them, and why: padding would cut it.

    ``stated``: the block that the config states. One told from shapes may be another where the last block is a partial one.
    """
    for member in members:
        f = formats[member.stack.roles[-1]]
        if member.part == f.scale and f.block and len(member.stack.roles) > 1 and f.block[0] > 1:
            if member.stack.interleaved or f.shape[0] % f.block[0]:
                yield member, "a block of scales holds rows of gate and of up: padding would cut it"
            elif f.block != stated:
                yield member, "gate and up are one matrix, and no weight_block_size says which of its rows share a scale"


def odd_biases(members: Iterable[StackTensor], formats: Mapping[Role, Format]) -> Iterator[tuple[StackTensor, int]]:
    """Yield biases that have not an element for every row of their matrices, and how many rows those have."""
    for member in members:
        rows = sum(formats[role].shape[0] for role in member.stack.roles)
        if member.part == BIAS and member.info.shape[member.leading :] != (rows,):
            yield member, rows


def unbiased(members: Collection[StackTensor], biased: Collection[Stack]) -> Iterator[StackTensor]:
    """Yield weights without a bias, of stacks that have one in other layers."""
    own = {member.stack for member in members if member.part == BIAS}
    return (member for member in members if member.part in WEIGHTS and member.stack in biased and member.stack not in own)
