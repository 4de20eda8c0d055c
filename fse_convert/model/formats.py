"""The storage format of one projection, read from its headers alone: FP8 with block scales, packed MXFP4, NVFP4, plain floats.

To add a storage format, add a row to `FACTS` and say in `read_format` how its headers look. A format says how each of its
tensors tiles the logical ``[N, K]`` matrix, so that padding needs no case per format: a stored row stands for ``Tile.rows``
logical rows, a stored column for ``Tile.cols`` logical columns, and new elements are ``Tile.fill``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from fse_convert.checkpoint.header import E8M0_DTYPES, TensorInfo
from fse_convert.errors import Problem
from fse_convert.layout.nan_and_one import ONES, NaN
from fse_convert.layout.sizes import ceil_div
from fse_convert.model.moe import Role

WEIGHTS = ("weight", "weight_packed")
SCALES = ("scale", "weight_scale", "weight_scale_inv")
SCALARS = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
"""Per-tensor factors: one number per projection, which padding leaves alone."""
CEIL_BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes considered when a scale's shape has a partial last block and the config names no block."""
MXFP8_BLOCK = (1, 32)
"""The block of FP8 weights that OCP calls MXFP8; it comes beside FP8 of any other block."""
NOT_GATHERED = "saved by a sharded training run without gathering its weights? save it again with all of them in their full shapes"
SUPPORTED = "supported: FP8 (F8_E4M3), packed MXFP4 and NVFP4 (I8, U8), BF16, F16, F32"
REQUANTISE = "choose a server that takes F32 scales; quantising again, to E8M0 scales, loses precision"
"""What to do about F32 scales that are not powers of two."""


@dataclass(frozen=True, slots=True)
class Element:
    """The element that pads a tensor (bytes), and the NaN codes of the tensor's elements."""

    fill: bytes
    nan: NaN | None


_E8M0, _F32, _BF16, _E4M3 = (Element(ONES[of], of) for of in (NaN.E8M0, NaN.F32, NaN.BF16, NaN.E4M3))
E8M0_SCALES = dict.fromkeys(E8M0_DTYPES, _E8M0)
FP8_SCALES = {**E8M0_SCALES, "F32": _F32, "BF16": _BF16}
FP4_WEIGHTS = dict.fromkeys(("I8", "U8"), Element(b"\0", None))
FP8_WEIGHTS = {"F8_E4M3": Element(b"\0", NaN.E4M3)}
PLAIN_WEIGHTS = {"BF16": Element(bytes(2), NaN.BF16), "F16": Element(bytes(2), NaN.F16), "F32": Element(bytes(4), NaN.F32)}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that hold for every projection of one storage format.

    ``label``: for people; empty where it depends on the dtypes. ``expert_dtype``: how DeepSeek's configs call it; ``written``: how
    other configs call the elements. ``weights``
    and ``scales``: the dtypes of each with the element that pads them, zero and one. ``packed``: elements per stored weight
    element. ``group``: columns per scale, where the format itself fixes it.
    """

    weights: Mapping[str, Element]
    label: str = ""
    expert_dtype: str | None = None
    written: frozenset[str] = frozenset()
    scales: Mapping[str, Element] = field(default_factory=dict)
    packed: int = 1
    group: int | None = None


class StorageKind(str, Enum):
    """Storage formats that the converter understands."""

    FP8_BLOCK = "fp8-block"
    FP8_CHANNEL = "fp8-channel"
    FP8_TENSOR = "fp8-tensor"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    PLAIN = "plain"

    @property
    def facts(self) -> Facts:
        """The format's row."""
        return FACTS[self]


_FP8, _MXFP4, _NVFP4 = (frozenset(words) for words in (("FP8", "MXFP8"), ("MXFP4", "FP4"), ("NVFP4", "FP4")))
FACTS: Mapping[StorageKind, Facts] = {
    StorageKind.FP8_BLOCK: Facts(FP8_WEIGHTS, expert_dtype="fp8", written=_FP8, scales=FP8_SCALES),
    StorageKind.FP8_CHANNEL: Facts(FP8_WEIGHTS, "FP8 per channel", expert_dtype="fp8", written=_FP8, scales=FP8_SCALES),
    StorageKind.FP8_TENSOR: Facts(FP8_WEIGHTS, "FP8 per tensor", expert_dtype="fp8", written=_FP8),
    StorageKind.MXFP4: Facts(FP4_WEIGHTS, "MXFP4", expert_dtype="fp4", written=_MXFP4, scales=E8M0_SCALES, packed=2, group=32),
    StorageKind.NVFP4: Facts(
        FP4_WEIGHTS, "NVFP4", expert_dtype="fp4", written=_NVFP4, scales={"F8_E4M3": _E4M3}, packed=2, group=16
    ),
    StorageKind.PLAIN: Facts(PLAIN_WEIGHTS),
}
WEIGHT_DTYPES = frozenset(dtype for facts in FACTS.values() for dtype in facts.weights)


@dataclass(frozen=True, slots=True)
class Tile:
    """The way a stored tensor tiles ``[N, K]``: logical rows and columns per element, the element that pads it, its NaN codes.

    ``cols`` 0: one column whatever K is.
    """

    rows: int
    cols: int
    fill: bytes
    nan: NaN | None

    def stored(self, n: int, k: int, dimensions: int) -> tuple[int, ...]:
        """Return the stored shape for ``[n, k]``: rows, rows and columns, or ``[rows, 1, columns, 1]`` (ModelOpt FP8_PB_WO)."""
        rows, cols = ceil_div(n, self.rows), ceil_div(k, self.cols) if self.cols else 1
        return (rows, 1, cols, 1) if dimensions == 4 else (rows, cols)[:dimensions]


@dataclass(frozen=True, slots=True)
class Format:
    """One projection's storage.

    ``shape`` is the logical ``[N, K]``, ``block`` the rows and columns that share a scale, ``tiles`` has one entry per
    tensor (None: a scalar).
    """

    kind: StorageKind
    shape: tuple[int, int]
    weight: str
    weight_dtype: str
    scale: str | None
    scale_dtype: str | None
    block: tuple[int, int] | None
    tiles: Mapping[str, Tile | None]

    @property
    def label(self) -> str:
        """A few words for people, such as ``FP8 32x32 E8M0``."""
        if self.kind.facts.label:
            return self.kind.facts.label
        if self.block is None:
            return self.weight_dtype
        if self.block == MXFP8_BLOCK and self.scale_dtype in E8M0_DTYPES:
            return "MXFP8" if self.scale_dtype == "F8_E8M0" else "MXFP8 (U8 scales)"
        scale = {"F8_E8M0": "E8M0", "U8": "E8M0 (U8)"}.get(self.scale_dtype or "", self.scale_dtype)
        return f"FP8 {self.block[0]}x{self.block[1]} {scale}"

    def width_block(self, role: Role) -> int:
        """Return how many elements of the expert's width share a scale: rows of gate and up, columns of down."""
        return self.block[1 if role is Role.DOWN else 0] if self.block else 1

    def shared_by(self, projections: int) -> Format:
        """Return the format of one of several projections that share its rows evenly; itself where the rows cannot be shared so."""
        rows, columns = self.shape
        return self if rows % projections else replace(self, shape=(rows // projections, columns))

    @property
    def same_storage(self) -> tuple[object, ...]:
        """The facts that must agree between projections that one kernel reads alike; all but the shape."""
        return (self.kind, self.weight_dtype, self.scale_dtype, self.block)


class FormatError(Exception):
    """A projection's headers make no format that is understood; the problem's ``where`` is the suffix at fault.

    ``sides``: for scales that fit no format, the elements per scale that their shape allows, along rows and along columns.
    """

    def __init__(self, code: str, suffix: str, message: str, hint: str = "", sides: tuple[frozenset[int], ...] = ()) -> None:
        super().__init__(message)
        self.problem = Problem(code, message, suffix, hint)
        self.sides = sides

    @property
    def lost(self) -> bool:
        """Whether something is not there: no format, however foreign, is told by that."""
        return self.problem.code in ("weight-missing", "scale-missing", "tensor-empty")


def read_format(parts: Mapping[str, TensorInfo], block_hint: tuple[int, int] | None = None) -> Format:
    """Tell the format of a projection from its tensors' dtypes and shapes.

    ``block_hint``: the config's ``weight_block_size``, which decides where the shapes alone allow several blocks.
    Raises FormatError naming the suffix at fault. Shapes: domain facts of the DeepSeek, Quark, ModelOpt and
    compressed-tensors releases.
    """
    for suffix, info in parts.items():
        if 0 in info.shape:
            raise FormatError("tensor-empty", suffix, f"{info.dtype} {list(info.shape)} has no elements", NOT_GATHERED)
    weight, scale = _weight(parts), _one(parts, SCALES)
    dtype, shape = parts[weight].dtype, parts[weight].shape
    if dtype not in WEIGHT_DTYPES:
        raise FormatError("dtype-unsupported", weight, f"weights of dtype {dtype} are not supported", SUPPORTED)
    if len(shape) != 2:
        hint = "fused 3-D experts are not supported" if len(shape) > 2 else NOT_GATHERED
        raise FormatError("weight-shape", weight, f"expected a matrix, found shape {list(shape)}", hint)
    _check_scalars(parts, weight, scale)
    if dtype in PLAIN_WEIGHTS:
        if scale is not None:
            raise FormatError(
                "scale-unexpected", scale, f"a scale beside {dtype} weights", "was the checkpoint dequantised in part?"
            )
        return _format(StorageKind.PLAIN, parts, weight)
    if scale is None:
        raise FormatError("scale-missing", weight, f"{dtype} weight without a scale", "is the checkpoint complete?")
    if dtype in FP8_WEIGHTS:
        return _fp8(parts, weight, scale, block_hint)
    return _fp4(parts, weight, scale)


def _weight(parts: Mapping[str, TensorInfo]) -> str:
    weight = _one(parts, WEIGHTS)
    if weight is not None:
        return weight
    if set(parts) <= {*WEIGHTS, *SCALES, *SCALARS}:
        raise FormatError("weight-missing", WEIGHTS[0], "no weight tensor", "is the checkpoint complete?")
    raise FormatError("format-unknown", min(parts), f"stored as {', '.join(sorted(parts))}: not understood", SUPPORTED)


def _one(parts: Mapping[str, TensorInfo], names: tuple[str, ...]) -> str | None:
    there = [n for n in names if n in parts]
    if len(there) > 1:
        raise FormatError("part-ambiguous", there[1], f"both {there[0]} and {there[1]} are there", "a projection has one of them")
    return there[0] if there else None


def _check_scalars(parts: Mapping[str, TensorInfo], weight: str, scale: str | None) -> None:
    dtype = parts[weight].dtype
    for suffix, info in parts.items():
        if suffix not in (weight, scale) and (suffix not in SCALARS or info.shape not in ((), (1,))):
            hint = "Ascend int8 and integer formats are not supported" if dtype in FP4_WEIGHTS else ""
            message = f"{info.dtype} {list(info.shape)} beside a {dtype} weight is not understood"
            raise FormatError("part-unknown", suffix, message, hint)


def _format(
    kind: StorageKind,
    parts: Mapping[str, TensorInfo],
    weight: str,
    scale: str | None = None,
    block: tuple[int, int] | None = None,
    scale_tile: tuple[int, int] | None = None,
) -> Format:
    """Put a format together. ``scale_tile``: rows and columns that an element of the scale stands for, by default the block."""
    info, facts = parts[weight], kind.facts
    (rows, columns), zero = info.shape, facts.weights[info.dtype]
    tiles: dict[str, Tile | None] = dict.fromkeys(parts)
    tiles[weight] = Tile(1, facts.packed, zero.fill, zero.nan)
    cell = scale_tile or block
    if scale and cell:
        one = facts.scales[parts[scale].dtype]
        tiles[scale] = Tile(*cell, one.fill, one.nan)
    return Format(
        kind=kind,
        shape=(rows, columns * facts.packed),
        weight=weight,
        weight_dtype=info.dtype,
        scale=scale,
        scale_dtype=parts[scale].dtype if scale else None,
        block=block,
        tiles=tiles,
    )


def _fp8(parts: Mapping[str, TensorInfo], weight: str, scale: str, hint: tuple[int, int] | None) -> Format:
    info, s = parts[weight], parts[scale]
    grid = s.shape
    if len(grid) == 4 and grid[1::2] == (1, 1):  # ModelOpt's FP8_PB_WO, always in blocks of 128
        grid, hint = grid[::2], hint or (128, 128)
    block = hint if hint and grid == _scale_shape(info, hint) else None
    if block is None and prod(grid) == 1:  # with a block in the config, a small matrix of one block has one scale too
        return _format(StorageKind.FP8_TENSOR, parts, weight, scale)
    if s.dtype not in FP8_SCALES:
        hint_text = f"supported: {', '.join(FP8_SCALES)}"
        raise FormatError("scale-dtype", scale, f"scales of dtype {s.dtype} beside FP8 weights", hint_text)
    if block is None and grid in ((info.shape[0], 1), (info.shape[0],)):
        return _format(StorageKind.FP8_CHANNEL, parts, weight, scale, scale_tile=(1, 0))
    return _format(StorageKind.FP8_BLOCK, parts, weight, scale, block or _block(info, grid, scale, hint))


def _scale_shape(info: TensorInfo, block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(ceil_div(size, side) for size, side in zip(info.shape, block, strict=True))


def _block(info: TensorInfo, grid: tuple[int, ...], scale: str, hint: tuple[int, int] | None) -> tuple[int, int]:
    """Tell the block from the shapes; where they contradict the config's, only a usual one is believed: 64x64, 1x128."""
    if len(grid) == 2:
        rows, cols = (_side(size, count) for size, count in zip(info.shape, grid, strict=True))
        if rows and cols and (hint is None or (cols in CEIL_BLOCKS and rows in (1, cols))):
            return rows, cols
    expected = f"expected {list(_scale_shape(info, hint))} of {hint[0]}x{hint[1]} blocks, " if hint else ""
    message = f"{expected}found {list(grid)} scales for an FP8 weight of {list(info.shape)}"
    hint_text = "the scale does not belong to this weight, or weight_block_size is wrong"
    raise FormatError("scale-geometry", scale, message, hint_text, _sides(info.shape, grid))


def _sides(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """Return the elements per scale that a grid of scales allows along each side; 0: all of them."""
    return tuple(frozenset(_allowed(size, count)) for size, count in zip(shape, grid, strict=False))


def _allowed(size: int, count: int) -> Iterator[int]:
    yield from (b for b in CEIL_BLOCKS if ceil_div(size, b) == count)
    if size % count == 0:
        yield size // count
    if count == 1:
        yield 0


def _side(size: int, count: int) -> int | None:
    """Tell the elements per block along one side from the number of blocks; None when no or several sizes explain it.

    Of a usual size with a partial last block and an odd one without, the usual one is meant.
    """
    exact = size // count if count and size % count == 0 else None
    fits = [b for b in CEIL_BLOCKS if ceil_div(size, b) == count]
    if exact is None or (count > 1 and exact not in (1, *CEIL_BLOCKS)):
        return fits[0] if len(fits) == 1 else exact
    return exact


def _fp4(parts: Mapping[str, TensorInfo], weight: str, scale: str) -> Format:
    info, s = parts[weight], parts[scale]
    for kind in (StorageKind.MXFP4, StorageKind.NVFP4):
        facts = kind.facts
        if facts.group and s.dtype in facts.scales and s.shape == (info.shape[0], ceil_div(2 * info.shape[1], facts.group)):
            return _format(kind, parts, weight, scale, (1, facts.group))
    message = f"{info.dtype} {list(info.shape)} with {s.dtype} {list(s.shape)} scales is neither MXFP4 nor NVFP4"
    raise FormatError("scale-geometry", scale, message, "the scale does not belong to this weight", _sides(info.shape, s.shape))
