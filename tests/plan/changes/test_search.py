"""Which list of changes is chosen: the fewest that help, those that lose nothing first."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.errors import NotConvertible
from fse_convert.plan.changes.search import Unfused, left_unfused
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Decision, Options
from fse_convert.plan.source import Source
from fse_convert.servers.judge import find_any
from fse_convert.testing.patch import edit_config
from tests.plan.changes.conftest import Make
from tests.plan.changes.recipes import quantization


def chosen(source: Source, target: str, **options: Any) -> Decision:
    """What is decided for a target."""
    return decide(source, Options(find_any(target) if target else None, **options))


def names(decision: Decision) -> list[str]:
    """The changes that are made."""
    return [change.name for change in decision.changes]


def test_a_server_that_fuses_the_source_needs_no_change(small: Make) -> None:
    source = small("v4-flash")
    assert names(chosen(source, "sglang-0.5.23-slots")) == []
    assert names(chosen(source, "vllm-0.33")) == []


def test_what_loses_nothing_comes_first_though_a_loss_is_permitted(small: Make) -> None:
    source = small("v4-flash")
    for lossy in (False, True):
        assert names(exact := chosen(source, "vllm-0.33-aiter", lossy=lossy)) == ["routed-fp8"]
        assert left_unfused(exact) is Unfused.DRAFTER_FAILS
        assert names(chosen(source, "atom", lossy=lossy)) == ["routed-fp8"]
    assert names(rounded := chosen(source, "vllm-0.33-aiter", lossy=True, shared_mxfp4=True)) == ["shared-mxfp4"]
    assert left_unfused(rounded) is Unfused.DRAFTER_RUNS
    assert names(chosen(source, "vllm-0.29-aiter", lossy=True)) == ["shared-mxfp4"]


def test_only_the_mends_that_a_target_needs_are_made(small: Make) -> None:
    def damage(root: Any) -> None:
        quantization(lambda quark: quark.pop("export"))(root)
        quantization(lambda quark: quark["exclude"].append("model.layers.1.mlp.shared_experts.down_proj"))(root)

    source = small("kimi-k2-quark", damage, stored={"shared": "mxfp4-u8"})
    made = names(chosen(source, "vllm-0.33-aiter"))
    assert len(made) == 2
    assert "export" in made[0]
    assert "shared" in made[1]
    assert left_unfused(chosen(source, "vllm-0.33-aiter")) is Unfused.NOTHING


def test_a_mend_and_a_recoding_may_both_be_needed(small: Make) -> None:
    source = small("kimi-k2-quark", quantization(lambda quark: quark.pop("export")))
    decision = chosen(source, "vllm-0.33-aiter", lossy=True)
    assert left_unfused(decision) is Unfused.NOTHING
    assert names(decision)[-1] == "shared-mxfp4"
    assert len(names(decision)) == 2


def test_a_native_target_is_mended_and_padded_at_once(small: Make) -> None:
    def damage(root: Any) -> None:
        layer = {"ignored_layers": [f"layers.{i}.ffn.shared_experts.w2" for i in range(3)]}
        edit_config(root, lambda config: config["quantization_config"].update(layer))

    source = small("v4-flash", damage)
    decision = chosen(source, "vllm-0.29")
    assert (decision.source_width, decision.main_width) == (256, 512)
    assert len(names(decision)) == 1
    assert decision.server.fused


@pytest.mark.parametrize("target", ["vllm-0.33-aiter-mega", "vllm-0.33-aiter"])
def test_where_nothing_helps_that_is_an_error_with_the_server_s_reason(target: str, small: Make) -> None:
    with pytest.raises(NotConvertible) as refused:
        chosen(small("v4.1-flash"), target, lossy=True)
    assert refused.value.problems[0].code == "no-change-helps"
    assert len(refused.value.problems) > 1
