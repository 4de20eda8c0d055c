"""Tensors as the source had them: cut, relabelled, decoded exactly, or taken from the originals in ``fse/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from fse_convert.checkpoint.header import E8M0_DTYPES, Header, TensorInfo
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import InvalidCheckpoint, Problem
from fse_convert.layout.sizes import GROUP, ceil_div
from fse_convert.restoration.reading import CHUNK, Bytes, TensorFile, unlike, without_padding
from fse_convert.sidecar.tensors import original_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """One source tensor, and what it comes back from.

    ``stored``: in the output's shard, or where ``kept`` among the originals. ``scale``: the F32 block scales of FP8 codes;
    ``groups``: the source's scales of their MXFP4 groups, among the originals; None for what does not come back from FP8 codes.
    ``stretches``: of bytes, in which a tensor was padded; 0 for others.
    """

    source: TensorInfo
    stored: TensorInfo
    kept: bool = False
    scale: TensorInfo | None = None
    groups: TensorInfo | None = None
    stretches: int = 0

    @property
    def as_is(self) -> bool:
        """Whether the output has the source's very tensor: its bytes, name and dtype."""
        s, t = self.source, self.stored
        return (s.name, s.dtype, s.shape) == (t.name, t.dtype, t.shape)

    @property
    def reads(self) -> int:
        """Bytes that are read."""
        return sum(t.nbytes for t in (self.stored, self.scale, self.groups) if t)


def recipes(source: Header, output: Shard, kept: Shard | None, renamed: Mapping[str, str], *, dropped: bool) -> list[Recipe]:
    """Find the way back of every tensor of a source shard, in its order.

    ``kept``: the originals of this shard, None where there are none; ``dropped``: whether the conversion was told to leave them
    out. ``renamed``: source names by the output's. Raises InvalidCheckpoint where an original is needed that was left out,
    VerificationFailure where there is nothing that a tensor can come back from.
    """
    stored = _Stored(output, kept, renamed)
    stored.check_order(output.name, [t.name for t in source.tensors])
    return [stored.recipe(t) or _refuse(f"{output.name}: {t.name}", dropped=dropped) for t in source.tensors]


def _refuse(where: str, *, dropped: bool) -> NoReturn:
    if dropped:
        message = "the conversion left out the originals that this needs (--drop-originals)"
        raise InvalidCheckpoint(Problem("originals-dropped", message, where, "keep the source, or convert it again"))
    raise unlike("tensor-missing", where, "nothing in the output or its fse/ has the form that this tensor comes back from")


class _Stored:
    """What the tensors of one source shard can come back from: the output's and the originals, both by the source's names."""

    def __init__(self, output: Shard, kept: Shard | None, renamed: Mapping[str, str]) -> None:
        self.tensors = {renamed.get(t.name, t.name): t for t in output.header.tensors}
        self.originals = {t.name.removeprefix(original_name("")): t for t in kept.header.tensors} if kept else {}
        self.scales = {name.rpartition(".")[0]: name for name in self.originals}

    def check_order(self, where: str, names: Sequence[str]) -> None:
        """Refuse tensors that do not lie in the order of the source's, in which they were written. Raises VerificationFailure."""
        known = set(names)
        for found in (self.tensors, self.originals):
            if [name for name in found if name in known] != [name for name in names if name in found]:
                raise unlike("tensor-order", where, "its tensors lie in another order than the original's: names were swapped")

    def recipe(self, t: TensorInfo) -> Recipe | None:
        """Return the way back of a source tensor, None where there is none."""
        original, out = self.originals.get(t.name), self.tensors.get(t.name)
        if original:
            same = (original.dtype, original.shape) == (t.dtype, t.shape)
            return Recipe(source=t, stored=original, kept=True) if same else None
        if out is None:
            return None
        of_scales = out.dtype == "F32" and t.dtype in E8M0_DTYPES
        if out.shape == t.shape and (out.nbytes == t.nbytes or of_scales):
            return Recipe(source=t, stored=out)
        return self._of_codes(t, out)

    def _of_codes(self, t: TensorInfo, out: TensorInfo) -> Recipe | None:
        """Return the way back from FP8 codes, for which their scales must be in the output and among the originals."""
        name = self.scales.get(t.name.rpartition(".")[0], "")
        groups, scale = self.originals.get(name), self.tensors.get(name)
        if groups is None or scale is None or (out.dtype, scale.dtype) != ("F8_E4M3", "F32") or groups.dtype not in E8M0_DTYPES:
            return None
        n, k = out.shape if len(out.shape) == 2 else (0, 0)
        packed = k % GROUP == 0 and 2 * t.nbytes == out.nbytes and (t.shape, groups.shape) == ((n, k // 2), (n, k // GROUP))
        if not packed or len(scale.shape) != 2 or not all(map(_block, out.shape, scale.shape)):
            return None
        return Recipe(source=t, stored=out, scale=scale, groups=groups)


def restored(recipe: Recipe, output: TensorFile, kept: TensorFile | None) -> Iterator[Bytes]:
    """Yield the bytes of one source tensor, in file order. Raises VerificationFailure for what no source can have become."""
    if recipe.stretches:
        yield from without_padding(output, recipe.stored, recipe.source.shape, recipe.stretches)
    elif recipe.kept and kept:
        yield from kept.pieces(recipe.stored)
    elif recipe.scale and recipe.groups and kept:
        yield from _codes(recipe.stored, _exponents(recipe.scale, output), kept.whole(recipe.groups), output)
    elif recipe.stored.nbytes != recipe.source.nbytes:
        yield _bytes(_exponents(recipe.stored, output))
    else:
        yield from output.pieces(recipe.stored)


def _exponents(scale: TensorInfo, output: TensorFile) -> Tensor:
    """Return the E8M0 bytes of F32 scales, in their shape."""
    import torch

    from fse_convert.layout.ue8m0 import from_fp32

    try:
        return from_fp32(torch.frombuffer(output.whole(scale), dtype=torch.float32).view(scale.shape))
    except ValueError as e:
        raise _damaged(scale, output, str(e)) from e


def _codes(weight: TensorInfo, scale: Tensor, groups: memoryview, output: TensorFile) -> Iterator[Bytes]:
    """Yield the MXFP4 codes of FP8 ``[n, k]``, in bands of whole blocks; coded again they would give the same bytes."""
    import torch

    from fse_convert.layout.mxfp4 import Unencodable
    from fse_convert.layout.mxfp4_to_fp8 import block_scales, to_mxfp4

    n, k = weight.shape
    rows, columns = map(_block, weight.shape, scale.shape)
    sf_ng = torch.frombuffer(groups, dtype=torch.uint8).view(n, -1)
    step = max(1, CHUNK // (rows * k)) * rows
    bands = [(first, min(step, n - first)) for first in range(0, n, step)]
    for (first, count), piece in zip(bands, output.read(weight, (count * k for _, count in bands)), strict=True):
        codes_nk = torch.frombuffer(piece, dtype=torch.uint8).view(count, k)
        tiles, groups_ng = scale[first // rows : ceil_div(first + count, rows)], sf_ng[first : first + count]
        try:
            w_np = to_mxfp4(codes_nk, tiles, groups_ng, (rows, columns))
            exact = block_scales(w_np, groups_ng, (rows, columns)).equal(tiles)
        except ValueError as e:
            raise _damaged(weight, output, e.sentence(first) if isinstance(e, Unencodable) else str(e)) from e
        if not exact:
            raise _damaged(weight, output, f"blocks of rows {first} to {first + count - 1} would have other scales")
        yield _bytes(w_np)


def _bytes(x: Tensor) -> bytearray:
    """Return the bytes of a uint8 tensor, without numpy."""
    import torch

    out = bytearray(x.numel())
    torch.frombuffer(out, dtype=torch.uint8).copy_(x.flatten())
    return out


def _block(size: int, tiles: int) -> int:
    """Return the power of two that cuts a size into so many tiles, the least where one tile has all; 0 where none does."""
    return next((b for b in (1 << i for i in range(size.bit_length() + 1)) if ceil_div(size, b) == tiles), 0)


def _damaged(t: TensorInfo, output: TensorFile, message: str) -> Exception:
    return unlike("tensor-damaged", f"{output.shard.name}: {t.name}", f"no source can have become it: {message}")
