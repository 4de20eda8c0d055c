"""Stacked experts padded by `--tp N`, cut by the servers' own loaders: every rank's slices mean the source's channels, then zeros.

What a model's loader does before it cuts is done here: it turns transposed tensors round, halves what holds gate and up, and takes
one expert after the other (vLLM 0.33 model_executor/layers/fused_moe/routed_experts.py:1054-1086, models/llama4.py:434-442,
models/step3p5.py:600-662). gpt-oss's own loader cuts all experts at once.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.peers import values
from tests.peers.sglang_run import REPOSITORY, run_driver
from tests.stacked import CASES, EXPERTS, Case, apart, transposed

pytestmark = pytest.mark.peers

TPS = (1, 2, 4, 8)
LOOP = [c for c in CASES if c.name in ("L1 Qwen3.5", "L1 FP8", "L2 Llama 4", "L2 FP8", "L4 BF16", "L4 FP8")]
GPT_OSS = next(c for c in CASES if c.name == "L3 MXFP4")
NAMES = {"gate_up_proj": "w13", "down_proj": "w2", "_blocks": "_weight", "_scales": "_weight_scale", "_bias": "_bias"}


def stored(root: Path, case: Case) -> dict[str, Tensor]:
    """The stacks of the first layer, by stack and suffix; single bytes as they are."""
    found: dict[str, Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tail = name.removeprefix(f"{case.blocks[0]}.")
            if tail.startswith(case.stacks):
                found[tail] = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return found


def matrices(case: Case, tensors: dict[str, Tensor], part: str) -> tuple[Tensor, ...]:
    """Gate, up and down ``[E, N, K]`` as a model's loader takes them apart."""
    stacks = [tensors[f"{stack}{part}"] for stack in case.stacks]
    if case.form is apart:
        return tuple(stacks)
    gate_up, down = (t.transpose(1, 2) for t in stacks) if case.form is transposed else stacks
    return (*gate_up.chunk(2, dim=1), down)


def per_expert(case: Case, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(("weight", "scale"), case.parts, strict=False):
        for projection, m in zip(("w1", "w3", "w2"), matrices(case, tensors, part.suffix), strict=True):
            yield from ((f"{e}/{projection}/{name}", m[e].contiguous().clone()) for e in range(EXPERTS))


def meaning(parts: dict[str, Tensor]) -> Tensor:
    if "scale" not in parts:
        return parts["weight"].to(torch.float64)
    return values.block_fp8(parts["weight"].view(torch.float8_e4m3fn), parts["scale"], (32, 32))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    from fse_convert.cli import main

    work, found = tmp_path_factory.mktemp("stacked"), {}
    for case in (*LOOP, GPT_OSS):
        found[case.name, 1] = work / case.name
        case.save(work / case.name)
        for tp in TPS[1:]:
            found[case.name, tp] = out = work / f"{case.name} {tp}"
            with pytest.raises(SystemExit) as stopped:
                main([str(work / case.name), str(out), "--tp", str(tp), "-q"])
            assert not stopped.value.code
    return found


def vllm(python: Path, driver: str, *arguments: str, folder: Path) -> None:
    command = [str(python), str(Path(__file__).parent / "drivers" / driver), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert "@@@" in done.stdout, done.stderr[-4000:]
    assert json.loads(done.stdout.rpartition("@@@")[2]) == {"version": "0.33.0"}


@pytest.fixture(scope="module")
def held(
    outputs: dict[tuple[str, int], Path], tmp_path_factory: pytest.TempPathFactory, python: Path
) -> dict[str, dict[str, Tensor]]:
    """What every rank holds of every expert, by server."""
    work, given = tmp_path_factory.mktemp("cut"), {}
    for case in LOOP:
        for tp in TPS:
            for name, tensor in per_expert(case, stored(outputs[case.name, tp], case)):
                e, matrix, part = name.split("/")
                given[f"{case.name} {e}/{tp}/{matrix}/{part}"] = tensor
    save_file(given, work / "in")
    vllm(python, "ranks_driver.py", "vLLM", str(work / "in"), str(work / "vLLM"), folder=work)
    assert run_driver("ranks_driver", "SGLang", work / "in", work / "SGLang", folder=work)["version"] == "0.5.23"
    return {engine: load_file(work / engine) for engine in ("vLLM", "SGLang")}


def unlike(case: Case, outputs: dict[tuple[str, int], Path], cut: dict[str, Tensor], tp: int) -> list[str]:
    """The slices that mean anything else than the source's channels of that rank, and zeros where the source has none."""
    source = dict(per_expert(case, stored(outputs[case.name, 1], case)))
    parts, wrong = [name for name, _ in zip(("weight", "scale"), case.parts, strict=False)], []
    for e in range(EXPERTS):
        for projection in ("w1", "w3", "w2"):
            real, dim = meaning({p: source[f"{e}/{projection}/{p}"] for p in parts}), int(projection == "w2")
            slices = [
                meaning({p: cut[f"routed/{case.name} {e}/{tp}/{projection}/{p}/{rank}"] for p in parts}) for rank in range(tp)
            ]
            joined = torch.cat(slices, dim)
            width = real.shape[dim]
            if not torch.equal(joined.narrow(dim, 0, width), real) or joined.narrow(dim, width, joined.shape[dim] - width).any():
                wrong.append(f"{projection} of expert {e}")
    return wrong


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("case", LOOP, ids=lambda c: c.name)
def test_every_rank_holds_the_sources_channels_and_zeros(
    case: Case, tp: int, engine: str, outputs: dict[tuple[str, int], Path], held: dict[str, dict[str, Tensor]]
) -> None:
    if tp == 1:
        assert case.width == held[engine][f"routed/{case.name} 0/1/w1/weight/0"].shape[0]
    assert unlike(case, outputs, held[engine], tp) == []


def expected(case: Case, tensors: dict[str, Tensor]) -> Any:
    """Weights of gpt-oss in float64: gate and up in turn ``[E, 2 I, H]``, down ``[E, H, I]``, and both biases."""
    found = []
    for stack in case.stacks:
        codes, scales = tensors[f"{stack}_blocks"].flatten(2), tensors[f"{stack}_scales"]
        found += [values.mxfp4(codes, scales), tensors[f"{stack}_bias"].double()]
    return found


def test_gpt_oss_cuts_whole_blocks_of_32(outputs: dict[tuple[str, int], Path], python: Path, tmp_path: Path) -> None:
    given = {}
    for tp in TPS:
        for name, tensor in stored(outputs[GPT_OSS.name, tp], GPT_OSS).items():
            called = name.removeprefix("experts.")
            for ours, theirs in NAMES.items():
                called = called.replace(ours, theirs)
            given[f"{tp}/{called}"] = tensor
    save_file(given, tmp_path / "in")
    vllm(python, "gpt_oss_driver.py", str(tmp_path / "in"), str(tmp_path / "out"), folder=tmp_path)
    cut = load_file(tmp_path / "out")
    source = expected(GPT_OSS, stored(outputs[GPT_OSS.name, 1], GPT_OSS))
    for tp in TPS:
        ranks = [
            {
                name: cut[f"{tp}/{name}/{rank}"]
                for name in ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
            }
            for rank in range(tp)
        ]
        gate_up = torch.cat([values.mxfp4(r["w13_weight"], r["w13_weight_scale"]) for r in ranks], 1)
        down = torch.cat([values.mxfp4(r["w2_weight"], r["w2_weight_scale"]) for r in ranks], 2)
        bias = torch.cat([r["w13_bias"].double() for r in ranks], 1)
        for got, real, dim in ((gate_up, source[0], 1), (bias, source[1], 1), (down, source[2], 2)):
            size = real.shape[dim]
            assert torch.equal(got.narrow(dim, 0, size), real), tp
            assert not got.narrow(dim, size, got.shape[dim] - size).any(), tp
        assert torch.equal(sum(r["w2_bias"].double() for r in ranks), source[3])
