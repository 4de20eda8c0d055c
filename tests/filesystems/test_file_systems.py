"""A conversion and its way back on real file systems: the same bytes everywhere, nothing left beside, room told truly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import digests
from tests.filesystems.images import KINDS, command, file_system, free, mounted, needs

pytestmark = pytest.mark.filesystems

PROVED = ["--verify", "storage"]
SLACK = 1 << 20
"""Bytes that a file system needs for itself to hold an output of a few megabytes."""
Run = Callable[..., tuple[int, str, str]]
Folders = Callable[..., Path]


@pytest.mark.parametrize("link", ["auto", "copy", "hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, link: str, made: Folders, converted: Folders, tmp_path: Path, run: Run) -> None:
    needs(kind)
    with file_system(kind, tmp_path, {"source": made()}) as at:
        source, out, original = at / "source", at / "out", at / "original"
        for target, more in (("megamoe-128", []), ("megamoe-512", ["--overwrite"])):
            code, _, err = run(source, out, "--target", target, "--link", link, "-q", *PROVED, *more)
            assert code == 0, err
            assert digests(out) == digests(converted(target, "v4.1-flash", *PROVED))
        code, _, err = run("restore", out, original, "--link", link, "-q")
        assert code == 0, err
        assert digests(original) == digests(source) == digests(made())
        assert sorted(p.name for p in at.iterdir() if p.name != "lost+found") == ["original", "out", "source"]


@pytest.mark.parametrize("link", ["auto", "copy", "hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_what_is_used(kind: str, link: str, made: Folders, tmp_path: Path, run: Run) -> None:
    needs(kind)
    with file_system(kind, tmp_path, {"source": made()}) as at:
        arguments = (at / "source", at / "out", "--target", "megamoe-128", "--link", link)
        _, text, _ = run(*arguments, "--dry-run", "--json")
        estimated = json.loads(text)["needs"]["disk"]
        before = free(at)
        assert run(*arguments, "-q", *PROVED)[0] == 0
        used = before - free(at)
        assert used <= estimated + SLACK
        if (kind, link) not in {("btrfs", "copy"), ("btrfs", "auto"), ("btrfs", "hard")}:  # it frees and shares as it likes
            assert estimated <= used + SLACK


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_file_system_is_told_before_the_work(kind: str, made: Folders, converted: Folders, tmp_path: Path, run: Run) -> None:
    needs(kind)
    with file_system(kind, tmp_path, {"source": made()}) as at:
        ballast = at / "ballast"
        with ballast.open("wb", buffering=0) as file:
            while free(at) > 66 << 20:  # 64 MiB of it must stay free in any case
                file.write(os.urandom(1 << 20))
        code, _, err = run(at / "source", at / "out", "--target", "megamoe-512", *PROVED)
        assert code == 4, err
        assert "error[no-space]" in err
        assert not (at / "out").exists()
        ballast.unlink()
        assert run(at / "source", at / "out", "--target", "megamoe-512", "-q", *PROVED)[0] == 0
        assert digests(at / "out") == digests(converted("megamoe-512", "v4.1-flash", *PROVED))


@pytest.mark.parametrize("link", ["auto", "copy", "hard"])
def test_a_read_only_source(link: str, made: Folders, converted: Folders, tmp_path: Path, run: Run) -> None:
    needs("ext4")
    if not shutil.which("mksquashfs"):
        pytest.skip("needs mksquashfs")
    image = tmp_path / "image"
    command("mksquashfs", made(), image, "-quiet", "-no-progress")
    with mounted(image, tmp_path / "source", "ro"):
        code, _, err = run(tmp_path / "source", tmp_path / "out", "--target", "megamoe-128", "--link", link, "-q", *PROVED)
    assert code == 0, err
    assert digests(tmp_path / "out") == digests(converted("megamoe-128", "v4.1-flash", *PROVED))


def test_fuse(made: Folders, converted: Folders, tmp_path: Path, run: Run) -> None:
    needs("ext4")
    if not shutil.which("bindfs"):
        pytest.skip("needs bindfs")
    below, at = tmp_path / "below", tmp_path / "at"
    at.mkdir()
    shutil.copytree(made(), below / "source")
    command("bindfs", below, at)
    try:
        assert run(at / "source", at / "out", "--target", "megamoe-128", "-q", *PROVED)[0] == 0
        assert digests(at / "out") == digests(converted("megamoe-128", "v4.1-flash", *PROVED))
        assert sorted(p.name for p in at.iterdir()) == ["out", "source"]
    finally:
        command("umount", at)
