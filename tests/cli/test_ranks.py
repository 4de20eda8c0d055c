"""``--tp N`` alone: padded for tensor parallelism from the command line, with shared experts and without, proved and restored."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.header import BITS
from fse_convert.testing.memory import PROJ, Tensors, expert
from fse_convert.testing.patch import write_shard

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "MXFP4, none shared": ("v4-flash", {"shared": 0}, 1024),
    "FP8, none shared": ("v3", {"shared": 0, "dense": 0}, 1024),
    "BF16, none shared": ("bf16", {"shared": 0, "width": 388}, 392),
    "MXFP4 and FP8": ("v4.1-flash", {}, 512),
    "FP8, two shared": ("v3", {"shared": 2, "dense": 0}, 1024),
    "NVFP4": ("nvfp4", {}, 512),
    "MXFP4 and BF16": ("qwen3.5-quark", {}, 512),
}


@pytest.mark.parametrize(("kind", "knobs", "width"), KINDS.values(), ids=KINDS)
def test_padded_proved_and_restored(
    kind: str, knobs: dict[str, Any], width: int, made: Make, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, out, back = made(kind, **knobs), tmp_path / "out", tmp_path / "back"
    said = json.loads(run("inspect", root, "--tp", 8, "--json")[1])["ranks"]
    assert said["needed"] == width
    source, _, *options = shlex.split(said["command"])[1:]
    code, text, err = run(source, out, *options)
    assert code == 0, err
    own = ", shared 384 -> 384" * (kind == "qwen3.5-quark")  # in BF16, which eight ranks share as it is
    assert f"width {said['width']} -> {width}{own}, for tensor parallelism 8" in text
    assert "padding fuses nothing" not in err, "nobody asked for fusion"
    assert "note[output-served]" not in err  # nobody asked about fusion
    text_config = json.loads((out / "config.json").read_text())
    assert text_config.get("text_config", text_config)["moe_intermediate_size"] == width
    assert run("verify", out, "--source", root)[0] == 0
    assert run("verify", out)[0] == 0
    assert run("restore", out, back)[0] == 0
    assert digest(back) == digest(root)


def test_a_width_that_ranks_share_already_is_copied(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4-flash", shared=0), tmp_path / "out"
    code, text, _ = run(root, out, "--tp", 3)
    assert (code, "nothing to change" in text) == (0, True)
    assert (out / "config.json").read_bytes() == (root / "config.json").read_bytes()


@pytest.mark.parametrize("target", ["megamoe-512", "vllm-0.33", "vllm-0.33-aiter", "sglang-0.5.23-slots"])
def test_a_target_for_a_model_without_shared_experts_is_refused(target: str, made: Make, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made("v4-flash", shared=0), tmp_path / "out", "--target", target, "--tp", 8, "--allow-unfused")
    assert (code, "error[no-shared-experts]" in err) == (3, True)
    assert "hint:  --tp N without --target pads for tensor parallelism alone" in err


def laguna(root: Path, shared: int) -> Path:
    """Write a model of one layer, two routed experts 384 wide in MXFP4, and a shared MLP in FP8 with a width of its own."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (8, 512))}
    for e in range(2):
        tensors |= expert(f"model.layers.0.mlp.experts.{e}", "mxfp4", 384, 512, PROJ)
    tensors |= expert("model.layers.0.mlp.shared_expert", "fp8-32", shared, 512, PROJ)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload, source = bytearray(), random.Random(0)
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + size]}
        payload += bytes(b & 0x77 for b in source.randbytes(size)) if "scale" not in name else b"\x7b" * size
    root.mkdir()
    write_shard(root / "model.safetensors", header, bytes(payload))
    config = {"model_type": "laguna", "num_hidden_layers": 1, "hidden_size": 512, "num_experts": 2}
    config |= {"moe_intermediate_size": 384, "shared_expert_intermediate_size": shared}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(
    ("options", "stored", "padded", "kernel"),
    [
        (("--tp", 8), 320, {"source": 320, "main": 512, "kernel": 512}, False),
        (("--tp", 8), 896, {"source": 896, "main": 1024, "kernel": 1024}, False),
        (("--tp", 8), 1536, {"source": 1536, "main": 1536, "kernel": 1536}, False),  # four routed widths, then three
        (("--target", "megamoe-512"), 640, {"source": 640, "main": 1024, "kernel": 1024}, True),
        (("--target", "megamoe-512", "--experts", "shared"), 640, {"source": 640, "main": 640, "kernel": 1024}, True),
    ],
)
def test_a_shared_width_of_its_own_is_padded_proved_and_restored(
    options: tuple[Any, ...], stored: int, padded: dict[str, int], kernel: bool, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, out, back = laguna(tmp_path / "source", stored), tmp_path / "out", tmp_path / "back"
    code, text, err = run(root, out, *options)
    assert code == 0, err
    assert f"width 384 -> 512, shared {stored} -> {padded['kernel']}" in text
    manifest = json.loads((out / "fse" / "manifest.json").read_text())
    assert manifest["model"]["shared_width"] == padded
    assert any("shared_l1_weight" in name for name in manifest["tensors"]) is kernel
    assert json.loads((out / "config.json").read_text())["shared_expert_intermediate_size"] == padded["main"]
    assert run("verify", out, "--source", root)[0] == 0
    assert run("verify", out)[0] == 0
    assert run("restore", out, back)[0] == 0
    assert digest(back) == digest(root)


@pytest.mark.parametrize(("stored", "needed"), [(896, 1024), (1536, 1536)])
def test_inspect_says_both_widths(stored: int, needed: int, tmp_path: Path, run: Run) -> None:
    _, text, _ = run("inspect", laguna(tmp_path / "source", stored), "--tp", 8)
    said = " ".join(text.split())
    assert f"TP 8: 512, with a shared expert of {needed}, is the smallest width that all known loaders take as it is" in said
