"""A process that may not do what it must: threads, memory, a folder that is gone, files it may not read. Exit 4 with a way out."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
CONVERT = [sys.executable, "-m", "fse_convert", "convert"]


@pytest.mark.parametrize("allowed", range(12))
def test_threads_that_cannot_be_started(
    allowed: int, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, [0]

    def limited(thread: threading.Thread) -> None:
        started[0] += 1
        if started[0] > allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    code, _, err = run(made(), tmp_path / "out", "--workers", "4")
    monkeypatch.undo()
    assert code == 4
    assert "error[too-many-threads]" in err
    assert "fewer --workers, or raise the limit" in err
    assert run(made(), tmp_path / "out")[0] == 0


@pytest.mark.parametrize("megabytes", [300, 600])
def test_memory_that_torch_does_not_fit_into(megabytes: int, made: Make, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 10**6,) * 2)

    command = [*CONVERT, made(), tmp_path / "out", "-q", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 4, done.stderr
    assert any(f"error[{code}]" in done.stderr for code in ("import-failed", "out-of-memory", "too-many-threads"))
    assert "raise the limit" in done.stderr


@pytest.mark.parametrize("message", ["", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."])
def test_memory_that_runs_out_while_a_shard_is_written(
    message: str, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fse_convert.conversion import files

    def out_of_memory(*_: object) -> None:
        raise RuntimeError(message) if message else MemoryError

    monkeypatch.setattr(files, "write_shard", out_of_memory)
    code, _, err = run(made(), tmp_path / "out")
    assert code == 4
    assert "error[out-of-memory]" in err
    assert "error[resumable]" in err


def test_a_working_folder_that_is_gone(made: Make, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *CONVERT, made(), tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=gone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "error[no-working-folder]" in done.stderr
    assert not (tmp_path / "out").exists()


class Broken(BytesIO):
    """A file whose disk fails."""

    def read(self, _size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def break_disk(victim: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """Let reads of a file fail, from an offset on."""
    opened, preadv, pread, copy = Path.open, os.preadv, os.pread, os.copy_file_range

    def broken(fd: int, at: int) -> None:
        if at >= offset and Path(f"/proc/self/fd/{fd}").resolve() == victim.resolve():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open_path(path: Path, *args: Any, **kwargs: Any) -> Any:
        return Broken() if not offset and path.resolve() == victim.resolve() else opened(path, *args, **kwargs)

    def checked(call: Callable[..., Any], at: int) -> Callable[..., Any]:
        def read(fd: int, *args: Any) -> Any:
            broken(fd, args[at])
            return call(fd, *args)

        return read

    monkeypatch.setattr(Path, "open", open_path)
    monkeypatch.setattr(os, "preadv", checked(preadv, 1))
    monkeypatch.setattr(os, "pread", checked(pread, 1))
    monkeypatch.setattr(os, "copy_file_range", checked(copy, 2))


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        pytest.param("model-00003", 0, id="a header"),
        pytest.param("model-00003", 1 << 12, id="tensors of a shard"),
        pytest.param("config.json", 0, id="config"),
        pytest.param("model.safetensors.index.json", 0, id="index"),
        pytest.param("tokenizer_config.json", 0, id="a file beside"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "restore", "verify"])
def test_a_disk_that_fails_is_named_by_the_file_on_it(
    command: str, name: str, offset: int, made: Make, output: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made()
    out = tmp_path / "converted" if command == "convert" else output()
    victim = next((out if command == "restore" else source).glob(f"{name}*"))
    arguments = {
        "convert": (source, out),
        "restore": ("restore", out, tmp_path / "back"),
        "verify": ("verify", out, "--source", source),
    }
    break_disk(victim, monkeypatch, offset)
    code, _, err = run(*arguments[command])
    monkeypatch.undo()
    assert code == 4, err
    assert "error[io-error]" in err
    assert f"where: {victim}" in err
    assert "check it before trying again" in err


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY], ids=errno.errorcode.get)
def test_what_the_machine_refuses_has_a_way_out(
    number: int, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    code, _, err = run(made(), tmp_path / "out")
    assert code == 4
    assert "see the system log" not in err


@pytest.mark.parametrize("command", ["convert", "inspect", "verify", "restore"])
def test_a_folder_that_may_not_be_listed(
    command: str, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Any = ".") -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    code, _, err = run(command, made(), *([tmp_path / "out"] if command in ("convert", "restore") else []))
    monkeypatch.undo()
    assert code == 4
    assert "error[permission]" in err
    assert str(made()) in err
