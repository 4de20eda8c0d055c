"""Something else touches staging, source or the folder around OUT during a run: the golden bytes and exit 0, or no output."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fse_convert.conversion.run import Conversion, Request
from fse_convert.errors import FseConvertError
from fse_convert.output.copying import Link
from fse_convert.plan.plan import Options
from fse_convert.progress import Event, Observer
from fse_convert.restoration import Restoration
from fse_convert.servers.targets import find_target
from fse_convert.verification.findings import Level

Digest = Callable[[Path], dict[str, str]]
Golden = dict[Level, tuple[dict[str, str], int]]
"""Digests of an undisturbed output, and how many events it takes, by level."""


def request(source: Path, out: Path, level: Level = Level.STORAGE, link: Link = Link.AUTO, target: str = "megamoe-512") -> Request:
    found = find_target(target)
    assert found
    return Request(source=source, out=out, options=Options(found), verify=level, link=link, workers=1)


def at(number: int, act: Callable[[], None]) -> Observer:
    """An observer that acts when event ``number`` comes."""
    seen = [0]

    def observe(_event: Event) -> None:
        seen[0] += 1
        if seen[0] == number:
            act()

    return observe


def count(source: Path, out: Path, level: Level, link: Link = Link.AUTO) -> int:
    events: list[Event] = []
    Conversion(request(source, out, level, link)).run(events.append)
    shutil.rmtree(out)
    return len(events)


def pick(folder: Path, which: int) -> Path | None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return files[which % len(files)] if files else None


def remove(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name(path.name + ".away"))


def append(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Another file of the same size in its place."""
    other = path.with_name(path.name + ".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def flip(path: Path) -> None:
    """Another byte at the end, in place."""
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if raw else b"x")


def add(path: Path) -> None:
    path.with_name("stray.safetensors").write_bytes(b"stray")


FILE_ACTS = [remove, rename, append, truncate, replace, flip, add]
SAME_SIZE = [replace, flip]
"""What shows in bytes alone: `--verify none` reads nothing back, and says so."""


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.NONE, Level.STORAGE])
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_adversary_gets_the_golden_bytes_or_no_output(
    level: Level,
    data: st.DataObject,
    tiny: Path,
    ram: Path,
    digest: Digest,
    golden_by_level: dict[Level, tuple[dict[str, str], int]],
) -> None:
    golden, events = golden_by_level[level]
    work = Path(ram / "adversary")
    shutil.rmtree(work, ignore_errors=True)
    source, home = work / "source", work / "home"
    shutil.copytree(tiny, source)
    home.mkdir()
    out = home / "out"
    staging = home / ".out.fse-partial"
    number, which = data.draw(st.integers(1, events), "event"), data.draw(st.integers(0, 30), "file")
    place = data.draw(st.sampled_from(["source", "staged", "staging", "parent"]), "place")
    acts = [a for a in FILE_ACTS if level is not Level.NONE or a not in SAME_SIZE]
    touch, whole = data.draw(st.sampled_from(acts), "act"), data.draw(st.booleans(), "remove the folder")

    def act() -> None:
        if place in ("source", "staged"):
            path = pick(source if place == "source" else staging / "output", which)
            if path:
                touch(path)
        else:
            folder = staging if place == "staging" else home
            if whole:
                shutil.rmtree(folder)
            else:
                folder.rename(folder.with_name(folder.name + ".away"))

    try:
        Conversion(request(source, out, level)).run(at(number, act))
    except FseConvertError:
        assert not out.exists()
    else:
        wrong = {n for n, d in digest(out).items() if golden.get(n) != d} | (golden.keys() - digest(out).keys())
        assert wrong == set()


@pytest.fixture(scope="session")
def golden_by_level(tiny: Path, ram: Path, digest: Digest) -> Golden:
    known = {}
    for level in (Level.NONE, Level.STORAGE):
        events: list[Event] = []
        out = ram / f"golden-{level.value}"
        Conversion(request(tiny, out, level)).run(events.append)
        known[level] = (digest(out), len(events))
    return known


@pytest.mark.parametrize("level", [Level.NONE, Level.STORAGE], ids=lambda level: level.value)
def test_a_staged_file_that_is_removed_last_of_all(level: Level, tiny: Path, tmp_path: Path) -> None:
    total = count(tiny, tmp_path / "out", level)
    staged = tmp_path / ".out.fse-partial" / "output"
    with pytest.raises(FseConvertError) as lost:
        Conversion(request(tiny, tmp_path / "out", level)).run(at(total, lambda: next(staged.glob("model-*")).unlink()))
    assert lost.value.problems[0].code == "staging-lost"
    assert lost.value.exit_code == 4
    assert not (tmp_path / "out").exists()


def test_a_staging_folder_that_goes_away_is_not_begun_again(tiny: Path, tmp_path: Path) -> None:
    total = count(tiny, tmp_path / "out", Level.STORAGE)
    with pytest.raises(FseConvertError) as lost:
        Conversion(request(tiny, tmp_path / "out")).run(at(total, lambda: shutil.rmtree(tmp_path / ".out.fse-partial")))
    assert lost.value.problems[0].code == "staging-lost"
    assert list(tmp_path.iterdir()) == []


def test_a_hard_linked_source_that_grows_after_it_was_read_back(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    carried = next(s.name for s in Conversion(request(source, tmp_path / "out")).plan.shards if s.carried)
    total = count(source, tmp_path / "out", Level.STORAGE, Link.HARD)
    with pytest.raises(FseConvertError) as changed:
        Conversion(request(source, tmp_path / "out", link=Link.HARD)).run(at(total, lambda: append(source / carried)))
    assert changed.value.problems[0].code == "source-changed"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "restore"])
def test_a_staging_folder_with_nothing_but_an_output_is_known(
    command: str, made: Callable[..., Path], tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """What a power cut on Btrfs leaves: fsync of a file there persists the path to that file only."""
    assert run(made(), tmp_path / "converted", "--verify", "none")[0] == 0
    (tmp_path / ".o.fse-partial" / "output").mkdir(parents=True)
    arguments = ("restore", tmp_path / "converted") if command == "restore" else (made(),)
    assert run(*arguments, tmp_path / "o")[0] == 0
    assert not (tmp_path / ".o.fse-partial").exists()


@pytest.mark.parametrize(
    ("place", "touch", "code"),
    [
        pytest.param("staged", remove, "staging-lost", id="a restored shard is removed"),
        pytest.param("staged", append, "staging-lost", id="a restored shard grows"),
        pytest.param("staged", add, "staging-lost", id="a file is added"),
        pytest.param("out", append, "source-changed", id="the output that is restored from grows"),
        pytest.param("out", add, "source-changed", id="a file is added to the output that is restored from"),
    ],
)
def test_a_restoration_that_is_disturbed_publishes_nothing(
    place: str, touch: Callable[[Path], None], code: str, tiny: Path, tmp_path: Path
) -> None:
    out, original = tmp_path / "out", tmp_path / "original"
    Conversion(request(tiny, out, Level.NONE)).run(lambda _event: None)
    events: list[Event] = []
    Restoration(out, original, Link.AUTO).run(events.append)
    shutil.rmtree(original)
    folder = out if place == "out" else tmp_path / ".original.fse-partial" / "output"
    with pytest.raises(FseConvertError) as disturbed:
        Restoration(out, original, Link.AUTO).run(at(len(events), lambda: touch(next(folder.glob("model-*.safetensors")))))
    assert disturbed.value.problems[0].code == code
    assert disturbed.value.exit_code == 4
    assert not original.exists()
