"""Tensor parallelism: what every rank of a server needs of the width, against figures worked out by hand from the servers' code."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.layout.sizes import round_up
from fse_convert.servers.subject import Subject
from fse_convert.servers.tensor_parallel import ENGINES, Load, Slices, rank_multiples, slices
from fse_convert.testing.memory import PROJ, Tensors, expert, subject_of

HIDDEN = 512
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
QUARK: dict[str, Any] = {"quantization_config": {"quant_method": "quark", "exclude": [], "global_quant_config": {}, "export": {}}}


def model(
    routed: str, width: int, shared: str = "", shared_width: int = 0, model_type: str = "qwen2_moe", **config: Any
) -> Subject:
    tensors: Tensors = expert("model.layers.0.mlp.experts.0", routed, width, HIDDEN, PROJ)
    name = "shared_expert" if model_type == "qwen2_moe" else "shared_experts"
    if shared:
        tensors |= expert(f"model.layers.0.mlp.{name}", shared, shared_width or width, HIDDEN, PROJ)
    return subject_of({"model_type": model_type, **config}, tensors)


LING_3, DOTS = (model("bf16", 768, "fp8-128", model_type=name, **FP8) for name in ("bailing_hybrid", "dots3_note"))


def gpt_oss(method: str, store: str = "mxfp4", width: int = 2880) -> Subject:
    """gpt-oss with stacked experts as they are released, or one by one as Quark writes them."""
    at, blocks = "model.layers.0.mlp.experts", HIDDEN // 32
    stacked: Tensors = {
        f"{at}.gate_up_proj_blocks": ("U8", (2, 2 * width, blocks, 16)),
        f"{at}.gate_up_proj_scales": ("U8", (2, 2 * width, blocks)),
        f"{at}.down_proj_blocks": ("U8", (2, HIDDEN, width // 32, 16)),
        f"{at}.down_proj_scales": ("U8", (2, HIDDEN, width // 32)),
    }
    tensors = expert(f"{at}.0", store, width, HIDDEN, PROJ) if method == "quark" else stacked
    return subject_of({"model_type": "gpt_oss", "quantization_config": {"quant_method": method}}, tensors)


def loads(about: Subject, engine: str, tp: int) -> list[Load]:
    return [s.load for s in slices(about, engine, tp)]


def smallest_width(about: Subject, width: int, n_shared: int, tp: int) -> int:
    """The smallest width of one expert for all servers, the shared MLP being so many of them wide."""
    return round_up(width, rank_multiples(about, tp).of_one(n_shared))


@pytest.mark.parametrize(
    ("store", "config", "width", "by_ranks"),
    [
        ("fp8-128", FP8, 1536, {2: 1536, 4: 1536, 8: 2048, 16: 2048}),  # MiniMax-M2.7, Qwen3-235B
        ("bf16", {}, 1536, {2: 1536, 4: 1536, 8: 1536, 16: 1536}),
        ("mxfp4", QUARK, 1536, {2: 1536, 4: 1536, 8: 1536, 16: 1536}),
        ("fp8-128", FP8, 2560, {2: 2560, 4: 2560, 8: 3072, 16: 4096}),  # Qwen3-Coder-480B
        ("fp8-128", FP8, 1792, {2: 1792, 4: 2048, 8: 2048, 16: 2048}),  # K2-Horizon
        ("fp8-128", FP8, 640, {2: 768, 4: 1024, 8: 1024, 16: 2048}),  # Qwen3.8-Flash-Next
        ("mxfp4", QUARK, 640, {2: 640, 4: 640, 8: 768, 16: 1024}),
        ("fp8-128", FP8, 1280, {2: 1280, 4: 1536, 8: 2048, 16: 2048}),  # Step-3.5
        ("fp8-128", FP8, 1408, {2: 1536, 4: 1536, 8: 2048, 16: 2048}),  # GLM-4.5-Air
        ("mxfp4", QUARK, 1408, {2: 1408, 4: 1408, 8: 1536, 16: 1536}),
        ("fp8-channel", {}, 1408, {2: 1408, 4: 1408, 8: 1408, 16: 1408}),
        ("nvfp4", {}, 1856, {2: 1856, 4: 1856, 8: 1920, 16: 2048}),
        ("mxfp8", {}, 1856, {2: 1856, 4: 1920, 8: 2048, 16: 2048}),
    ],
)
def test_the_smallest_width_of_every_rank(store: str, config: dict[str, Any], width: int, by_ranks: dict[int, int]) -> None:
    about = model(store, width, **config)
    assert {tp: smallest_width(about, width, 0, tp) for tp in by_ranks} == by_ranks
    for tp, wide in by_ranks.items():
        padded = model(store, wide, **config)
        assert {load for engine in ENGINES for load in loads(padded, engine, tp)} == {Load.WHOLE}
        assert smallest_width(padded, wide, 0, tp) == wide


def test_a_shared_mlp_of_several_experts_needs_less_of_one() -> None:
    about = model("bf16", 384, "fp8-128", 768, **FP8)
    assert smallest_width(about, 384, 2, 2) == 384
    assert smallest_width(about, 384, 2, 4) == 512
    assert smallest_width(model("fp8-128", 384, "fp8-128", 768, **FP8), 384, 2, 2) == 512


@pytest.mark.parametrize(
    ("about", "tp", "expected"),
    [
        (model("fp8-128", 1536, **FP8), 4, ([Load.WHOLE], [Load.WHOLE])),
        (model("fp8-128", 1536, **FP8), 8, ([Load.REFINED], [Load.REFUSED])),
        (model("fp8-128", 640, **FP8), 8, ([Load.REFUSED], [Load.REFUSED])),
        (model("fp8-128", 1536, quantization_config={"quant_method": "quark"}), 8, ([Load.REFUSED], [Load.REFUSED])),
        (model("fp8-128", 1280, "fp8-128", **FP8), 4, ([Load.REFINED, Load.REFUSED], [Load.REFUSED, Load.REFUSED])),
        (model("mxfp4", 640, **QUARK), 8, ([Load.WRONG], [Load.WRONG])),
        (model("nvfp4", 1856), 16, ([Load.WRONG], [Load.WRONG])),
        (model("mxfp4", 1536, **FP8), 8, ([Load.WHOLE], [Load.REFUSED])),
        (model("mxfp4", 2048, **FP8), 8, ([Load.WHOLE], [Load.WHOLE])),
        (model("bf16", 1536), 5, ([Load.REFUSED], [Load.REFUSED])),
        (LING_3, 4, ([Load.WHOLE, Load.PADDED], [Load.WHOLE, Load.PADDED])),
        (gpt_oss("mxfp4"), 8, ([Load.PADDED], [Load.PADDED])),
        (gpt_oss("gpt_oss_mxfp4"), 8, ([Load.PADDED], [Load.WRONG])),
        (gpt_oss("quark"), 8, ([Load.PADDED], [Load.WRONG])),
        (gpt_oss("quark", "nvfp4", 2896), 16, ([Load.WRONG], [Load.WRONG])),
        (gpt_oss("mxfp4"), 6, ([Load.WHOLE], [Load.WHOLE])),
        (gpt_oss("mxfp4"), 7, ([Load.REFUSED], [Load.REFUSED])),
        (model("mxfp4", 640, quantization_config={"quant_method": "mxfp4"}), 8, ([Load.WRONG], [Load.WRONG])),
        (DOTS, 4, ([Load.WHOLE, Load.PADDED], [Load.WHOLE, Load.REFUSED])),
    ],
)
def test_what_a_server_makes_of_a_checkpoint_as_it_is(about: Subject, tp: int, expected: tuple[list[Load], list[Load]]) -> None:
    assert (loads(about, "vLLM", tp), loads(about, "SGLang", tp)) == expected


def test_an_answer_names_the_slice_what_it_must_be_a_multiple_of_and_where_that_was_read() -> None:
    (routed, shared) = slices(model("mxfp4", 640, "bf16", 1280, **QUARK), "vLLM", 8)
    assert routed == Slices("vLLM", shared=False, width=640, rank=80, multiple=32, load=Load.WRONG, source=routed.source)
    assert (shared.rank, shared.multiple, shared.load) == (160, 1, Load.WHOLE)
    assert "oracle/mxfp4.py" in routed.source
    assert "fp8_utils.py" in shared.source


def test_a_server_that_pads_shared_experts_asks_no_width_for_them() -> None:
    assert smallest_width(LING_3, 768, 1, 16) == 768
    other = model("bf16", 768, "fp8-128", **FP8)
    assert smallest_width(other, 768, 1, 16) == 2048


@pytest.mark.parametrize(("tp", "width"), [(2, 2880), (6, 2880), (7, 2912), (8, 2880), (11, 3168), (64, 2880)])
def test_gpt_oss_needs_whole_blocks_and_a_width_that_the_ranks_divide(tp: int, width: int) -> None:
    assert smallest_width(gpt_oss("mxfp4"), 2880, 0, tp) == width
