"""File systems of their own for a test: made on a file, mounted through a loop device. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class FileSystem:
    """A kind of file system: how it is made, and how it is mounted."""

    make: Sequence[str]
    options: str = ""

    @property
    def missing(self) -> str:
        """Why it cannot be made here; empty where it can."""
        if os.geteuid():
            return "needs root"
        if not Path("/dev/loop-control").exists():
            return "needs loop devices"
        return "" if shutil.which(self.make[0]) else f"needs {self.make[0]}"


KINDS: Mapping[str, FileSystem] = {
    "ext4": FileSystem(["mkfs.ext4", "-q", "-F"]),
    "ext4-writeback": FileSystem(["mkfs.ext4", "-q", "-F"], "data=writeback"),
    "xfs": FileSystem(["mkfs.xfs", "-q", "-f"]),
    "xfs-no-reflink": FileSystem(["mkfs.xfs", "-q", "-f", "-m", "reflink=0"]),
    "btrfs": FileSystem(["mkfs.btrfs", "-q", "-f"]),
    "tmpfs": FileSystem(["mount"]),
    "overlay": FileSystem(["mkfs.ext4", "-q", "-F"]),
}


def command(*args: object) -> None:
    """Run a command quietly; raises with what it said."""
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, args))}: {done.stdout}{done.stderr}")


@contextmanager
def mounted(disk: Path, at: Path, options: str = "") -> Iterator[Path]:
    """Mount what is on a file, through a loop device, for the length of a ``with`` block."""
    at.mkdir(exist_ok=True)
    loop = subprocess.run(["losetup", "--find", "--show", str(disk)], capture_output=True, text=True, check=True).stdout.strip()
    with ExitStack() as undo:
        undo.callback(command, "losetup", "--detach", loop)
        command("mount", *(["-o", options] if options else []), loop, at)
        undo.callback(unmount, at)
        yield at


@contextmanager
def file_system(kind: str, folder: Path, contents: Mapping[str, Path], megabytes: int = 320) -> Iterator[Path]:
    """Mount a new file system of a kind, with copies of some folders on it; in an overlay they lie in the lower layer."""
    at = folder / "at"
    at.mkdir()
    with ExitStack() as undo:
        if kind == "tmpfs":
            command("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", at)
            undo.callback(unmount, at)
            fill(at, contents)
            yield at
            return
        disk = folder / "disk"
        with disk.open("wb") as file:
            file.truncate(megabytes << 20)
        base = "ext4" if kind == "overlay" else kind
        make(base, disk)
        undo.enter_context(mounted(disk, at, KINDS[base].options))
        if kind != "overlay":
            fill(at, contents)
            yield at
            return
        for layer in ("lower", "upper", "work", "merged"):
            (at / layer).mkdir()
        fill(at / "lower", contents)
        layers = ",".join(f"{layer}dir={at / layer}" for layer in ("lower", "upper", "work"))
        command("mount", "-t", "overlay", "-o", layers, "overlay", at / "merged")
        undo.callback(unmount, at / "merged")
        yield at / "merged"


def fill(at: Path, contents: Mapping[str, Path]) -> None:
    """Copy folders to a file system, durably."""
    for name, folder in contents.items():
        shutil.copytree(folder, at / name)
    os.sync()


def free(at: Path) -> int:
    """Return the bytes that a file system has left, after everything is written out."""
    os.sync()
    space = os.statvfs(at)
    return space.f_bavail * space.f_frsize


def unmount(at: Path) -> None:
    """Unmount, after whoever is still closing files there."""
    for _ in range(50):
        with suppress(OSError):
            return command("umount", at)
        time.sleep(0.1)
    return command("umount", at)


def make(kind: str, disk: Path) -> None:
    """Make a file system on a file or device."""
    command(*KINDS[kind].make, disk)


def needs(kind: str) -> None:
    """Skip the test where a kind of file system cannot be made."""
    if missing := KINDS[kind].missing:
        pytest.skip(missing)
