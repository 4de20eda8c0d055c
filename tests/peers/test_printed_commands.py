"""What `inspect` says to do, done: the printed command, vLLM's own check before and after, the proof, and the way back.

At published widths with few layers and experts for every list of changes that is offered, and for every mend on small checkpoints.
Prints a row for each: ``pytest tests/peers/test_printed_commands.py -s``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.errors import size
from fse_convert.plan.source import Source, describe_source
from fse_convert.testing.checkpoints import make_checkpoint
from tests.peers.aiter import answer, ask_vllm, cases
from tests.plan.changes.models import SMALL
from tests.plan.changes.recipes import RECIPES, Damage, retyped

pytestmark = [pytest.mark.peers, pytest.mark.slow]

Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
NEWEST = "0.33"
FEW: Mapping[str, Any] = {"layers": 1, "experts": 2, "vocab": 64, "mtp": 0}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {  # hidden size and width are those of the release
    "qwen3.5-quark": {"hidden": 4096, "width": 1024},
    "glm-4.5-quark": {"hidden": 5120, "width": 1536, "dense": 0},
    "v4-flash": {"hidden": 4096, "width": 2048},
    "kimi-k2-quark": {"hidden": 7168, "width": 2048, "dense": 0},
    "v4.1-flash": {"hidden": 5120, "width": 2304, "engram_rows": 64},
    "v4-pro": {"hidden": 7168, "width": 3072},
}


@dataclass(frozen=True)
class Row:
    """One printed command and what came of it. ``before`` and ``after``: a letter per layer of vLLM's check; empty if not asked."""

    source: str
    command: str
    changes: tuple[str, ...]
    codes: tuple[int, int, int]
    restored: bool
    seconds: float
    bytes: tuple[int, int]
    left: tuple[str, ...]
    sources: tuple[Source, Source]
    judged: bool
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        options = " ".join(shlex.split(self.command)[3:])
        judge = f"{self.before} -> {self.after}" if self.judged else "-"
        codes = "/".join(map(str, self.codes))
        sizes = " -> ".join(map(size, self.bytes))
        same = "equal" if self.restored else "DIFFERENT"
        return f"| {self.source} | `{options}` | {codes} | {judge} | {same} | {self.seconds:.1f} s | {sizes} |"


def commands(run: Run, root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the commands that `inspect` prints, one for each list of changes, and whether one is for vLLM's check of FSE."""
    code, text, _ = run("inspect", root)
    assert code == 0
    report = json.loads(run("inspect", root, "--json")[1])
    fse = f"vllm-{NEWEST}-aiter"
    by_changes: dict[tuple[str, ...], tuple[str, bool]] = {}
    for offer in sorted(report["offers"], key=lambda offer: fse not in offer["targets"]):
        by_changes.setdefault(tuple(offer["does"]), (offer["command"], fse in offer["targets"]))
    if report["heal"]:
        by_changes["--heal",] = report["heal"], True
    if report["advice"]["command"]:
        by_changes["padding",] = report["advice"]["command"], False
    printed = [line.strip() for line in text.splitlines() if line.startswith("  fse-convert ")]
    for command, judged in by_changes.values():
        assert command in printed
        yield command, judged


def follow(source: str, command: str, folder: Path, run: Run, digest: Digest, *, judged: bool) -> Row:
    """Run a printed command, with the output elsewhere; prove the output, restore the source, and inspect the output."""
    started = time.monotonic()
    _, place, _, *options = shlex.split(command)
    out, back = folder / "out", folder / "back"
    folder.mkdir()
    converted = run(place, out, *options, "-q")[0]
    verified = run("verify", out, "--source", place, "--level", "numerics" if "--heal" not in options else "storage")[0]
    restored = run("restore", out, back)[0]
    seconds = time.monotonic() - started
    manifest = json.loads((out / "fse" / "manifest.json").read_text())
    after = json.loads(run("inspect", out, "--json")[1])
    row = Row(
        source=source,
        command=command,
        changes=tuple(change["name"] for change in manifest.get("changes", [])),
        codes=(converted, verified, restored),
        restored=digest(back) == digest(Path(place)),
        seconds=seconds,
        bytes=(sum(p.stat().st_size for p in Path(place).glob("*.safetensors")), after["checkpoint"]["bytes"]),
        left=tuple(after["mends"]),
        sources=(described(Path(place)), described(out)),
        judged=judged,
    )
    shutil.rmtree(folder)
    return row


def described(folder: Path) -> Source:
    """Describe a checkpoint, or an output, which conversions refuse to open."""
    return describe_source(read_checkpoint(LocalFolder(folder)).checkpoint)


def judge(rows: Sequence[Row], python: Path) -> list[Row]:
    """Ask vLLM's own check about the checkpoint before and after each command for which that is the question."""
    asked = [
        (f"{number} {when}", case)
        for number, row in enumerate(rows)
        if row.judged
        for when, source in zip(("before", "after"), row.sources, strict=True)
        for case, _, _ in cases(f"{number} {when}", source, NEWEST)
    ]
    answers = {found["id"]: answer(found) for found in ask_vllm({"cases": [case for _, case in asked]}, python)["answers"]}
    letters = {key: "".join(answers[case["id"]] for other, case in asked if other == key) for key, _ in asked}
    return [replace(r, before=letters.get(f"{i} before", ""), after=letters.get(f"{i} after", "")) for i, r in enumerate(rows)]


def told(rows: Sequence[Row], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            "\n| source | command | convert/verify/restore | vLLM's check | restored | time | tensors |",
            *rows,
            sep="\n",
            flush=True,
        )


def test_every_list_of_changes_at_published_widths(
    tmp_path: Path, run: Run, digest: Digest, python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for kind, sizes in PUBLISHED.items():
        root = make_checkpoint(tmp_path / kind, kind, **{**FEW, **sizes})
        for number, (command, judged) in enumerate(commands(run, root)):
            rows.append(follow(kind, command, tmp_path / f"{kind}-{number}", run, digest, judged=judged))
            told(rows[-1:], capsys)
    rows = judge(rows, python)
    told(rows, capsys)
    assert [row for row in rows if row.codes != (0, 0, 0) or not row.restored] == []
    assert {row.source for row in rows} == PUBLISHED.keys()
    fused = [row for row in rows if row.judged and "--heal" not in row.command]
    assert [(set(row.before), set(row.after)) for row in fused] == [({"u"}, {"f"})] * len(fused)
    assert {(row.source, row.changes) for row in fused} == {
        ("v4-flash", ("routed-fp8",)),
        ("v4-pro", ("routed-fp8",)),
        *((kind, ("shared-mxfp4",)) for kind in PUBLISHED if kind != "v4.1-flash"),
    }


UNREAD_BY_VLLM: Mapping[str, Damage] = {
    "heal-quark-scale-labels": retyped("U8", "F8_E8M0", ".weight_scale"),
    "heal-quark-weight-labels": retyped("U8", "I8", ".weight"),
}
"""Defects of labels, which vLLM's check does not look at."""
MENDED = list({r.changes: r for r in reversed(RECIPES) if r.changes[0].startswith("heal-")}.values())
"""The first recipe of every list of mends."""


def test_every_mend_that_inspect_prints(
    tmp_path: Path, run: Run, digest: Digest, python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, column = [], -1
    made = [(r.name, r.kind, r.damage, dict(r.knobs), r.changes, r.before[column], r.after[column]) for r in MENDED]
    made += [(name, "quark-mxfp4", damage, {}, (name,), "", "") for name, damage in UNREAD_BY_VLLM.items()]
    for number, (name, kind, damage, knobs, _, _, _) in enumerate(made):
        root = make_checkpoint(tmp_path / f"{number}", kind, **{**SMALL, "sparse": False, **knobs})
        damage(root)
        (command,) = [c for c, _ in commands(run, root) if "--heal" in c]
        rows.append(follow(name, command, tmp_path / f"healed-{number}", run, digest, judged=True))
    rows = judge(rows, python)
    told(rows, capsys)
    assert [row for row in rows if row.codes != (0, 0, 0) or not row.restored or row.left] == []
    for row, (name, _, _, _, changes, before, after) in zip(rows, made, strict=True):
        assert row.changes == changes, name
        for own, expected in ((row.before, before), (row.after, after)):
            assert [o for o, e in zip(own, expected, strict=False) if e != "x"] == [e for e in expected if e != "x"], name
