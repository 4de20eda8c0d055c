"""The tensors of an output that are padded: their shapes, what fills them, and where, derived from the source and the new widths.

Worked out without the planner's and the writer's code: of tensors that hold several matrices, by the family's row and their shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from fse_convert.checkpoint.header import BITS, TensorInfo
from fse_convert.model.description import Description, ExpertGroup, LayerDescription
from fse_convert.model.families.family import Family, Stack
from fse_convert.model.formats import Format, StorageKind
from fse_convert.model.moe import Role
from fse_convert.servers.native import LaunchWidths
from fse_convert.verification.code_of_one import ONES

WEIGHT_ENDS = ("", ".weight", ".weight_packed")
SCALE_ENDS = ("_scales", "_scale", "_scale_inv", ".scale", ".weight_scale", ".weight_scale_inv")
"""What stands behind the name of a stack's weight or scale. gpt-oss's MXFP4 has ``_blocks``, of 32 columns, and ``_scales``; in
both, rows stand first whatever floats of the same family do (transformers 5.24 integrations/mxfp4.py)."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A tensor that grows to ``shape`` in equal stretches of bytes, each at its end by elements ``fill``.

    ``stretches``: one where a matrix gets rows, one a row where rows become longer, one a matrix where each of several gets rows.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    fill: bytes
    stretches: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a stretch before and after."""
        return self.info.nbytes // self.stretches, prod(self.shape) * len(self.fill) // self.stretches

    @property
    def is_many(self) -> bool:
        """Whether the two shapes, taken for those of one matrix, would tell other stretches."""
        return self.stretches != _of_one(self.info.shape, self.shape)


def padded_tensors(description: Description, source: LaunchWidths, main: LaunchWidths) -> dict[str, Padded]:
    """Find every tensor that must have grown when experts of the ``source``'s widths are stored ``main`` wide.

    Gate and up grow in rows, down in columns.
    """
    if source == main:
        return {}
    found: dict[str, Padded] = {}
    for d in description.layers:
        for group, width in ((d.routed, main.routed), (d.shared, main.shared)):
            found |= {p.info.name: p for p in (_padded_of(group, width) if group else ())}
        found |= {p.info.name: p for p in _padded_stacks(description.family, d, main)}
    return found


def _padded_of(group: ExpertGroup, width: int) -> Iterator[Padded]:
    for expert in group.experts:
        for role, projection in expert.projections.items():
            f = group.formats[role]
            n, k = f.shape
            new = (n, width) if role is Role.DOWN else (width, k)
            for suffix, info in projection.parts.items():
                cell = _cell(f, suffix)
                shape = _stored(new, cell, len(info.shape)) if cell else info.shape
                if shape != info.shape:
                    fill = _fill(info, is_scale=suffix == f.scale)
                    yield Padded(info, shape, fill, _of_one(info.shape, shape))


def _padded_stacks(family: Family | None, d: LayerDescription, main: LaunchWidths) -> Iterator[Padded]:
    """Yield the tensors of a layer that hold several matrices: of all routed experts, and gate and up of a shared MLP."""
    if family and d.routed:
        for info in d.layer.stacked:
            stack, end = _row(family.stacked, info.name.removeprefix(f"{d.layer.name}."))
            yield from _padded_stack(info, stack, end, 1, d.routed, main.routed)
    if family and d.shared and d.layer.shared:
        for info in d.layer.fused:
            stack, end = _row(family.fused, info.name.removeprefix(f"{d.layer.shared.name}."))
            yield from _padded_stack(info, stack, end, 0, d.shared, main.shared)


def _row(stacks: Iterable[Stack], name: str) -> tuple[Stack, str]:
    """Find the row that a name begins with, the longest one, and return what stands behind."""
    stack = max((s for s in stacks if name.startswith(s.name)), key=lambda s: len(s.name))
    return stack, name[len(stack.name) :]


def _padded_stack(info: TensorInfo, stack: Stack, end: str, first: int, group: ExpertGroup, width: int) -> Iterator[Padded]:
    """Yield what a tensor becomes, by its row and its own shape; nothing where it does not grow.

    ``end``: of its name; ``first``: the dimension of rows, where columns do not stand before them. Gate and up grow at one end
    where their rows take turns, else at two.
    """
    f, is_scale, is_down = group.formats[stack.roles[-1]], end in SCALE_ENDS, stack.roles == (Role.DOWN,)
    cell: tuple[int, int] | None = {"_blocks": (1, 32), "_bias": (1, 0), ".bias": (1, 0)}.get(end)
    if is_scale or end in WEIGHT_ENDS:
        cell = _cell(f, (f.scale or "") if is_scale else f.weight)
    if not (cell and cell[is_down]):
        return
    columns_first = stack.transposed and end != "_scales" and len(info.shape) == first + 2
    axis, size = first + (is_down != columns_first), len(stack.roles) * -(-width // cell[is_down])
    if size != info.shape[axis]:
        shape = (*info.shape[:axis], size, *info.shape[axis + 1 :])
        ends = 1 if stack.interleaved else len(stack.roles)
        yield Padded(info, shape, _fill(info, is_scale=is_scale), prod(info.shape[:axis]) * ends)


def _of_one(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Return in how many stretches one matrix grows: as a whole by rows, or every row by columns."""
    return old[0] if old[0] == new[0] else 1


def _fill(info: TensorInfo, *, is_scale: bool) -> bytes:
    return ONES[info.dtype] if is_scale else bytes(BITS[info.dtype] // 8)


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
