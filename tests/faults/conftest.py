"""A server process that runs the command line with faults, in forked children."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.checkpoints import make_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]


class Server:
    """Runs the command line in a child with one fault; see `fse_convert.testing.faults.Injector`."""

    def __init__(self, stderr: Path) -> None:
        self.stderr = stderr
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, root: Path, *args: object, **fault: Any) -> dict[str, Any]:
        """Run the command line; the answer holds exit code, number of operations, the trace if asked for, and what was printed."""
        assert self.process.stdin
        assert self.process.stdout
        request = {"root": str(root), "args": [str(a) for a in args], "stderr": str(self.stderr), **fault}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        answer["text"] = self.stderr.read_text()
        assert "Traceback" not in answer["text"], answer["text"]
        return answer

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server per session."""
    server = Server(tmp_path_factory.mktemp("server") / "stderr")
    yield server
    server.close()


@pytest.fixture(scope="session")
def ram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of runs with dozens of fsyncs each would wait for the disk all day."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30):
        yield tmp_path_factory.mktemp("ram")
        return
    folder = Path(tempfile.mkdtemp(prefix="fse-convert-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ram_path(ram: Path) -> Iterator[Path]:
    """An empty folder in memory, gone after the test."""
    folder = Path(tempfile.mkdtemp(dir=ram))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny(ram: Path) -> Path:
    """The smallest checkpoint that has everything: two layers, MTP, shards to rewrite and to carry."""
    knobs = {"hidden": 512, "width": 128, "layers": 1, "experts": 1, "vocab": 8, "engram_rows": 8, "mtp_experts": 1}
    return make_checkpoint(ram / "tiny" / "source", "v4.1-flash", **knobs)


@pytest.fixture(scope="session")
def golden(tiny: Path, server: Server, digest: Callable[[Path], dict[str, str]], ram: Path) -> tuple[dict[str, str], int]:
    """Digests of an uninterrupted run with storage proof and one worker, and how many operations it takes."""
    folder = Path(tempfile.mkdtemp(dir=ram))
    answer = server.run(folder, tiny, folder / "out", "--verify", "storage", "--workers", "1")
    assert answer["code"] == 0
    return digest(folder / "out"), answer["count"]
