"""``--tp N`` alone: padded for tensor parallelism from the command line, with shared experts and without, proved and restored."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    words = [str(out) if word == "OUT" else word for word in shlex.split(said["command"])[1:]]
    code, text, err = run(*words)
    assert code == 0, err
    assert f"width {said['width']} -> {width}, for tensor parallelism 8" in text
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
