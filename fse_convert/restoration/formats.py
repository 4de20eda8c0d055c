"""Tensors in the format that they had in the source: relabelled, decoded exactly, or taken from the originals in ``fse/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fse_convert.checkpoint.header import Header, TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.sizes import ceil_div
from fse_convert.restoration.tensors import CHUNK, Bytes, TensorFile, unlike
from fse_convert.sidecar.tensors import original_name

if TYPE_CHECKING:
    from torch import Tensor

E8M0_DTYPES = ("F8_E8M0", "U8")
WEIGHT = ".weight"


class Way(str, Enum):
    """How a source tensor comes back: as it is stored, as exponents of F32 scales, or as MXFP4 codes of FP8 ones."""

    AS_IS = "as it is"
    EXPONENTS = "exponents"
    CODES = "codes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One source tensor, and what it comes back from.

    ``stored``: in the output's shard, or where ``kept`` among the originals. ``scale``: the F32 block scales of FP8 codes;
    ``groups``: the source's scales of their MXFP4 groups, among the originals.
    """

    source: TensorInfo
    stored: TensorInfo
    kept: bool = False
    way: Way = Way.AS_IS
    scale: TensorInfo | None = None
    groups: TensorInfo | None = None

    @property
    def reads(self) -> int:
        """Bytes that are read."""
        return sum(t.nbytes for t in (self.stored, self.scale, self.groups) if t)


def recipes(source: Header, output: Shard, kept: Shard | None, renamed: Mapping[str, str]) -> list[Recipe]:
    """Find the way back of every tensor of a source shard, in its order.

    ``kept``: the originals of this shard, None where there are none. ``renamed``: source names by the output's. Raises
    InvalidCheckpoint where an original is needed that the conversion was told to leave out, VerificationFailure where a tensor is
    not there.
    """
    originals = {t.name: t for t in kept.header.tensors} if kept else {}
    stored = {renamed.get(t.name, t.name): t for t in output.header.tensors}
    return [_recipe(t, stored, originals, output.name) for t in source.tensors]


def _recipe(t: TensorInfo, stored: Mapping[str, TensorInfo], originals: Mapping[str, TensorInfo], shard: str) -> Recipe:
    original, out = originals.get(original_name(t.name)), stored.get(t.name)
    if original:
        return Recipe(source=t, stored=original, kept=True)
    if out is None:
        raise unlike("tensor-missing", f"{shard}: {t.name}", "the output has no tensor that it comes from")
    if (out.nbytes, out.shape) == (t.nbytes, t.shape):
        return Recipe(source=t, stored=out)
    if out.dtype == "F32" and t.dtype in E8M0_DTYPES and out.shape == t.shape:
        return Recipe(source=t, stored=out, way=Way.EXPONENTS)
    if out.dtype == "F8_E4M3" and out.shape[-1] == 2 * t.shape[-1]:
        scale = next((s for s in stored if s.startswith(t.name.removesuffix(WEIGHT) + ".") and s != t.name), "")
        groups = originals.get(original_name(scale))
        if groups:
            return Recipe(source=t, stored=out, way=Way.CODES, scale=stored[scale], groups=groups)
    message = "the conversion left out the originals that this needs (--drop-originals)"
    raise InvalidCheckpoint(Problem("originals-dropped", message, f"{shard}: {t.name}", "keep the source, or convert it again"))


def restored(recipe: Recipe, output: TensorFile, kept: TensorFile | None) -> Iterator[Bytes]:
    """Yield the bytes of one source tensor, in file order. Raises VerificationFailure for what no source can have become."""
    if recipe.kept and kept:
        yield from kept.pieces(recipe.stored)
    elif recipe.way is Way.EXPONENTS:
        yield from _exponents(recipe, output)
    elif recipe.way is Way.CODES and kept:
        yield from _codes(recipe, output, kept)
    else:
        yield from output.pieces(recipe.stored)


def _exponents(recipe: Recipe, output: TensorFile) -> Iterator[Bytes]:
    """Yield E8M0 bytes of F32 scales."""
    import torch

    from fse_convert.layout.ue8m0 import from_fp32

    for piece in output.pieces(recipe.stored):
        try:
            yield _bytes(from_fp32(torch.frombuffer(piece, dtype=torch.float32)))
        except ValueError as e:
            raise _damaged(recipe, output, e) from e


def _codes(recipe: Recipe, output: TensorFile, kept: TensorFile) -> Iterator[Bytes]:
    """Yield MXFP4 codes of FP8 ones, in bands of whole blocks."""
    import torch

    from fse_convert.layout.mxfp4_to_fp8 import to_mxfp4
    from fse_convert.layout.ue8m0 import from_fp32

    if recipe.scale is None or recipe.groups is None:
        raise TypeError(recipe)
    (n, k), (tiles, _) = recipe.stored.shape, recipe.scale.shape
    block = tuple(_block(*sizes) for sizes in zip((n, k), recipe.scale.shape, strict=True))
    scale = torch.frombuffer(output.whole(recipe.scale), dtype=torch.float32).view(tiles, -1)
    groups = torch.frombuffer(kept.whole(recipe.groups), dtype=torch.uint8).view(n, -1)
    step = max(1, CHUNK // (block[0] * k)) * block[0]
    bands = [(first, min(step, n - first)) for first in range(0, n, step)]
    for (first, rows), piece in zip(bands, output.read(recipe.stored, (rows * k for _, rows in bands)), strict=True):
        codes = torch.frombuffer(piece, dtype=torch.uint8).view(rows, k)
        of = slice(first // block[0], ceil_div(first + rows, block[0]))
        try:
            packed = to_mxfp4(codes, from_fp32(scale[of]), groups[first : first + rows], (block[0], block[1]))
        except ValueError as e:
            raise _damaged(recipe, output, e) from e
        yield _bytes(packed)


def _bytes(x: Tensor) -> bytearray:
    """Return the bytes of a uint8 tensor, without numpy."""
    import torch

    out = bytearray(x.numel())
    torch.frombuffer(out, dtype=torch.uint8).copy_(x.flatten())
    return out


def _block(size: int, tiles: int) -> int:
    """Return the power of two that cuts a size into so many tiles; where one tile has all, any that is no smaller."""
    return next(b for b in (1 << i for i in range(size.bit_length() + 1)) if ceil_div(size, b) <= tiles)


def _damaged(recipe: Recipe, output: TensorFile, error: ValueError) -> Exception:
    return unlike("tensor-damaged", f"{output.shard.name}: {recipe.stored.name}", f"no source can have become it: {error}")
