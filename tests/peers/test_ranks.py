"""Experts padded by `--tp N`, cut by the servers' own loaders: every rank's slices mean the source's columns, then zeros.

The loaders of routed experts and of linear layers of vLLM 0.33 and SGLang 0.5.23 run on a CPU; the numbers are worked out here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.peers import values
from tests.peers.sglang_run import REPOSITORY, run_driver

pytestmark = pytest.mark.peers

Made = Callable[..., Path]
Matrices = dict[str, dict[str, Tensor]]
"""Tensors by projection (w1, w3, w2) and part (weight, scale, and the global scale of NVFP4)."""
TPS, HIDDEN, PROJECTIONS = (2, 4, 8), 256, ("w1", "w3", "w2")
ROUTED, SHARED = "layers.0.ffn.experts.0", "layers.0.ffn.shared_experts"


class Stored(NamedTuple):
    """An expert of a checkpoint in a format, as wide as no TP above splits into whole blocks, and the width that each needs."""

    kind: str
    expert: str
    block: tuple[int, int]
    width: int
    needed: tuple[int, ...]


FORMATS = {
    "BF16": Stored("bf16", ROUTED, (1, 1), 330, (330, 332, 336)),
    "FP8 128": Stored("v4-flash-fp8", ROUTED, (128, 128), 352, (512, 512, 1024)),
    "FP8 32": Stored("v4.1-flash", SHARED, (32, 32), 352, (384, 384, 512)),
    "MXFP4": Stored("v4.1-flash", ROUTED, (1, 32), 352, (384, 384, 512)),
    "NVFP4": Stored("nvfp4", ROUTED, (1, 16), 352, (384, 384, 512)),
}
LOADERS = [(engine, loader) for engine in ("vLLM", "SGLang") for loader in ("routed", "shared")]


def read(folder: Path, expert: str) -> Matrices:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def tensors(prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name in index:
            part = name.removeprefix(f"{prefix}.")
            if name.startswith(f"{prefix}.") and part != "input_scale":
                with safe_open(folder / index[name], framework="pt") as f:
                    tensor = f.get_tensor(name)
                yield part.replace("weight_scale", "scale"), tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor

    return {projection: dict(tensors(f"{expert}.{projection}")) for projection in PROJECTIONS}


def meaning(parts: dict[str, Tensor], stored: Stored) -> Tensor:
    """The numbers, in float64."""
    weight, scale = parts["weight"], parts.get("scale")
    if scale is None:
        return weight.to(torch.float64)
    if "scale_2" in parts:
        return values.nvfp4(weight, scale.view(torch.float8_e4m3fn), parts["scale_2"])
    if stored.block[0] == 1:
        return values.mxfp4(weight, scale)
    return values.block_fp8(weight.view(torch.float8_e4m3fn), scale, stored.block)


class Cuts:
    """Sources, padded outputs, and what the ranks of every server hold of them."""

    def __init__(self, sources: dict[str, Matrices], padded: dict[str, Matrices], held: dict[str, dict[str, Tensor]]) -> None:
        self.sources, self.padded, self.held = sources, padded, held

    def rank(self, engine: str, loader: str, case: str, projection: str, rank: int) -> dict[str, Tensor]:
        """What a rank holds; a scale of the whole matrix is not cut."""
        whole = {part: t for part, t in self.padded[case][projection].items() if t.ndim == 0}
        name = f"{loader}/{case}/{projection}"
        return whole | {
            part: self.held[engine][f"{name}/{part}/{rank}"] for part in self.padded[case][projection] if part not in whole
        }


@pytest.fixture(scope="module")
def cuts(made: Made, tmp_path_factory: pytest.TempPathFactory, python: Path) -> Cuts:
    from fse_convert.cli import main

    work = tmp_path_factory.mktemp("ranks")
    sources: dict[str, Matrices] = {}
    padded: dict[str, Matrices] = {}
    for name, stored in FORMATS.items():
        root = made(stored.kind, hidden=HIDDEN, width=stored.width, layers=1, experts=1, mtp=0)
        sources[name] = read(root, stored.expert)
        for tp in TPS:
            with pytest.raises(SystemExit) as stopped:
                main([str(root), str(work / f"{name} {tp}"), "--tp", str(tp), "-q"])
            assert not stopped.value.code
            padded[f"{name}/{tp}"] = read(work / f"{name} {tp}", stored.expert)
            padded[f"{name} as it is/{tp}"] = sources[name]
    given = {
        f"{case}/{projection}/{part}": tensor.contiguous().clone()
        for case, matrices in padded.items()
        for projection, parts in matrices.items()
        for part, tensor in parts.items()
        if tensor.ndim == 2 and ("as it is" not in case or case == BAD)
    }
    save_file(given, work / "in")
    assert run_driver("ranks_driver", "SGLang", work / "in", work / "SGLang", folder=work)["version"] == "0.5.23"
    assert run_vllm(python, work) == {"version": "0.33.0"}
    return Cuts(sources, padded, {engine: load_file(work / engine) for engine in ("vLLM", "SGLang")})


def run_vllm(python: Path, work: Path) -> Any:
    driver = Path(__file__).parent / "drivers" / "ranks_driver.py"
    command = [str(python), str(driver), "vLLM", str(work / "in"), str(work / "vLLM")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work, env=environment)
    assert "@@@" in done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("@@@")[2])


def wrong(cuts: Cuts, engine: str, loader: str, case: str, *, width: int) -> list[str]:
    """The slices that mean anything else than the source's channels of that rank, and zeros where the source has none."""
    name, tp = case.split("/")
    stored, found = FORMATS[name.removesuffix(" as it is")], []
    source = {p: meaning(parts, stored) for p, parts in cuts.sources[name.removesuffix(" as it is")].items()}
    per_rank = width // int(tp)
    for projection, matrix in source.items():
        dim = projection == "w2"
        shape = [width, HIDDEN] if not dim else [HIDDEN, width]
        whole = torch.zeros(shape, dtype=torch.float64)
        whole[: matrix.shape[0], : matrix.shape[1]] = matrix
        for rank in range(int(tp)):
            got = meaning(cuts.rank(engine, loader, case, projection, rank), stored)
            if not torch.equal(got, whole.narrow(int(dim), rank * per_rank, per_rank)):
                found.append(f"{projection} of rank {rank}")
    return found


@pytest.mark.parametrize(("engine", "loader"), LOADERS)
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_holds_the_sources_channels_and_zeros(cuts: Cuts, name: str, tp: int, engine: str, loader: str) -> None:
    stored = FORMATS[name]
    width = cuts.padded[f"{name}/{tp}"]["w1"]["weight"].shape[0]
    assert width == stored.needed[TPS.index(tp)]
    assert wrong(cuts, engine, loader, f"{name}/{tp}", width=width) == []


BAD = "MXFP4 as it is/8"


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_without_padding_ranks_get_the_scales_of_other_columns(cuts: Cuts, engine: str) -> None:
    """So the comparison can fail, and `inspect` is right to say "wrong numbers"."""
    assert wrong(cuts, engine, "routed", BAD, width=352)
