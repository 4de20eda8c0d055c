"""Slots for shared experts: of formats that were read, and of no others."""

from __future__ import annotations

import pytest

from fse_convert.model.formats import StorageKind
from fse_convert.servers import judge
from fse_convert.servers.judge import Question
from fse_convert.servers.slots import SLOT_KINDS
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.memory import Model

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("question", [Question.SLOTS, Question.AITER])
def test_experts_of_a_format_that_was_not_read_are_not_called_fused(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of E5M2, say, once it is a format: alike in routed and shared experts is not enough."""
    store = "fp8-128-f32-scale"
    about = Model(routed=store, shared=store, mtp=0, config={"expert_dtype": "fp8", "quantization_config": FP8}).subject()
    fused = [a.name for a in judge.judge(about) if a.question is question and a.fused]
    assert fused
    monkeypatch.setattr(judge, "SLOT_KINDS", SLOT_KINDS - {StorageKind.FP8_BLOCK})
    for answer in (a for a in judge.judge(about) if a.name in fused):
        assert {(v.outcome, v.reasons[0].code) for v in answer.layers} == {(Outcome.UNKNOWN, "slot-format")}
        assert answer.model.outcome is Outcome.UNKNOWN


def test_every_format_of_today_was_read() -> None:
    assert set(StorageKind) == SLOT_KINDS
