"""The width of one expert: what tensor parallelism alone asks for, whose rule counts, and what a target adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fse_convert.errors import InvalidCheckpoint
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Decision, Options
from fse_convert.plan.source import Source, describe_source
from fse_convert.plan.width_rounding import needed_widths, stored_widths
from fse_convert.servers.judge import find_any
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, expert

HIDDEN = 512
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NO_TARGET = Options(None)


def minimax(store: str, width: int, **config: Any) -> Source:
    """MiniMax-M2, which has no shared experts: one layer of one expert."""
    tensors = expert("model.layers.0.block_sparse_moe.experts.0", store, width, HIDDEN, W)
    config = {"intermediate_size": width, "num_local_experts": 1, **config}
    return describe_source(checkpoint({"model_type": "minimax_m2", "num_hidden_layers": 1, **config}, tensors))


def glm(routed: str, shared: str, width: int, n_shared: int = 1, **config: Any) -> Source:
    """GLM-4-MoE: one layer of one routed expert, and a shared MLP of some."""
    tensors: Tensors = expert("model.layers.0.mlp.experts.0", routed, width, HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_experts", shared, n_shared * width, HIDDEN, PROJ)
    config = {"moe_intermediate_size": width, "n_routed_experts": 1, "n_shared_experts": n_shared, **config}
    return describe_source(checkpoint({"model_type": "glm4_moe", "num_hidden_layers": 1, **config}, tensors))


def width(source: Source, options: Options) -> int:
    decided = decide(source, replace(options, allow_unfused=True))
    assert needed_widths(source.subject, options, stored_widths(source.description)) == decided.at_kernel
    return decided.width


def padded(decision: Decision) -> tuple[int, int, int]:
    return decision.source_width, decision.main_width, decision.width


@pytest.mark.parametrize(
    ("source", "by_ranks"),
    [
        (minimax("bf16", 1536), {1: 1536, 2: 1536, 8: 1536, 16: 1536, 5: 1540}),
        (minimax("fp8-128-f32", 1536, quantization_config=FP8), {1: 1536, 2: 1536, 4: 1536, 8: 2048, 16: 2048}),
        (minimax("fp8-32", 1536), {8: 1536, 16: 1536, 32: 2048}),
        (minimax("mxfp4", 640), {4: 640, 8: 768, 16: 1024}),
        (minimax("nvfp4", 1856), {4: 1856, 8: 1920, 16: 2048}),
        (minimax("mxfp8", 1856), {2: 1856, 4: 1920, 8: 2048}),
        (minimax("fp8-tensor", 1408), {8: 1408, 16: 1408}),
        (glm("bf16", "fp8-128-f32", 384, 2, quantization_config=FP8), {2: 384, 4: 512, 8: 512}),
        (glm("mxfp4", "bf16", 384), {2: 384, 4: 384, 8: 512}),
    ],
    ids=lambda x: next(iter(x.description.layers)).routed.label if isinstance(x, Source) else None,
)
def test_without_a_target_the_ranks_alone_decide(source: Source, by_ranks: dict[int, int]) -> None:
    assert {tp: width(source, replace(NO_TARGET, tp=tp)) for tp in by_ranks} == by_ranks


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, 2048),  # SGLang checks FP4 experts against the config's FP8 block of 128, vLLM does not
        ("vllm-0.33-aiter", 1536),
        ("sglang-0.5.23-slots", 2048),
        ("atom", 2048),  # a server whose rules are not known: those of all
        ("megamoe-512", 2048),
        ("megamoe-128", 2048),
        ("vllm-0.33", 1536),
        ("sglang-0.5.23", 2048),
    ],
)
def test_the_rule_is_that_of_the_server_that_is_named(target: str | None, expected: int) -> None:
    source = glm("mxfp4", "bf16", 1536, quantization_config=FP8)
    options = Options(find_any(target) if target else None, tp=8)
    assert width(source, options) == expected


def test_a_target_adds_what_its_contract_asks_for() -> None:
    source = glm("mxfp4", "fp8-32", 384)
    assert width(source, replace(NO_TARGET, tp=2)) == 384
    assert width(source, Options(find_any("megamoe-512"), tp=2)) == 512
    assert width(source, Options(find_any("megamoe-128"), tp=2)) == 384


def test_a_width_that_is_right_changes_nothing() -> None:
    decision = decide(minimax("fp8-128-f32", 2048, quantization_config=FP8), Options(None, tp=8))
    assert padded(decision) == (2048, 2048, 2048)
    assert (decision.config_edits, decision.changes) == ((), ())


@pytest.mark.parametrize(
    ("source", "edited", "n_shared"),
    [
        (minimax("fp8-128-f32", 1536, quantization_config=FP8), {"intermediate_size": (1536, 2048)}, 0),
        (glm("fp8-128-f32", "fp8-128-f32", 1536, 2, quantization_config=FP8), {"moe_intermediate_size": (1536, 2048)}, 2),
    ],
    ids=["routed only", "two shared"],
)
def test_all_experts_are_padded_and_their_keys_edited(source: Source, edited: dict[str, tuple[int, int]], n_shared: int) -> None:
    decision = decide(source, Options(None, tp=8))
    assert padded(decision) == (1536, 2048, 2048)
    assert {e.key: (e.old, e.new) for e in decision.config_edits} == edited
    assert decision.n_shared == n_shared
    assert {v.verdict.outcome for v in decision.verdicts} == {Outcome.UNKNOWN}, "nothing is said of fusion"
    assert {r.code for v in decision.verdicts for r in v.verdict.reasons} == {"not-judged"}


@pytest.mark.parametrize("name", ["megamoe-512", "vllm-0.33", "vllm-0.33-aiter", "sglang-0.5.23-slots"])
def test_a_target_needs_shared_experts(name: str) -> None:
    with pytest.raises(InvalidCheckpoint) as e:
        decide(minimax("mxfp4", 640), Options(find_any(name), tp=8, allow_unfused=True))
    (problem,) = e.value.problems
    assert (problem.code, problem.where) == ("no-shared-experts", "memory")
    assert "there is nothing to fuse" in problem.message
    assert problem.hint == "--tp N without --target pads for tensor parallelism alone"


def laguna(routed: str, shared: str, widths: tuple[int, int], **config: Any) -> Source:
    """Laguna, whose shared MLP has a width of its own: one layer of one routed expert."""
    tensors: Tensors = expert("model.layers.0.mlp.experts.0", routed, widths[0], HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_expert", shared, widths[1], HIDDEN, PROJ)
    config = {"moe_intermediate_size": widths[0], "shared_expert_intermediate_size": widths[1], "num_experts": 1, **config}
    return describe_source(checkpoint({"model_type": "laguna", "num_hidden_layers": 1, **config}, tensors))


@pytest.mark.parametrize(
    ("source", "tp", "widths"),
    [
        (laguna("bf16", "bf16", (384, 320)), 8, (384, 320)),
        (laguna("bf16", "bf16", (384, 330)), 4, (384, 332)),
        (laguna("bf16", "bf16", (330, 384)), 4, (332, 384)),
        (laguna("fp8-128-f32", "fp8-128-f32", (768, 1280), quantization_config=FP8), 4, (1024, 1536)),
        (laguna("fp8-128-f32", "bf16", (768, 1280), quantization_config=FP8), 4, (1024, 1280)),
        (laguna("bf16", "fp8-128-f32", (768, 1280), quantization_config=FP8), 4, (768, 1536)),
        (laguna("bf16", "fp8-128-f32", (768, 1536), quantization_config=FP8), 8, (768, 2048)),
        (laguna("fp8-128-f32", "bf16", (768, 768), quantization_config=FP8), 4, (1024, 768)),
        (laguna("bf16", "fp8-128-f32", (768, 768), quantization_config=FP8), 4, (768, 1024)),
        (laguna("fp8-128-f32", "fp8-128-f32", (768, 768), quantization_config=FP8), 4, (1024, 1024)),
        (laguna("fp8-128-f32", "fp8-128-f32", (1408, 5632), quantization_config=FP8), 8, (2048, 6144)),  # Qwen2-57B-A14B's ratio
    ],
)
def test_a_shared_width_of_its_own_grows_by_itself(source: Source, tp: int, widths: tuple[int, int]) -> None:
    decision = decide(source, Options(None, tp=tp))
    assert (decision.at_main.routed, decision.at_main.shared) == widths
    keys = ("moe_intermediate_size", "shared_expert_intermediate_size")
    config = source.checkpoint.config | {e.key: e.new for e in decision.config_edits}
    assert tuple(config[key] for key in keys) == widths
    assert decision.pads == (decision.at_main != decision.at_source)


def test_a_multiple_of_the_routed_width_stays_the_same_one_where_something_asks_for_it() -> None:
    fp8 = laguna("fp8-128-f32", "fp8-128-f32", (1408, 5632), quantization_config=FP8)
    for target in ("megamoe-512", "vllm-0.33-aiter"):
        decision = decide(fp8, Options(find_any(target), tp=8, allow_unfused=True))
        assert (decision.at_kernel.routed, decision.at_kernel.shared) == (2048, 8192)
    assert decide(glm("bf16", "fp8-128-f32", 768, 2, quantization_config=FP8), Options(None, tp=4)).growth == "768 -> 768"


def test_a_routed_key_that_some_loader_reads_as_the_shared_width_ties_both() -> None:
    """Sarvam: SGLang builds the shared MLP from the routed width."""
    tensors: Tensors = expert("model.layers.0.mlp.experts.0", "fp8-128-f32", 1408, HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_experts", "fp8-128-f32", 4 * 1408, HIDDEN, PROJ)
    config = {
        "model_type": "sarvam_moe",
        "num_hidden_layers": 1,
        "num_experts": 1,
        "num_shared_experts": 4,
        "quantization_config": FP8,
    }
    config |= {"moe_intermediate_size": 1408, "moe_shared_expert_intermediate_size": 1408}
    assert decide(describe_source(checkpoint(config, tensors)), Options(None, tp=8)).growth == "1408 -> 2048"


def test_a_width_that_is_stated_per_shared_expert_stays_whole() -> None:
    """dots3-note: the key says the width of one of two shared experts, so that of both is even."""
    tensors: Tensors = expert("model.layers.0.mlp.experts.0", "bf16", 384, HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_experts", "bf16", 2 * 225, HIDDEN, PROJ)
    config = {"model_type": "dots3_note", "num_hidden_layers": 1, "n_routed_experts": 1, "n_shared_experts": 2}
    config |= {"moe_intermediate_size": 384, "shared_experts_intermediate_size": 225}
    decision = decide(describe_source(checkpoint(config, tensors)), Options(None, tp=3))
    assert [(e.key, e.new) for e in decision.config_edits if e.new != e.old] == []
    decision = decide(describe_source(checkpoint(config, tensors)), Options(None, tp=4))
    assert [(e.key, e.new) for e in decision.config_edits if e.new != e.old] == [("shared_experts_intermediate_size", 226)]


OWN_SHAPE = ("llama4_text", "gpt_oss", "aria_text")
"""Model types whose stacks are transposed in releases and in transformers alike."""


def stacked(model_type: str, width: int) -> Source:
    """One layer of two experts in two stacks, ``[E, H, 2 I]`` and ``[E, I, H]``."""
    at = f"model.layers.0.{'feed_forward' if model_type == 'llama4_text' else 'mlp'}.experts"
    names = ("fc1.weight", "fc2.weight") if model_type == "aria_text" else ("gate_up_proj", "down_proj")
    shapes = (2, HIDDEN, 2 * width), (2, width, HIDDEN)
    tensors: Tensors = {f"{at}.{name}": ("BF16", shape) for name, shape in zip(names, shapes, strict=True)}
    if model_type == "gpt_oss":
        tensors |= {f"{at}.gate_up_proj_bias": ("BF16", (2, 2 * width)), f"{at}.down_proj_bias": ("BF16", (2, HIDDEN))}
    if model_type == "llama4_text":
        tensors |= expert("model.layers.0.feed_forward.shared_expert", "bf16", width, HIDDEN, PROJ)
    config = {"model_type": model_type, "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_local_experts": 2, "moe_num_experts": 2}
    return describe_source(checkpoint(config | {"moe_intermediate_size": width, "intermediate_size": width}, tensors))


@pytest.mark.parametrize(
    ("model_type", "width", "tp", "expected"),
    [
        ("qwen3_vl_moe_text", 200, 128, 384),  # 256: gate and up are as high as they are wide
        ("qwen3_vl_moe_text", 400, 512, 1024),  # 512: down is
        ("qwen3_vl_moe_text", 200, 256, 768),  # both in turn
        ("qwen3_vl_moe_text", 256, 4, 256),  # it is so already
        ("qwen3_vl_moe_text", 400, 64, 448),
        *((name, width, tp, tp * 2 if tp < 512 else tp) for name in OWN_SHAPE for width, tp in ((200, 128), (400, 512))),
    ],
)
def test_no_stack_becomes_square_where_a_loader_goes_by_its_shape(model_type: str, width: int, tp: int, expected: int) -> None:
    """Transformers turns Qwen3-VL's stacks where their shapes differ from its own, and takes a square one as it is."""
    source = stacked(model_type, width)
    assert source.description.problems == ()
    decision = decide(source, Options(None, tp=tp))
    assert (decision.at_main.routed, decision.width) == (expected, expected)
