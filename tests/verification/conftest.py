"""Random shared experts in both layouts, a converted checkpoint to edit, and a GPU and a DeepGEMM that are not there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fse_convert.layout import ue8m0
from fse_convert.verification.addresses import KernelLayout
from tests.layout import tensors
from tests.verification.recipes import KNOBS, Recipe
from tests.verification.source_layout import SourceLayout

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
MakeSource = Callable[..., SourceLayout]
MakeKernel = Callable[[SourceLayout, int], KernelLayout]


def quantize_blocks(w: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    n, k = w.shape
    grown = torch.nn.functional.pad(w, (0, -k % columns, 0, -n % rows))
    blocks = grown.view(grown.shape[0] // rows, rows, grown.shape[1] // columns, columns)
    exponent = torch.log2(blocks.abs().amax((1, 3)).clamp(1e-30) / 448).ceil()
    full = torch.exp2(exponent).repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    return (w / full).to(torch.float8_e4m3fn).view(torch.uint8), (exponent + 127).to(torch.uint8)


@pytest.fixture
def make_source() -> MakeSource:
    """``(hidden, width, block=(32, 32), seed=0, sd=0.02) -> SourceLayout`` with normal weights; each block's scale differs."""

    def make(hidden: int, width: int, block: tuple[int, int] = (32, 32), seed: int = 0, sd: float = 0.02) -> SourceLayout:
        generator = torch.Generator().manual_seed(seed)
        tensors: list[Tensor] = []
        for n, k in ((width, hidden), (width, hidden), (hidden, width)):
            weight = torch.empty(n, k).normal_(0, sd, generator=generator)
            codes, scale = quantize_blocks(weight, *block)
            jitter = torch.randint(-2, 3, scale.shape, generator=generator)
            tensors += [codes, (scale.int() + jitter).to(torch.uint8)]
        return SourceLayout(*tensors, block=block)

    return make


@pytest.fixture
def make_kernel() -> MakeKernel:
    """``(source, width) -> KernelLayout`` by `fse_convert.layout`, the writer's own functions."""

    def make(source: SourceLayout, width: int) -> KernelLayout:
        h, s = source.hidden, source.width

        def scales(scale: Tensor, n: int, k: int, rows: int, groups: int) -> Tensor:
            return tensors.pad(ue8m0.expand(scale, n, k, *source.block), rows, groups, b"\x7f")

        gate, up = (tensors.pad(w, width, h, b"\0") for w in (source.gate, source.up))
        gate_sf, up_sf = (scales(sf, s, h, width, h // 32) for sf in (source.gate_scale, source.up_scale))
        return KernelLayout(
            tensors.interleave(gate, up),
            tensors.l1_scale(gate_sf, up_sf),
            tensors.pad(source.down, h, width, b"\0"),
            tensors.l2_scale(scales(source.down_scale, h, s, h, width // 32)),
        )

    return make


@pytest.fixture(scope="module")
def root(made: Make) -> Path:
    return made("v4.1-flash", experts=1)


@pytest.fixture
def out(output: Make) -> Path:
    return output(experts=1)


@pytest.fixture
def verify(out: Path, root: Path, run: Run) -> Run:
    """``verify OUT --source SOURCE`` with more arguments."""
    return lambda *more: run("verify", out, "--source", root, "-q", *more)


@pytest.fixture(scope="session")
def changed(made: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], tuple[Path, Path]]:
    """Make the source and the output of a recipe, once per session; never write into them."""
    from fse_convert.cli import main

    known: dict[str, tuple[Path, Path]] = {}

    def make(recipe: Recipe) -> tuple[Path, Path]:
        if recipe.name not in known:
            folder = tmp_path_factory.mktemp("changed")
            root = Path(shutil.copytree(made(recipe.kind, **KNOBS), folder / "source"))
            recipe.damage(root)
            with pytest.raises(SystemExit) as stopped:
                main([str(root), str(folder / "out"), *recipe.options, "-q"])
            assert not stopped.value.code
            known[recipe.name] = root, folder / "out"
        return known[recipe.name]

    return make


@pytest.fixture
def device(monkeypatch):
    """``device(SM100)`` makes torch report that GPU, while tensors stay on the CPU."""

    def set_device(facts: tuple[str, tuple[int, int]] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: facts is not None)
        if facts:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: facts[0])
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: facts[1])

    return set_device


@pytest.fixture
def deep_gemm(monkeypatch):
    def install(module: Any) -> Any:
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        return module

    return install
