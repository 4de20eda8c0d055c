"""What an output may replace, and what is said of a run that was cut off after it had replaced one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import UsageError
from fse_convert.output.lock import LOCK, locked, staging_root
from fse_convert.output.overwrite import check_output, left_behind


def cut_off(tmp_path: Path) -> Path:
    """What a run leaves that is killed between the swap and the removal of what it replaced."""
    out = tmp_path / "out"
    root = staging_root(out)
    for folder in (out / "fse", root / "output" / "fse"):
        folder.mkdir(parents=True)
        (folder.parent / MANIFEST).write_text("{}")
    (root / "output" / "shard").write_bytes(bytes(1000))
    (root / LOCK).write_text("")
    return out


def test_what_a_run_that_was_cut_off_left_is_named(tmp_path: Path) -> None:
    out = cut_off(tmp_path)
    with pytest.raises(UsageError) as e:
        check_output(tmp_path / "source", out, overwrite=False)
    assert [p.code for p in e.value.problems] == ["output-exists", "left-behind"]
    assert "1002 B" in e.value.problems[1].message
    assert e.value.problems[1].where == str(staging_root(out))
    assert (staging_root(out) / "output" / "shard").is_file()


def test_what_a_run_is_working_on_is_not_called_left_behind(tmp_path: Path) -> None:
    out = cut_off(tmp_path)
    with locked(staging_root(out), out):
        assert left_behind(out) == ()
    assert left_behind(out)
