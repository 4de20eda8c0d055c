"""How an output appears: locked, staged, renamed once; and nothing left when something fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fse_convert.checkpoint.transaction import Staging, check_space, stage
from fse_convert.errors import EnvironmentFailure, Locked, UsageError


def test_output_appears_by_publishing_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stage(out) as staging:
        staging.write("a/b.json", b"{}")
        assert not out.exists()
        staging.publish()
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
        "import sys, time, pathlib\nfrom fse_convert.checkpoint.transaction import stage\n"
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
        staging.publish()
    assert [p.name for p in out.iterdir()] == ["whole"]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError), stage(out) as staging:
        staging.write("x", b"1")
        out.mkdir()
        (out / "theirs").write_text("")
        monkeypatch.setattr(Path, "exists", lambda _: False)
        staging.publish()
    monkeypatch.undo()
    assert [p.name for p in out.iterdir()] == ["theirs"]


def test_overwriting_swaps_whole_folders(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    with stage(out) as staging:
        staging.write("new", b"1")
        staging.publish()
    assert [p.name for p in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def test_space_is_checked_where_the_output_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet" / "there", 0)
    with pytest.raises(EnvironmentFailure, match="bytes and a margin"):
        check_space(tmp_path / "out", 1 << 62)


def test_staging_lies_beside_the_output(tmp_path: Path) -> None:
    assert Staging(tmp_path / "out").root.parent == tmp_path
