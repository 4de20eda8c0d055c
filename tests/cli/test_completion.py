"""Completion of commands, options, targets and codes in the shells themselves."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
CASES = [
    ("fse-convert ins", "inspect"),
    ("fse-convert re", "restore"),
    ("fse-convert --ta", "--target"),
    ("fse-convert checkpoint out --tar", "--target"),
    ("fse-convert checkpoint out --target megamoe-5", "megamoe-512"),
    ("fse-convert inspect x --require vllm-0.33-aiter-m", "vllm-0.33-aiter-mega"),
    ("fse-convert inspect x --target ato", "atom"),
    ("fse-convert inspect x --col", "--color"),
    ("fse-convert explain width-r", "width-ratio"),
]
"""A line that was typed, and what its last word becomes."""
FILES = "fse-convert check"
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def needs(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")


@pytest.mark.parametrize(("words", "offered"), [*CASES, (FILES, "")])
def test_bash_completes(words: str, offered: str) -> None:
    script = """
        compopt() { echo "$@"; }  # bash has it only while it completes
        source <(fse-convert completion bash)
        COMP_WORDS=($TYPED) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _fse_convert_completion fse-convert
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "--norc", "-c", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**ENV, "TYPED": words}).stdout.split()
    assert shown == ([offered] if offered else ["-o", "default"])


@pytest.mark.parametrize(("words", "offered"), [*CASES, (FILES, "checkpoint/")])
def test_fish_completes(words: str, offered: str, tmp_path: Path) -> None:
    needs("fish")
    (tmp_path / "checkpoint").mkdir()
    script = f"fse-convert completion fish | source; complete --do-complete {words!r}"
    env = {**ENV, "HOME": str(tmp_path)}
    shown = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True, env=env, cwd=tmp_path)
    assert [line.partition("\t")[0] for line in shown.stdout.splitlines()] == [offered]


@pytest.mark.parametrize(("words", "offered"), [*CASES, (FILES, "checkpoint/")])
def test_zsh_completes(words: str, offered: str, tmp_path: Path) -> None:
    """Type the words in an interactive zsh, press TAB, and let a key write the line to a file."""
    needs("zsh")
    (tmp_path / "checkpoint").mkdir()
    line = tmp_path / "line"
    setup = f"""
        autoload -Uz compinit && compinit -u -d {tmp_path}/dump
        source <(fse-convert completion zsh)
        line-out() {{ print -r -- "$BUFFER" > {line}; exit }}
        zle -N line-out; bindkey '^I' complete-word; bindkey '^X' line-out
    """
    (tmp_path / ".zshrc").write_text(setup)
    main, sub = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-i"], stdin=sub, stdout=sub, stderr=sub, env={**ENV, "ZDOTDIR": str(tmp_path), "TERM": "vt100"}, cwd=tmp_path
    )
    os.close(sub)
    os.write(main, f"{words}\t\x18".encode())
    shown = b""
    try:
        while part := os.read(main, 4096):
            shown += part
    except OSError:  # the shell has ended
        pass
    os.close(main)
    process.wait()
    assert line.read_text().split() == [*words.split()[:-1], offered], shown


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_it_prints_a_script(name: str, run: Run) -> None:
    code, out, err = run("completion", name)
    assert (code, err) == (0, "")
    assert "_FSE_CONVERT_COMPLETE" in out
