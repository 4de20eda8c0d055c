"""One conversion by several processes, `--shards I/N`: whatever the parts, the order and what went wrong, the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import open_checkpoint
from fse_convert.output.journal import read_journal
from fse_convert.output.parts import Job, Part
from fse_convert.output.staging import stage

Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KNOBS: dict[str, Any] = {"layers": 4, "shard_size": 400_000}


def nothing(*_: object) -> str:
    raise AssertionError


def job(name: str, size: int, linked: Path | None = None) -> Job:
    return Job(name=name, size=size, room=size, write=nothing, linked=linked)


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 12))
def test_parts_have_every_file_once_in_order_and_even_sizes(sizes: list[int], count: int) -> None:
    jobs = [job(f"{i}", size) for i, size in enumerate(sizes)]
    parts = [Part(i, count).of(jobs) for i in range(1, count + 1)]
    names = [[j.name for j in part] for part in parts]
    assert sorted(n for part in names for n in part) == sorted(j.name for j in jobs)
    assert all(part == sorted(part, key=int) for part in names)
    loads = [sum(j.size for j in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_hard_links_weigh_nothing() -> None:
    jobs = [job("a", 100, Path("x")), job("b", 50), job("c", 50)]
    assert [[j.name for j in Part(i, 2).of(jobs)] for i in (1, 2)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_and_a_last_call_give_the_bytes_of_one_run(
    order: tuple[int, ...], made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path
) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, tmp_path / "whole")[0] == 0
    seen = 0
    for part in order:
        code, printed, _ = run(source, out, "--shards", f"{part}/3", "--json")
        assert code == 0
        assert not out.exists()
        seen += len(json.loads(printed)["files"])
    code, printed, err = run(source, out, "-v")
    assert code == 0
    assert err.count("finished by an earlier run, its hash agrees") == seen
    assert digest(out) == digest(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_part_says_what_comes_next(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, printed, _ = run(made(**KNOBS), tmp_path / "out", "--shards", "2/3")
    assert code == 0
    assert "part 2 of 3" in printed
    assert "the same command without --part proves them and publishes" in printed


def test_the_last_call_writes_what_no_part_did(made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, tmp_path / "whole")[0] == 0
    assert run(source, out, "--shards", "2/3")[0] == 0
    assert run(source, out)[0] == 0
    assert digest(out) == digest(tmp_path / "whole")


@pytest.mark.parametrize("change", [("--routed", "fp8"), ("--shared", "mxfp4", "--lossy")])
def test_a_change_of_format_gives_the_same_bytes_whatever_the_workers_and_parts(
    change: tuple[str, ...], made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path
) -> None:
    source, how = made("v4-flash", hidden=320, width=160, **KNOBS), (*change, "--verify", "storage")
    for workers in ("1", "3"):
        assert run(source, tmp_path / workers, *how, "--workers", workers)[0] == 0
    for part in (2, 1, 3):
        assert run(source, tmp_path / "parts", *how, "--part", f"{part}/3")[0] == 0
    assert run(source, tmp_path / "parts", *how)[0] == 0
    assert digest(tmp_path / "1") == digest(tmp_path / "3") == digest(tmp_path / "parts")
    assert len(list((tmp_path / "parts" / "fse").glob("original-*"))) > 3


def test_parts_at_once_in_processes_of_their_own(made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, tmp_path / "whole")[0] == 0
    command = [sys.executable, "-m", "fse_convert", source, out, "--shards"]
    parts = [subprocess.Popen([*command, f"{i}/3"], stderr=subprocess.PIPE, stdout=subprocess.PIPE) for i in (1, 2, 3)]
    assert [(p.communicate(), p.returncode)[1] for p in parts] == [0, 0, 0]
    assert run(source, out)[0] == 0
    assert digest(out) == digest(tmp_path / "whole")


def test_the_same_part_twice_and_a_whole_run_beside_a_part_are_locked_out(
    made: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    with stage(out, {}, part="1-of-3"):
        for arguments in (("--shards", "1/3"), ()):
            code, _, err = run(source, out, *arguments)
            assert code == 6
            assert "error[locked]" in err


def test_parts_of_different_conversions_do_not_mix(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, out, "--shards", "1/2")[0] == 0
    for arguments in (("--shards", "2/2"), ()):
        code, _, err = run(source, out, "--target", "megamoe-128", *arguments)
        assert code == 2
        assert "arguments.target was " in err


def test_a_damaged_file_of_a_part_is_written_anew(made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, tmp_path / "whole")[0] == 0
    assert run(source, out, "--shards", "1/1")[0] == 0
    path = max((tmp_path / ".out.fse-partial" / "output").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, _, err = run(source, out, "-v")
    assert code == 0
    assert f"{path.name}: finished by an earlier run, but its content changed: written again" in err
    assert digest(out) == digest(tmp_path / "whole")


def test_a_part_that_fails_leaves_the_others_their_files(source: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    folder, out = source(**KNOBS), tmp_path / "out"
    checkpoint = open_checkpoint(LocalFolder(folder))
    starts = {s.name: s.header.data_start for s in checkpoint.shards}
    bad = next(t for n, t in checkpoint.tensors.items() if ".shared_experts." in n and t.dtype == "F8_E4M3")
    with (folder / bad.shard).open("r+b") as f:
        f.seek(starts[bad.shard] + bad.start)
        f.write(b"\x7f")
    failed = [part for part in (1, 2, 3, 4) if run(folder, out, "--shards", f"{part}/4")[0] == 3]
    assert 1 <= len(failed) <= 2, "the shard itself, and the kernel layout made of it"
    journals = [read_journal(p) for p in (tmp_path / ".out.fse-partial").glob("journal.*")]
    done = {name for journal in journals if journal for name in journal[1]}
    assert len(done) > len(failed)
    assert all((tmp_path / ".out.fse-partial" / "output" / name).is_file() for name in done)


@pytest.mark.parametrize("value", ["0/3", "4/3", "1", "a/b", "-1/2", "1/0", "1/99999", "\u0661/2"])
def test_what_is_no_part_is_refused(value: str, made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, _, err = run(made(**KNOBS), tmp_path / "out", "--shards", value)
    assert code == 2
    assert "fse-convert convert --help" in err


@pytest.mark.parametrize("other", [("--restart",), ("--ray", "auto")])
def test_what_excludes_parts(other: tuple[str, ...], made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, _, err = run(made(**KNOBS), tmp_path / "out", "--shards", "1/2", *other)
    assert code == 2
    assert "error[parts-alone]" in err


def test_parts_of_another_count_wait(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    with stage(out, {}, part="1-of-1"):
        code, _, err = run(source, out, "--shards", "1/2")
        assert code == 6
        assert "of-1" in err
    shutil.rmtree(tmp_path / ".out.fse-partial")
    for part in ("1/1", "1/2"):
        assert run(source, out, "--shards", part)[0] == 0


def test_what_else_lies_in_the_staging_folder_is_not_published(
    made: Callable[..., Path], run: Run, digest: Digest, tmp_path: Path
) -> None:
    source, out, staged = made(**KNOBS), tmp_path / "out", tmp_path / ".out.fse-partial" / "output"
    assert run(source, tmp_path / "whole", "--verify", "none")[0] == 0
    assert run(source, out, "--shards", "1/1")[0] == 0
    (staged / "stray.txt").write_text("x")
    (staged / "zzz.safetensors").write_text("x")
    moved = min(staged.glob("*.safetensors"))
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    folder = max(staged.glob("model-*.safetensors"))
    folder.unlink()
    folder.mkdir()
    assert run(source, out, "--verify", "none")[0] == 0
    assert digest(out) == digest(tmp_path / "whole")
    assert not any(p.is_symlink() for p in out.rglob("*"))


def test_a_journal_line_that_lacks_a_word_vouches_for_nothing(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    source, out = made(**KNOBS), tmp_path / "out"
    assert run(source, out, "--shards", "1/1")[0] == 0
    (journal,) = (tmp_path / ".out.fse-partial").glob("journal.*")
    journal.write_text(journal.read_text().replace('"how"', '"who"'))
    assert run(source, out)[0] == 0


def test_more_parts_than_files(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    code, printed, _ = run(made(**KNOBS), tmp_path / "out", "--shards", "999/999")
    assert code == 0
    assert "0 files" in printed
    shutil.rmtree(tmp_path / ".out.fse-partial")
