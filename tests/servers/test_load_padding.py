"""What vLLM 0.30 pads by itself, and what that asks of a shared expert."""

from __future__ import annotations

import pytest

from fse_convert.servers import load_padding
from fse_convert.servers.load_padding import ROUTED_PAD, needed_contract, padded_routed
from fse_convert.servers.targets import MEGAMOE_128, MEGAMOE_512, TARGETS

BY_NAME = {t.name: t for t in TARGETS}
VLLM_0_30 = BY_NAME["vllm-0.30"]


def test_vllm_0_30_pads_routed_experts_to_512() -> None:
    assert [padded_routed(w, VLLM_0_30) for w in (2304, 2560, 1)] == [2560, 2560, 512]
    assert padded_routed(2304, BY_NAME["vllm-0.33"]) == 2304


@pytest.mark.parametrize(("multiple", "contract"), [(512, MEGAMOE_512), (256, MEGAMOE_512), (64, MEGAMOE_128)])
def test_a_server_that_pads_routed_experts_needs_that_width_of_the_shared_one(
    multiple: int, contract: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_padding, "ROUTED_PAD", {"vllm-0.30": multiple})
    assert VLLM_0_30.contract is MEGAMOE_128
    assert needed_contract(VLLM_0_30) is contract
    assert all(needed_contract(t) is t.contract for t in TARGETS if t is not VLLM_0_30)


def test_every_padding_is_of_a_row() -> None:
    assert ROUTED_PAD.keys() <= BY_NAME.keys()
