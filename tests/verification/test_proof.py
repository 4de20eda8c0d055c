"""A whole proof: what it says that it will do adds up with what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fse_convert.conversion.run import Conversion, Request
from fse_convert.plan.plan import Options
from fse_convert.progress import Event
from fse_convert.servers.targets import find_target
from fse_convert.verification import layers
from fse_convert.verification.findings import Level, Sample
from fse_convert.verification.kernel import KernelResult, probe
from fse_convert.verification.proof import Check, verify

Make = Callable[..., Path]


def done(check: Check) -> tuple[int, int]:
    """Verify, and add up the events: bytes, and how often something was finished."""
    events: list[Event] = []
    assert not verify(check, events.append).failed
    return sum(e.bytes for e in events), sum(e.done for e in events)


@pytest.mark.parametrize("level", [None, Level.STORAGE, Level.NUMERICS, Level.KERNEL])
def test_the_workload_adds_up_with_a_source(level: Level | None, root: Path, out: Path) -> None:
    check = Check(out, root, level)
    assert check.workload() == done(check)
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert check.workload()[0] == sum(p.stat().st_size for p in files)
    assert check.workload()[1] - len(files) == (0 if level is Level.STORAGE else 3)


def test_the_workload_adds_up_without_a_source(out: Path) -> None:
    assert Check(out, None).workload() == done(Check(out, None))


def test_a_kernel_that_is_there_counts(root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = replace(probe(), status="ready")
    monkeypatch.setattr("fse_convert.verification.kernel.probe", lambda: ready)
    monkeypatch.setattr(layers, "probe", lambda: ready)
    monkeypatch.setattr(layers, "check_kernel", lambda *_args, **_more: KernelResult("passed", "", {}))
    check = Check(out, root, Level.KERNEL)
    assert check.workload() == done(check)
    assert check.workload()[1] == Check(out, root, Level.STORAGE).workload()[1] + 6


def test_the_workload_of_a_sample_is_not_known(root: Path, out: Path) -> None:
    assert Check(out, root, sample=Sample(3)).workload() == (0, 0)


def test_the_workload_of_a_damaged_manifest_is_that_of_the_files(root: Path, out: Path) -> None:
    expected = Check(out, root, Level.STORAGE).workload()
    (out / "fse/manifest.json").write_text("{")
    assert Check(out, root).workload() == expected


@pytest.mark.parametrize("level", [Level.NONE, Level.STORAGE, Level.NUMERICS])
def test_the_workload_of_a_conversion_adds_up(level: Level, root: Path, tmp_path: Path) -> None:
    target = find_target("megamoe-512")
    assert target
    conversion = Conversion(Request(root, tmp_path / "out", Options(target), verify=level))
    events: list[Event] = []
    expected = conversion.workload()
    conversion.run(events.append)
    assert expected == (sum(e.bytes for e in events if not e.done), sum(e.done for e in events))
