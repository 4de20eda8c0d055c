"""Every recipe: what vLLM on ROCm makes of the checkpoint, which changes are proposed, and what it makes of the output."""

from __future__ import annotations

import pytest

from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.heal import HEALS, heals
from fse_convert.plan.tensors import Copied
from tests.plan.changes.conftest import Make
from tests.plan.changes.models import RECODINGS, changes_of, letters
from tests.plan.changes.recipes import RECIPES, Recipe
from tests.releases import until_newest

by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])


@by_recipe
def test_the_changes_make_of_it_what_servers_take(recipe: Recipe, small: Make) -> None:
    source = small(recipe.kind, recipe.damage, **recipe.knobs)
    assert letters(source) == until_newest(recipe.before)
    changes = changes_of(source, recipe.changes)
    assert tuple(change.name for change in changes) == recipe.changes
    output = with_changes(source, changes)
    assert letters(output) == until_newest(recipe.after)
    assert heals(output.subject) == (), "a mended checkpoint needs no mend"
    assert [c.code for c in output.description.conflicts if c not in source.description.conflicts] == []
    assert output.description.problems == ()


@by_recipe
def test_no_two_changes_touch_one_tensor_and_relabelled_ones_keep_their_bytes(recipe: Recipe, small: Make) -> None:
    source = small(recipe.kind, recipe.damage, **recipe.knobs)
    changes = changes_of(source, recipe.changes)
    touched = [name for change in changes for name in change.tensors]
    assert len(touched) == len(set(touched))
    assert set(touched) <= source.checkpoint.tensors.keys()
    output = with_changes(source, changes)
    assert sum(len(shard.header.tensors) for shard in output.checkpoint.shards) == len(output.checkpoint.tensors)
    for spec in (spec for change in changes for specs in change.tensors.values() for spec in specs):
        if isinstance(spec.change, Copied):
            assert output.checkpoint.tensors[spec.name].nbytes == spec.change.source.nbytes
            assert (spec.name, spec.dtype) != (spec.change.source.name, spec.change.source.dtype)


def test_every_mend_has_a_recipe() -> None:
    used = {name for recipe in RECIPES for name in recipe.changes} - RECODINGS.keys()
    assert len(used) == len(HEALS) - 1, "labels of scales do not matter to vLLM: test_heal.py"
