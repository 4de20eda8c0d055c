"""Somebody else who touches files during a run: at any step, any file or folder, in any way; the same for the same seed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fse_convert.conversion.run import Conversion, Request
from fse_convert.errors import FseConvertError
from fse_convert.output import staging
from fse_convert.output.copying import Link
from fse_convert.output.signals import handling
from fse_convert.plan.plan import Options
from fse_convert.progress import Event, Observer, ignore
from fse_convert.restoration.run import Restoration
from fse_convert.servers.targets import find_target
from fse_convert.testing.faults import Injector
from fse_convert.verification.findings import Level

Digest = Callable[[Path], dict[str, str]]
TICK = 0.012
"""Seconds between two times of change that older kernels tell apart: a clock that stands still hides any change."""


def request(
    source: Path,
    out: Path,
    level: Level = Level.STORAGE,
    link: Link = Link.AUTO,
    *,
    target: str = "megamoe-512",
    overwrite: bool = False,
) -> Request:
    """A conversion on one thread; without a target to FP8 experts."""
    options = Options(find_target(target), routed_fp8=not target)
    return Request(source=source, out=out, options=options, verify=level, link=link, workers=1, overwrite=overwrite)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name(path.name + ".away"))


def append(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Another file of the same size in its place, or an empty folder."""
    other = path.with_name(path.name + ".new")
    if path.is_dir():
        rename(path)
        path.mkdir()
        return
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def flip(path: Path) -> None:
    """Another byte at the end, in place."""
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if raw else b"x")


def add(path: Path) -> None:
    path.with_name("stray.safetensors").write_bytes(b"stray")


ON_FILES = [remove, rename, append, truncate, replace, flip, add]
ON_FOLDERS = [remove, rename, replace]
IN_BYTES = [replace, flip, truncate]
"""What of a staged file may show in bytes alone, the last while it is written: `--verify none` compares none, and says so."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command and how it is run; ``restores``: back from an output, else a conversion."""

    name: str
    level: Level = Level.NUMERICS
    link: Link = Link.AUTO
    target: str = "megamoe-512"
    overwrite: bool = False
    restores: bool = False


SCENARIOS = [
    Scenario("convert"),
    Scenario("convert, storage", Level.STORAGE),
    Scenario("convert, none", Level.NONE),
    Scenario("convert, hard links", Level.STORAGE, Link.HARD),
    Scenario("carry, copies, none", Level.NONE, Link.COPY, "megamoe-128"),
    Scenario("overwrite", Level.STORAGE, overwrite=True),
    Scenario("overwrite, hard links, none", Level.NONE, Link.HARD, overwrite=True),
    Scenario("convert to FP8", target=""),
    Scenario("restore", restores=True),
    Scenario("restore, no digests", Level.NONE, restores=True),
    Scenario("restore, hard links", link=Link.HARD, restores=True),
    Scenario("restore from FP8", target="", restores=True),
    Scenario("restore from FP8, no digests", Level.NONE, target="", restores=True),
]


class Ground:
    """A scenario on a ground of its own: what is read, the folder in which the output appears, and what it must be."""

    def __init__(self, scenario: Scenario, tiny: Path, folder: Path, digest: Digest) -> None:
        self.scenario, self.digest = scenario, digest
        self.pristine, self.work = folder / "pristine", folder / "work"
        self.input, self.home = self.work / "input", self.work / "home"
        self.out, self.staged = self.home / "out", self.home / ".out.fse-partial"
        (self.pristine / "home").mkdir(parents=True)
        self.made = self.pristine / "input"
        if scenario.restores:
            Conversion(request(tiny, self.made, scenario.level, target=scenario.target)).run(ignore)
        else:
            shutil.copytree(tiny, self.made)
        if scenario.overwrite:
            Conversion(request(tiny, self.pristine / "home" / "out", Level.NONE, target="megamoe-128")).run(ignore)
        self.before = digest(self.pristine / "home" / "out")
        self._reset()
        counter = Injector(str(self.work))
        self._run(counter)
        self.steps, self.golden = counter.count, digest(self.out)

    def disturbed(self, seed: int) -> str:
        """Run once while somebody touches something; return how it ended. Fails when anything but the golden bytes appears."""
        dice = random.Random(f"{self.scenario.name} {seed}")
        step, place = dice.randint(1, self.steps), dice.choice(["input", "staged", "staged", "folder"])
        acts = ON_FOLDERS if place == "folder" else ON_FILES
        if place == "staged" and self.scenario.level is Level.NONE and not self.scenario.restores:
            acts = [a for a in acts if a not in IN_BYTES]
        touch, which = dice.choice(acts), dice.random()
        about = f"{self.scenario.name}, seed {seed}: {touch.__name__} of {place} at step {step} of {self.steps}"
        self._reset()

        def act() -> None:
            path = self._pick(place, which)
            if path:
                time.sleep(TICK)
                touch(path)

        error: FseConvertError | None = None
        try:
            self._run(Injector(str(self.work), step, act))
        except FseConvertError as e:
            error = e
        there = self.digest(self.out)
        if error is None:
            assert there == self.golden, about
            return "golden"
        assert there == self.before or (place == "folder" and not there), (about, error)
        assert error.exit_code == 4 or (error.exit_code == 1 and place == "staged"), (about, error)
        return error.problems[0].code

    def _pick(self, place: str, which: float) -> Path | None:
        folder = self.input if place == "input" else self.staged / "output"
        if place == "folder":
            found = [p for p in (self.staged, self.staged / "output", self.home) if p.exists()]
        else:
            found = sorted(p for p in folder.rglob("*") if p.is_file())
        return found[int(which * len(found))] if found else None

    def _reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work)

    def _run(self, injector: Injector) -> None:
        def observe(_event: Event) -> None:
            injector.step("event")

        with _until_the_last_look(injector):
            self._command(observe)

    def _command(self, observe: Observer) -> None:
        s = self.scenario
        if s.restores:
            job: Restoration | Conversion = Restoration(self.input, self.out, s.link)
        else:
            job = Conversion(request(self.input, self.out, s.level, s.link, target=s.target, overwrite=s.overwrite))
        job.run(observe)


@contextmanager
def _until_the_last_look(injector: Injector) -> Iterator[None]:
    """Let an injector act until the program looks at everything a last time: between that and the rename nothing can see it."""

    def last(handler: signal.Handlers) -> AbstractContextManager[object]:
        injector.remove()
        return handling(handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "handling", last)
        injector.install()
        try:
            yield
        finally:
            injector.remove()
