"""docs/troubleshooting.md names only what is there: codes, options, targets, variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fse_convert.cli import cli
from fse_convert.codes import all_codes
from fse_convert.conversion.estimate import NUMERICS, PER_WORKER

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
WORDS = re.findall(r"`([^`\n]+)`", PAGE)
FOREIGN = {"--load-format"}


def test_options_and_codes_are_there() -> None:
    options = {name for command in cli.commands.values() for param in command.params for name in param.opts}
    assert {o for word in WORDS for o in re.findall(r"--[a-z-]+", word)} <= options | FOREIGN
    assert {w for w in WORDS if re.fullmatch(r"no-space|not-[a-z]+", w)} <= all_codes().keys()
    assert {w.split()[1] for w in WORDS if w.startswith("fse-convert ")} <= cli.commands.keys()


def test_the_memory_that_it_names_holds_torch_numerics_and_the_default_workers() -> None:
    workers = next(p for p in cli.commands["convert"].params if p.name == "workers")
    assert "up to 4" in str(workers.show_default)
    found = re.search(
        r"at most (\d+) GiB of memory with four workers \(torch (\d+) MiB, numerics (\d+) MiB, (\d+) MiB a worker\)", PAGE
    )
    assert found
    gib, torch, numerics, worker = map(int, found.groups())
    assert (numerics << 20, worker << 20) == (NUMERICS, PER_WORKER)
    assert torch + numerics + 4 * worker <= gib << 10


def test_the_default_target_refuses_what_a_server_fuses(
    run: Callable[..., tuple[int, str, str]], made: Callable[..., Path], tmp_path: Path
) -> None:
    root = made("v3")
    assert run("inspect", root, "--require", "vllm-0.33-aiter")[0] == 0
    code, _, err = run(root, tmp_path / "out", "--dry-run")
    assert (code, "error[not-fusable]" in err) == (3, True)
    assert f"fse-convert inspect {root} says which servers fuse it" in err
    assert run(root, tmp_path / "out", "--target", "vllm-0.33-aiter", "--dry-run")[0] == 0
