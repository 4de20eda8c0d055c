"""Stacked experts, padded by a conversion: each layout against the same layout of wider matrices, and against numbers by hand."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fse_convert.conversion import source_rows, writer
from fse_convert.restoration import reading as restored
from fse_convert.verification import expected_bytes
from tests.stacked import CASES, EXPERTS, LAYERS, Case

Run = Callable[..., tuple[int, str, str]]


def load(root: Path) -> dict[str, Tensor]:
    found = {}
    for path in root.glob("*.safetensors"):
        with safe_open(path, framework="pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in dtype, shape or any bit."""

    def bits(t: Tensor) -> Tensor:
        return t.contiguous().view(torch.uint8)

    assert a.keys() == b.keys()
    return [n for n in a if (a[n].dtype, a[n].shape) != (b[n].dtype, b[n].shape) or not torch.equal(bits(a[n]), bits(b[n]))]


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize("chunk", [1 << 20, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_layout_is_padded_proved_and_restored(
    case: Case, chunk: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (writer, source_rows, restored, expected_bytes):
        monkeypatch.setattr(module, "CHUNK", chunk)
    root, out, back = tmp_path / "source", tmp_path / "out", tmp_path / "back"
    case.save(root, shards=2)
    code, _, err = run(root, out, "--tp", case.tp)
    assert code == 0, err
    assert same(load(out), case.tensors(case.padded)) == []
    assert json.loads((out / "config.json").read_text()) == case.config_of(case.padded)
    code, _, err = run("verify", out, "--source", root)
    assert code == 0, err
    assert run("restore", out, back)[0] == 0
    assert files(back) == files(root)
    assert all(filecmp.cmp(root / name, back / name, shallow=False) for name in files(root))


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("L1 Qwen3.5", "L3 MXFP4", "L4 FP8")], ids=lambda c: c.name)
def test_workers_and_parts_change_no_byte(case: Case, tmp_path: Path, run: Run) -> None:
    root = tmp_path / "source"
    case.save(root, shards=3)
    assert run(root, tmp_path / "one", "--tp", case.tp, "--workers", "1")[0] == 0
    assert run(root, tmp_path / "many", "--tp", case.tp, "--workers", "3")[0] == 0
    for part in ("1/2", "2/2"):
        assert run(root, tmp_path / "parts", "--tp", case.tp, "--part", part)[0] == 0
    assert run(root, tmp_path / "parts", "--tp", case.tp)[0] == 0
    for other in ("many", "parts"):
        assert files(tmp_path / other) == files(tmp_path / "one")
        assert all(filecmp.cmp(tmp_path / "one" / n, tmp_path / other / n, shallow=False) for n in files(tmp_path / "one"))


def test_a_kernel_contract_pads_them_too(tmp_path: Path, run: Run) -> None:
    case = next(c for c in CASES if c.name == "L4 MXFP8")
    root, out = tmp_path / "source", tmp_path / "out"
    case.save(root)
    code, _, err = run(root, out, "--target", "megamoe-128", "--allow-unfused")
    assert code == 0, err
    assert same(load(out), case.tensors(128)) == []
    assert run("verify", out, "--source", root)[0] == 0


def test_inspect_tells_them_apart_from_what_is_not_understood(tmp_path: Path, run: Run) -> None:
    case = CASES[0]
    case.save(tmp_path / "source")
    code, out, _ = run("inspect", tmp_path / "source", "--json")
    assert code == 0
    layers = json.loads(out)["layers"]
    assert len(layers) == LAYERS + 1
    assert {(d["routed"]["count"], d["routed"]["width"]) for d in layers} == {(EXPERTS, 33)}
    assert layers[0]["stacked"] == [f"model.layers.0.mlp.experts.{p}_proj" for p in ("down", "gate_up")]


GATE, UP = [[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]
DOWN = [[13, 14, 15], [16, 17, 18]]
N = [0, 0]
DOWN_4_WIDE = [[13, 14, 15, 0], [16, 17, 18, 0]]
SHARED = {f"shared_expert.{p}_proj.weight": m for p, m in (("gate", GATE), ("up", UP), ("down", DOWN))}
SHARED_4_WIDE = {f"shared_expert.{p}_proj.weight": m for p, m in (("gate", [*GATE, N]), ("up", [*UP, N]), ("down", DOWN_4_WIDE))}
GOLDEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "L1": (
        "granitemoe",
        {"input_linear.weight": [*GATE, *UP], "output_linear.weight": DOWN},
        {"input_linear.weight": [*GATE, N, *UP, N], "output_linear.weight": DOWN_4_WIDE},
    ),
    "L2": (
        "llama4_text",
        {
            "experts.gate_up_proj": [[1, 3, 5, 7, 9, 11], [2, 4, 6, 8, 10, 12]],
            "experts.down_proj": [[13, 16], [14, 17], [15, 18]],
            **SHARED,
        },
        {
            "experts.gate_up_proj": [[1, 3, 5, 0, 7, 9, 11, 0], [2, 4, 6, 0, 8, 10, 12, 0]],
            "experts.down_proj": [[13, 16], [14, 17], [15, 18], N],
            **SHARED_4_WIDE,
        },
    ),
    "L3": (
        "gpt_oss",
        {
            "gate_up_proj": [[1, 7, 3, 9, 5, 11], [2, 8, 4, 10, 6, 12]],
            "gate_up_proj_bias": [21, 24, 22, 25, 23, 26],
            "down_proj": [[13, 16], [14, 17], [15, 18]],
            "down_proj_bias": [31, 32],
        },
        {
            "gate_up_proj": [[1, 7, 3, 9, 5, 11, 0, 0], [2, 8, 4, 10, 6, 12, 0, 0]],
            "gate_up_proj_bias": [21, 24, 22, 25, 23, 26, 0, 0],
            "down_proj": [[13, 16], [14, 17], [15, 18], N],
            "down_proj_bias": [31, 32],
        },
    ),
    "L4": (
        "step3p5",
        {f"{of}.{p}_proj.weight": m for of in ("moe", "share_expert") for p, m in (("gate", GATE), ("up", UP), ("down", DOWN))},
        {
            f"{of}.{p}_proj.weight": m
            for of in ("moe", "share_expert")
            for p, m in (("gate", [*GATE, N]), ("up", [*UP, N]), ("down", DOWN_4_WIDE))
        },
    ),
}
"""One expert with H = 2, I = 3: gate, up and down by hand, and how they are stored 4 wide."""
BLOCKS = {"granitemoe": "block_sparse_moe.", "llama4_text": "feed_forward.", "gpt_oss": "mlp.experts.", "step3p5": ""}
SIZES = {"intermediate_size": 3, "moe_intermediate_size": 3, "num_local_experts": 2, "moe_num_experts": 2, "share_expert_dim": 3}


def tensors(model_type: str, numbers: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Of routed experts two: the numbers, and twice as large ones."""
    found = {f"model.layers.0.{BLOCKS[model_type]}{name}": torch.tensor(n).bfloat16() for name, n in numbers.items()}
    return {name: t if "_expert." in name else torch.stack((t, 2 * t)) for name, t in found.items()}


@pytest.mark.parametrize("layout", GOLDEN)
def test_numbers_by_hand(layout: str, tmp_path: Path, run: Run) -> None:
    model_type, stored, padded = GOLDEN[layout]
    root, out = tmp_path / "source", tmp_path / "out"
    root.mkdir()
    save_file(tensors(model_type, stored), root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 2, "num_hidden_layers": 1, **SIZES}))
    code, _, err = run(root, out, "--tp", "4")
    assert code == 0, err
    assert same(load(out), tensors(model_type, padded)) == []


@pytest.mark.parametrize("options", [("--routed", "fp8"), ("--shared", "mxfp4", "--lossy"), ("--heal",)])
@pytest.mark.parametrize("name", ["L1 FP8", "L1 Granite", "L3 MXFP4", "L4 MXFP8"])
def test_changes_of_format_are_refused_before_any_work(name: str, options: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    case = next(c for c in CASES if c.name == name)
    root, out = tmp_path / "source", tmp_path / "out"
    case.save(root)
    for dry in ((), ("--dry-run",)):
        code, _, err = run(root, out, *options, *dry)
        assert code == 3
        assert "error[changes-stacked]" in err
        assert f"{case.blocks[0]}.{min(case.stacks)}" in err
        assert "--tp N pads stacked experts as they are" in " ".join(err.split())
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert run(root, out, "--tp", case.tp, "-q")[0] == 0, "the hint says so"


def test_a_target_is_offered_no_change_of_stacked_experts(tmp_path: Path, run: Run) -> None:
    case = next(c for c in CASES if c.name == "L1 FP8")
    case.save(tmp_path / "source")
    code, out, _ = run("inspect", tmp_path / "source", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["offers"], found["mends"]) == ([], [])
