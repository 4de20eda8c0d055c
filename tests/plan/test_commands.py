"""Commands say everything that they rest on: pasted, the program is asked for the very options that were planned with."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from fse_convert.plan.commands import conversion_command, inspection_command
from fse_convert.plan.plan import Experts, Options
from fse_convert.plan.source import describe_source
from fse_convert.servers.judge import find_any
from fse_convert.servers.subject import Subject
from fse_convert.testing.memory import Model, checkpoint

if TYPE_CHECKING:
    from fse_convert.conversion.run import Request

Run = Callable[..., tuple[int, str, str]]
SET: dict[str, Any] = {
    "target": find_any("vllm-0.33"), "experts": Experts.SHARED, "tp": 4, "allow_unfused": True, "routed_fp8": True,
    "shared_mxfp4": True, "heal": True, "lossy": True, "drop_originals": True,
}  # fmt: skip


def subject(model_type: str = "deepseek_v4", family: str = "") -> Subject:
    config = Model().full_config() | {"model_type": model_type}
    return describe_source(checkpoint(config, Model().tensors()), family).subject


def requested(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> Request:
    """What the command line asks a conversion for."""
    asked: list[Request] = []

    def stop(request: Request) -> None:
        asked.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("fse_convert.conversion.run.Conversion", stop)
    program, *arguments = shlex.split(command)
    assert program == "fse-convert"
    run(*arguments)
    (request,) = asked
    return request


def test_every_option_is_tried() -> None:
    assert {f.name for f in fields(Options)} == SET.keys()


@pytest.mark.parametrize("name", SET)
def test_pasted_it_asks_for_what_was_planned(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(**{"target": SET["target"], name: SET[name]})
    asked = requested(conversion_command(subject(), "my model", options), run, monkeypatch)
    assert (asked.options, str(asked.source)) == (options, "my model")


def test_what_different_options_make_lands_in_different_folders() -> None:
    """A page may offer all of them, and each is pasted in one working directory."""
    every = [Options(**{"target": target, name: SET[name]}) for target in (None, SET["target"]) for name in SET]
    commands = [shlex.split(conversion_command(subject(), "model", options)) for options in every]
    assert len({tuple(command[3:]) for command in commands}) == len({command[2] for command in commands}) > len(SET)
    assert ["model", "model-tp-4", "--tp", "4"] in [command[1:] for command in commands]
    assert "model" not in [command[2] for command in commands]


@pytest.mark.parametrize(("model_type", "family"), [("newcomer", "DeepSeek-V4"), ("deepseek_v4", ""), ("deepseek_v4", "AXK1")])
def test_a_family_is_named_where_the_config_does_not(
    model_type: str, family: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = subject(model_type, family)
    named = "DeepSeek-V4" if model_type == "newcomer" else ""
    asked = requested(conversion_command(about, "model", Options(SET["target"])), run, monkeypatch)
    assert asked.family == named
    option = ["--family", named] if named else []
    assert shlex.split(inspection_command("a b", about.config, "DeepSeek-V4")) == ["fse-convert", "inspect", "a b", *option]


@pytest.mark.parametrize(
    ("place", "out"),
    [
        ("hf://org/name@main", "name-vllm-0.33"),
        ("/models/name/", "name-vllm-0.33"),
        ("/models/a@b", "a@b-vllm-0.33"),
        ("..", "vllm-0.33"),
    ],
)
def test_the_output_lands_in_the_working_directory(place: str, out: str) -> None:
    assert shlex.split(conversion_command(subject(), place, Options(SET["target"])))[1:3] == [place, out]
