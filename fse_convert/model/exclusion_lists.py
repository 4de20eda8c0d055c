"""Lists of modules that a config leaves unquantised: which modules an entry may mean, and lists that leave out others than before.

Servers differ in how they match, so an entry is taken to mean a module where any of them, or the exporter, takes it so: it may be
the module's name, the name of a module around it, a shell pattern, or ``re:`` and a regular expression that need not reach the end.
How servers match, each in its own way, is in `fse_convert.servers.aiter.patterns` and `fse_convert.servers.left_out`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

_TEXT_MODEL = re.compile(r"(?:(?:model|language_model)\.)*")
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
_SHARDS = ("gate_proj", "up_proj", "w1", "w3")
"""Projections that servers know as one, ``gate_up_proj``."""
GATES = r"re:.*shared_exper[t]_gate"
"""All gates of shared experts, spelled such that vLLM 0.29 does not take the entry for one of shared experts.

It looks for ``shared_expert`` anywhere in the list (0.29 quantization/utils/config_utils.py, the rule for QuarkConfig).
"""


@lru_cache(maxsize=1 << 16)
def spellings(module: str) -> tuple[str, ...]:
    """Return the names of a module: with any prefix of the text model, and of a projection that servers fuse, as the fused one."""
    parent, _, last = module.rpartition(".")
    names = (module, f"{parent}.gate_up_proj") if last in _SHARDS else (module,)
    bare = [_TEXT_MODEL.sub("", name, count=1) for name in names]
    return tuple(dict.fromkeys((*names, *(prefix + name for name in bare for prefix in _PREFIXES))))


def is_pattern(entry: str) -> bool:
    """Tell whether an entry is no plain name."""
    return entry.startswith("re:") or any(mark in entry for mark in "*?[")


def means(entry: str, module: str) -> bool:
    """Tell whether an entry may mean a module; an expression that Python cannot compile means none."""
    names = spellings(module)
    if entry.startswith("re:"):
        return _matches(entry, names)
    if is_pattern(entry):
        return any(fnmatchcase(name, entry) for name in names)
    entry = entry.removesuffix(".weight")
    return any(name == entry or name.startswith(f"{entry}.") for name in names)


def names_exactly(entry: str, module: str) -> bool:
    """Tell whether every server takes an entry of ``exclude`` to mean a module: its name, or a regular expression."""
    names = spellings(module)
    return _matches(entry, names) if entry.startswith("re:") else entry in names


def covered(entries: Iterable[str], name: str, modules: Iterable[str] = ()) -> bool:
    """Tell whether some entry may mean a module of experts, or anything inside of it: for doubts, not for changes of the list.

    ``modules``: names of modules below it, beside those that most families have.
    """
    names = (name, f"model.{name}", f"{name}.gate_proj", f"{name}.w1", f"{name}.0.w1", f"{name}.0.gate_proj", *modules)
    return any(_touches(entry, names) for entry in entries)


def _touches(entry: str, names: Iterable[str]) -> bool:
    if entry.startswith("re:"):
        return _matches(entry, names, anywhere=True)
    bare = entry.strip("*").strip(".")
    return any(fnmatchcase(n, entry) or f".{bare}." in f".{n}." for n in names) if bare else bool(entry)


def _matches(entry: str, names: Iterable[str], *, anywhere: bool = False) -> bool:
    try:
        pattern = re.compile(entry[3:])
    except re.error:
        return False
    return any(pattern.search(name) if anywhere else pattern.match(name) for name in names)


def without(entries: Sequence[str], freed: Collection[str], kept: Iterable[str]) -> list[str]:
    """Return a list of exclusions that leaves out no module of ``freed``, and all those of ``kept`` that it left out before.

    Entries that mean no module of ``freed`` stay as they are, in their order; ``kept`` modules that lose theirs are named.
    """
    stay = [entry for entry in entries if not any(means(entry, module) for module in freed)]
    lost = [entry for entry in entries if entry not in stay]
    left_out = (module for module in kept if any(means(entry, module) for entry in lost))
    return [*stay, *(module for module in left_out if not any(names_exactly(entry, module) for entry in stay))]


def with_plain_gates(entries: Iterable[str]) -> list[str]:
    """Return a list of exclusions in which `GATES` stands for every entry of a shared expert's gate."""
    spelled = [GATES if _of_gates(entry) else entry for entry in entries]
    return [entry for i, entry in enumerate(spelled) if entry != GATES or i == spelled.index(GATES)]


def _of_gates(entry: str) -> bool:
    return entry.removesuffix(".weight").removesuffix("$").endswith("shared_expert_gate")
