"""A fused expert one element at a time, in integers and fractions: it shares nothing with the code under test."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tests.verification.source_layout import SourceLayout


def e4m3(code: int) -> Fraction:
    sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 3) & 15, code & 7
    assert code & 0x7F != 0x7F
    return sign * (
        Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )


POSITIVE = [e4m3(code) for code in range(0x7F)]


def to_e4m3(value: Fraction) -> int:
    """Nearest code, ties to the even one, saturating."""
    magnitude = min(abs(value), Fraction(448))
    code = min(range(0x7F), key=lambda c: (abs(POSITIVE[c] - magnitude), c & 1))
    return code | (0x80 if value < 0 else 0)


def fp32(value: float | Fraction) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16(value: float) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def ceil_log2(value: Fraction) -> int:
    exponent = -200
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def oracle_groups(row: list[float], exponent_of: Callable[[Fraction], int]) -> list[tuple[int, int]]:
    """(code, scale byte) of each element of a row."""
    out = []
    for g in range(0, len(row), 32):
        group = [Fraction(v) for v in row[g : g + 32]]
        exponent = exponent_of(max(abs(v) for v in group))
        out += [(to_e4m3(v / Fraction(2) ** exponent), exponent + 127) for v in group]
    return out


def oracle_dot(x: list[tuple[int, int]], codes: list[int], scale_bytes: list[int]) -> float:
    exact = sum(
        (e4m3(c) * e4m3(w) * Fraction(2) ** (s + b - 254) for (c, s), w, b in zip(x, codes, scale_bytes, strict=True)),
        Fraction(0),
    )
    return float(exact)


def oracle_weight(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    return [
        (codes[r].tolist(), [int(scale[r // block[0], k // block[1]]) for k in range(codes.shape[1])])
        for r in range(codes.shape[0])
    ]


def oracle_expert(x: Tensor, s: SourceLayout, limit: float | None) -> tuple[list[list[float]], list[list[int]]]:
    """Outputs as BF16 values and requantised codes."""
    gate, up, down = (
        oracle_weight(w, sf, s.block) for w, sf in ((s.gate, s.gate_scale), (s.up, s.up_scale), (s.down, s.down_scale))
    )
    inverse = Fraction(fp32(1 / 448))
    outputs, all_codes = [], []
    for row in x.float().tolist():
        xq = oracle_groups(row, lambda amax: ceil_log2(max(amax, Fraction(fp32(1e-4))) / 448))
        v = []
        for w1, w3 in zip(gate, up, strict=True):
            g, u = bf16(fp32(oracle_dot(xq, *w1))), bf16(fp32(oracle_dot(xq, *w3)))
            if limit is not None:
                c = bf16(fp32(limit))
                g, u = min(g, c), max(min(u, c), -c)
            sigmoid = fp32(1 / fp32(1 + fp32(math.exp(-g))))
            v.append(fp32(fp32(g * sigmoid) * u))
        q = oracle_groups(v, lambda amax: ceil_log2(Fraction(fp32(amax * inverse))) if amax else -127)
        all_codes.append([code for code, _ in q])
        outputs.append([bf16(fp32(oracle_dot(q, *w))) for w in down])
    return outputs, all_codes
