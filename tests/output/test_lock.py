"""Locks of a staging folder, held by other processes."""

from __future__ import annotations

import errno
import fcntl
import os
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


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("how_often", [1, 99])
def test_a_folder_that_another_run_just_removed_is_made_again(
    how_often: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_opening(LOCK, number, how_often, monkeypatch)
    with locked(tmp_path / "s", tmp_path):
        assert len(failed) == how_often


def test_a_folder_that_never_stays_is_the_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_opening(LOCK, errno.ESTALE, 1000, monkeypatch)
    with pytest.raises(OSError, match="Stale") as e, locked(tmp_path / "s", tmp_path):
        pass
    assert e.value.errno == errno.ESTALE


def test_a_lock_that_was_removed_while_it_was_taken_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS may remember the path for seconds: `stat` of it then tells of the file that was removed."""
    real, root = fcntl.flock, tmp_path / "s"
    removed: list[os.stat_result] = []

    def flock(fd: int, kind: int) -> None:
        real(fd, kind)
        if not removed:
            removed.append(os.stat(root / LOCK))
            (root / LOCK).unlink()
            root.rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(root, tmp_path) as hold:
        hold.check()
        assert (root / LOCK).is_file()
    assert removed


def fail_opening(name: str, number: int, how_often: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let opening files of a name fail so often; return where it did."""
    real, failed = os.open, []

    def opening(path: Path, *arguments: int, **options: int) -> int:
        if Path(path).name == name and len(failed) < how_often:
            failed.append(Path(path))
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opening)
    return failed
