"""Answers about tensor parallelism: a sentence per server, the width that all take, its price, a command only where it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.errors import size
from fse_convert.plan.ranks import Ranks, ranks
from fse_convert.servers.tensor_parallel import ENGINES, Load
from fse_convert.testing.memory import PROJ, Tensors, W, expert, plans_of, subject_of

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
HIDDEN = 512
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def minimax(store: str, width: int, **config: Any) -> Ranks | None:
    """MiniMax-M2, one layer of two experts, at TP 8."""
    block = "model.layers.0.block_sparse_moe.experts"
    return answer("minimax_m2", {**expert(f"{block}.0", store, width, HIDDEN, W), **expert(f"{block}.1", store, width, HIDDEN, W)},
                  {"intermediate_size": width, "num_local_experts": 2, **config})  # fmt: skip


def glm(width: int, tp: int) -> Ranks | None:
    """GLM-4-MoE in BF16, one layer of one routed and one shared expert."""
    tensors = expert("model.layers.0.mlp.experts.0", "bf16", width, HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_experts", "bf16", width, HIDDEN, PROJ)
    return answer("glm4_moe", tensors, {"moe_intermediate_size": width, "n_routed_experts": 1}, tp)


def answer(model_type: str, tensors: Tensors, config: dict[str, Any], tp: int = 8) -> Ranks | None:
    about = subject_of({"model_type": model_type, "num_hidden_layers": 1, **config}, tensors)
    return ranks(about, plans_of(about, tensors), tp, "my model")


def lines(found: Ranks | None) -> list[tuple[str, str]]:
    assert found
    return list(found.lines())


def test_a_width_that_no_server_cuts_into_whole_blocks() -> None:
    matrix = 512 * HIDDEN + 4 * 4 * 4  # 512 channels more: E4M3, and an F32 scale per 128x128
    finer = "TP 8: vLLM makes scale blocks finer while loading, which only some of its kernels take, for routed experts"
    smallest = "TP 8: 2048 is the smallest width that all known loaders take as it is"
    assert lines(minimax("fp8-128-f32", 1536, quantization_config=FP8)) == [
        (
            f"{finer}, 192 wide per rank, not whole blocks of 128.",
            "",
        ),
        ("TP 8: SGLang refuses routed experts, 192 wide per rank, not whole blocks of 128.", ""),
        (
            f"{smallest}: {size(2 * 3 * matrix)} more on disk, 33 % more expert arithmetic.",
            "fse-convert 'my model' 'my model-tp-8' --tp 8",
        ),
    ]


def test_a_width_that_all_servers_load_has_no_command() -> None:
    found = minimax("fp8-128-f32", 2048, quantization_config=FP8)
    assert found
    assert (found.width, found.needed, found.bytes, found.command) == (2048, 2048, 0, "")
    loads = "loads routed experts, 256 wide per rank, a multiple of 128."
    assert lines(found) == [(f"TP 8: {engine} {loads}", "") for engine in ENGINES]


@pytest.mark.parametrize(
    ("store", "width", "config", "needed", "loads"),
    [
        ("bf16", 1536, {}, 1536, [Load.WHOLE, Load.WHOLE]),
        ("bf16", 1540, {}, 1544, [Load.REFUSED, Load.REFUSED]),
        ("mxfp4", 640, {}, 768, [Load.WRONG, Load.WRONG]),
        ("mxfp4", 1536, {"quantization_config": FP8}, 2048, [Load.WHOLE, Load.REFUSED]),
        ("nvfp4", 1856, {}, 1920, [Load.WRONG, Load.WRONG]),
        ("mxfp8", 1856, {}, 2048, [Load.REFUSED, Load.REFUSED]),
        ("fp8-channel", 1408, {}, 1408, [Load.WHOLE, Load.WHOLE]),
    ],
)
def test_every_format_has_its_answer(store: str, width: int, config: dict[str, Any], needed: int, loads: list[Load]) -> None:
    found = minimax(store, width, **config)
    assert found
    assert ([s.load for s in found.slices], found.needed, bool(found.command)) == (loads, needed, needed != width)


def test_a_slice_that_ranks_share_unevenly_is_said_to_have_a_part() -> None:
    assert lines(glm(1540, 8))[0][0] == (
        "TP 8: vLLM refuses routed experts, 192 and a part wide per rank; refuses shared experts, 192 and a part wide per rank."
    )


def test_a_server_that_pads_by_itself_is_said_to() -> None:
    tensors = expert("model.layers.0.mlp.experts.0", "bf16", 768, HIDDEN, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_experts", "fp8-128-f32", 768, HIDDEN, PROJ)
    config = {"moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768, "num_experts": 1}
    found = answer("bailing_hybrid", tensors, {**config, "quantization_config": FP8}, 4)
    assert "pads by itself shared experts, 192 wide per rank, not whole blocks of 128" in lines(found)[0][0]
    assert found
    assert found.needed == 768


def test_a_price_without_a_command_where_a_conversion_would_refuse() -> None:
    tensors = expert("model.layers.0.block_sparse_moe.experts.0", "mxfp4", 640, HIDDEN, W)
    found = answer("minimax_m2", tensors, {"num_local_experts": 1})
    said = lines(found)
    assert said[-1][0].startswith("TP 8: 768 is the smallest width")
    assert {command for _, command in said} == {""}, "config.json has no intermediate_size that could be edited"


def test_one_rank_needs_no_answer() -> None:
    assert glm(1540, 1) is None


def test_experts_that_are_not_understood_have_none() -> None:
    stacked: Tensors = {"model.layers.0.block_sparse_moe.experts.gate_up_proj": ("BF16", (2, 512, 1024))}
    assert answer("minimax_m2", stacked, {"num_local_experts": 2}) is None


def test_experts_of_two_widths_have_none() -> None:
    tensors = expert("model.layers.0.block_sparse_moe.experts.0", "bf16", 384, HIDDEN, W)
    tensors |= expert("model.layers.1.block_sparse_moe.experts.0", "bf16", 256, HIDDEN, W)
    assert answer("minimax_m2", tensors, {"num_local_experts": 1, "num_hidden_layers": 2}) is None


def test_inspect_prints_the_answer_and_its_record_has_it(made: Made, run: Run) -> None:
    root = made("v4-flash", shared=0)
    code, text, _ = run("inspect", root, "--tp", 8)
    flat = " ".join(text.split())
    assert code == 0
    assert "there is nothing to fuse" in flat
    assert "No change of format" not in flat
    assert "TP 8: 1024 is the smallest width that all known loaders take as it is: 4.5 MiB more on disk, 167 % more" in flat
    record = json.loads(run("inspect", root, "--tp", 8, "--json")[1])["ranks"]
    assert record == {
        "tp": 8,
        "slices": [
            {"engine": "vLLM", "shared": False, "width": 384, "rank": 48, "multiple": 32, "load": "wrong"},
            {"engine": "SGLang", "shared": False, "width": 384, "rank": 48, "multiple": 128, "load": "refused"},
        ],
        "width": 384,
        "needed": 1024,
        "bytes": 3 * 3 * 3 * 640 * 512 * 17 // 32,
        "command": f"fse-convert {root} {root.name}-tp-8 --tp 8",
    }
    assert json.loads(run("inspect", root, "--json")[1])["ranks"] is None


def test_what_was_padded_loads_and_what_was_written_here_gets_no_command(made: Made, tmp_path: Path, run: Run) -> None:
    root, out = made("v4-flash", shared=0), tmp_path / "out"
    before = json.loads(run("inspect", root, "--tp", 4, "--json")[1])
    assert run(root, out, "--tp", 4)[0] == 0
    after = json.loads(run("inspect", out, "--tp", 4, "--json")[1])
    assert (after["ranks"]["width"], after["ranks"]["command"]) == (before["ranks"]["needed"], "")
    assert {s["load"] for s in after["ranks"]["slices"]} == {"whole"}
    assert after["checkpoint"]["bytes"] - before["checkpoint"]["bytes"] == before["ranks"]["bytes"]
    again = json.loads(run("inspect", out, "--tp", 16, "--json")[1])["ranks"]
    assert (again["needed"], again["command"]) == (2048, "")
