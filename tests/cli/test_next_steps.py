"""What a command says at its end and when it is stopped: how long it took, and commands that work if they are pasted."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fse_convert.output.journal import Journal
from tests.hub_server import COMMIT, serve, stand_in

if TYPE_CHECKING:
    import pytest

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def steps(err: str) -> list[str]:
    """The commands at the end of stderr."""
    lines = err.splitlines()
    at = next(i for i, line in enumerate(lines) if re.fullmatch(r"done in \d[\d.]* s; next:", line))
    assert all(line.startswith("  ") for line in lines[at + 1 :])
    return [line.strip() for line in lines[at + 1 :]]


def pasted(command: str, run: Run) -> int:
    words = shlex.split(command)
    assert words[0] == "fse-convert"
    return run(*words[1:])[0]


def test_a_conversion_leads_to_serving_publishing_and_proving(made: Made, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "my out"
    _, _, err = run(made(), out, "--target", "vllm-0.30")
    serve, publish, verify = steps(err)
    assert serve.startswith(f"vllm serve '{out}' ")
    assert {"--load-format fse", "--moe-backend deep_gemm_mega_moe"} <= set(re.findall(r"--[\w-]+ \w+", serve))
    assert shlex.split(publish) == ["hf", "upload", "my out", str(out)]
    assert pasted(verify, run) == 0


def test_of_a_contract_the_next_step_is_to_ask_which_server(made: Made, run: Run, tmp_path: Path) -> None:
    _, _, err = run(made(), tmp_path / "out", "--target", "megamoe-128")
    assert pasted(steps(err)[0], run) == 0
    assert steps(err)[0].startswith("fse-convert inspect ")


def test_an_inspection_leads_to_a_server_that_fuses_and_names_the_real_paths(
    made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made(), "check point")
    _, out, err = run("inspect", "check point")
    assert [step.split()[0] for step in steps(err)] == ["vllm", "python"]
    assert all("'check point'" in step and "--load-format" not in step for step in steps(err))
    command = next(line.strip() for line in out.splitlines() if line.startswith("  fse-convert "))
    assert pasted(command, run) == 0
    assert (tmp_path / "check point-megamoe-512" / "config.json").is_file()
    assert [s.split()[0] for s in steps(run("inspect", "check point", "--require", "sglang-0.5.23")[2])] == ["python"]
    code, _, err = run("inspect", "check point", "--require", "vllm-0.30")
    assert (code, "next:" in err) == (1, False)


def test_a_restoration_leads_to_an_inspection(converted: Made, run: Run, tmp_path: Path) -> None:
    _, _, err = run("restore", converted(), tmp_path / "back")
    assert [pasted(step, run) for step in steps(err)] == [0]


def test_the_last_json_line_has_the_steps_too(made: Made, run: Run, tmp_path: Path) -> None:
    _, _, err = run(made(), tmp_path / "out", "--target", "vllm-0.30", "--log-json")
    last = json.loads(err.splitlines()[-1])
    assert (last["event"], len(last["next"])) == ("done", 3)


def test_a_stopped_conversion_says_what_is_kept_and_the_next_one_what_it_found(
    made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, left = tmp_path / "out", tmp_path / ".out.fse-partial"
    command = (made(), out, "--workers", "1", "--verify", "none")
    real, done = Journal.add, []

    def stop(journal: Journal, name: str, record: object) -> None:
        real(journal, name, record)  # type: ignore[arg-type]
        done.append(name)
        if len(done) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as signals:
        signals.setattr(Journal, "add", stop)
        code, _, err = run(*command)
    assert code == 130
    assert re.search(r"error\[interrupted\]: stopped by a signal: [34] of 8 shards \([\d.]+ [KM]iB\) are kept\n", err)
    assert f"  where: {left}\n" in err
    assert f"the same command resumes from there; to discard it: rm -r {left}\n" in err
    code, _, err = run(*command)
    assert code == 0
    assert re.search(rf"note\[resuming\]: {left}: [34] of 8 shards \([\d.]+ [KM]iB\) are there from an earlier run", err)
    assert not left.exists()


def test_a_stopped_conversion_that_finished_nothing(made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", stop)
    _, _, err = run(made(), tmp_path / "out", "--workers", "1")
    assert "stopped by a signal: nothing is finished yet\n" in err
    assert "the same command begins again; to discard it: rm -r " in err


def test_a_restart_says_nothing_of_what_it_discards(made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Journal.add

    def stop(journal: Journal, name: str, record: object) -> None:
        real(journal, name, record)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as signals:
        signals.setattr(Journal, "add", stop)
        assert run(made(), tmp_path / "out", "--workers", "1")[0] == 130
    code, _, err = run(made(), tmp_path / "out", "--restart")
    assert (code, "note[resuming]" in err) == (0, False)


def test_a_stopped_verification_wrote_nothing(converted: Made, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out = converted()
    monkeypatch.setattr(os, "pread", stop)
    monkeypatch.setattr(os, "preadv", stop)
    code, _, err = run("verify", out)
    assert (code, "error[interrupted]: stopped by a signal\n  hint:  the same command begins again" in err) == (130, True)


def test_a_model_of_the_hub_is_served_at_the_revision_that_was_inspected(
    made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve("org/name", made()) as hub:
        stand_in(hub, tmp_path, monkeypatch)
        _, _, err = run("inspect", "hf://org/name@main", "--tp", 4)
    vllm, sglang = steps(err)
    assert vllm.startswith(f"vllm serve org/name --revision {COMMIT} --tensor-parallel-size 4 ")
    assert sglang.startswith(f"python -m sglang.launch_server --model-path org/name --revision {COMMIT} --tp 4 ")


def test_a_conversion_for_a_parallel_size_is_served_at_it(made: Made, run: Run, tmp_path: Path) -> None:
    _, _, err = run(made(), tmp_path / "out", "--target", "vllm-0.30", "--tp", 4)
    assert "--tensor-parallel-size 4 " in steps(err)[0]
