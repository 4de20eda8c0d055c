"""Killed at every file operation in turn: always resumable, always the same bytes in the end, the output never half there."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
Digest = Callable[[Path], dict[str, str]]
FAST = ("--verify", "storage", "--workers", "1")


@pytest.fixture
def tmp_path(ram_path: Path) -> Path:
    """Everything here happens in memory."""
    return ram_path


def check_between(folder: Path, out: Path, golden: dict[str, str], digest: Digest) -> None:
    """After a crash, the output is not there or it is complete."""
    if out.exists():
        assert digest(out) == golden


def finish(server: Any, folder: Path, source: Path, out: Path, golden: dict[str, str], digest: Digest, *options: str) -> None:
    """Run again without a fault: the output is there, complete, and nothing else is."""
    if out.exists():  # the crash came after the rename
        answer = server.run(folder, source, out, *FAST, *options)
        assert answer["code"] == 2
        assert "output-exists" in answer["text"]
    else:
        answer = server.run(folder, source, out, *FAST, *options)
        assert answer["code"] == 0, answer["text"]
        assert [p.name for p in folder.iterdir()] == [out.name]
    assert digest(out) == golden


@pytest.mark.parametrize("action", ["kill", "torn", "lose"])
def test_killed_at_every_operation(
    action: str, tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    source = digest(tiny)
    for at in range(1, count + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        answer = server.run(folder, tiny, folder / "out", *FAST, at=at, action=action)
        assert answer["code"] == 137, (at, answer)
        check_between(folder, folder / "out", want, digest)
        finish(server, folder, tiny, folder / "out", want, digest)
        shutil.rmtree(folder)
    assert digest(tiny) == source
    print(f"{action}: {count} points, all resumed to the same bytes")


def test_killed_at_every_operation_of_the_resuming_run(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    middle = count // 2
    points = 0
    at = 1
    while True:
        folder = tmp_path / f"{at}"
        folder.mkdir()
        assert server.run(folder, tiny, folder / "out", *FAST, at=middle, action="torn")["code"] == 137
        answer = server.run(folder, tiny, folder / "out", *FAST, at=at, action="torn")
        if answer["code"] == 0:
            break
        assert answer["code"] == 137
        check_between(folder, folder / "out", want, digest)
        finish(server, folder, tiny, folder / "out", want, digest)
        shutil.rmtree(folder)
        points, at = points + 1, at + 1
    print(f"resume: {points} points")
    assert points > 10


def test_killed_at_every_operation_with_hard_links(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, _ = golden
    source = digest(tiny)
    trace = server.run(tmp_path, tiny, tmp_path / "golden", *FAST, "--link", "hard", trace=True)["trace"]
    links = [i for i, (name, _) in enumerate(trace, 1) if name == "link"]
    assert links
    for at in range(links[0] - 2, len(trace) + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        assert server.run(folder, tiny, folder / "out", *FAST, "--link", "hard", at=at)["code"] == 137
        check_between(folder, folder / "out", want, digest)
        finish(server, folder, tiny, folder / "out", want, digest, "--link", "hard")
        shutil.rmtree(folder)
    assert digest(tiny) == source
    print(f"hard links: {len(trace) + 3 - links[0]} points, {len(links)} of them links")


def test_a_change_of_format_killed_at_every_operation(tiny: Path, server: Any, digest: Digest, tmp_path: Path) -> None:
    """Originals are files like any other."""
    change = ("--routed", "fp8")
    count = server.run(tmp_path, tiny, tmp_path / "golden", *FAST, *change)["count"]
    want = digest(tmp_path / "golden")
    assert any(name.startswith("fse/original-") for name in want)
    for at in range(1, count + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        assert server.run(folder, tiny, folder / "out", *FAST, *change, at=at, action="torn")["code"] == 137
        check_between(folder, folder / "out", want, digest)
        finish(server, folder, tiny, folder / "out", want, digest, *change)
        shutil.rmtree(folder)
    print(f"change of format: {count} points")
    assert server.run(tmp_path, "restore", tmp_path / "golden", tmp_path / "back")["code"] == 0
    assert digest(tmp_path / "back") == digest(tiny)


def test_a_part_killed_at_every_operation(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    """Part 1 of 2 dies, is started again, part 2 runs, and the last call publishes; in between there is no output."""
    want, _ = golden
    count = server.run(tmp_path, tiny, tmp_path / "first", *FAST, "--shards", "1/2")["count"]
    for at in range(1, count + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        assert server.run(folder, tiny, folder / "out", *FAST, "--shards", "1/2", at=at, action="torn")["code"] == 137
        for part in ("1/2", "2/2") if at % 2 else ("2/2",):
            assert server.run(folder, tiny, folder / "out", *FAST, "--shards", part)["code"] == 0
            assert not (folder / "out").exists()
        finish(server, folder, tiny, folder / "out", want, digest)
        shutil.rmtree(folder)
    print(f"parts: {count} points")
    assert count > 20


def test_resume_writes_only_what_is_missing(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, _ = golden
    shards = [f"{n}" for n in want if n.endswith(".safetensors")]
    trace = server.run(tmp_path, tiny, tmp_path / "first", *FAST, trace=True)["trace"]
    last_journal = max(i for i, (name, path) in enumerate(trace, 1) if name == "write" and path.endswith("/journal"))
    answer = server.run(tmp_path, tiny, tmp_path / "out", *FAST, at=last_journal + 1, action="kill")
    assert answer["code"] == 137
    again = server.run(tmp_path, tiny, tmp_path / "out", *FAST, trace=True)
    assert again["code"] == 0
    written = {
        path.rsplit("/output/", 1)[1]
        for name, path in again["trace"]
        if name in ("write", "copy_file_range") and "/output/" in path
    }
    assert written.isdisjoint(shards)
    assert digest(tmp_path / "out") == want


def damage_journal(root: Path, how: str) -> None:
    journal = root / "journal"
    raw = journal.read_bytes()
    journal.write_bytes(
        {"empty": b"", "garbage": b"\xff\xfe{[", "truncated": raw[: len(raw) * 2 // 3], "array": b"[1]\n" + raw}[how]
    )


@pytest.mark.parametrize("how", ["empty", "garbage", "truncated", "array"])
def test_a_damaged_journal_is_never_misread(
    how: str, tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    assert server.run(tmp_path, tiny, tmp_path / "out", *FAST, at=count - 5)["code"] == 137
    damage_journal(tmp_path / ".out.fse-partial", how)
    finish(server, tmp_path, tiny, tmp_path / "out", want, digest)


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_a_file_that_the_journal_names_is_hashed_before_it_is_trusted(
    how: str, tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    assert server.run(tmp_path, tiny, tmp_path / "out", *FAST, at=count - 5)["code"] == 137
    path = min((tmp_path / ".out.fse-partial" / "output").glob("*.safetensors"))
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    finish(server, tmp_path, tiny, tmp_path / "out", want, digest)


def test_resume_refuses_another_conversion_and_names_the_fields(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    assert server.run(tmp_path, source, tmp_path / "out", *FAST, at=count - 5)["code"] == 137
    answer = server.run(tmp_path, source, tmp_path / "out", *FAST, "--target", "megamoe-128")
    assert answer["code"] == 2
    assert "arguments.target" in answer["text"]
    assert "--restart" in answer["text"]
    shard = min(source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes())
    answer = server.run(tmp_path, source, tmp_path / "out", *FAST)
    assert answer["code"] == 2
    assert f"source.{shard.name}" in answer["text"]
    assert server.run(tmp_path, source, tmp_path / "out", *FAST, "--restart")["code"] == 0
    assert digest(tmp_path / "out") == want


def test_overwriting_survives_a_crash_at_every_operation(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    """The earlier output or the new one is there after the next run, never neither."""
    want, count = golden
    out = tmp_path / "out"
    assert server.run(tmp_path, tiny, out, *FAST, "--target", "megamoe-128")["code"] == 0
    old = digest(out)
    shutil.copytree(out, tmp_path / "kept")
    total = server.run(tmp_path, tiny, out, *FAST, "--overwrite")["count"]
    assert digest(out) == want
    for at in range(count - 10, total + 1):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "kept", out)
        assert server.run(tmp_path, tiny, out, *FAST, "--overwrite", at=at)["code"] == 137
        if out.exists():
            assert digest(out) in (old, want)
        assert server.run(tmp_path, tiny, out, *FAST, "--overwrite")["code"] == 0
        assert digest(out) == want
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_within_a_second_and_leave_a_resumable_state(
    number: int, made: Callable[..., Path], run: Callable[..., Any], digest: Digest, tmp_path: Path
) -> None:
    source = made("v4.1-flash", layers=6, hidden=1024, width=640, experts=16)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "fse_convert", source, out], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not (tmp_path / ".out.fse-partial" / "journal").exists():
        assert process.poll() is None
        time.sleep(0.01)
    start = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate()
    assert time.monotonic() - start < 2, "a second for the program, one for a busy machine"
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert not out.exists()
    assert run(source, out)[0] == 0
    assert run(source, tmp_path / "other")[0] == 0
    assert digest(out) == digest(tmp_path / "other")


def test_random_kills_of_a_real_process(made: Callable[..., Path], run: Callable[..., Any], digest: Digest, tmp_path: Path) -> None:
    """200 times kill -9 after a random time; each next run goes on, and now and then one may finish."""
    source = made("v4.1-flash", layers=2, hidden=512, width=384, experts=3)
    assert run(source, tmp_path / "golden", "--verify", "storage")[0] == 0
    want = digest(tmp_path / "golden")
    delays = random.Random(7)
    out = tmp_path / "out"
    kills = finished = 0
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.forker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert server.stdin
    assert server.stdout
    while kills < 200:
        server.stdin.write(f"{source}\t{out}\t{delays.uniform(0.0, 0.3)}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        assert code in (0, -9), code
        kills += code == -9
        if out.exists():
            assert digest(out) == want
            finished += 1
            shutil.rmtree(out)
    server.stdin.close()
    server.wait()
    server.stdout.close()
    assert run(source, out, "--verify", "storage")[0] == 0
    assert digest(out) == want
    print(f"{kills} kills, {finished} outputs finished in between")
