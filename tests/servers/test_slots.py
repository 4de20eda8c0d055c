"""Slots for shared experts: of formats that were read, and of no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fse_convert.model.formats import StorageKind
from fse_convert.servers.slots import SLOT_KINDS, SLOT_TARGETS, SlotTarget, slot_verdicts
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.memory import Model


@pytest.mark.parametrize("store", ["fp8-128-f32-scale", "bf16", "nvfp4"])
@pytest.mark.parametrize("target", SLOT_TARGETS, ids=lambda t: t.name)
def test_experts_of_a_format_that_was_not_read_are_not_called_fused(target: SlotTarget, store: str) -> None:
    """As of E5M2, say, once it is a format: alike in routed and shared experts is not enough."""
    about = Model(routed=store, shared=store, mtp=0).subject()
    kind = about.description.layers[0].routed.gate.kind
    assert {v.outcome for v in slot_verdicts(about, target)} == {Outcome.FUSED}
    found = slot_verdicts(about, replace(target, kinds=SLOT_KINDS - {kind}))
    assert {(v.outcome, v.reasons[0].code) for v in found} == {(Outcome.UNKNOWN, "slot-format")}


def test_every_format_of_today_was_read() -> None:
    assert set(StorageKind) == SLOT_KINDS
