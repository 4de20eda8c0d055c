"""Bytes that move between files: in the kernel, through a buffer, as links; always all of them or an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fse_convert.output import copying as ranges
from fse_convert.output.copying import Link, carry, copy_range, read_into, read_rows, way, write_all
from fse_convert.output.mounts import Mount

DATA = bytes(range(256)) * 300


@pytest.fixture
def files(tmp_path: Path) -> tuple[int, int, Path]:
    (tmp_path / "src").write_bytes(DATA)
    src = os.open(tmp_path / "src", os.O_RDONLY)
    dst = os.open(tmp_path / "dst", os.O_RDWR | os.O_CREAT, 0o666)
    return src, dst, tmp_path / "dst"


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_copy_range_falls_back_when_the_kernel_cannot(
    refusal: int | None, files: tuple[int, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst, path = files
    monkeypatch.setattr(ranges, "STEP", 1000)
    monkeypatch.setattr(ranges, "BUFFER", 700)
    if refusal:

        def refuse(*_: object) -> int:
            raise OSError(refusal, "no")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    seen: list[int] = []
    write_all(dst, b"head")
    copy_range(src, dst, 100, 5000, seen.append)
    assert path.read_bytes() == b"head" + DATA[100:5100]
    assert sum(seen) == 5000


@pytest.mark.parametrize(("call", "which"), [("pread", "src"), ("write", "dst")])
def test_an_error_names_the_file_that_it_is_about(
    call: str, which: str, files: tuple[int, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying within the kernel does not tell which of the two failed."""
    src, dst, path = files

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "copy_file_range", fail)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="broken") as e:
        copy_range(src, dst, 0, 10)
    assert e.value.filename == str(path.with_name(which))


def test_a_read_that_fails_names_its_file(files: tuple[int, int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="broken") as e:
        read_into(files[0], memoryview(bytearray(4)), 0)
    assert e.value.filename == str(files[2].with_name("src"))


def test_a_source_that_ends_early_is_seen(files: tuple[int, int, Path]) -> None:
    src, dst, _ = files
    with pytest.raises(EOFError, match="10 bytes early"):
        copy_range(src, dst, len(DATA) - 10, 20)
    with pytest.raises(EOFError, match="10 bytes early"):
        read_into(src, memoryview(bytearray(20)), len(DATA) - 10)


def test_short_writes_and_reads_go_on(files: tuple[int, int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst, path = files
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    buffer = bytearray(100)
    read_into(src, memoryview(buffer), 3)
    write_all(dst, buffer)
    assert path.read_bytes() == DATA[3:103]


def test_rows_that_lie_apart_are_read_at_once_whatever_a_read_gives(
    files: tuple[int, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    for most in (100, 1, 0):
        frame = bytearray(b"." * 24)
        heads = [memoryview(frame)[at : at + 5] for at in range(0, 24, 8)]
        if most < 100:
            monkeypatch.setattr(os, "preadv", lambda fd, views, at, most=most: preadv(fd, [v[: most or 3] for v in views[:2]], at))
        read_rows(files[0], heads, 3)
        assert frame == b"".join(DATA[at : at + 5] + b"..." for at in (3, 8, 13))
    with pytest.raises(EOFError, match="2 bytes early"):
        read_rows(files[0], heads, len(DATA) - 13)


@pytest.mark.parametrize("link", Link)
def test_carry_brings_the_bytes_over(link: Link, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(DATA)
    (tmp_path / "link").symlink_to("blob")
    how = carry(tmp_path / "link", tmp_path / "out", link)
    assert (tmp_path / "out").read_bytes() == DATA
    assert not (tmp_path / "out").is_symlink()
    assert ((tmp_path / "out").stat().st_ino == (tmp_path / "blob").stat().st_ino) == (how == "hard link") == (link is Link.HARD)


def test_hard_links_across_devices_become_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "other device")

    (tmp_path / "a").write_bytes(DATA)
    monkeypatch.setattr(os, "link", refuse)
    assert carry(tmp_path / "a", tmp_path / "b", Link.HARD) == "copy"
    assert (tmp_path / "b").read_bytes() == DATA


def test_clone_shares_blocks_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ranges.fcntl, "ioctl", lambda _fd, request, _src: asked.append(request))
    (tmp_path / "a").write_bytes(DATA)
    assert carry(tmp_path / "a", tmp_path / "b", Link.AUTO) == "clone"
    assert asked == [ranges.FICLONE]


def test_a_copy_that_was_asked_for_shares_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """copy_file_range and sendfile clone on XFS and Btrfs."""

    def share(*_: object) -> int:
        raise AssertionError("may share blocks")

    for owner, name in [(os, "copy_file_range"), (os, "sendfile"), (ranges.fcntl, "ioctl"), (os, "link")]:
        monkeypatch.setattr(owner, name, share)
    (tmp_path / "a").write_bytes(DATA)
    assert carry(tmp_path / "a", tmp_path / "b", Link.COPY) == "copy"
    assert (tmp_path / "b").read_bytes() == DATA


@pytest.mark.parametrize(
    ("link", "clones", "kind", "elsewhere", "want"),
    [
        pytest.param(Link.AUTO, True, "xfs", False, "clone", id="cloned"),
        pytest.param(Link.AUTO, False, "ext4", False, "copy", id="no clones"),
        pytest.param(Link.COPY, True, "xfs", False, "copy", id="a copy as asked"),
        pytest.param(Link.HARD, True, "xfs", False, "hard link", id="a hard link as asked"),
        pytest.param(Link.HARD, True, "xfs", True, "clone", id="no hard link to another mount"),
        pytest.param(Link.HARD, False, "overlay", False, "hard link or copy", id="overlay"),
    ],
)
def test_the_way_is_known_before(
    link: Link, clones: bool, kind: str, elsewhere: bool, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ioctl(_fd: int, _request: int, _src: int) -> None:
        if not clones:
            raise OSError(errno.EOPNOTSUPP, "no")

    def mount(path: Path) -> Mount:
        return Mount(number=2 if elsewhere and path.name == "a" else 1, kind=kind, device=1)

    monkeypatch.setattr(ranges, "mount_of", mount)
    monkeypatch.setattr(ranges.fcntl, "ioctl", ioctl)
    (tmp_path / "a").write_bytes(DATA)
    assert way(tmp_path / "a", tmp_path, link) == want
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
