"""`--dry-run`: what happens to every file, and what it takes; held against what a real run then does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
KNOBS = {"layers": 4, "shard_size": 400_000}


@pytest.mark.parametrize(
    "options", [[], ["--target", "megamoe-128"], ["--experts", "shared", "--link", "hard"], ["--link", "hard"]]
)
def test_bytes_are_those_of_the_run(options: list[str], made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    code, printed, _ = run(source, out, "--dry-run", "--json", *options)
    assert code == 0
    assert not list(tmp_path.iterdir())
    needs = json.loads(printed)["needs"]
    code, printed, _ = run(source, out, "--json", *options)
    assert code == 0
    how = json.loads(printed)["files"]
    small = {"config.json", "model.safetensors.index.json", "fse/manifest.json", "fse/model.safetensors.index.json"}
    assert {f["name"] for f in needs["files"]} == how.keys() - small
    names = {"rewrite": ["rewritten"], "hard link": ["hard link"], "copy": ["copy"], "clone": ["clone"]}
    for file in needs["files"]:
        if file["what"] in names:
            assert how[file["name"]] in names[file["what"]]
        size = (out / file["name"]).stat().st_size
        assert file["written"] == (0 if file["what"] in ("hard link", "clone") else size)
    assert needs["disk"] == sum(f["written"] for f in needs["files"])
    assert needs["fits"] is True
    assert needs["read"] >= sum(f["read"] for f in needs["files"])


def test_kernel_layout_reads_what_it_is_made_of(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    needs = json.loads(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json")[1])["needs"]
    for file in needs["files"]:
        if file["what"] == "kernel layout":
            assert 0 < file["read"] < file["written"]  # 384 columns are padded to 512


def test_the_screen(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, printed, _ = run(made(**KNOBS), tmp_path / "out", "--dry-run")
    assert code == 0
    for word in ("rewrite", "copy", "kernel layout", "disk: ", "memory: at most", "time: reads"):
        assert word in printed
    assert "NOT ENOUGH" not in printed


def test_a_part_is_a_part(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    whole = json.loads(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json")[1])["needs"]
    parts = [
        json.loads(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json", "--shards", f"{i}/2")[1])["needs"] for i in (1, 2)
    ]
    named = sorted(f["name"] for part in parts for f in part["files"])
    assert named == sorted(f["name"] for f in whole["files"] if f["name"].endswith(".safetensors"))


def test_without_room_it_says_so(made: Callable[..., Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fse_convert.conversion.run.free_space", lambda _: 0)
    code, printed, _ = run(made(**KNOBS), tmp_path / "out", "--dry-run")
    assert code == 4
    assert "NOT ENOUGH" in printed


def test_it_needs_no_torch(made: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["convert", str(made(**KNOBS)), str(tmp_path / "out"), "--dry-run"]
    code = (
        f"import sys; from fse_convert.cli.process import _run; assert _run({arguments!r}) == 0; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_what_a_conversion_will_do_is_known_before_torch_is_imported(made: Callable[..., Path], tmp_path: Path) -> None:
    """Its import takes more than a second, in which the first shards are written."""
    code = (
        "import sys; from pathlib import Path; from fse_convert.conversion.run import Conversion, Request; "
        "from fse_convert.plan.plan import Options; from fse_convert.servers.judge import find_any; "
        f"source, out = Path({str(made(**KNOBS))!r}), Path({str(tmp_path / 'out')!r}); "
        "job = Conversion(Request(source, out, Options(find_any('megamoe-512')))); "
        "assert len(job.workload()) == 3 and job.jobs and job.needs_torch; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hard_links_do_not_reach_another_file_system(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    source = made(**KNOBS)
    with tempfile.TemporaryDirectory(dir=memory) as other:
        out = Path(other) / "out"
        needs = json.loads(run(source, out, "--link", "hard", "--dry-run", "--json")[1])["needs"]
        code, printed, _ = run(source, out, "--link", "hard", "--json", "--verify", "none")
        assert code == 0
        assert "hard link" not in json.loads(printed)["bytes"]
        assert needs["disk"] == sum((out / f["name"]).stat().st_size for f in needs["files"])


def test_what_is_staged_already_needs_no_room(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    whole = json.loads(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json")[1])["needs"]
    part = json.loads(run(made(**KNOBS), tmp_path / "out", "--shards", "1/2", "--json")[1])["bytes"]
    rest = json.loads(run(made(**KNOBS), tmp_path / "out", "--dry-run", "--json")[1])["needs"]
    assert rest["disk"] == whole["disk"] - sum(part.values())


@pytest.mark.parametrize("columns", ["40", "60"])
def test_names_and_sizes_stay_readable_on_a_narrow_terminal(columns: str, made: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fse_convert", str(made(**KNOBS)), str(tmp_path / "out"), "--dry-run", "-q"]
    env = {**os.environ, "COLUMNS": columns, "TTY_COMPATIBLE": "1"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "\u2026" not in shown.split("disk:")[0].split("file")[-1]
