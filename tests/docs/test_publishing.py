"""docs/publishing.md: its commands run in their order, with a local server in place of the Hub; the Hub's own are left out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub_server import serve, stand_in

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "publishing.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.+)$", "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE)


def test_every_command_works(
    made: Callable[..., Path], run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    with serve("deepseek-ai/DeepSeek-V4.1-Flash", made()) as hub:
        stand_in(hub, tmp_path / "cache", monkeypatch)
        ours = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("fse-convert ")]
        assert [words[0] for words in ours] == [
            "inspect", "hf://deepseek-ai/DeepSeek-V4.1-Flash@main", "card", "verify", "inspect", "verify",
        ]  # fmt: skip
        for words in ours:
            into = words.index(">>") if ">>" in words else len(words)
            code, out, err = run(*words[:into])
            assert code == 0, err
            for file in map(Path, words[into + 1 :]):
                file.write_text(file.read_text(encoding="utf-8") + out, encoding="utf-8")
            if words[0] == "verify":
                assert "note: added, removed or edited since the conversion, and read by no server: README.md" in out


def test_the_command_that_serves_is_the_card_s(run: Callable[..., tuple[int, str, str]], converted: Callable[..., Path]) -> None:
    card = run("card", converted("vllm-0.30"), "--repo", "me/DeepSeek-V4.1-Flash-fse")[1]
    serving = next(command for command in COMMANDS if command.startswith("vllm serve"))
    assert f"$ {serving}\n" in card
    assert f"$ {next(c for c in COMMANDS if c.startswith('hf download'))}\n" in card
