"""What a power cut leaves: OUT is absent, or as it was, or complete; the same command then finishes it, with the same bytes.

``FSE_CUTS`` is the number of cuts in all (`make powercut` makes 200); each is at another instant of a real run on a real file
system, and leaves another part of what was written since the last flush.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.conftest import digests
from tests.filesystems.conftest import MAKE, call, mounted
from tests.filesystems.disk import logged_disk

pytestmark = pytest.mark.filesystems

MEGABYTES = 320
"""The smallest disk on which mkfs.xfs makes a file system."""
CUTS = int(os.environ.get("FSE_CUTS", "15"))
PROVED = ["--verify", "storage"]
Run = Callable[..., tuple[int, str, str]]
Folders = Callable[..., Path]
Digests = dict[str, str]


@dataclass(frozen=True)
class Scene:
    """One command on a file system of its own. ``weight``: its share of the cuts. ``before``: what OUT was converted for before."""

    weight: int
    command: list[str]
    before: str = ""


SCENES = {
    "convert": Scene(2, ["source", "out", "--target", "megamoe-512", *PROVED]),
    "carried over": Scene(1, ["source", "out", "--target", "megamoe-128", *PROVED]),
    "overwrite": Scene(1, ["source", "out", "--target", "megamoe-512", "--overwrite", *PROVED], before="megamoe-128"),
    "restore": Scene(1, ["restore", "converted", "out"]),
}
SYSTEMS = ("ext4", "xfs", "btrfs")


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_power_cut(kind: str, name: str, made: Folders, converted: Folders, tmp_path: Path, run: Run) -> None:
    if os.geteuid() or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse")
    scene = SCENES[name]
    golden = digests(made() if name == "restore" else converted(scene.command[3], "v4.1-flash", *PROVED))
    disk_folder, at = tmp_path / "disk", tmp_path / "at"
    disk_folder.mkdir()
    command = [str(at / word) if word in ("source", "out", "converted") else word for word in scene.command]
    with logged_disk(disk_folder, MEGABYTES) as disk:
        call(*MAKE[kind], disk.path)
        with mounted(disk.path, at):
            before = furnish(at, scene, made(), converted)
            first = disk.position
            code, _, err = run(*command, "-q")
            assert code == 0, err
            last = disk.position
    assert last > first
    random = Random(f"{kind} {name}")
    cuts = round(CUTS * scene.weight / (len(SYSTEMS) * sum(s.weight for s in SCENES.values())))
    after_exit = [last] if cuts > 1 else []
    for instant in [*after_exit, *(random.randint(first, last) for _ in range(max(1, cuts - 1)))]:
        print(kind, name, instant, disk.image(instant, tmp_path / "image", random))  # shown where the test fails
        with mounted(tmp_path / "image", at):
            found = digests(at / "out") if (at / "out").exists() else {}
            assert found in (before["out"], golden), f"after a cut at {instant - first} of {last - first}"
            assert instant < last or found == golden, "exit 0 was not durable"
            code, _, err = run(*command, "-q")
            assert code == 0 or (found == golden and "error[output-exists]" in err), err
            assert {place: digests(at / place) for place in before} == {**before, "out": golden}


def furnish(at: Path, scene: Scene, source: Path, converted: Folders) -> dict[str, Digests]:
    """Put on the disk what a scene starts from, durably; return the digests of every place."""
    places = {"converted": converted("megamoe-512", "v4.1-flash", *PROVED)} if scene.command[0] == "restore" else {"source": source}
    if scene.before:
        places["out"] = converted(scene.before, "v4.1-flash", *PROVED)
    for place, folder in places.items():
        shutil.copytree(folder, at / place)
    os.sync()
    return {"out": {}, **{place: digests(folder) for place, folder in places.items()}}
