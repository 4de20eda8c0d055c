"""How an output appears: locked, staged, renamed once; and nothing left when something fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import EnvironmentFailure, Locked, Problem, UsageError
from fse_convert.output.lock import LOCK
from fse_convert.output.staging import Staging, stage


def test_output_appears_by_publishing_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stage(out) as staging:
        staging.write("a/b.json", b"{}")
        assert not out.exists()
        staging.publish(lambda: None)
    assert (out / "a" / "b.json").read_bytes() == b"{}"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), stage(tmp_path / "out") as staging:
        staging.write("x", b"1")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_second_run_is_locked_out_and_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import sys, time, pathlib\nfrom fse_convert.output.staging import stage\n"
        "with stage(pathlib.Path(sys.argv[1])) as s:\n    s.write('half', b'1'); print('staged', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "staged\n"
    with pytest.raises(Locked) as e, stage(out):
        pass
    assert e.value.exit_code == 6
    process.kill()
    process.communicate()
    with stage(out) as staging:
        assert not list(staging.folder.iterdir())
        staging.write("whole", b"1")
        staging.publish(lambda: None)
    assert [p.name for p in out.iterdir()] == ["whole"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_appears_meanwhile_is_not_replaced(replace: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError), stage(out, replace=replace) as staging:
        staging.write("x", b"1")
        out.mkdir()
        (out / "theirs").write_text("")
        staging.publish(lambda: None)
    assert [p.name for p in out.iterdir()] == ["theirs"]


def test_overwriting_swaps_whole_folders(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "fse").mkdir()
    (out / MANIFEST).write_text("{}")
    with stage(out, replace=True) as staging:
        staging.write("new", b"1")
        staging.publish(lambda: None)
    assert [p.name for p in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def test_staging_lies_beside_the_output(tmp_path: Path) -> None:
    assert Staging(tmp_path / "out").root.parent == tmp_path


def test_once_the_output_is_there_a_signal_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fse_convert.output import staging as transaction

    def stop(_number: int, _frame: object) -> None:
        raise AssertionError("stopped")

    sync, before = transaction.sync_folder, signal.signal(signal.SIGTERM, stop)

    def signalled(folder: Path) -> None:
        sync(folder)
        if folder == tmp_path:  # the parent, after the rename
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(transaction, "sync_folder", signalled)
    try:
        with stage(tmp_path / "out") as staging:
            staging.write("x", b"1")
            staging.publish(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [UsageError, EnvironmentFailure])
def test_what_an_argument_or_the_machine_stopped_stays(error: type[UsageError | EnvironmentFailure], tmp_path: Path) -> None:
    with pytest.raises(error), stage(tmp_path / "out", {"a": 1}) as staging:
        staging.write("x", b"1")
        raise error(Problem("x", "x"))
    assert (Staging(tmp_path / "out").folder / "x").is_file()


def test_an_output_that_is_there_before_the_lock_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError) as e, stage(tmp_path / "out"):
        pass
    assert e.value.problems[0].code == "output-exists"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_files_of_the_plan_stay(tmp_path: Path) -> None:
    with stage(tmp_path / "out") as staging:
        for name in ("a", "fse/b", "c/d"):
            staging.write(name, b"1")
        (staging.folder / "link").symlink_to(tmp_path)
        staging.keep_only({"a", "fse/b"})
        assert sorted(str(p.relative_to(staging.folder)) for p in staging.folder.rglob("*") if not p.is_dir()) == ["a", "fse/b"]
        assert not (staging.folder / "link").exists()
        staging.publish(lambda: None)


def test_a_file_system_that_keeps_removed_files_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS and FUSE give them another name until they are closed, so that their folder is not empty."""
    rmdir, closed = Path.rmdir, False

    def not_empty(folder: Path) -> None:
        if not closed and folder == Staging(tmp_path / "out").root:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
        rmdir(folder)

    close = os.close

    def closing(fd: int) -> None:
        nonlocal closed
        closed |= str(Path(f"/proc/self/fd/{fd}").readlink()).endswith(f"/{LOCK} (deleted)")
        close(fd)

    monkeypatch.setattr(Path, "rmdir", not_empty)
    monkeypatch.setattr(os, "close", closing)
    with stage(tmp_path / "out") as staging:
        staging.write("x", b"1")
        staging.publish(lambda: None)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
