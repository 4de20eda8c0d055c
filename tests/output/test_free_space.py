"""Room on the disk of an output."""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.errors import EnvironmentFailure
from fse_convert.output.free_space import check_space


def test_space_is_checked_where_the_output_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet" / "there", 0)
    with pytest.raises(EnvironmentFailure, match=r"needs 4,194,304\.00 TiB and a margin of 64\.0 MiB"):
        check_space(tmp_path / "out", 1 << 62)
