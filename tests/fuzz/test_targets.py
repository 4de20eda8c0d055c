"""Every target of the fuzzer on its seeds, and on changes of them that are the same every time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.fuzz import commands, readers
from tests.fuzz.mutating import mutated

Targets = dict[str, tuple[Callable[[bytes], str], list[bytes]]]
GOOD = {
    "header": "accepted",
    "checkpoint": "planned",
    "inspect": "0",
    "convert": "0",
    "verify": "0, alone 0",
    "restore": "0",
    "serve": "served",
}
"""How the seeds of a target end, or some of them."""
CHANGES = 40


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return {**readers.READERS, **commands.targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("name", GOOD)
def test_a_target_ends_as_documented(name: str, targets: Targets) -> None:
    target, seeds = targets[name]
    unchanged, rng = Counter(map(target, seeds)), random.Random(name)
    assert unchanged[GOOD[name]]
    changed = Counter(target(mutated(rng.choice(seeds), rng)) for _ in range(CHANGES))
    print(f"{name}: {dict(unchanged)}, changed {dict(changed)}")
    assert len(changed) > 1
