"""Hints about the machine are true: take away what was in the way, give the same command again."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from fse_convert.checkpoint.hub import HubFolder
from fse_convert.errors import FseConvertError
from fse_convert.output.lock import locked
from fse_convert.output.staging import Staging
from fse_convert.testing.faults import Injector
from tests.cli.hints import FIRST, KNOBS, STEP, Digest, Make, Run, said
from tests.hub_server import serve


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no-space"), (errno.EDQUOT, "no-space"), (errno.EACCES, "permission"), (errno.EROFS, "permission"),
        (errno.EFBIG, "file-too-large"), (errno.ENOMEM, "out-of-memory"), (errno.EMFILE, "too-many-files"),
        (errno.ENFILE, "too-many-files"), (errno.EIO, "io-error"), (errno.EBUSY, "io-error"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else None,
)  # fmt: skip
def test_what_the_machine_refused_once_resumes(
    number: int, code: str, made: Make, converted: Make, run: Run, digest: Digest, tmp_path: Path
) -> None:
    out, command = tmp_path / "out", (made(**KNOBS), tmp_path / "out", "--workers", "1", "--verify", "storage", "--json")
    fault = Injector(str(tmp_path), STEP, "error", number)
    fault.install()
    try:
        found = said(run(*command)[1])
    finally:
        fault.remove()
    assert found.keys() == {code, "resumable"}
    assert "the same command resumes from there" in found["resumable"]
    assert len(found[code]) > len("x ")
    assert run(*command)[0] == 0
    assert digest(out) == digest(converted("megamoe-512", "v4.1-flash", "--verify", "storage", **KNOBS))


def interrupted(tmp_path: Path, run: Run, *command: object) -> None:
    fault = Injector(str(tmp_path), STEP, "error", errno.ENOSPC)
    fault.install()
    try:
        assert run(*command)[0] == 4
    finally:
        fault.remove()


@pytest.mark.parametrize("how", ["start anew with --restart and without --part", "give another output folder"])
@pytest.mark.parametrize("part", [(), ("--part", "1/1")], ids=["whole", "a part"])
def test_an_unfinished_conversion_of_something_else(how: str, part: tuple[str, ...], made: Make, run: Run, tmp_path: Path) -> None:
    root, out = made(**KNOBS), tmp_path / "out"
    interrupted(tmp_path, run, root, out, "--workers", "1")
    _, _, err = run(root, out, "--target", "megamoe-128", *part)
    assert "error[resume-differs]" in err
    assert how in err
    elsewhere = (tmp_path / "elsewhere",) if "another" in how else (out, "--restart")
    assert run(root, *elsewhere, "-q", "--target", "megamoe-128", "--verify", "storage")[0] == 0


@pytest.mark.parametrize("how", ["wait for the other run", "give another output folder"])
def test_a_folder_that_another_run_writes(how: str, made: Make, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(Staging(out).root, out):
        code, _, err = run(made(**KNOBS), out)
        assert (code, "error[locked]" in err, how in err) == (6, True, True)
        if "another" in how:
            out = tmp_path / "elsewhere"
            assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    if "wait" in how:
        assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    assert out.exists()


@pytest.mark.parametrize("how", ["move it away", "give another output folder"])
def test_a_place_for_unfinished_work_that_is_taken(how: str, made: Make, run: Run, tmp_path: Path) -> None:
    out, root = tmp_path / "out", Staging(tmp_path / "out").root
    root.mkdir()
    (root / "thesis.txt").write_text("years of work")
    code, _, err = run(made(**KNOBS), out)
    assert (code, "error[staging-foreign]" in err, how in err) == (2, True, True)
    if "move" in how:
        root = root.rename(tmp_path / "away")
    else:
        out = tmp_path / "elsewhere"
    assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0
    assert (root / "thesis.txt").read_text() == "years of work"


def test_room_that_was_made(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
        _, _, err = run(made(**KNOBS), tmp_path / "out")
    assert "error[no-space]" in err
    assert "free some space" in err
    assert run(made(**KNOBS), tmp_path / "out", "-q", "--verify", "storage")[0] == 0


def test_a_source_that_is_left_alone(source: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = source(**KNOBS), shutil.disk_usage
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "disk_usage", lambda path: (os.utime(root / FIRST), real(path))[1])
        found = said(run(root, tmp_path / "out", "--json")[1])
    assert "wait until nothing writes to the source" in found["source-changed"]
    assert found["resumable"].endswith("start anew with --restart and without --part")
    assert run(root, tmp_path / "out", "--restart", "-q", "--verify", "storage")[0] == 0


def test_unfinished_work_that_nobody_touches_any_more(
    made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", os.fsync

    def clean(fd: int) -> None:
        real(fd)
        if Staging(out).folder.exists():
            Staging(out).root.rename(tmp_path / "cleaned")

    with monkeypatch.context() as cleaner:
        cleaner.setattr(os, "fsync", clean)
        found = said(run(made(**KNOBS), out, "--json", "--workers", "1", "--verify", "storage")[1])
    assert "then give the same command again" in found["staging-lost"]
    assert run(made(**KNOBS), out, "-q", "--verify", "storage")[0] == 0


def test_a_run_that_was_stopped(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt  # a signal itself would end this process

    command = (made(**KNOBS), tmp_path / "out", "--json", "--workers", "1", "--verify", "storage")
    with monkeypatch.context() as signals:
        signals.setattr(os, "fsync", stop)
        code, text, _ = run(*command)
    assert (code, "the same command begins again" in said(text)["interrupted"]) == (130, True)
    assert run(*command)[0] == 0


def test_a_proof_that_failed_once(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (made(**KNOBS), tmp_path / "out", "--json")
    with monkeypatch.context() as broken:
        broken.setattr("fse_convert.verification.numerics.E8M0_ONE", 0x7E)
        found = said(run(*command)[1])
    assert "nothing was published: run again" in found["proof-failed"]
    assert not (tmp_path / "out").exists()
    assert run(*command)[0] == 0


def test_a_folder_inside_of_a_mounted_one(made: Make, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Path("/dev/shm")
    if not (place.is_mount() and os.access(place, os.W_OK)):
        pytest.skip("nothing is mounted where this may write")
    monkeypatch.setattr("fse_convert.output.overwrite.any", lambda _: False, raising=False)  # as if nothing were in it
    code, _, err = run(made(**KNOBS), place, "--overwrite")
    assert (code, "error[output-mounted]" in err, "give a folder inside of it" in err) == (2, True, True)
    monkeypatch.undo()
    with tempfile.TemporaryDirectory(dir=place) as inside:
        assert run(made(**KNOBS), Path(inside) / "out", "-q", "--verify", "storage")[0] == 0


@pytest.mark.parametrize(
    ("wrong", "code", "words", "right"),
    [
        ("hf://one", "hub-address", "hf://org/name or hf://org/name@revision", "hf://org/name"),
        ("hf://org/nome", "no-such-model", "check the spelling", "hf://org/name"),
        ("hf://org/name@nope", "no-such-revision", "give a branch, a tag or a commit", "hf://org/name@v1"),
    ],
)
def test_an_address_of_the_hub(wrong: str, code: str, words: str, right: str, made: Make) -> None:
    pytest.importorskip("huggingface_hub")
    with serve("org/name", made(**KNOBS)) as hub:
        with pytest.raises(FseConvertError) as e:
            HubFolder(wrong, endpoint=hub.endpoint)
        assert {p.code: words in p.hint for p in e.value.problems} == {code: True}
        assert HubFolder(right, endpoint=hub.endpoint).files


def test_numerics_run_on_the_cpu_too(made: Make, converted: Make, run: Run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = ("verify", converted(**KNOBS), "--source", made(**KNOBS))
    code, _, err = run(*command, "--device", "cuda")
    assert (code, "error[no-cuda]" in err, "leave --device away" in err) == (4, True, True)
    assert run(*command)[0] == 0
