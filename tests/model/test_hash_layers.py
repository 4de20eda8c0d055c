"""How many layers of DeepSeek-V4 route by a table: by config.json, by the tensors, and where some of these are missing."""

from __future__ import annotations

import pytest

from fse_convert.testing.memory import Model, Tensors, description_of

BIAS, TABLE, WEIGHT = "bias", "tid2eid", "weight"


def gates(tables: int, layers: int = 4) -> Tensors:
    """What the gates of a model have beside their weights: a table each, then a bias each."""
    kinds = [(i, TABLE if i < tables else BIAS) for i in range(layers)]
    return {f"layers.{i}.ffn.gate.{kind}": ("I64", (8, 1)) if kind == TABLE else ("F32", (2,)) for i, kind in kinds}


def told(written: int, tensors: Tensors) -> list[str]:
    model = Model(layers=4, config={"num_hash_layers": written})
    return [c.message for c in description_of(model.full_config(), model.tensors() | tensors).conflicts]


@pytest.mark.parametrize(("written", "tables"), [(1, 1), (0, 0), (3, 1), (0, 1), (3, 0)])
def test_layers_that_route_by_a_table_are_as_many_as_there_are_tables(written: int, tables: int) -> None:
    expected = f"num_hash_layers is {written}, expected {tables}, the layers whose gate has a tid2eid"
    assert told(written, gates(tables)) == ([] if written == tables else [expected])


def test_a_table_that_was_lost_is_no_fault_of_the_config() -> None:
    lost = {name: info for name, info in gates(2).items() if name != "layers.1.ffn.gate.tid2eid"}
    assert told(2, lost) == []
    assert told(0, lost) == ["num_hash_layers is 0, expected 1, the layers whose gate has a tid2eid"]
