"""SGLang's reading of Quark configs, per release: which entries say that shared experts are quantised otherwise.

As ``can_fuse_shared_expert``, ``_find_matched_config`` and ``_is_draft_layer`` of quark.py in 0.5.20 to 0.5.22 have it.
"""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.model.quantization import read_quantization
from fse_convert.servers.sglang_quark import SglangQuark

MX = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}
FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}
BEFORE, SINCE = "0.5.21", "0.5.22"
"""The last release that takes a config's names as they are, and the first one that renames them."""


def reading(release: str, *, general: object = MX, exclude: tuple[str, ...] = (), **layers: Any) -> SglangQuark:
    """A model of three layers and one drafter layer. ``layers``: schemes of single modules."""
    quark = {"quant_method": "quark", "global_quant_config": general, "layer_quant_config": layers, "exclude": list(exclude)}
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "quantization_config": quark}
    return SglangQuark.of(read_quantization(config), config, release, draft=False)


@pytest.mark.parametrize(
    ("release", "entry", "fuses"),
    [
        (SINCE, "model.decoder.mlp.shared_*", False),
        (BEFORE, "model.decoder.mlp.shared_*", True),
        (BEFORE, "model.layers.0.mlp.shared_*", False),
        (SINCE, "model.layers.2.mlp.shared_*", True),
        (SINCE, "layers.0.ffn.shared_experts.w1", False),
        (BEFORE, "layers.0.ffn.shared_experts.w1", True),
        (BEFORE, "model.layers.0.mlp.shared_experts.gate_proj", True),
        (SINCE, "model.layers.0.mlp.shared_expert.gate_proj", False),
        (BEFORE, "model.layers.0.mlp.shared_expert.gate_proj", False),
    ],
)
def test_a_scheme_of_shared_experts_counts_where_the_release_looks_for_it(release: str, entry: str, fuses: bool) -> None:
    assert reading(release, **{entry: FP8}).may_fuse() is fuses
    assert reading(release, **{entry: MX}).may_fuse(), "the same scheme as the routed experts'"


@pytest.mark.parametrize(
    ("release", "entry", "fuses"),
    [
        (BEFORE, "mtp.0.ffn.shared_experts.w1", True),
        (SINCE, "mtp.0.ffn.shared_experts.w1", False),  # renamed to model.mtp.0 before it is asked
        (BEFORE, "model.layers.3.mlp.shared_experts.gate_proj", True),
        (SINCE, "model.layers.3.mlp.shared_experts.gate_proj", True),
        (SINCE, "model.layers.2.mlp.shared_experts.gate_proj", False),
        (SINCE, "model.layers.4.mlp.shared_experts.gate_proj", False),
        (SINCE, "layers.0.mlp.shared_expert_gate", True),
    ],
)
def test_an_excluded_shared_expert_counts_unless_it_is_the_drafters(release: str, entry: str, fuses: bool) -> None:
    assert reading(release, exclude=(entry,)).may_fuse() is fuses


def test_routed_experts_named_one_by_one_have_the_scheme_of_their_entries() -> None:
    named = {f"layers.0.ffn.experts.{e}.w{n}": MX for e in (0, 1) for n in (1, 2, 3)}
    assert reading(SINCE, general=FP8, **named).spec("model.layers.0.mlp.experts") == MX
    assert reading(SINCE, general=FP8, **named).spec("model.layers.1.mlp.experts") == FP8
    assert not reading(SINCE, general=FP8, **named).may_fuse()
