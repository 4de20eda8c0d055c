"""Something else touches staging, source or the folder around OUT during a run: the golden bytes and exit 0, or no output."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.conversion.run import Conversion
from fse_convert.errors import FseConvertError
from fse_convert.output.copying import Link
from fse_convert.progress import Event, Observer
from fse_convert.restoration.run import Restoration
from fse_convert.verification.findings import Level
from tests.faults.adversary import SCENARIOS, Digest, Ground, Scenario, add, append, flip, remove, replace, request

MINUTES = float(os.environ.get("FSE_ADVERSARY_MINUTES", "0"))
"""How long each scenario goes on with new seeds: FSE_ADVERSARY_MINUTES=3 pytest tests/faults/test_disturbed.py -k adversary."""
SEEDS = 12


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_an_adversary_gets_the_golden_bytes_or_no_output(scenario: Scenario, tiny: Path, ram_path: Path, digest: Digest) -> None:
    """The short campaign has the same seeds every time, the long one goes on where the clock stood."""
    ground = Ground(scenario, tiny, ram_path, digest)
    ends = Counter(ground.disturbed(seed) for seed in range(SEEDS))
    seed, until = time.time_ns(), time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        ends[ground.disturbed(seed)] += 1
        seed += 1
    print(f"{scenario.name}: {ends.total()} runs over {ground.steps} steps: {dict(ends)}")
    assert len(ends) > 1


def at(number: int, act: Callable[[], None]) -> Observer:
    """An observer that acts when event ``number`` comes."""
    seen = [0]

    def observe(_event: Event) -> None:
        seen[0] += 1
        if seen[0] == number:
            act()

    return observe


def count(source: Path, out: Path, level: Level, link: Link = Link.AUTO) -> int:
    events: list[Event] = []
    Conversion(request(source, out, level, link)).run(events.append)
    shutil.rmtree(out)
    return len(events)


@pytest.mark.parametrize("level", [Level.NONE, Level.STORAGE], ids=lambda level: level.value)
def test_a_staged_file_that_is_removed_last_of_all(level: Level, tiny: Path, tmp_path: Path) -> None:
    total = count(tiny, tmp_path / "out", level)
    staged = tmp_path / ".out.fse-partial" / "output"
    with pytest.raises(FseConvertError) as lost:
        Conversion(request(tiny, tmp_path / "out", level)).run(at(total, lambda: next(staged.glob("model-*")).unlink()))
    assert lost.value.problems[0].code == "staging-lost"
    assert lost.value.exit_code == 4
    assert not (tmp_path / "out").exists()


def test_a_staging_folder_that_goes_away_is_not_begun_again(tiny: Path, tmp_path: Path) -> None:
    total = count(tiny, tmp_path / "out", Level.STORAGE)
    with pytest.raises(FseConvertError) as lost:
        Conversion(request(tiny, tmp_path / "out")).run(at(total, lambda: shutil.rmtree(tmp_path / ".out.fse-partial")))
    assert lost.value.problems[0].code == "staging-lost"
    assert list(tmp_path.iterdir()) == []


def test_a_hard_linked_source_that_grows_after_it_was_read_back(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    carried = next(s.name for s in Conversion(request(source, tmp_path / "out")).plan.shards if s.carried)
    total = count(source, tmp_path / "out", Level.STORAGE, Link.HARD)
    with pytest.raises(FseConvertError) as changed:
        Conversion(request(source, tmp_path / "out", link=Link.HARD)).run(at(total, lambda: append(source / carried)))
    assert changed.value.problems[0].code == "source-changed"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "restore"])
def test_a_staging_folder_with_nothing_but_an_output_is_known(
    command: str, made: Callable[..., Path], tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """What a power cut on Btrfs leaves: fsync of a file there persists the path to that file only."""
    assert run(made(), tmp_path / "converted", "--verify", "none")[0] == 0
    (tmp_path / ".o.fse-partial" / "output").mkdir(parents=True)
    arguments = ("restore", tmp_path / "converted") if command == "restore" else (made(),)
    assert run(*arguments, tmp_path / "o")[0] == 0
    assert not (tmp_path / ".o.fse-partial").exists()


@pytest.mark.parametrize(
    ("place", "touch", "code"),
    [
        pytest.param("staged", remove, "staging-lost", id="a restored shard is removed"),
        pytest.param("staged", append, "staging-lost", id="a restored shard grows"),
        pytest.param("staged", replace, "staging-lost", id="a restored shard is replaced by one of its size"),
        pytest.param("staged", flip, "staging-lost", id="a byte of a restored shard is flipped"),
        pytest.param("staged", add, "staging-lost", id="a file is added"),
        pytest.param("out", append, "source-changed", id="the output that is restored from grows"),
        pytest.param("out", add, "source-changed", id="a file is added to the output that is restored from"),
    ],
)
def test_a_restoration_that_is_disturbed_publishes_nothing(
    place: str, touch: Callable[[Path], None], code: str, tiny: Path, tmp_path: Path
) -> None:
    out, original = tmp_path / "out", tmp_path / "original"
    Conversion(request(tiny, out, Level.NONE)).run(lambda _event: None)
    events: list[Event] = []
    Restoration(out, original, Link.AUTO).run(events.append)
    shutil.rmtree(original)
    folder = out if place == "out" else tmp_path / ".original.fse-partial" / "output"
    with pytest.raises(FseConvertError) as disturbed:
        Restoration(out, original, Link.AUTO).run(at(len(events), lambda: touch(next(folder.glob("model-*.safetensors")))))
    assert disturbed.value.problems[0].code == code
    assert disturbed.value.exit_code == 4
    assert not original.exists()


@pytest.mark.parametrize("touch", [append, flip], ids=["grows", "has other bytes"])
def test_a_carried_file_that_changes_before_it_is_restored_is_named(
    touch: Callable[[Path], None], tiny: Path, tmp_path: Path
) -> None:
    out, original = tmp_path / "out", tmp_path / "original"
    Conversion(request(tiny, out, Level.NONE)).run(lambda _event: None)
    with pytest.raises(FseConvertError) as disturbed:
        Restoration(out, original, Link.AUTO).run(at(1, lambda: touch(out / "tokenizer_config.json")))
    (problem,) = disturbed.value.problems
    assert (problem.code, problem.where) == ("source-changed", "tokenizer_config.json")
    assert not original.exists()


def test_verify_names_what_a_run_that_was_cut_off_left(
    output: Callable[..., Path], tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    out = output()
    assert "left-behind" not in run("verify", out)[2]
    left = tmp_path / f".{out.name}.fse-partial"
    (left / "output").mkdir(parents=True)
    (left / "output" / "shard").write_bytes(bytes(1234))
    (left / "lock").touch()
    code, _, err = run("verify", out)
    assert code == 0
    assert f"note[left-behind]: {left}: a run that was cut off left 1.2 KiB" in err
