"""The command line where the world is odd: closed and full outputs, signals, files that must not be overwritten."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.cli import cli

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]


def shell(line: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``$0`` is the interpreter and ``$1`` and on are the arguments."""
    command = ["bash", "-c", line, sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def test_a_report_is_never_written_into_the_checkpoint_or_over_something_else(
    source: Make, run: Run, digest: Digest, tmp_path: Path
) -> None:
    root = source()
    before = digest(root)
    for inside in ("config.json", "new.html", "model-00001-of-00007.safetensors"):
        assert run("inspect", root, "--html", root / inside)[0] == 2
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    code, _, err = run("inspect", root, "--html", precious)
    assert code == 2
    assert "error[report-exists]" in err
    assert precious.read_text() == "years of work"
    assert digest(root) == before
    for _ in range(2):  # a report may replace a report
        assert run("inspect", root, "--html", tmp_path / "report.html")[0] == 0


def test_restore_refuses_an_output_that_lacks_files(made: Make, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(made(), out)[0] == 0
    (out / "tokenizer_config.json").unlink()
    shutil.rmtree(out / "inference")
    code, _, err = run("restore", out, tmp_path / "restored")
    assert code == 1
    assert "error[file-missing]" in err
    assert "tokenizer_config.json" in err
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        ({"moe_intermediate_size": -1}, "config-value", 3),
        ({"n_shared_experts": 2}, "config-width", 3),
        ({"n_routed_experts": 5}, "config-experts", 3),
        ({"hidden_size": 1024}, "config-hidden", 3),
        ({"expert_dtype": "fp8"}, "config-unsupported", 1),
        ({"hidden_act": "gelu"}, "config-unsupported", 1),
        ({"num_nextn_predict_layers": 5}, "drafter-short", 1),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "native-method", 1),
    ],
)
def test_the_gate_refuses_what_a_server_could_not_load(
    change: dict[str, object], error: str, expected: int, source: Make, run: Run
) -> None:
    import json

    root = source("v4-flash")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, **change}))
    code, _, err = run("inspect", root, "--require", "vllm-0.33")
    assert code == expected
    gate = rf"not-fused\]: vllm-0.33 (is unsafe|does not fuse|is not known to fuse): {error}: "
    assert re.search(rf"error\[({error}\]: |{gate})", err)


def test_a_full_stdout_is_no_bug_and_no_answer(made: Make) -> None:
    result = shell('"$0" -m fse_convert inspect "$1" --json > /dev/full', made())
    assert result.returncode == 4
    assert "error[output-lost]" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_closed_stdout_does_not_keep_the_work_from_being_done(made: Make, tmp_path: Path) -> None:
    result = shell('"$0" -m fse_convert "$1" "$2" >&- 2>&-', made(), tmp_path / "out")
    assert result.returncode == 0
    assert (tmp_path / "out" / "fse" / "manifest.json").is_file()


def test_a_closed_pipe_is_no_answer(made: Make, tmp_path: Path) -> None:
    result = shell('"$0" -m fse_convert "$1" "$2" 2>/dev/null | true; exit ${PIPESTATUS[0]}', made(), tmp_path / "out")
    assert result.returncode in (0, 141)
    assert (tmp_path / "out" / "fse" / "manifest.json").is_file()


@pytest.mark.parametrize("flags", [[], ["-vv"], ["--log-json"]])
def test_progress_that_nobody_reads_does_not_stop_the_work(flags: list[str], made: Make, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fse_convert", str(made()), str(tmp_path / "out"), *flags]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=writer, check=False)
    os.close(writer)
    assert result.returncode == 0
    assert (tmp_path / "out" / "fse" / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_have_their_codes(number: int, code: int, made: Make, tmp_path: Path) -> None:
    source = made("v4.1-flash", layers=6, hidden=1024, width=640, experts=16)
    command = [sys.executable, "-m", "fse_convert", str(source), str(tmp_path / "out"), "--json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / ".out.fse-partial").exists():
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in err
    if out:  # within the time that a stopped run has
        assert f'"exit_code": {code}' in out


def test_debug_shows_where_an_error_comes_from_and_changes_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fse_convert.cli import main

    monkeypatch.setenv("FSE_CONVERT_DEBUG", "1")
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path), "--json", "--target", "nothing"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert json.loads(out)["problems"][0]["code"] == "target-unknown"
    assert "Traceback" in err


def test_bare_command_is_help(run: Run) -> None:
    code, out, err = run()
    assert code == 0
    assert "Usage: fse-convert" in out
    assert err == ""


def test_numpy_is_not_missed(made: Make, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    command = [sys.executable, "-m", "fse_convert", str(made()), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert "NumPy" not in result.stderr


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_every_help_has_three_examples_that_parse(command: str, run: Run) -> None:
    code, out, _ = run(*command.split(), "--help")
    examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert (code, len(examples), "\\b" in out) == (0, 3, False)
    for example in examples:
        (command_line,) = re.findall(r"fse-convert[^|>)]*", example)
        words = shlex.split(command_line)
        named = words[1] if words[1] in cli.commands else "convert"
        cli.commands[named].make_context(named, words[1 if named == "convert" else 2 :])
        assert words[0] == "fse-convert"
    assert command == "" or "FSE_CONVERT_WORKERS=8" in out


def test_no_summary_is_cut_off(run: Run) -> None:
    _, out, _ = run("--help")
    assert "..." not in out.partition("Commands:")[2].partition("Exit codes:")[0]
    assert all(len(command.get_short_help_str(200)) <= 46 for command in cli.commands.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["help"], "Usage: fse-convert [OPTIONS] "),
        (["help", "verify"], "Usage: fse-convert verify [OPTIONS] OUT"),
        (["version"], "fse-convert"),
        (["-V"], "fse-convert"),
    ],
)
def test_other_words_for_help_and_version(words: list[str], expected: str, run: Run) -> None:
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.startswith(expected)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--vesion"], "--version"),
        (["--colour", "never"], "--color"),
        (["insepct", "x"], "inspect"),
        (["inspect", "x", "--requier", "vllm-0.33"], "--require"),
        (["--overwite", "a", "b"], "--overwrite"),
    ],
)
def test_a_typo_is_told_what_was_meant(words: list[str], meant: str, run: Run) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert re.search(rf"(Did you mean|Possible options:).* '?{meant}\b", err), err


@pytest.mark.parametrize("flags", [["-q"], ["-v"], ["-q", "--log-json"]], ids=" ".join)
def test_how_much_is_said_may_stand_before_a_command(flags: list[str], made: Make, run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*flags, "inspect", made())
    assert (code, out) == run("inspect", made(), *flags)[:2]
    assert code == 0
    assert run(*flags, made(), tmp_path / "out", "--dry-run")[0] == 0


def test_options_come_from_the_environment(made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSE_CONVERT_TARGET", "megamoe-128")
    monkeypatch.setenv("FSE_CONVERT_JSON", "1")
    _, out, _ = run(made(), tmp_path / "out", "--dry-run")
    assert json.loads(out)["target"] == "megamoe-128"
    code, out, _ = run(made(), tmp_path / "out", "--workers", "many")
    assert (code, json.loads(out)["problems"][0]["code"]) == (2, "usage")
    assert json.loads(run(made(), tmp_path / "out", "--target", "megamoe-512", "--dry-run")[1])["target"] == "megamoe-512"
    monkeypatch.setenv("FSE_CONVERT_WORKERS", "many")
    code, out, _ = run(made(), tmp_path / "out")
    assert (code, "FSE_CONVERT_WORKERS" in out or "--workers" in out) == (2, True)


def test_what_contradicts_json_is_refused(made: Make, run: Run) -> None:
    code, out, _ = run("inspect", made(), "--json", "--format", "markdown")
    assert (code, json.loads(out)["problems"][0]["message"]) == (2, "--json and --format markdown exclude each other")


def test_what_is_not_proved_is_said_so(made: Make, run: Run, tmp_path: Path) -> None:
    assert "NOT proved: --verify none was given\n" in run(made(), tmp_path / "out", "--verify", "none")[1]


def test_where_the_page_was_written_is_said(made: Make, run: Run, tmp_path: Path) -> None:
    assert f"report written to {tmp_path / 'r.html'}\n" in run("inspect", made(), "--html", tmp_path / "r.html")[2]
