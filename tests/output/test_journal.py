"""The journal: torn lines cost a file, never more."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fse_convert.output.journal import Journal, read_journal

MARK = {"version": "1", "source": {"a": [1, 2, 3]}}


def test_what_is_added_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", MARK, {})
    journal.create()
    journal.add("x", {"size": 1})
    assert read_journal(tmp_path / "journal") == (MARK, {"x": {"size": 1}})
    assert read_journal(tmp_path / "none") is None


@settings(deadline=None)  # it waits for the disk
@given(cut=st.integers(0, 400))
def test_going_on_after_a_torn_line_loses_that_line_alone(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torn_at(cut, Path(folder) / "journal")


def torn_at(cut: int, path: Path) -> None:
    first = Journal(path, MARK, {})
    first.create()
    for name in "abc":
        first.add(name, {"size": 1})
    raw = path.read_bytes()
    path.write_bytes(raw[: min(cut, len(raw))])
    found = read_journal(path)
    if found is None:
        assert cut < raw.index(b"\n")
        return
    again = Journal(path, *found)
    again.resume()
    again.add("d", {"size": 4})
    assert read_journal(path) == (MARK, {**found[1], "d": {"size": 4}})
