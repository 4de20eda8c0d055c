"""File-system traps: links into a hub cache, odd names, read-only folders, other environments; the bytes are always the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.checkpoints import make_checkpoint

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]


def to_cache(root: Path, cache: Path) -> Path:
    """Turn a folder into a hub cache's snapshot: every file a relative link to a blob."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    for i, path in enumerate(sorted(p for p in root.rglob("*") if p.is_file())):
        name = path.relative_to(root)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / str(i))
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(i), (snapshot / name).parent))
    return snapshot


@pytest.mark.parametrize("link", ["auto", "copy", "hard"])
def test_hub_cache_snapshot(link: str, made: Make, run: Run, digest: Digest, tmp_path: Path) -> None:
    """The output holds regular files that outlive the cache; a hard link goes to the blob."""
    snapshot = to_cache(made("v4.1-flash"), tmp_path / "cache")
    assert run(made("v4.1-flash"), tmp_path / "plain")[0] == 0
    before = digest(tmp_path / "cache")
    assert run(snapshot, tmp_path / "out", "--link", link)[0] == 0
    assert digest(tmp_path / "cache") == before
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    shutil.rmtree(tmp_path / "cache")
    assert digest(tmp_path / "out") == digest(tmp_path / "plain")


def test_a_hard_linked_source_that_is_edited_later_is_seen_by_verify(source: Make, run: Run, tmp_path: Path) -> None:
    root, out = source(), tmp_path / "out"
    assert run(root, out, "--link", "hard")[0] == 0
    assert run("verify", out)[0] == 0
    linked = next(p for p in out.glob("*.safetensors") if p.stat().st_nlink > 1)
    with (root / linked.name).open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))
    code, out_text, err = run("verify", out)
    assert code == 1
    assert linked.name in out_text + err


@pytest.mark.parametrize(
    "name",
    ["with space", "line\nbreak", "ünïcode", b"\xff\xfe", "a" * 200],
    ids=["a space", "a line break", "umlauts", "no Unicode", "200 characters"],
)
def test_odd_names_of_files_and_folders(name: str | bytes, source: Make, run: Run, digest: Digest, tmp_path: Path) -> None:
    root = source()
    text = os.fsdecode(name)
    (root / text).write_text("beside")
    base = tmp_path / text
    base.mkdir()
    out = base / "out"
    assert run(root, out)[0] == 0
    assert (out / text).read_text() == "beside"
    assert run("verify", out, "--source", root)[0] == 0
    code, report, _ = run("verify", out, "--source", root, "--json")
    assert code == 0
    assert json.loads(report)["ok"] is True


def test_names_that_are_too_long_for_staging(made: Make, run: Run, tmp_path: Path) -> None:
    code, _, err = run(made(), tmp_path / ("x" * 250))
    assert code == 4
    assert "error[name-too-long]" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_places(source: Make, run: Run, tmp_path: Path) -> None:
    root = source()
    parent = tmp_path / "locked"
    parent.mkdir()
    parent.chmod(0o555)
    code, _, err = run(root, parent / "out")
    assert code == 4
    assert "error[permission]" in err


def test_a_read_only_source_is_enough(source: Make, run: Run, tmp_path: Path) -> None:
    root = source()
    for path in sorted(root.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    root.chmod(0o555)
    assert run(root, tmp_path / "out")[0] == 0
    assert all(p.stat().st_mode & 0o200 for p in (tmp_path / "out").rglob("*"))
    root.chmod(0o755)
    for path in root.rglob("*"):
        path.chmod(0o755)


def test_a_source_that_changes_while_it_is_read_is_refused(
    source: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fse_convert.conversion import files

    root, out = source(), tmp_path / "out"
    shard = sorted(root.glob("*.safetensors"))[2]
    write = files.write_shard

    def touched(*args: object) -> None:
        os.utime(shard, ns=(1, 1))
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write_shard", touched)
    code, _, err = run(root, out, "--workers", "1")
    assert code == 4
    assert "error[source-changed]" in err
    assert shard.name in err
    assert not out.exists()


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers_or_environment(made: Make, run: Run, digest: Digest, tmp_path: Path) -> None:
    root = made("v4.1-flash", layers=3)
    assert run(root, tmp_path / "golden", "--workers", "1")[0] == 0
    want = digest(tmp_path / "golden")
    for i, (workers, extra) in enumerate(
        [
            (2, {"PYTHONHASHSEED": "1"}),
            (8, {"PYTHONHASHSEED": "2", "LC_ALL": "C", "TMPDIR": str(tmp_path)}),
            (3, {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "TZ": "Asia/Tokyo"}),
        ]
    ):
        out = tmp_path / f"{i}"
        command = [sys.executable, "-m", "fse_convert", str(root), str(out), "--workers", str(workers)]
        subprocess.run(command, check=True, env={**os.environ, **extra}, capture_output=True)
        assert digest(out) == want


@pytest.mark.slow
def test_memory_stays_bounded_beside_a_tensor_of_98_gb(made: Make, tmp_path: Path) -> None:
    """A sparse engram table as large as DeepSeek-V4.1's, under a limit of 1 GiB: planning and writing never touch its size."""
    knobs = {"hidden": 512, "width": 384, "layers": 2, "experts": 3, "vocab": 64}
    root = make_checkpoint(tmp_path / "source", "v4.1-flash", engram_rows=384_006_168, sparse=True, **knobs)
    assert sum(p.stat().st_size for p in root.glob("*.safetensors")) > 90e9
    code = (
        "import resource, sys, torch\nfrom fse_convert.cli import main\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "used = int(next(l for l in open('/proc/self/status') if l.startswith('VmSize')).split()[1]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: assert e.code == 0, e.code\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    command = [sys.executable, "-c", code, str(root), str(tmp_path / "out"), "--link", "hard", "--verify", "none", "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    grown = int(result.stdout.splitlines()[-1]) * 1024
    print(f"peak memory beside a sparse checkpoint of 90 GB: {grown >> 20} MiB above torch")
    assert grown < 600 << 20
