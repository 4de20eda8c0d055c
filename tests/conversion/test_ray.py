"""`--ray`: the same plan on a real Ray cluster of this machine, with two workers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fse_convert

pytest.importorskip("ray", reason="Ray has no build for this Python")
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster with two CPUs, in a process tree of its own."""
    port = free_port()
    script = Path(sys.executable).with_name("ray")
    command = [
        script, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2",
        "--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            if b"Ray runtime started" in log.read_bytes():
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def convert(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fse_convert", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_same_bytes_as_without(
    cluster: str, made: Callable[..., Path], digest: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    source, out = made(layers=4, shard_size=400_000), tmp_path / "out"
    assert convert(source, tmp_path / "whole").returncode == 0
    done = convert(source, out, "--ray", cluster)
    assert done.returncode == 0, done.stderr
    assert digest(out) == digest(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_going_on_after_parts(
    cluster: str, made: Callable[..., Path], digest: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    source, out = made(layers=4, shard_size=400_000), tmp_path / "out"
    assert convert(source, tmp_path / "whole").returncode == 0
    assert convert(source, out, "--part", "1/2").returncode == 0
    staged = tmp_path / ".out.fse-partial" / "output"
    before = {p.relative_to(staged): p.stat().st_ino for p in staged.rglob("*") if p.is_file()}
    assert before
    done = convert(source, out, "--ray", cluster)
    assert done.returncode == 0, done.stderr
    assert {name: (out / name).stat().st_ino for name in before} == before  # nothing finished was written again
    assert digest(out) == digest(tmp_path / "whole")


def test_a_bad_shard_is_named_as_without(cluster: str, source: Callable[..., Path], tmp_path: Path) -> None:
    from fse_convert.checkpoint.folder import LocalFolder
    from fse_convert.checkpoint.reader import open_checkpoint

    folder = source(layers=4, shard_size=400_000)
    checkpoint = open_checkpoint(LocalFolder(folder))
    info = next(t for n, t in sorted(checkpoint.tensors.items()) if ".shared_experts." in n and t.dtype == "F8_E4M3")
    start = next(s for s in checkpoint.shards if s.name == info.shard).header.data_start + info.start
    with (folder / info.shard).open("r+b") as f:
        f.seek(start)
        f.write(b"\x7f")
    done = convert(folder, tmp_path / "out", "--ray", cluster)
    assert done.returncode == 3, done.stderr
    assert "error[nan]" in done.stderr
    assert info.name in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_as_without(
    number: int, cluster: str, made: Callable[..., Path], digest: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    source, out = made(layers=4, shard_size=400_000), tmp_path / "out"
    command = [sys.executable, "-m", "fse_convert", str(source), str(out), "--ray", cluster, "--log-json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any((tmp_path / ".out.fse-partial" / "output").glob("*")):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert [json.loads(line)["code"] for line in err.splitlines() if '"error"' in line] == ["interrupted"]
    done = convert(source, out)
    while done.returncode == 6:  # tasks of the dead run hold their parts until Ray has ended them
        done = convert(source, out)
    assert done.returncode == 0, done.stderr
    assert convert(source, tmp_path / "whole").returncode == 0
    assert digest(out) == digest(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_node_that_sees_something_else_writes_nothing(made: Callable[..., Path], tmp_path: Path) -> None:
    import pickle

    from fse_convert.conversion.run import Conversion, Request, write_part
    from fse_convert.errors import EnvironmentFailure
    from fse_convert.output.parts import Part
    from fse_convert.output.staging import stage
    from fse_convert.plan.plan import Options
    from fse_convert.servers.targets import find_target

    target = find_target("megamoe-512")
    assert target
    request = Request(source=made(layers=4, shard_size=400_000), out=tmp_path / "out", options=Options(target))
    with stage(request.out, {**Conversion(request).fingerprint, "version": "another"}):
        pass
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EnvironmentFailure) as other:
        write_part(pickle.dumps(request), Part(1, 2))
    assert other.value.problems[0].code == "node-differs"
    assert other.value.problems[0].message == f"a node sees something else: version was another, is {fse_convert.__version__}"
    assert [p for p in sorted(tmp_path.rglob("*")) if not p.name.startswith("lock")] == [
        p for p in before if not p.name.startswith("lock")
    ]


def test_no_cluster_there(made: Callable[..., Path], tmp_path: Path) -> None:
    done = convert(made(layers=4, shard_size=400_000), tmp_path / "out", "--ray", f"127.0.0.1:{free_port()}")
    assert done.returncode == 4
    assert "error[no-cluster]" in done.stderr
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in done.stderr
