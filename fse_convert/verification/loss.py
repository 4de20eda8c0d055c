"""What rounding costs: the error of every matrix that lost precision, and of what its expert computes; measured, never passed.

Figures are rounded to four significant digits, so that they are the same on every machine, whatever order its libraries add in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fse_convert.model.moe import Role
from fse_convert.verification.addresses import GROUP
from fse_convert.verification.decode import E2M1, Matrix
from fse_convert.verification.experts import Sides
from fse_convert.verification.numerics import exact_expert, relative_l2

DIGITS = 4
STEP = 1 << 20
"""Elements of a matrix that are compared at once."""
GATES: Mapping[str, tuple[float, float]] = {
    "relative_l2": (0.0, 0.14),
    "norm_ratio": (0.97, 1.02),
    "projection": (0.97, math.inf),
    "saturated": (0.0, 0.02),
}
"""Least and greatest figure that ordinary weights have: normal, Laplace and Student-t ones in BF16 and FP8 were measured."""


class MatrixLoss(NamedTuple):
    """How a rounded matrix ``q`` differs from its source ``v``.

    ``relative_l2``: ``|q - v| / |v|``. ``norm_ratio``: ``|q| / |v|``. ``projection``: ``<q, v> / |v|**2``. ``saturated``: the share
    of elements above the greatest value that their group's scale can hold; ``flushed``: of those that are zero and were not.
    """

    relative_l2: float
    norm_ratio: float
    projection: float
    saturated: float
    flushed: float

    @property
    def unusual(self) -> dict[str, float]:
        """The figures that ordinary weights do not have."""
        figures = self._asdict()
        return {name: figures[name] for name, (low, high) in GATES.items() if not low <= figures[name] <= high}


@dataclass(frozen=True, slots=True)
class ExpertLoss:
    """The error of one expert: of its matrices, by the modules' names, and of its output without rounding inside."""

    name: str
    matrices: Mapping[str, MatrixLoss]
    output: float

    @property
    def unusual(self) -> dict[str, dict[str, float]]:
        """The figures that ordinary weights do not have, by matrix."""
        return {name: m.unusual for name, m in self.matrices.items() if m.unusual}


def rounded(figure: float) -> float:
    """Return a figure in four significant digits."""
    return float(f"{figure:.{DIGITS}g}")


def measure_expert(name: str, sides: Sides, x: Tensor, limit: float | None) -> ExpertLoss:
    """Measure an expert of the output against the source's. ``x``: hidden states BF16 ``[t, hidden]``; ``limit``: of SwiGLU."""
    ours, source = sides
    pairs = ((ours.matrix(role), source.matrix(role)) for role in Role)
    matrices = {theirs.weight.name.rpartition(".")[0]: measure(mine, theirs) for mine, theirs in pairs}
    output, exact = (exact_expert(x, expert, limit).output for expert in sides)
    return ExpertLoss(name, matrices, rounded(relative_l2(output, exact)))


def measure(ours: Matrix, source: Matrix) -> MatrixLoss:
    """Measure a matrix in MXFP4 against the source's values; a matrix of zeros that stays one has lost nothing."""
    n, k = source.shape
    step = max(1, STEP // k)
    error, norm, kept, product, saturated, flushed = torch.zeros(6, dtype=torch.float64)
    for start in range(0, n, step):
        stop = min(n, start + step)
        q, v = ours.values(start, stop), source.values(start, stop)
        largest = E2M1[-1] * ours.scales(start, stop)[:, :, None]
        error += (q - v).square().sum()
        norm += v.square().sum()
        kept += q.square().sum()
        product += (q * v).sum()
        saturated += (v.abs().view(len(v), -1, GROUP) > largest).sum()
        flushed += ((q == 0) & (v != 0)).sum()
    if not float(norm):
        return MatrixLoss(0.0 if not float(error) else math.inf, 1.0, 1.0, 0.0, 0.0)
    figures = ((error / norm).sqrt(), (kept / norm).sqrt(), product / norm, saturated / (n * k), flushed / (n * k))
    return MatrixLoss(*(rounded(float(figure)) for figure in figures))
