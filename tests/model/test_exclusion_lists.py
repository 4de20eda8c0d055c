"""Which modules an entry of a list may mean, and lists that leave out others than before."""

from __future__ import annotations

import pytest

from fse_convert.model.exclusion_lists import GATES, covered, means, names_exactly, with_plain_gates, without

GATE = "model.language_model.layers.3.mlp.shared_expert.gate_proj"
DOWN = "model.layers.1.mlp.shared_experts.down_proj"


@pytest.mark.parametrize(
    ("entry", "module", "may", "exactly"),
    [
        (GATE, GATE, True, True),
        (f"{GATE}.weight", GATE, True, False),
        ("language_model.model.layers.3.mlp.shared_expert.gate_proj", GATE, True, True),
        ("layers.3.mlp.shared_expert.gate_proj", GATE, True, True),
        ("model.language_model.layers.3.mlp.shared_expert.gate_up_proj", GATE, True, True),
        ("model.language_model.layers.3.mlp.shared_expert.gate_up_proj", GATE.replace("gate", "down"), False, False),
        ("layers.3.ffn.shared_experts.gate_up_proj", "layers.3.ffn.shared_experts.w3", True, True),
        ("layers.3.ffn.shared_experts.gate_up_proj", "layers.3.ffn.shared_experts.w2", False, False),
        ("model.layers.1.mlp.shared_experts", DOWN, True, False),
        ("model.layers.1", DOWN, True, False),
        ("model.layers.1", DOWN.replace("layers.1", "layers.11"), False, False),
        ("model.layers.1.mlp.shared_expert", DOWN, False, False),
        ("*shared_expert*", DOWN, True, False),
        ("*.mlp.shared_experts.?own_proj", DOWN, True, False),
        ("*.mlp.experts*", DOWN, False, False),
        ("re:.*shared_expert", DOWN, True, True),
        (r"re:model\.layers\.\d+\.mlp\.shared_experts\.down_proj$", DOWN, True, True),
        ("re:mlp", DOWN, False, False),
        (r"re:layers\.1\.", DOWN, True, True),
        ("re:(", DOWN, False, False),
        ("lm_head", "lm_head", True, True),
    ],
)
def test_what_an_entry_means(entry: str, module: str, may: bool, exactly: bool) -> None:
    assert means(entry, module) is may
    assert names_exactly(entry, module) is exactly


@pytest.mark.parametrize(
    ("entry", "yes"),
    [
        ("layers.1.ffn.experts", True),
        ("layers.1", True),
        ("layers.1.", True),
        ("layers.10", False),
        ("model.layers.1.ffn.experts", True),
        ("*experts*", True),
        ("*.experts.*", True),
        ("re:.*experts", True),
        ("re:layers\\.1\\.ffn\\.experts\\.0\\.w1", True),
        ("re:(", False),
        ("lm_head", False),
        ("expert", False),
        ("*", True),
        ("", False),
    ],
)
def test_an_entry_covers_experts_if_it_may_mean_any_part_of_them(entry: str, yes: bool) -> None:
    assert covered([entry], "layers.1.ffn.experts") is yes


def test_only_entries_of_freed_modules_go() -> None:
    entries = ["lm_head", "a.b.gate_proj", "*.c.*", "a.b", "lm_head"]
    assert without(entries, {"a.b.gate_proj"}, ["lm_head"]) == ["lm_head", "*.c.*", "lm_head"]
    assert without(entries, set(), ["x"]) == entries


def test_what_an_entry_also_left_out_is_named_unless_another_entry_does() -> None:
    entries = ["*b*", "re:a.x"]
    assert without(entries, {"a.b"}, ["a.x.b", "a.c.b", "a.d"]) == ["re:a.x", "a.c.b"]


def test_entries_of_gates_become_one() -> None:
    entries = ["x", "a.mlp.shared_expert_gate", "y", "y", "re:.*shared_expert_gate$", GATES, "*.shared_expert_gate.weight"]
    assert with_plain_gates(entries) == ["x", GATES, "y", "y"]
    assert with_plain_gates(["a.shared_expert", "a.shared_expert_gate_proj"]) == ["a.shared_expert", "a.shared_expert_gate_proj"]


def test_the_entry_of_gates_is_one_for_every_reader_but_no_word_that_vllm_0_29_looks_for() -> None:
    assert names_exactly(GATES, "model.language_model.layers.3.mlp.shared_expert_gate")
    assert not means(GATES, GATE)
    assert "shared_expert" not in GATES
