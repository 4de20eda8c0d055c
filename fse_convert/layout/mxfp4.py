"""What MXFP4 is: 4-bit codes in groups of 32 columns, and how a value is refused that another format cannot hold.

A code has a sign (bit 3) and one of eight magnitudes (E2M1); two share a byte, the even column in the low nibble. The value
is ``magnitude * 2 ** (byte - 127)`` with one E8M0 byte a group. Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fse_convert.layout.sizes import GROUP

if TYPE_CHECKING:
    from torch import Tensor

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of codes 0 to 7, which is whole."""
SIGN = 8


class Unencodable(ValueError):
    """A value that the other format cannot hold; ``code`` is the one of the problem that it is for people.

    ``row`` and ``column`` count elements from the start of what was given, ``count`` columns are concerned.
    """

    def __init__(self, code: str, reason: str, row: int, column: int, count: int) -> None:
        super().__init__(reason)
        self.code, self.reason, self.row, self.column, self.count = code, reason, row, column, count

    def sentence(self, first_row: int = 0) -> str:
        """Say what is wrong and where; ``first_row``: of what was given, in the whole tensor."""
        columns = f"columns {self.column} to {self.column + self.count - 1}" if self.count > 1 else f"column {self.column}"
        return f"{self.reason} at row {first_row + self.row}, {columns}"

    def __str__(self) -> str:
        return self.sentence()


def refuse_where(bad: Tensor, code: str, reason: str, count: int = GROUP) -> None:
    """Raise Unencodable for the first True of ``bool [n, c]``, each of which stands for ``count`` columns."""
    if bad.any():
        row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[1])
        raise Unencodable(code, reason, row, column * count, count)


def check_groups(k: int) -> None:
    """Raise ValueError when columns do not make whole groups."""
    if k % GROUP:
        raise ValueError(f"K = {k} is not a multiple of {GROUP}")
