"""How one projection is stored, read from its headers alone: FP8 with block scales, packed MXFP4, NVFP4, plain floats.

A format says how each of its tensors tiles the logical ``[N, K]`` matrix, so that padding needs no case per format: a
stored row stands for ``Tile.rows`` logical rows, a stored column for ``Tile.cols`` logical columns, and new elements
are ``Tile.fill``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.layout.sizes import ceil_div

WEIGHTS = ("weight", "weight_packed")
SCALES = ("scale", "weight_scale", "weight_scale_inv")
SCALARS = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
"""Per-tensor factors: one number per projection, which padding leaves alone."""
E8M0_DTYPES = ("F8_E8M0", "U8")
"""How UE8M0 scales are stored: under their own dtype, or as bytes (Quark, ModelOpt)."""
MXFP4_GROUP = 32
NVFP4_GROUP = 16
CEIL_BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes considered when a scale's shape has a partial last block and the config names no block."""


class Kind(str, Enum):
    """Storage formats that the converter understands."""

    FP8_BLOCK = "fp8-block"
    FP8_CHANNEL = "fp8-channel"
    FP8_TENSOR = "fp8-tensor"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    PLAIN = "plain"


class NaN(str, Enum):
    """Which codes of an element are NaN."""

    E4M3 = "e4m3"
    E8M0 = "e8m0"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


@dataclass(frozen=True, slots=True)
class Tile:
    """How a stored tensor tiles ``[N, K]``: logical rows and columns per element, the element that pads it (bytes), its NaN codes.

    ``cols`` 0: one column whatever K is.
    """

    rows: int
    cols: int
    fill: bytes
    nan: NaN | None


@dataclass(frozen=True, slots=True)
class Format:
    """One projection's storage.

    ``shape`` is the logical ``[N, K]``, ``block`` the rows and columns that share a scale, ``tiles`` has one entry per
    tensor (None: a scalar).
    """

    kind: Kind
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
        if self.kind is Kind.PLAIN:
            return self.weight_dtype
        if self.kind is Kind.FP8_BLOCK and self.block:
            scale = {"F8_E8M0": "E8M0", "U8": "E8M0 (U8)"}.get(self.scale_dtype or "", self.scale_dtype)
            if self.block == (1, MXFP4_GROUP) and self.scale_dtype in E8M0_DTYPES:
                return "MXFP8" if self.scale_dtype == "F8_E8M0" else "MXFP8 (U8 scales)"
            return f"FP8 {self.block[0]}x{self.block[1]} {scale}"
        return {
            Kind.MXFP4: "MXFP4",
            Kind.NVFP4: "NVFP4",
            Kind.FP8_CHANNEL: "FP8 per channel",
            Kind.FP8_TENSOR: "FP8 per tensor",
        }[self.kind]

    @property
    def same_storage(self) -> tuple[object, ...]:
        """What must agree between projections that one kernel reads alike; all but the shape."""
        return (self.kind, self.weight_dtype, self.scale_dtype, self.block)


class FormatError(Exception):
    """A projection's headers make no format that is understood: a stable code, the suffix at fault, a message and a hint."""

    def __init__(self, code: str, suffix: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.suffix, self.message, self.hint = code, suffix, message, hint


PLAIN_NAN = {"BF16": NaN.BF16, "F16": NaN.F16, "F32": NaN.F32}
SCALE_FILL = {
    "F8_E8M0": (b"\x7f", NaN.E8M0),
    "U8": (b"\x7f", NaN.E8M0),
    "F32": (struct.pack("<f", 1.0), NaN.F32),
    "BF16": (b"\x80\x3f", NaN.BF16),
}
"""The code of 1.0 in each dtype that scales come in, and its NaN codes."""


def read_format(parts: Mapping[str, TensorInfo], block_hint: tuple[int, int] | None = None) -> Format:
    """Tell the format of a projection from its tensors' dtypes and shapes.

    ``block_hint``: the config's ``weight_block_size``, which decides where the shapes alone allow several blocks.
    Raises FormatError naming the suffix at fault. Shapes: domain facts of the DeepSeek, Quark, ModelOpt and
    compressed-tensors releases.
    """
    weight = _one(parts, WEIGHTS, "weight")
    scale = _one(parts, SCALES, "scale", required=False)
    info = parts[weight]
    if info.dtype not in ("F8_E4M3", "I8", "U8", *PLAIN_NAN):
        raise FormatError("dtype-unsupported", weight, f"weights of dtype {info.dtype} are not supported", SUPPORTED)
    if len(info.shape) != 2 or 0 in info.shape:
        raise FormatError(
            "weight-shape",
            weight,
            f"expected a matrix, found shape {list(info.shape)}",
            "fused 3-D experts are not supported",
        )
    scalars = _scalars(parts, weight, scale, info.dtype)
    if info.dtype in PLAIN_NAN:
        return _plain(info, weight, scale, scalars)
    if scale is None:
        raise FormatError("scale-missing", weight, f"{info.dtype} weight without a scale", "is the checkpoint complete?")
    if info.dtype == "F8_E4M3":
        return _fp8(info, weight, scale, parts[scale], scalars, block_hint)
    return _fp4(info, weight, scale, parts[scale], scalars)


SUPPORTED = "supported: FP8 (F8_E4M3), packed MXFP4 and NVFP4 (I8, U8), BF16, F16, F32"


def _one(parts: Mapping[str, TensorInfo], names: tuple[str, ...], what: str, *, required: bool = True) -> str:
    found = [n for n in names if n in parts]
    if len(found) > 1:
        raise FormatError("part-ambiguous", found[1], f"both {found[0]} and {found[1]} are there", "a projection has one of them")
    if not found and required:
        if set(parts) <= {*WEIGHTS, *SCALES, *SCALARS}:
            raise FormatError(f"{what}-missing", names[0], f"no {what} tensor", "is the checkpoint complete?")
        raise FormatError("format-unknown", min(parts), f"stored as {', '.join(sorted(parts))}: not understood", SUPPORTED)
    return found[0] if found else None  # type: ignore[return-value]


def _scalars(parts: Mapping[str, TensorInfo], weight: str, scale: str | None, dtype: str) -> dict[str, Tile | None]:
    for suffix, info in parts.items():
        if suffix in (weight, scale):
            continue
        if suffix not in SCALARS or info.shape not in ((), (1,)):
            hint = "Ascend int8 and integer formats are not supported" if dtype in ("I8", "U8") else ""
            raise FormatError(
                "part-unknown",
                suffix,
                f"{info.dtype} {list(info.shape)} beside a {dtype} weight is not understood",
                hint,
            )
    return {s: None for s in parts if s not in (weight, scale)}


def _plain(info: TensorInfo, weight: str, scale: str | None, scalars: dict[str, Tile | None]) -> Format:
    if scale is not None:
        raise FormatError(
            "scale-unexpected", scale, f"a scale beside {info.dtype} weights", "was the checkpoint dequantised in part?"
        )
    fill = bytes(2 if info.dtype != "F32" else 4)
    tiles: dict[str, Tile | None] = {weight: Tile(1, 1, fill, PLAIN_NAN[info.dtype]), **scalars}
    return Format(Kind.PLAIN, _matrix(info), weight, info.dtype, None, None, None, tiles)


def _fp8(
    info: TensorInfo,
    weight: str,
    scale: str,
    s: TensorInfo,
    scalars: dict[str, Tile | None],
    hint: tuple[int, int] | None,
) -> Format:
    n, k = _matrix(info)
    tiles: dict[str, Tile | None] = {weight: Tile(1, 1, b"\0", NaN.E4M3), **scalars}
    one = prod(s.shape) == 1 and not (hint and _explains(hint, info, s))  # one block of a small matrix has one scale too
    if one:
        return Format(Kind.FP8_TENSOR, (n, k), weight, info.dtype, scale, s.dtype, None, {**tiles, scale: None})
    if s.dtype not in SCALE_FILL:
        raise FormatError(
            "scale-dtype", scale, f"scales of dtype {s.dtype} beside FP8 weights", f"supported: {', '.join(SCALE_FILL)}"
        )
    fill, nan = SCALE_FILL[s.dtype]
    block = hint if hint and _explains(hint, info, s) else None
    if block is None and s.shape in ((n, 1), (n,)):
        return Format(Kind.FP8_CHANNEL, (n, k), weight, info.dtype, scale, s.dtype, None, {**tiles, scale: Tile(1, 0, fill, nan)})
    if block is None:
        block = _block(info, s, scale, hint)
    tiles[scale] = Tile(*block, fill, nan)
    return Format(Kind.FP8_BLOCK, (n, k), weight, info.dtype, scale, s.dtype, block, tiles)


def _explains(block: tuple[int, int], info: TensorInfo, s: TensorInfo) -> bool:
    return s.shape == (ceil_div(info.shape[0], block[0]), ceil_div(info.shape[1], block[1]))


def _block(info: TensorInfo, s: TensorInfo, scale: str, hint: tuple[int, int] | None) -> tuple[int, int]:
    """Tell the block from the shapes; where they contradict the config's, only a usual one is believed: 64x64, 1x128."""
    if len(s.shape) == 2:
        rows, cols = (_side(size, count) for size, count in zip(info.shape, s.shape, strict=True))
        if rows and cols and (hint is None or (cols in CEIL_BLOCKS and rows in (1, cols))):
            return rows, cols
    expected = (
        f"expected {[ceil_div(d, b) for d, b in zip(info.shape, hint, strict=True)]} of {hint[0]}x{hint[1]} blocks, "
        if hint
        else ""
    )
    message = f"{expected}found {list(s.shape)} scales for a weight of {list(info.shape)}"
    raise FormatError("scale-geometry", scale, message, "the scale does not belong to this weight, or weight_block_size is wrong")


def _side(size: int, count: int) -> int | None:
    """Elements per block along one side, from the number of blocks; None when no or several sizes explain it.

    Of a usual size with a partial last block and an odd one without, the usual one is meant.
    """
    exact = size // count if count and size % count == 0 else None
    fits = [b for b in CEIL_BLOCKS if ceil_div(size, b) == count]
    if exact is None or (count > 1 and exact not in (1, *CEIL_BLOCKS)):
        return fits[0] if len(fits) == 1 else exact
    return exact


def _fp4(info: TensorInfo, weight: str, scale: str, s: TensorInfo, scalars: dict[str, Tile | None]) -> Format:
    n, k = info.shape[0], 2 * info.shape[1]
    packed = Tile(1, 2, b"\0", None)
    if s.dtype in ("F8_E8M0", "U8") and s.shape == (n, ceil_div(k, MXFP4_GROUP)):
        tile = Tile(1, MXFP4_GROUP, b"\x7f", NaN.E8M0)
        return Format(
            Kind.MXFP4,
            (n, k),
            weight,
            info.dtype,
            scale,
            s.dtype,
            (1, MXFP4_GROUP),
            {weight: packed, scale: tile, **scalars},
        )
    if s.dtype == "F8_E4M3" and s.shape == (n, ceil_div(k, NVFP4_GROUP)):
        tile = Tile(1, NVFP4_GROUP, b"\x38", NaN.E4M3)
        return Format(
            Kind.NVFP4,
            (n, k),
            weight,
            info.dtype,
            scale,
            s.dtype,
            (1, NVFP4_GROUP),
            {weight: packed, scale: tile, **scalars},
        )
    message = f"{info.dtype} {list(info.shape)} with {s.dtype} {list(s.shape)} scales is neither MXFP4 nor NVFP4"
    raise FormatError("scale-geometry", scale, message, "8-bit integers are not packed FP4: integer formats are not supported")


def _matrix(info: TensorInfo) -> tuple[int, int]:
    return info.shape[0], info.shape[1]
