"""Tells damage from a format that is not supported, for projections whose headers make no format that is understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.errors import Problem
from fse_convert.model.description import NOT_UNDERSTOOD
from fse_convert.model.formats import SUPPORTED, Format, FormatError
from fse_convert.model.moe import Expert, Projection, Role

ODD = "the other experts are understood, so this tensor is likely damaged: download or export its shard again"
Formats = Mapping[Role, Format | FormatError]
"""The formats of an expert's projections, and why some have none; projections that are missing are left out."""
Read = list[tuple[Expert, Formats]]
"""Experts of a layer that should be stored alike: all routed ones, or the shared one if there is one."""


class Misfits:
    """Tells damage from a format that is not supported, for the experts of a layer that should be stored alike.

    A format that is not supported shows in every expert; one odd matrix among others that are understood is damage.
    ``understood``: the projections that are understood in any layer. ``same_blocks``: scales that fit no format could still have
    blocks of one size, along rows and along columns, which damage would hardly leave.
    """

    def __init__(self, read: Read, understood: set[Role]) -> None:
        errors = [f for _, formats in read for f in formats.values() if isinstance(f, FormatError)]
        parts = [(e.projections[r].parts, f) for e, formats in read for r, f in formats.items() if errors]
        self.understood = understood
        self.dtypes = {_dtypes(p) for p, f in parts if isinstance(f, Format)}
        grids = [e.sides for e in errors if e.sides]
        self.same_blocks = all(frozenset.intersection(*sides) for sides in zip(*grids, strict=False))

    def problem(self, error: FormatError, role: Role, projection: Projection) -> Problem:
        """Return the problem that a misfit is."""
        suffix = error.problem.where
        stored = projection.parts.get(suffix)
        problem = replace(error.problem, where=stored.name if stored else f"{projection.name}.{suffix}")
        code = problem.code
        if error.lost:
            return problem
        if self.dtypes and (role in self.understood or _dtypes(projection.parts) in self.dtypes):
            return replace(problem, code="matrix-odd", hint=ODD) if code in NOT_UNDERSTOOD else problem
        if code in NOT_UNDERSTOOD or not self.same_blocks:
            return problem
        return replace(problem, code="format-unknown", hint=SUPPORTED)


def _dtypes(parts: Mapping[str, TensorInfo]) -> frozenset[tuple[str, str]]:
    return frozenset((suffix, info.dtype) for suffix, info in parts.items())
