"""What goes to stderr: by default, quietly, in detail, and as JSON lines."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fse_convert.progress import Event, Phase, Work
from fse_convert.report.log import Log, listening
from fse_convert.report.progress import Heartbeat, progress

Run = Callable[..., tuple[int, str, str]]


def test_quiet_is_quiet_and_errors_are_not(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, out, err = run(made(), tmp_path / "out", "-q")
    assert (code, err) == (0, "")
    assert "converted:" in out
    code, _, err = run(made(), tmp_path / "out", "-q")
    assert code == 2
    assert "error[output-exists]" in err
    assert run("verify", tmp_path / "out", "--source", made(), "--quiet")[2] == ""
    assert run("restore", tmp_path / "out", tmp_path / "back", "-q")[2] == ""


def test_verbose_tells_what_is_done_and_more_tells_more(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    plain, once, twice = (run(made(), tmp_path / f"out{len(flag)}", *flag)[2] for flag in ([], ["-v"], ["-v", "-v"]))
    assert "info:" not in plain
    assert "info: planned: DeepSeek-V4.1, " in once
    assert "debug:" not in once
    assert "debug:" in twice


def test_json_lines(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, _, err = run(made(), tmp_path / "out", "--log-json", "-v")
    assert code == 0
    events = [json.loads(line) for line in err.splitlines()]
    assert {e["event"] for e in events} == {"note", "log", "start", "file", "done"}
    (start,), (done,) = ([e for e in events if e["event"] == kind] for kind in ("start", "done"))
    assert [(p["phase"], p["unit"]) for p in start["phases"]] == [
        ("write", "shard"),
        ("read back", "file"),
        ("numerics", "layer"),
    ]
    for phase in start["phases"]:
        files = [e for e in events if e["event"] == "file" and e["phase"] == phase["phase"]]
        assert files[-1]["done"] == files[-1]["count"] == phase["count"] == len(files)
        assert files[-1]["bytes"] == files[-1]["total"] == phase["bytes"]
    assert all(e["elapsed"] >= 0 for e in events)
    times = [datetime.fromisoformat(e["time"]) for e in events]
    assert times == sorted(times)
    assert times[0].utcoffset() == timedelta(0)
    assert events[-1] is done


def test_errors_are_json_lines_too(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, _, err = run(made(), tmp_path / "out", "--log-json")
    assert code == 2
    (line,) = err.splitlines()
    found = json.loads(line)
    assert (found["event"], found["code"]) == ("error", "output-exists")
    assert found["hint"]


def test_a_line_per_file_and_one_every_30_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beat = Heartbeat([Work(Phase.WRITE, "shard", 2, 100), Work(Phase.NUMERICS, "layer", 4)], Log())
    beat.observe(Event("a", 10))
    assert capsys.readouterr().err == ""
    now[0] += 30
    beat.observe(Event("a", 15))
    assert capsys.readouterr().err == "write 0/2 shards  25 B of 100 B  1 B/s  90 s left  a\n"
    now[0] += 20
    beat.observe(Event("a", 25))
    beat.observe(Event("a", 50, done=True, how="rewritten"))
    assert capsys.readouterr().err == "write 1/2 shards  100 B of 100 B  2 B/s  a rewritten\n"
    now[0] += 100
    beat.observe(Event("layers.0.ffn", done=True, phase=Phase.NUMERICS))
    now[0] += 10
    beat.observe(Event("layers.1.ffn", done=True, phase=Phase.NUMERICS))
    assert capsys.readouterr().err == (
        "numerics 1/4 layers  layers.0.ffn\nnumerics 2/4 layers  0.2 layers/s  10 s left  layers.1.ffn\n"
    )


def test_bytes_of_an_earlier_run_are_no_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beat = Heartbeat([Work(Phase.WRITE, "shard", 2, 100)], Log())
    beat.observe(Event("a", 80, kept=True))
    now[0] += 10
    beat.observe(Event("b", 10))
    beat.observe(Event("b", done=True))
    assert capsys.readouterr().err == "write 1/2 shards  90 B of 100 B  1 B/s  10 s left  b\n"


def test_a_line_also_while_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    beat = Heartbeat([Work(Phase.WRITE, "shard", 2, 100)], Log())
    beat.interval = 0.05
    with beat.beating():
        beat.observe(Event("slow", 10))
        time.sleep(0.5)
    assert capsys.readouterr().err.count("write 0/2 shards  10 B of 100 B") >= 2


def test_listening_leaves_logging_as_it_was() -> None:
    logger = logging.getLogger("fse_convert")
    before = (logger.level, list(logger.handlers))
    with listening(Log(verbose=2)):
        assert logger.isEnabledFor(logging.DEBUG)
    assert (logger.level, list(logger.handlers)) == before
    with listening(Log(quiet=True, verbose=2)):
        assert (logger.level, list(logger.handlers)) == before


def test_quiet_progress_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress([Work(Phase.WRITE, "shard", 1, 10)], Log(quiet=True)) as observe:
        observe(Event("a", 10, done=True))
    assert capsys.readouterr().err == ""


def on_terminal(command: list[str], columns: int, **env: str) -> str:
    """What a command shows on a terminal of that width."""
    main, sub = pty.openpty()
    process = subprocess.Popen(
        command, stdout=sub, stderr=sub, stdin=sub, env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **env}
    )
    os.close(sub)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [40, 100])
def test_a_bar_on_a_terminal_fits_its_width(columns: int, made: Callable[..., Path], tmp_path: Path) -> None:
    shown = on_terminal([sys.executable, "-m", "fse_convert", str(made()), str(tmp_path / "out"), "--verify", "none"], columns)
    assert "converted: DeepSeek-V4.1, " in shown
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", shown)]
    bars = [line for line in lines if line.startswith("write ") and "shards" in line]
    assert bars
    assert all(len(line) <= columns for line in bars)
    assert any("━" in line for line in bars) == (columns > 40)


def test_a_dumb_terminal_gets_lines(made: Callable[..., Path], tmp_path: Path) -> None:
    shown = on_terminal([sys.executable, "-m", "fse_convert", str(made()), str(tmp_path / "out")], 100, TERM="dumb")
    assert "\x1b" not in shown
    assert "write 8/8 shards" in shown
    assert "numerics 3/3 layers" in shown


def test_no_color(made: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fse_convert", str(made()), str(tmp_path / "out"), "--verify", "none"]
    shown = on_terminal(command, 100, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)
