"""Commands in any order, killed at any operation: OUT and ORIGINAL hold the bytes of undisturbed runs, or what they held before."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fse_convert.testing.checkpoints import make_checkpoint
from tests.faults.conftest import Server
from tests.verification.recipes import KNOBS, RECIPES

MINUTES = float(os.environ.get("FSE_MACHINE_MINUTES", "0"))
"""How long the machine goes on with new random runs after those that are the same every time; `make statemachine` sets it."""
RUNS = 40
"""Runs that are the same every time: about a minute."""
PADDED = ("--target", "megamoe-128", "--allow-unfused")
WAYS = {recipe.kind: [PADDED, *(other.options for other in RECIPES if other.kind == recipe.kind)] for recipe in RECIPES}
"""Every kind of checkpoint with a change of format, and the conversions of it: one that pads, and one for each change."""
FAST = ("--verify", "storage", "--workers", "1", "-q")
KILLED = 137
Digests = dict[str, str]


class Fault(NamedTuple):
    """Where a run ends, as a share of the operations of an undisturbed one, and how."""

    share: float
    action: str


FAULTS = st.one_of(st.none(), st.none(), st.builds(Fault, st.floats(0, 1), st.sampled_from(["kill", "torn", "lose"])))
MOSTLY = st.sampled_from([True, True, False])
LINKS = st.sampled_from(["auto", "copy", "hard"])


class Ground:
    """What all runs of the machine share: the server, a source of every kind, and what undisturbed commands make of it."""

    def __init__(self, server: Server, digest: Callable[[Path], Digests], folder: Path) -> None:
        self.server, self.digest, self.folder = server, digest, folder
        self.known: dict[tuple[str, tuple[str, ...]], tuple[Digests, int]] = {}
        self.seen: Counter[str] = Counter()

    def source(self, kind: str) -> Path:
        """The checkpoint of a kind, made once."""
        path = self.folder / kind
        if not path.exists():
            make_checkpoint(path, kind, **KNOBS)
            next(r for r in RECIPES if r.kind == kind).damage(path)
        return path

    def golden(self, kind: str, way: tuple[str, ...]) -> tuple[Digests, int]:
        """Digests of an undisturbed conversion, and how many operations it takes."""
        if (kind, way) not in self.known:
            out = self.folder / "golden" / "out"
            out.parent.mkdir()
            answer = self.server.run(out.parent, self.source(kind), out, *FAST, *way)
            assert answer["code"] == 0, answer["text"]
            self.known[kind, way] = self.digest(out), answer["count"]
            shutil.rmtree(out.parent)
        return self.known[kind, way]


class Machine(RuleBasedStateMachine):
    """Users of one checkpoint: they convert it or what was restored, also in parts and over an output; verify, restore, remove."""

    ground: Ground

    @initialize(kind=st.sampled_from(sorted(WAYS)))
    def begin(self, kind: str) -> None:
        """Start with nothing but the source."""
        self.kind, self.source = kind, self.ground.source(kind)
        self.bytes = self.ground.digest(self.source)
        self.home = Path(tempfile.mkdtemp(dir=self.ground.folder))
        self.out, self.original = self.home / "out", self.home / "original"
        self.held: Digests = {}
        self.begun: set[tuple[Any, ...]] = set()
        self.restored = 0

    def teardown(self) -> None:
        """Whatever lies there, the padded output can be made from it, and nothing but it is left."""
        if hasattr(self, "home"):
            assert self.run(self.source, self.out, *FAST, *PADDED, "--overwrite", "--restart")[0] == 0
            assert self.ground.digest(self.out) == self.ground.golden(self.kind, PADDED)[0]
            assert {p.name for p in self.home.iterdir()} <= {"out", "original", ".original.fse-partial"}
            shutil.rmtree(self.home)

    def run(self, *args: object, fault: Fault | None = None, count: int = 0) -> tuple[int, str]:
        """Run the command line, killed where a fault says; the source stays as it is, whatever happens."""
        at = {"at": 1 + int(fault.share * count), "action": fault.action} if fault else {}
        answer = self.ground.server.run(self.home, *args, **at)
        assert self.ground.digest(self.source) == self.bytes
        self.ground.seen[f"{args[0] if args[0] in ('restore', 'verify') else 'convert'} {answer['code']}"] += 1
        return answer["code"], answer["text"]

    @rule(data=st.data(), fault=FAULTS, link=LINKS, overwrite=MOSTLY, restart=st.booleans(), again=st.booleans())
    def convert(self, data: Any, fault: Fault | None, link: str, *, overwrite: bool, restart: bool, again: bool) -> None:
        """Convert the source, or what was restored from an output of it: the same bytes."""
        way = data.draw(st.sampled_from(WAYS[self.kind]), label="way")
        source = self.original if again and self.original.exists() else self.source
        identity = (way, source, self.restored if source == self.original else 0)
        flags = (*("--overwrite",) * overwrite, *("--restart",) * restart)
        want, count = self.ground.golden(self.kind, way)
        code, text = self.run(source, self.out, *FAST, *way, "--link", link, *flags, fault=fault, count=count)
        self.judge(code, text, want, identity, overwrite=overwrite, restart=restart)
        if code == 0:
            assert self.ground.digest(self.out) == want
            assert not (self.home / ".out.fse-partial").exists()

    @rule(data=st.data(), fault=FAULTS, count=st.integers(2, 3), overwrite=MOSTLY)
    def convert_a_part(self, data: Any, fault: Fault | None, count: int, *, overwrite: bool) -> None:
        """Write some of the files, and publish nothing."""
        way = data.draw(st.sampled_from(WAYS[self.kind]), label="way")
        part = f"{data.draw(st.integers(1, count), label='part')}/{count}"
        flags, operations = ("--overwrite",) * overwrite, self.ground.golden(self.kind, way)[1]
        code, text = self.run(self.source, self.out, *FAST, *way, "--part", part, *flags, fault=fault, count=operations)
        self.judge(code, text, self.held, (way, self.source, 0), overwrite=overwrite, restart=False)

    def judge(self, code: int, text: str, want: Digests, identity: tuple[Any, ...], *, overwrite: bool, restart: bool) -> None:
        """Accept success, death, and the two refusals where they are due; OUT is as it was, or what is wanted."""
        there = self.ground.digest(self.out)
        if code == 2:
            due = {"output-exists": self.held and not overwrite, "resume-differs": not restart and self.begun - {identity}}
            assert any(f"error[{name}]" in text and is_due for name, is_due in due.items()), text
        else:
            assert code in (0, KILLED), text
        assert there == self.held or (code != 2 and there == want)
        self.held = there
        if not (self.home / ".out.fse-partial").exists():
            self.begun = set()
        elif code != 2:
            self.begun.add(identity)

    @precondition(lambda self: self.held)
    @rule(fault=FAULTS, link=LINKS)
    def restore(self, fault: Fault | None, link: str) -> None:
        """Bring the source back, its own bytes, or nothing."""
        was = self.ground.digest(self.original)
        code, text = self.run("restore", self.out, self.original, "--link", link, "-q", fault=fault, count=60)
        there = self.ground.digest(self.original)
        if was:
            assert code == 2, text
            assert there == was
        else:
            assert code in (0, KILLED), text
            assert there == self.bytes or (code == KILLED and not there)
            self.restored += bool(there)
        assert self.ground.digest(self.out) == self.held

    @precondition(lambda self: self.held)
    @rule(with_source=st.booleans())
    def verify(self, *, with_source: bool) -> None:
        """Prove what is there."""
        code, text = self.run("verify", self.out, "-q", *(("--source", self.source, "--level", "storage") if with_source else ()))
        assert code == 0, text
        assert self.ground.digest(self.out) == self.held

    @precondition(lambda self: not self.held)
    @rule(command=st.sampled_from(["verify", "restore"]))
    def without_an_output(self, command: str) -> None:
        """Prove or restore what is not there."""
        was = self.ground.digest(self.original)
        code, text = self.run(command, self.out, *((self.original,) if command == "restore" else ()))
        assert code in (2, 3), text
        assert self.ground.digest(self.original) == was
        assert not self.out.exists()

    @precondition(lambda self: self.held or self.original.exists())
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        """Remove the output or what was restored, as a user would; what is hard-linked elsewhere stays."""
        shutil.rmtree(data.draw(st.sampled_from([p for p in (self.out, self.original) if p.exists()]), label="folder"))
        self.held = self.ground.digest(self.out)


@pytest.mark.slow
def test_commands_in_any_order(server: Server, digest: Callable[[Path], Digests], ram_path: Path) -> None:
    ground = Ground(server, digest, ram_path)

    class Here(Machine):
        pass

    Here.ground = ground
    checks = list(HealthCheck)
    short = settings(max_examples=RUNS, stateful_step_count=20, deadline=None, database=None, suppress_health_check=checks)
    run_state_machine_as_test(Here, settings=settings(short, derandomize=True))
    runs, until = RUNS, time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        run_state_machine_as_test(Here, settings=settings(short, max_examples=10))
        runs += 10
    print(f"{runs} runs, {ground.seen.total()} commands: {dict(sorted(ground.seen.items()))}")
