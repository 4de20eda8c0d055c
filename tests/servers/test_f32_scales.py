"""Which scales are read before a server's answer, however the experts are stored."""

from __future__ import annotations

import pytest

from fse_convert.servers.f32_scales import f32_block_scales
from fse_convert.testing.memory import description_of
from tests.model.test_stacked import headers
from tests.stacked import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_f32_scales_of_stacked_and_fused_experts_are_listed(case: Case) -> None:
    tensors = headers(case, case.width)
    found = [
        t.name for d in description_of(case.config_of(case.width), tensors).layers for t in f32_block_scales(d.shared, d.routed)
    ]
    assert sorted(found) == sorted(n for n, (dtype, _) in tensors.items() if dtype == "F32")
