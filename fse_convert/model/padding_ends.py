"""At which ends an expert's tensors are padded: gate and up get rows, each at the end of its own half, and down gets columns."""

from __future__ import annotations

from fse_convert.model.families.family import Stack
from fse_convert.model.moe import Role


def padded_shape(role: Role, shape: tuple[int, int], width: int) -> tuple[int, int]:
    """Return the ``[N, K]`` of a projection once its expert is so wide."""
    return (shape[0], width) if role is Role.DOWN else (width, shape[1])


def halves(stack: Stack) -> int:
    """Return in how many parts the rows of a stack's matrix grow, each at its end; in one where those of gate and up take turns."""
    return 1 if stack.interleaved else len(stack.roles)
