"""Every command on real file systems: the golden bytes, what was estimated, and nothing left beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fse_convert.conversion.run import Conversion
from fse_convert.errors import EnvironmentFailure
from fse_convert.output.copying import Link
from fse_convert.progress import Event
from fse_convert.verification.findings import Level
from tests.faults.adversary import request
from tests.filesystems.conftest import LARGE, Disks

pytestmark = [pytest.mark.slow, pytest.mark.filesystems]
Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KINDS = ["ext4", "xfs", "xfs without reflinks", "btrfs", "tmpfs", "overlay", "fuse"]
CLONES = {"xfs", "btrfs"}
KNOBS = {"layers": 3, "experts": 8}
CARRIED = ("--target", "megamoe-128")
"""Pads nothing: every shard is carried over."""
SLACK = 2 << 20
"""Bytes of folders, metadata and ends of blocks, and of config, indexes and manifest, which no estimate counts."""


def disk_with(kind: str, source: Path, disks: Disks) -> tuple[Path, Path]:
    """Return a file system, and a copy of a checkpoint on it; of an overlay in its lower layer."""
    if kind == "overlay":
        disk = disks.overlay(source)
        return disk, disk / source.name
    disk = disks.fuse(disks.make("tmpfs")) if kind == "fuse" else disks.make(kind)
    return disk, Path(shutil.copytree(source, disk / "source"))


@pytest.mark.parametrize("link", ["auto", "copy", "hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_used_was_estimated(
    kind: str, link: str, made: Make, run: Run, digest: Digest, disks: Disks, used: Callable[[Path], int], tmp_path: Path
) -> None:
    disk, source = disk_with(kind, made(**KNOBS), disks)
    assert run(made(**KNOBS), tmp_path / "golden", *CARRIED)[0] == 0
    needs = json.loads(run(source, disk / "out", *CARRIED, "--link", link, "--dry-run", "--json")[1])["needs"]
    before = used(disk)
    code, printed, _ = run(source, disk / "out", *CARRIED, "--link", link, "--json")
    assert code == 0
    assert needs["disk"] - SLACK < used(disk) - before < needs["disk"] + SLACK
    assert digest(disk / "out") == digest(tmp_path / "golden")
    shards = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert shards > 4 * SLACK
    how = {"auto": "clone" if kind in CLONES else "copy", "copy": "copy", "hard": "hard link"}[link]
    assert json.loads(printed)["bytes"][how] == shards
    assert (needs["disk"] < shards) == (how == "clone" or (how == "hard link" and kind != "overlay"))


@pytest.mark.parametrize("kind", KINDS)
def test_convert_again_and_back(kind: str, made: Make, run: Run, digest: Digest, disks: Disks, tmp_path: Path) -> None:
    disk, source = disk_with(kind, made(**KNOBS), disks)
    assert run(made(**KNOBS), tmp_path / "golden")[0] == 0
    assert run(source, disk / "out", *CARRIED)[0] == 0
    assert run(source, disk / "out", "--overwrite")[0] == 0
    assert digest(disk / "out") == digest(tmp_path / "golden")
    assert run("verify", disk / "out", "--source", source)[0] == 0
    assert run("restore", disk / "out", disk / "back")[0] == 0
    assert digest(disk / "back") == digest(made(**KNOBS))
    assert [p.name for p in disk.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_room_that_another_program_takes_is_exit_4_and_the_rest_resumes(
    kind: str, made: Make, run: Run, digest: Digest, disks: Disks, tmp_path: Path
) -> None:
    assert run(made(**KNOBS), tmp_path / "golden", "--verify", "none")[0] == 0
    disk, source = disk_with(kind, made(**KNOBS), disks)
    fillers: list[Path] = []

    def fill(event: Event) -> None:
        """Take the margin too, in steps: what Btrfs calls free it does not give to one file."""
        if event.done and not fillers:
            for step in (16 << 20, 1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        fillers.append(disk / f"filler{len(fillers)}")
                        with fillers[-1].open("wb") as f:
                            os.posix_fallocate(f.fileno(), 0, step)

    with pytest.raises(EnvironmentFailure) as full:
        Conversion(request(source, disk / "out", Level.NONE, Link.COPY)).run(fill)
    assert [p.code for p in full.value.problems] == ["no-space", "resumable"]
    for filler in fillers:
        filler.unlink(missing_ok=True)
    assert run(source, disk / "out", "--link", "copy", "--verify", "none")[0] == 0
    assert digest(disk / "out") == digest(tmp_path / "golden")


@pytest.mark.parametrize("link", ["auto", "hard"])
def test_a_source_on_a_read_only_image(link: str, made: Make, run: Run, digest: Digest, disks: Disks, tmp_path: Path) -> None:
    source = disks.squashed(made(**KNOBS))
    assert run(made(**KNOBS), tmp_path / "golden")[0] == 0
    assert run(source, tmp_path / "out", "--link", link)[0] == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "golden")


def test_room_for_clones_is_not_asked_for(made: Make, run: Run, disks: Disks) -> None:
    disk, source = disk_with("xfs", made(**KNOBS), disks)
    shards = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    free = shutil.disk_usage(disk).free
    with (disk / "filler").open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, free - (64 << 20) - shards * 3 // 4)
    assert run(source, disk / "copied", *CARRIED, "--link", "copy")[0] == 4
    assert run(source, disk / "cloned", *CARRIED)[0] == 0
    assert run("restore", disk / "cloned", disk / "back", "--link", "copy")[0] == 4
    assert run("restore", disk / "cloned", disk / "back")[0] == 0


@pytest.mark.parametrize(("kind", "meaning"), [("xfs", "share their blocks"), ("ext4", "no reflink")])
def test_doctor_tries_whether_blocks_can_be_shared(kind: str, meaning: str, made: Make, run: Run, disks: Disks) -> None:
    disk, _ = disk_with(kind, made(**KNOBS), disks)
    found = json.loads(run("doctor", disk, "--json")[1])["findings"]
    assert meaning in next(f["meaning"] for f in found if f["name"] == "disk")
    assert not list(disk.glob("tmp*"))


@pytest.mark.parametrize("source", ["out's own", "another mount of it"])
def test_hard_links_do_not_cross_mounts(source: str, made: Make, run: Run, disks: Disks) -> None:
    """Volumes of a container are mounts of one file system: a link between them is refused, and what is copied was counted."""
    disk, folder = disk_with("ext4", made(**KNOBS), disks)
    if source == "another mount of it":
        folder = disks.mount("--bind", folder)
    needs = json.loads(run(folder, disk / "out", *CARRIED, "--link", "hard", "--dry-run", "--json")[1])["needs"]
    ways = json.loads(run(folder, disk / "out", *CARRIED, "--link", "hard", "--json")[1])["bytes"]
    assert ("hard link" in ways) == (source == "out's own") == (needs["disk"] < ways.get("copy", LARGE))


def test_a_mount_point_is_not_replaced_though_it_is_of_the_same_file_system(made: Make, run: Run, disks: Disks) -> None:
    disk, source = disk_with("ext4", made(**KNOBS), disks)
    (disk / "elsewhere").mkdir()
    out = disks.mount("--bind", disk / "elsewhere", at=disk / "out")
    code, _, err = run(source, out, "--overwrite")
    assert code == 2
    assert "error[output-mounted]" in err
    assert list(out.iterdir()) == []
