"""A whole proof: what it says that it will do adds up with what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fse_convert.conversion.run import Conversion, Request
from fse_convert.errors import EnvironmentFailure, Problem
from fse_convert.output.copying import Link
from fse_convert.plan.plan import Options
from fse_convert.progress import Event, Phase, Work
from fse_convert.servers.targets import find_target
from fse_convert.verification import layers
from fse_convert.verification.findings import Level
from fse_convert.verification.gpu_kernel import KernelResult, probe
from fse_convert.verification.proof import Check, verify
from fse_convert.verification.sample import Sample

Make = Callable[..., Path]


def added(events: list[Event]) -> dict[str, tuple[int, int]]:
    """How often something was finished, and bytes, by phase."""
    return {
        phase: (sum(e.done for e in events if e.phase == phase), sum(e.bytes for e in events if e.phase == phase))
        for phase in dict.fromkeys(e.phase for e in events)
    }


def stated(works: list[Work]) -> dict[str, tuple[int, int]]:
    return {work.phase: (work.count, work.bytes) for work in works}


def done(check: Check) -> dict[str, tuple[int, int]]:
    """Verify, and add up the events."""
    events: list[Event] = []
    assert not verify(check, events.append).failed
    return added(events)


@pytest.mark.parametrize("level", [None, Level.STORAGE, Level.NUMERICS, Level.KERNEL])
def test_the_workload_adds_up_with_a_source(level: Level | None, root: Path, out: Path) -> None:
    check = Check(out, root, level)
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"]
    expected = {Phase.READ: (len(files), sum(p.stat().st_size for p in files)), Phase.NUMERICS: (3, 0)}
    if level is Level.STORAGE:
        del expected[Phase.NUMERICS]
    assert stated(check.workload()) == done(check) == expected


def test_the_workload_adds_up_without_a_source(out: Path) -> None:
    assert stated(Check(out, None).workload()) == done(Check(out, None))


def test_files_that_the_hub_added_are_not_waited_for(root: Path, out: Path) -> None:
    (out / ".gitattributes").write_text("*.safetensors filter=lfs")
    for source in (None, root):
        assert stated(Check(out, source).workload()) == done(Check(out, source))


def test_a_kernel_that_is_there_counts(root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = replace(probe(), status="ready")
    monkeypatch.setattr("fse_convert.verification.gpu_kernel.probe", lambda: ready)
    monkeypatch.setattr(layers, "probe", lambda: ready)
    monkeypatch.setattr(layers, "check_kernel", lambda *_args, **_more: KernelResult("passed", "", {}))
    check = Check(out, root, Level.KERNEL)
    assert stated(check.workload()) == done(check)
    assert [(w.phase, w.count) for w in check.workload()[1:]] == [(Phase.NUMERICS, 3), (Phase.KERNEL, 3)]


def test_the_workload_of_a_sample_is_not_known(root: Path, out: Path) -> None:
    works = Check(out, root, sample=Sample(3)).workload()
    assert [(w.phase, w.count, w.bytes) for w in works] == [(Phase.READ, 0, 0), (Phase.NUMERICS, 0, 0)]


def test_the_workload_of_a_damaged_manifest_is_that_of_the_files(root: Path, out: Path) -> None:
    expected = Check(out, root, Level.STORAGE).workload()
    (out / "fse/manifest.json").write_text("{")
    assert Check(out, root).workload() == [*expected, Work(Phase.NUMERICS, "layer", 0)]


@pytest.mark.parametrize("link", [Link.COPY, Link.HARD])
@pytest.mark.parametrize("level", [Level.NONE, Level.STORAGE, Level.NUMERICS])
def test_the_workload_of_a_conversion_adds_up_also_when_it_is_resumed(level: Level, link: Link, root: Path, tmp_path: Path) -> None:
    target = find_target("megamoe-512")
    assert target
    request = Request(root, tmp_path / "out", Options(target), link=link, verify=level)

    def stop(event: Event) -> None:
        if event.done and event.phase is Phase.WRITE:
            raise EnvironmentFailure(Problem("io-error", "stopped"))

    with pytest.raises(EnvironmentFailure):
        Conversion(replace(request, workers=1)).run(stop)
    conversion = Conversion(request)
    events: list[Event] = []
    expected = stated(conversion.workload())
    conversion.run(events.append)
    assert expected == added(events)
    assert any(e.kept for e in events)
