"""Bytes of tensors in another format, worked out from the source's values, by other ways than the writer's.

`Rule.FP8`: MXFP4 values are decoded to float32, divided by their tile's power of two, and cast by torch. The cast is exact, and
E4M3 has one code for every value and for either zero: equal bytes are equal values and equal signs of zeros. Which power of two a
tile must have is tried on values where exponents alone do not decide it, so that scales have one right answer too.
`Rule.MXFP4`: the definition in float64. `Rule.F32`: powers of two. The writer has tables, and works on the bits of integers.

Names carry shapes: ``n`` rows, ``k`` columns, ``p`` bytes of two MXFP4 codes, ``g`` groups of 32 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.plan.tensors import Recoded, Rule
from fse_convert.verification.addresses import GROUP
from fse_convert.verification.compare import CHUNK, Memory, Rows, SourceTensors, Undefined
from fse_convert.verification.decode import FLOATS, Matrix, decode_codes, decode_mxfp4, decode_scales

NAN = 0xFF
"""E8M0's only code that is no number."""
BIAS = 127
LEAST = 1
"""The least scale byte: 2**-127 is subnormal in F32, and servers take it for zero."""
HEADROOM = 6
"""MXFP4's greatest value times 2**6 is 384, below E4M3's greatest, 448."""
SPAN = 14
"""Exponents that groups of a tile may lie apart whatever their codes: 0.5 * 2**(6 - 14) is E4M3's least value, 2**-9."""
BEYOND = 100
"""A power of two with which no MXFP4 value but zero becomes an E4M3 value."""
MAGNITUDES = 0x7777777777777777
"""The bits of sixteen MXFP4 codes without their signs."""


class TileScales:
    """Scale bytes of the tiles of one matrix after the other; the last are kept: its weight and its scale are two tensors."""

    def __init__(self, source: SourceTensors) -> None:
        self.source = source
        self.last: tuple[TensorInfo, Tensor] | None = None

    def of(self, change: Recoded) -> Tensor:
        """Return the E8M0 bytes that the tiles of a matrix must have: uint8 ``[ceil(n / b), ceil(k / b')]``.

        DeepSeek's rule, or where that is not exact the least power of two that holds the tile's greatest value. Raises Undefined.
        """
        weight = change.sources[0]
        if self.last is None or self.last[0] != weight:
            (n, k), (rows, columns) = change.shape, change.block or (1, GROUP)
            step, memory = max(1, CHUNK // (rows * k)) * rows, Memory()
            bands = []
            for start in range(0, n, step):
                w_np, sf_ng = _packed(change, self.source, start, min(n, start + step), memory)
                bands.append(_tile_scales(w_np, sf_ng, (rows, columns)))
            self.last = weight, torch.cat(bands)
        return self.last[1]


def _packed(change: Recoded, source: SourceTensors, start: int, stop: int, memory: Memory) -> tuple[Tensor, Tensor]:
    """Read rows of MXFP4 codes and of their groups' scales: uint8 ``[n, p]`` and ``[n, g]``."""
    weight, scale = change.sources
    return source.rows(weight, start, stop, memory, "weight"), source.rows(scale, start, stop, memory, "scale")


def _tile_scales(w_np: Tensor, sf_ng: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the scale bytes of a band of whole tiles: exponents decide where groups lie close, else values are tried."""
    if bool((sf_ng == NAN).any()):
        raise Undefined("a group's scale is a NaN (0xFF)")
    e_ng = sf_ng.to(torch.int16)
    live_ng = (w_np.view(torch.int64).view(*sf_ng.shape, -1) & MAGNITUDES).ne(0).any(2)
    top, low = _tile_max(e_ng.where(live_ng, -1), block), -_tile_max((-e_ng).where(live_ng, -NAN), block)
    if bool((top < 0).any()):  # a tile of zeros: any scale would do, so it is the one of its greatest exponent
        top = torch.where(top < 0, _tile_max(e_ng, block), top)
    t = (top - HEADROOM).clamp(min=LEAST).to(torch.uint8)
    rows, groups = block[0], block[1] // GROUP
    for i, j in (top - low > SPAN).nonzero().tolist():
        tile = slice(i * rows, (i + 1) * rows), slice(j * groups, (j + 1) * groups)
        codes = w_np.view(*sf_ng.shape, -1)[tile].flatten(0, 1)
        values = decode_mxfp4(codes).double() * decode_scales(sf_ng[tile].flatten())[:, None]
        t[i, j] = _exact_scale(values, int(t[i, j]))
    return t


def _tile_max(x_ng: Tensor, block: tuple[int, int]) -> Tensor:
    rows, groups = block[0], block[1] // GROUP
    n, g = x_ng.shape
    whole = pad(x_ng, (0, -g % groups, 0, -n % rows), value=-NAN)
    return whole.view(-1, rows, whole.shape[1] // groups, groups).amax((1, 3))


def _exact_scale(values: Tensor, preferred: int) -> int:
    """Return the scale byte under which E4M3 holds float64 values: ``preferred``, else the least without overflow."""
    mantissa, exponent = torch.frexp(values.abs().max())
    least = max(LEAST, int(exponent) - 9 + int(mantissa > 0.875) + BIAS)  # 448 is 0.875 * 2**9
    for byte in (preferred, least):
        scaled = values * 2.0 ** (BIAS - byte)
        if torch.equal(decode_codes(scaled.to(torch.float8_e4m3fn).view(torch.uint8)), scaled):
            return byte
    raise Undefined("no power of two makes every value of a tile exact in E4M3")


def recoded_rows(change: Recoded, source: SourceTensors, tiles: TileScales) -> Rows:
    """Describe a tensor of the output that is coded in another format."""
    if change.rule is Rule.F32:
        return _f32_scales(change, source)
    if change.rule is Rule.MXFP4:
        return _mxfp4(change, source)
    return _fp8_scales(change, tiles) if change.is_scale else _fp8(change, source, tiles)


def _fp8(change: Recoded, source: SourceTensors, tiles: TileScales) -> Rows:
    (n, k), (rows, columns) = change.shape, change.block or (1, GROUP)
    column = torch.arange(0, k, GROUP) // columns

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        w_np, sf_ng = _packed(change, source, first, first + count, memory)
        row = torch.arange(first, first + count) // rows
        shift_ng = (sf_ng.int() - tiles.of(change)[row[:, None], column].int()).clamp(-BEYOND, BEYOND)
        factor_ng = (shift_ng + BIAS << 23).view(torch.float32)
        values = decode_mxfp4(w_np).view(count, -1, GROUP).mul_(factor_ng[:, :, None])
        out = memory.take("expected", count * k)
        torch.frombuffer(out, dtype=torch.float8_e4m3fn).view(values.shape).copy_(values)
        return out

    return Rows(n, k, expected, multiple=rows)


def _fp8_scales(change: Recoded, tiles: TileScales) -> Rows:
    (n, k), (rows, columns) = change.shape, change.block or (1, GROUP)

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        return _bytes(decode_scales(tiles.of(change)[first : first + count]).float(), memory)

    return Rows(-(-n // rows), -(-k // columns) * 4, expected)


def _f32_scales(change: Recoded, source: SourceTensors) -> Rows:
    (scale,) = change.sources

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        stored = source.rows(scale, first, first + count, memory, "source")
        if bool(((stored == NAN) | (stored < LEAST)).any()):
            raise Undefined("a scale is a NaN (0xFF), or 2**-127, which servers take for zero in F32")
        return _bytes(decode_scales(stored).float(), memory)

    return Rows(scale.shape[0], scale.nbytes // scale.shape[0] * 4, expected)


def _mxfp4(change: Recoded, source: SourceTensors) -> Rows:
    if change.weight is None:
        raise ValueError("a matrix is coded from a weight")
    matrix, (n, k) = Matrix(change.weight, change.scale, change.shape, change.block, source), change.shape
    fine = change.sources[-1].dtype == "F32" or (change.scale is not None and change.scale.dtype in FLOATS)
    dtype = torch.float64 if fine else torch.float32

    def expected(first: int, count: int, memory: Memory) -> memoryview:
        values = matrix.values(first, first + count, dtype)
        scales = mxfp4_scales(values)
        return _bytes(scales if change.is_scale else mxfp4_codes(values, scales), memory)

    return Rows(n, k // (GROUP if change.is_scale else 2), expected, work=8 * k)


def mxfp4_scales(values: Tensor) -> Tensor:
    """Return the E8M0 bytes of values ``[n, k]`` as MXFP4, by the definition: uint8 ``[n, k / 32]``.

    Per group of 32: ``floor(log2(amax)) - 2``, one more where amax's mantissa is 1.75 or above, within [-127, 127]; -127 for zeros.
    Raises Undefined for what is not finite. Rule: vLLM 0.33 model_executor/layers/quantization/utils/mxfp4_utils.py.
    """
    mantissa, exponent = torch.frexp(values.view(values.shape[0], -1, GROUP).abs().amax(2))  # mantissa in [0.5, 1)
    if not bool(mantissa.isfinite().all()):
        raise Undefined("a value is NaN or infinite")
    byte = (exponent - 3 + (mantissa >= 0.875).int() + BIAS).clamp(0, NAN - 1)
    return byte.masked_fill(mantissa == 0, 0).to(torch.uint8)


def mxfp4_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest MXFP4 codes of values ``[n, k]`` under their groups' own scales: uint8 ``[n, k / 2]``.

    ``values``: float64, or float32 of fewer than 20 bits, which leave room for the sums. Codes are 0.5 apart below a magnitude of
    2, 1 below 4, and 2 above, so that 2 x, x + 2 and x / 2 + 4 count them: the least of the three does everywhere, and its ties
    go to the even code. The rule of the scales leaves no magnitude of 7 or more.
    """
    factors = decode_scales(NAN - 1 - scales).to(values.dtype)
    x = values.view(values.shape[0], -1, GROUP).abs().mul_(factors[:, :, None])
    count = torch.minimum(2 * x, x + 2)
    codes = torch.minimum(count, x.mul_(0.5).add_(4), out=count).round_().to(torch.int8)  # from floats four times as fast as uint8
    signs = (values.float().view(torch.int32) >> 28).to(torch.int8).bitwise_and_(8)
    pairs = codes.view(values.shape).bitwise_or_(signs).view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def _bytes(tensor: Tensor, memory: Memory) -> memoryview:
    raw = tensor.contiguous().view(torch.uint8).flatten()
    out = memory.take("expected", raw.numel())
    torch.frombuffer(out, dtype=torch.uint8).copy_(raw)
    return out
