"""Takes every key and every name of every family's row out, misnames it, or swaps it with another; a test must see each.

    python -m tests.model.families.mutants [WORDS ...]     one process each; prints those that no test sees

WORDS: only those with one of them in their names, as they are printed.

The tests are collected once. Of those whose parameters name model types a mutant meets the ones that name one of its row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.families.width_keys import Share, Width
from fse_convert.model.moe import Role

TESTS = (
    "tests/plan/test_edits.py",
    "tests/model/families/test_keys.py",
    "tests/model/test_stacked.py",
    "tests/model/families/test_rows.py",
    "tests/model/families/test_resemblance.py",
    "tests/model/test_config_against_tensors.py",
    "tests/model/test_identity.py",
    "tests/plan/test_width_rounding.py",
)
SLOW = "test_nested_or_flat_in_any_order_the_answer_is_the_same"
"""Judges every change by every server; it comes last."""
EQUAL = {
    # A loader builds the shared MLP from the routed width, so that this key can say nothing else.
    "Sarvam (sarvam_moe): widths: moe_shared_expert_intermediate_size of a routed expert",
    # transformers builds routed experts and the one shared MLP from intermediate_size, so that all are as wide.
    "Hunyuan (hunyuan_v1_moe): widths: moe_intermediate_size of one shared expert",
}
"""Wrong rows that mean the same as the right ones."""
TYPES = {t for family in FAMILIES for t in family.model_types}
AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """One wrong row: what is wrong, and the value of a field."""

    family: Family
    does: str
    field: str
    value: Any

    @property
    def name(self) -> str:
        """What stands in reports."""
        return f"{self.family.name} ({self.family.model_types[0]}): {self.does}"


def mutants(family: Family) -> Iterator[Mutant]:
    """Yield every wrong row of a family; one that is refused is read for its names alone."""
    if family.refused:
        yield Mutant(family, "not refused", "refused", None)
        return
    for field, value, does in (*_widths(family), *_keys(family), *_names(family), *_sparse(family), *_stacks(family)):
        yield Mutant(family, does, field, value)


Wrong = Iterator[tuple[str, Any, str]]
"""A field, its wrong value, and in words what is wrong."""


def _widths(family: Family) -> Wrong:
    for field in ("widths", "readings"):
        rows: tuple[Width, ...] = getattr(family, field)
        for i, row in enumerate(rows):
            others = rows[:i], rows[i + 1 :]
            if len(rows) > 1 or field == "readings":
                yield field, (*others[0], *others[1]), f"{field} without {row.key}"
            yield field, (*others[0], replace(row, key=f"{row.key}_"), *others[1]), f"{field}: {row.key} misnamed"
            for share in set(Share) - {row.share}:
                yield field, (*others[0], replace(row, share=share), *others[1]), f"{field}: {row.key} of {share.value}"
        for i, row in enumerate(rows[:-1]):
            swapped = replace(row, key=rows[i + 1].key), replace(rows[i + 1], key=row.key)
            yield field, (*rows[:i], *swapped, *rows[i + 2 :]), f"{field}: {row.key} and {rows[i + 1].key} swapped"


def _keys(family: Family) -> Wrong:
    for field in ("depth_keys", "n_routed_keys", "n_shared_keys"):
        keys: tuple[str, ...] = getattr(family, field)
        for i, key in enumerate(keys):
            yield field, (*keys[:i], *keys[i + 1 :]), f"{field} without {key}"
            yield field, (*keys[:i], f"{key}_", *keys[i + 1 :]), f"{field}: {key} misnamed"
    for a, b in (("n_routed_keys", "n_shared_keys"), ("n_routed_keys", "depth_keys"), ("n_shared_keys", "depth_keys")):
        if getattr(family, a) and getattr(family, b):
            yield a, getattr(family, b), f"{a} are {b}"
    yield "hidden_key", f"{family.hidden_key}_", "hidden_key misnamed"
    yield "hidden_key", family.widths[0].key, "hidden_key is that of the width"
    for field in ("mtp_key", "mtp_routed_key"):
        if key := getattr(family, field):
            yield field, None, f"no {field}"
            yield field, f"{key}_", f"{field} misnamed"


def _names(family: Family) -> Wrong:
    yield "layers", f"{family.layers}_", "layers misnamed"
    yield "block", f"{family.block}_", "block misnamed"
    if family.mtp:
        yield "mtp", None, "no mtp"
        yield "mtp", f"{family.mtp}_", "mtp misnamed"
    if family.shared:
        yield "shared", "", "no shared"
        yield "shared", f"{family.shared}_", "shared misnamed"
        if family.block:
            yield "beside", not family.beside, "beside turned"
        yield "gated", not family.gated, "gated turned"
    for i, model_type in enumerate(family.model_types):
        yield "model_types", (*family.model_types[:i], *family.model_types[i + 1 :]), f"without {model_type}"
    for field in ("routed_names", "shared_names") if family.shared else ("routed_names",):
        names: dict[str, Role] = dict(getattr(family, field))
        for name, role in names.items():
            rest = {n: r for n, r in names.items() if n != name}
            yield field, rest, f"{field} without {name}"
            yield field, {f"{name}_": role, **rest}, f"{field}: {name} misnamed"
        down = next(n for n, r in names.items() if r is Role.DOWN)
        for name, role in names.items():
            if role is Role.UP:
                yield field, {**names, name: Role.DOWN, down: Role.UP}, f"{field}: {name} and {down} swapped"


def _sparse(family: Family) -> Wrong:
    rule = family.sparse
    if rule is None:
        return
    yield "sparse", None, "no sparse"
    for part in ("first", "last", "step", "dense"):
        if key := getattr(rule, part):
            wrong: dict[str, Any]
            for wrong, does in (({part: None}, f"sparse without {key}"), ({part: f"{key}_"}, f"sparse: {key} misnamed")):
                yield "sparse", replace(rule, **wrong), does
    if rule.step:
        yield "sparse", replace(rule, ahead=1 - rule.ahead), "sparse: one layer off"
    for i, word in enumerate(rule.words):
        yield "sparse", replace(rule, words=(*rule.words[:i], *rule.words[i + 1 :])), f"sparse without {word}"
        yield "sparse", replace(rule, words=(*rule.words[:i], f"{word}_", *rule.words[i + 1 :])), f"sparse: {word} misnamed"


def _stacks(family: Family) -> Wrong:
    for field in ("stacked", "fused"):
        stacks = getattr(family, field)
        for i, stack in enumerate(stacks):
            others = stacks[:i], stacks[i + 1 :]
            yield field, (*others[0], *others[1]), f"{field} without {stack.name}"
            wrong = {"misnamed": replace(stack, name=f"{stack.name}_")}
            if len(stack.roles) > 1:
                wrong["interleaved or not"] = replace(stack, interleaved=not stack.interleaved)
            if field == "stacked":  # others are always [2 S, H]
                wrong["transposed or not"] = replace(stack, transposed=not stack.transposed)
            if stack.transposed:
                wrong["by its shape or not"] = replace(stack, by_shape=not stack.by_shape)
            for does, changed in wrong.items():
                yield field, (*others[0], changed, *others[1]), f"{field}: {stack.name} {does}"
        if len(stacks) > 1:
            a, b = stacks[0], stacks[-1]
            swapped = (replace(a, name=b.name), *stacks[1:-1], replace(b, name=a.name))
            yield field, swapped, f"{field}: {a.name} and {b.name} swapped"


class Pass:
    """A pytest plugin that runs all mutants in place of the tests, each in a fork."""

    def __init__(self, chosen: list[Mutant]) -> None:
        self.chosen = chosen
        self.survivors: list[Mutant] = []
        self.running: dict[int, Mutant] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for every mutant, a few at once."""
        for done, mutant in enumerate(self.chosen):
            if len(self.running) == AT_ONCE:
                self._wait()
            pid = os.fork()
            if pid == 0:
                os._exit(_seen(mutant, session.items))
            self.running[pid] = mutant
            if done % 100 == 99:
                sys.stderr.write(f"{done + 1} of {len(self.chosen)}\n")
        while self.running:
            self._wait()
        return True

    def _wait(self) -> None:
        pid, status = os.wait()
        mutant = self.running.pop(pid)
        if os.waitstatus_to_exitcode(status) == 0:
            self.survivors.append(mutant)
            sys.stderr.write(f"survives: {mutant.name}\n")


def _seen(mutant: Mutant, items: list[pytest.Item]) -> int:
    """Return 1 where a test fails beside this mutant, 0 where all pass."""
    family = mutant.family
    words = family.model_types  # before they change
    vars(family).pop("pattern", None)
    object.__setattr__(family, mutant.field, mutant.value)
    about = sorted((item for item in items if _models(item) & set(words)), key=lambda item: item.name.startswith(SLOW))
    ordered = [*about, *(item for item in items if not _models(item) & TYPES)]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for item, following in zip(ordered, (*ordered[1:], None), strict=True):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return 1
    return 0


def _models(item: pytest.Item) -> set[str]:
    """Return the model types that the parameters of a test name."""
    given = getattr(item, "callspec", None)
    values = given.params.values() if given else ()
    return {str(getattr(value, "model_type", value)) for value in values}


def main(names: Iterable[str]) -> int:
    """Run the pass and say what no test sees."""
    words = list(names)
    chosen = [m for family in FAMILIES for m in mutants(family) if m.name not in EQUAL]
    chosen = [m for m in chosen if not words or any(word in m.name for word in words)]
    plugin = Pass(chosen)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not peers", *TESTS], plugins=[plugin])
    sys.stdout.write(f"{len(chosen)} wrong rows, {len(plugin.survivors)} seen by no test\n")
    for mutant in plugin.survivors:
        sys.stdout.write(f"  {mutant.name}\n")
    return code or bool(plugin.survivors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
