"""One rule for colour, on stdout and stderr of every command: --color, NO_COLOR, FORCE_COLOR, the terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.test_log import on_terminal

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def is_colored(shown: str) -> bool:
    return "\x1b[" in re.sub(r"\x1b\[(\?25[hl]|2K|1A)", "", shown)


@pytest.mark.parametrize(
    ("option", "env", "colored"),
    [
        ([], {}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ([], {"FSE_CONVERT_COLOR": "always"}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color=never"], {"FORCE_COLOR": "1"}, False),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_off_a_terminal(
    option: list[str], env: dict[str, str], colored: bool, before: bool, made: Made, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command = ["inspect", str(made()), "--require", "vllm-0.30"]
    _, out, err = run(*(option + command if before else command + option))
    assert (is_colored(out), is_colored(err)) == (colored, colored)
    assert "error[not-fused]" in re.sub(r"\x1b\[[\d;]*m", "", err)


@pytest.mark.parametrize(
    ("option", "env", "colored"),
    [
        ([], {}, True),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"TERM": "dumb"}, False),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_on_a_terminal(option: list[str], env: dict[str, str], colored: bool, converted: Made) -> None:
    shown = on_terminal([sys.executable, "-m", "fse_convert", "verify", str(converted()), *option], 80, **env)
    assert is_colored(shown) == colored


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", ["inspect", "targets", "dry-run", "convert", "verify", "explain"])
def test_no_word_is_broken(command: str, columns: int, made: Made, converted: Made, tmp_path: Path) -> None:
    """Every word of the report on a wide terminal is one on a narrow one; only what is longer than a line sticks out."""
    source, out = os.path.relpath(made(), tmp_path), os.path.relpath(converted(), tmp_path)
    arguments = {
        "inspect": ["inspect", source],
        "targets": ["targets"],
        "dry-run": [source, "x", "--dry-run"],
        "convert": [source, "y", "-q"],
        "verify": ["verify", out, "--source", source, "-q"],
        "explain": ["explain"],
    }[command]
    run = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); from fse_convert.cli import main; main()", *arguments]

    def shown(width: int) -> list[str]:
        lines = on_terminal(run, width, NO_COLOR="1").splitlines()
        if command == "convert":
            (tmp_path / "y").rename(tmp_path / f"y{width}")
        return lines

    wide, narrow = shown(400), shown(columns)
    rest = {word for line in narrow for word in line.split()} - {word for line in wide for word in line.split()}
    assert {word for word in rest if not re.search(r"^─+$|:$|^[█░▲x!?]+$|^\d[\d.]*$", word)} == set()
    long = [line for line in narrow if len(line) > columns]
    commands = ("fse-convert ", "vllm ", "python ", "hf ")
    assert all(len(line.split()) == 1 or line.lstrip().startswith(commands) for line in long), long
