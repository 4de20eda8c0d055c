"""Locks of a staging folder, held by other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fse_convert.errors import Locked, UsageError
from fse_convert.output.lock import LOCK, locked
from fse_convert.output.staging import stage

HOLD = """
import pathlib, sys
from fse_convert.output.lock import locked
root = pathlib.Path(sys.argv[1])
with locked(root, root, sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(root: Path, part: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("theirs", "ours"), [("", ""), ("", "1-of-2"), ("1-of-2", ""), ("1-of-2", "1-of-2")])
def test_who_locks_whom_out(theirs: str, ours: str, tmp_path: Path) -> None:
    with held(tmp_path / "s", theirs), pytest.raises(Locked), locked(tmp_path / "s", tmp_path, ours):
        pass
    with locked(tmp_path / "s", tmp_path, ours):
        pass


def test_parts_live_side_by_side(tmp_path: Path) -> None:
    with held(tmp_path / "s", "1-of-2"), locked(tmp_path / "s", tmp_path, "2-of-2"):
        pass


def test_the_lock_file_can_be_locked_over_a_network(tmp_path: Path) -> None:
    """NFS turns flock into fcntl locks, which need a descriptor that may write: a folder never has one."""
    with locked(tmp_path / "s", tmp_path):
        assert (tmp_path / "s" / LOCK).is_file()


@pytest.mark.parametrize("what", ["link", "file", "folder"])
def test_what_is_not_ours_is_never_emptied(what: str, tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / ".out.fse-partial"
    victim.mkdir()
    (victim / "precious").write_text("x")
    if what == "link":
        root.symlink_to(victim)
    elif what == "file":
        root.write_text("x")
    else:
        victim = victim.rename(root)
    with pytest.raises(UsageError) as e, stage(tmp_path / "out"):
        pass
    assert e.value.problems[0].code == "staging-foreign"
    assert what == "file" or (victim / "precious").read_text() == "x"
    assert not (victim / LOCK).exists()
