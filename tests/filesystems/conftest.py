"""Real file systems on loop devices; what this machine cannot make or mount is skipped with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAKE: dict[str, tuple[str, ...]] = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
    "xfs without reflinks": ("mkfs.xfs", "-q", "-m", "reflink=0"),
    "btrfs": ("mkfs.btrfs", "-q"),
}
"""What makes a file system in an image."""
LARGE = 400 << 20
"""Bytes of an image; XFS wants 300 MiB."""


def call(*command: object) -> None:
    """Run a command of the system; skip where it does not work."""
    if not shutil.which(str(command[0])):
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip().splitlines()[-1:]}")


class Disks:
    """Makes file systems, each mounted on a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounted: list[Path] = []

    def mount(self, *arguments: object, at: Path | None = None) -> Path:
        """Mount something on a new folder."""
        target = at or self.folder / f"mount{len(self.mounted)}"
        target.mkdir()
        call("mount", *arguments, target)
        self.mounted.append(target)
        return target

    def make(self, kind: str, size: int = LARGE) -> Path:
        """Return the folder of a new file system of a kind and size in bytes."""
        if kind == "tmpfs":
            return self.mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")
        image = self.folder / f"image{len(self.mounted)}"
        with image.open("wb") as f:
            f.truncate(size)
        call(*MAKE[kind], image)
        return self.mount("-o", "loop", image)

    def overlay(self, lower: Path) -> Path:
        """Return an overlay whose lower layer holds a folder's copy, all of it in memory."""
        disk = self.make("tmpfs")
        shutil.copytree(lower, disk / "lower" / lower.name)
        for name in ("upper", "work"):
            (disk / name).mkdir()
        layers = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        return self.mount("-t", "overlay", "-o", layers, "overlay")

    def fuse(self, below: Path) -> Path:
        """Return a FUSE file system that shows a folder."""
        target = self.folder / f"mount{len(self.mounted)}"
        target.mkdir()
        call("bindfs", below, target)
        self.mounted.append(target)
        return target

    def squashed(self, source: Path) -> Path:
        """Return a read-only file system that holds what a folder holds."""
        image = self.folder / f"image{len(self.mounted)}"
        call("mksquashfs", source, image, "-quiet", "-no-progress")
        return self.mount("-o", "loop,ro", image)


@contextmanager
def mounted(disk: Path, at: Path) -> Iterator[Path]:
    """Mount what is on a file, through a loop device that is gone afterwards, so that another state of it can be mounted."""
    at.mkdir(exist_ok=True)
    loop = subprocess.run(["losetup", "--find", "--show", str(disk)], capture_output=True, text=True, check=True).stdout.strip()
    try:
        call("mount", loop, at)
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
        subprocess.run(["losetup", "--detach", loop], check=True)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    """File systems that are gone after the test."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    made = Disks(tmp_path)
    yield made
    for folder in reversed(made.mounted):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def used() -> Callable[[Path], int]:
    """Return a function that tells how many bytes are taken on a folder's file system, once all is written."""

    def count(folder: Path) -> int:
        os.sync()
        return shutil.disk_usage(folder).used

    return count
