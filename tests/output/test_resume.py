"""What a run resumes from: work of the same conversion alone; what differs is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.errors import UsageError
from fse_convert.output.resume import check_same_conversion

MARK = {"version": "1", "source": {"a": [1, 2, 3]}}


def test_differences_are_named_by_path() -> None:
    check_same_conversion(Path(), [MARK], MARK)
    with pytest.raises(UsageError, match=r"made from something else: source\.b, version was 1, is 2"):
        check_same_conversion(Path(), [MARK], {"version": "2", "source": {"a": [1, 2, 3], "b": [0, 0, 0]}})
