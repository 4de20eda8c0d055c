"""Fuzz one target with atheris, its seeds and its own way to change JSON; `make fuzz` takes all of them.

    pip install atheris
    python -m tests.fuzz header|checkpoint|inspect|convert|verify|restore|serve CORPUS -max_total_time=600 -rss_limit_mb=4096

Prints how the inputs ended; stops at the first crash: an exception, or an exit code that is not documented.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import atheris

from tests.fuzz.mutating import mutated


def main() -> None:
    """Fuzz until libFuzzer says that it is enough, and print the counts."""
    name, corpus, *rest = sys.argv[1:]
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="fse-convert-fuzz-", dir=memory if memory.is_dir() else None))
    with atheris.instrument_imports(include=["fse_convert"]):
        from tests.fuzz import commands, readers

        target, seeds = {**readers.READERS, **commands.targets(home)}[name]
        target(seeds[0])  # imports what it needs
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    ends: Counter[str] = Counter()

    def one(data: bytes) -> None:
        ends[target(data)] += 1
        if ends.total() % 100 == 0:
            print(f"{name}: {ends.total()} inputs, {dict(sorted(ends.items()))}", flush=True)

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutated(data, rng)[:largest] if rng.random() < 0.7 else atheris.Mutate(data, largest)

    dictionary = f"-dict={Path(__file__).with_name('json.dict')}"
    atheris.Setup([sys.argv[0], corpus, dictionary, "-keep_seed=1", *rest], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
