"""Every I/O error at every file operation, and a real full disk: one clear message, exit 4, resumable, the source untouched."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
Digest = Callable[[Path], dict[str, str]]
FAST = ("--verify", "storage", "--workers", "1")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENAMETOOLONG)


@pytest.fixture
def tmp_path(ram_path: Path) -> Path:
    """Everything here happens in memory."""
    return ram_path


@pytest.mark.parametrize("action", ["error", "errors"], ids=["once", "from then on"])
def test_every_error_at_every_operation(
    action: str, tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    want, count = golden
    source = digest(tiny)
    codes: dict[int, int] = {}
    for at in range(1, count + 1):
        number = ERRORS[at % len(ERRORS)]
        folder = tmp_path / f"{at}"
        folder.mkdir()
        out = folder / "out"
        answer = server.run(folder, tiny, out, *FAST, at=at, action=action, errno=number)
        assert answer["code"] in (0, 4), (at, answer)
        codes[answer["code"]] = codes.get(answer["code"], 0) + 1
        if answer["code"] == 4:
            staging = folder / ".out.fse-partial"
            kept = (staging / "journal").exists() and (staging / "output").exists()
            assert ("error[resumable]" in answer["text"]) == kept, answer["text"]
            assert answer["text"].count("error[") == 1 + kept, answer["text"]
        if out.exists():
            assert digest(out) == want
        else:
            assert answer["code"] == 4
            again = server.run(folder, tiny, out, *FAST)
            assert again["code"] == 0, again["text"]
            assert digest(out) == want
            assert [p.name for p in folder.iterdir()] == ["out"]
        shutil.rmtree(folder)
    assert digest(tiny) == source
    print(f"{count} faults ({action}): {codes.get(4, 0)} reported with exit 4 and resumed, {codes.get(0, 0)} without effect")
    assert codes[4] > count // 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of a given size (bytes); needs the right to mount."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"cannot mount a small file system here: {result.stderr.strip() or 'no right to'}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, small_disk: Callable[[int], Path]
) -> None:
    """50 random sizes between nothing and almost enough; the space check is turned off, as if another writer took the space."""
    want, _ = golden
    sizes = random.Random(11)
    total = sum(p.stat().st_size for p in tiny.rglob("*") if p.is_file())
    for _ in range(50):
        disk = small_disk(os.sysconf("SC_PAGE_SIZE") + sizes.randrange(total))
        answer = server.run(disk, tiny, disk / "out", *FAST, no_margin=True)
        assert answer["code"] == 4, answer
        assert "error[no-space]" in answer["text"]
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert server.run(disk, tiny, disk / "out", *FAST, no_margin=True)["code"] == 0
        assert digest(disk / "out") == want
    print("50 full disks, all resumed once there was room")


def test_too_little_space_is_said_before_anything_is_written(tiny: Path, server: Any, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(32 << 20)
    answer = server.run(disk, tiny, disk / "out", *FAST)
    assert answer["code"] == 4
    assert "and a margin of 64.0 MiB" in answer["text"]
    assert not list(disk.iterdir())


def test_order_of_sync_and_rename(tiny: Path, server: Any, tmp_path: Path) -> None:
    """Every file is on disk before the journal vouches for it, every folder before the one rename, the parent after it."""
    trace = server.run(tmp_path, tiny, tmp_path / "out", *FAST, trace=True)["trace"]
    (rename,) = (i for i, (name, _) in enumerate(trace) if name == "rename")
    staging = f"{tmp_path}/.out.fse-partial"
    synced: dict[str, int] = {}
    written: dict[str, int] = {}
    for i, (name, path) in enumerate(trace):
        if name == "fsync":
            synced[path] = i
        elif name in ("write", "copy_file_range"):
            written[path] = i
            if path == f"{staging}/journal":  # whatever it vouches for was written and synced before
                shards = {p for p in written if "/output/" in p and p.endswith(".safetensors")}
                assert all(synced.get(p, -1) > written[p] for p in shards if p in synced or written[p] < i - 1)
    files = {p for p in written if "/output/" in p}
    assert files
    assert all(written[p] < synced[p] < rename for p in files)
    folders = {str(Path(p).parent) for p in files}
    assert all(synced[f] < rename and synced[f] > max(synced[p] for p in files if str(Path(p).parent) == f) for f in folders)
    assert synced[str(tmp_path)] > rename
    assert max(files, key=written.__getitem__).endswith("output/fse/manifest.json")


def test_the_source_is_never_opened_for_writing(tiny: Path, server: Any, tmp_path: Path) -> None:
    answer = server.run(tiny.parent, tiny, tmp_path / "out", *FAST, "--link", "hard", trace=True)
    assert answer["code"] == 0
    assert [call for call in answer["trace"] if call[0] != "link"] == []


def test_a_file_whose_fsync_failed_is_written_again(
    tiny: Path, server: Any, golden: tuple[dict[str, str], int], digest: Digest, tmp_path: Path
) -> None:
    """The kernel may have dropped the pages and called them clean: a second fsync of the same file would prove nothing."""
    want, _ = golden
    trace = server.run(tmp_path, tiny, tmp_path / "first", *FAST, trace=True)["trace"]
    points = [i for i, (name, path) in enumerate(trace, 1) if name == "fsync" and path.endswith(".safetensors")]
    assert len(points) >= 3
    for at in points:
        folder = tmp_path / f"{at}"
        folder.mkdir()
        failed = server.run(folder, tiny, folder / "out", *FAST, at=at, action="error", errno=errno.EIO, trace=True)
        assert failed["code"] == 4
        name = failed["trace"][at - 1][1].rsplit("/output/", 1)[1]
        assert [n for n, p in failed["trace"] if n == "fsync" and p.endswith(f"/output/{name}")] == ["fsync"]
        again = server.run(folder, tiny, folder / "out", *FAST, trace=True)
        assert again["code"] == 0
        assert [n for n, p in again["trace"] if n in ("write", "copy_file_range") and p.endswith(f"/output/{name}")]
        assert digest(folder / "out") == want
    print(f"{len(points)} files whose fsync failed, each written again")
