"""The takeover without vLLM, whose modules stand in with the attributes that count; with it: tests/peers/test_vllm_serving.py."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fse_convert.errors import NotServable
from fse_convert.serving.sidecar import Sidecar, open_sidecar
from fse_convert.serving.vllm.takeover import SLOTS, Block, Takeover, find_blocks, marker
from fse_convert.sidecar.tensors import KernelTensorName
from fse_convert.testing.patch import flip_payload

H, S = 512, 512
LAYERS = ("layers.0.ffn.experts", "layers.1.ffn.experts")
SHARED = [f"{w}.{kind}" for w in ("w1", "w2", "w3") for kind in ("weight", "weight_scale_inv")]


class Parameters(nn.Module):
    """Experts of vLLM 0.33: parameters in kernel layout, registered at construction."""

    hidden_size, num_shared_experts, has_fused_shared_experts = H, 1, True

    def __init__(self, width: int = S) -> None:
        super().__init__()
        self.intermediate_size = width
        shapes = {
            KernelTensorName.L1_WEIGHT: torch.zeros(2 * width, H, dtype=torch.float8_e4m3fn),
            KernelTensorName.L1_SCALE: torch.zeros(H // 128, 2 * width, dtype=torch.int32).t(),
            KernelTensorName.L2_WEIGHT: torch.zeros(H, width, dtype=torch.float8_e4m3fn),
            KernelTensorName.L2_SCALE: torch.zeros(width // 128, H, dtype=torch.int32).t(),
        }
        for part, value in shapes.items():
            self.register_parameter(part.value, nn.Parameter(value, requires_grad=False))

    def load_shared_expert_weight(self, name: str, tensor: Tensor) -> str:
        raise AssertionError("the original loader was called")


class Slots(nn.Module):
    """Experts of vLLM 0.29-0.32: slots that `finalize_weights` fills; 0.30 pads the routed width in it."""

    hidden_size, num_shared_experts = H, 1

    def __init__(self, width: int = S, pad: int = 1, supported: bool = True) -> None:
        super().__init__()
        self.intermediate_size, self.pad, self.supported = width, pad, supported
        self._transformed_l1_weights: Any = None
        self._transformed_shared_l1_weights: Any = None
        self._transformed_shared_l2_weights: Any = None

    @property
    def has_fused_shared_experts(self) -> bool:
        return self._transformed_shared_l1_weights is not None

    def finalize_weights(self, shared_experts: Any = None) -> None:
        assert shared_experts is None, "only routed experts are left to transform"
        self.intermediate_size = -(-self.intermediate_size // self.pad) * self.pad
        self._transformed_l1_weights = (torch.zeros(1), torch.zeros(1))

    def _deep_gemm_supports_shared_experts(self, _deep_gemm: Any) -> bool:
        return self.supported


class Moe(nn.Module):
    def __init__(self, experts: nn.Module, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.experts, self.shared_experts = experts, shared_experts


def mlp() -> nn.Module:
    linears = {name: nn.Linear(4, 4, bias=False) for name in ("gate_up_proj", "down_proj")}
    for linear in linears.values():
        linear.weight_scale_inv = nn.Parameter(torch.ones(1))
    return nn.ModuleDict(linears)


def model(*blocks: Moe) -> nn.Module:
    return nn.ModuleList(blocks)


@pytest.fixture(scope="module")
def sidecar(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Sidecar:
    from fse_convert.cli import main

    out = tmp_path_factory.mktemp("converted") / "out"
    with pytest.raises(SystemExit) as stopped:
        main([str(made("v4-flash")), str(out), "--verify", "storage"])
    assert not stopped.value.code
    return open_sidecar(out)


@pytest.fixture(autouse=True)
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in = ModuleType("vllm.utils.deep_gemm")
    vars(stand_in)["_import_deep_gemm"] = SimpleNamespace
    for name, module in {"vllm": ModuleType("vllm"), "vllm.utils": ModuleType("vllm.utils"), stand_in.__name__: stand_in}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return


def give(block: Moe, tensor: Tensor) -> list[Any]:
    """Load a shared MLP's six tensors as a model of either generation does."""
    if isinstance(block.experts, Parameters):
        return [block.experts.load_shared_expert_weight(f"model.layers.0.ffn.shared_experts.{n}", tensor) for n in SHARED]
    for name, parameter in block.shared_experts.named_parameters():
        parameter.weight_loader(parameter, tensor, *([0] if "gate_up" in name else []))
    block.experts.finalize_weights(block.shared_experts)
    return []


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(NotServable) as e:
        call()
    return str(e.value)


def assert_holds(block: Moe, sidecar: Sidecar, prefix: str) -> None:
    experts = block.experts
    held = (
        [getattr(experts, p.value) for p in KernelTensorName]
        if isinstance(experts, Parameters)
        else [*getattr(experts, SLOTS[0]), *getattr(experts, SLOTS[1])]
    )
    for mine, his in zip(held, sidecar.tensors(prefix), strict=True):
        assert mine.stride() == his.stride()
        assert torch.equal(mine.contiguous().view(torch.uint8), his.contiguous().view(torch.uint8))


def test_parameters(sidecar: Sidecar) -> None:
    blocks = [Moe(Parameters()), Moe(Parameters())]
    takeover = Takeover(sidecar, model(*blocks), "0.33.0")
    with takeover:
        for block, prefix in zip(blocks, LAYERS, strict=True):
            names = give(block, marker(prefix))
            assert set(names) == {f"model.layers.0.ffn.experts.{part.value}" for part in KernelTensorName}
    takeover.finish()
    for block, prefix in zip(blocks, LAYERS, strict=True):
        assert_holds(block, sidecar, prefix)
        with pytest.raises(AssertionError, match="the original loader was called"):
            give(block, marker(prefix))
    assert takeover.taken == dict(zip(("0", "1"), LAYERS, strict=True))
    assert takeover.nbytes == sum(t.nbytes for prefix in LAYERS for t in sidecar.tensors(prefix))


@pytest.mark.parametrize(("version", "width", "pad"), [("0.32.1", 512, 1), ("0.30.0", 384, 512), ("0.29.0", 512, 1)])
def test_slots(sidecar: Sidecar, version: str, width: int, pad: int) -> None:
    block, shared = Moe(Slots(width, pad), mlp()), []
    shared = list(block.shared_experts.parameters())
    takeover = Takeover(sidecar, model(block), version)
    with takeover:
        assert [p.numel() for p in shared] == [0] * 4, "the MLP is freed before anything is loaded"
        give(block, marker(LAYERS[0]))
        assert not block.experts.has_fused_shared_experts, "not yet there while the routed experts are transformed"
    takeover.finish()
    assert block.shared_experts is None
    assert "finalize_weights" not in vars(block.experts)
    assert_holds(block, sidecar, LAYERS[0])


def test_an_empty_model_and_one_without_mega_moe(sidecar: Sidecar) -> None:
    for other in (nn.Linear(2, 2), model(Moe(nn.Linear(2, 2), mlp()))):
        assert find_blocks(other) == []
        text = refusal(lambda other=other: Takeover(sidecar, other, "0.33.0"))
        assert "[not-megamoe]" in text
        assert "--moe-backend deep_gemm_mega_moe --enable-expert-parallel" in text


def test_layers_outside_of_the_kernel(sidecar: Sidecar) -> None:
    serial, off, gone = Parameters(), Slots(), Slots()
    serial.has_fused_shared_experts = False
    off.num_shared_experts = 0
    for block in (Moe(serial, mlp()), Moe(off, mlp()), Moe(gone, None)):
        text = refusal(lambda block=block: Takeover(sidecar, model(Moe(Parameters()), block), "0.32.0"))
        assert "1: the server runs the shared experts of 1 of 2 layers outside of the kernel" in text
        assert "[not-fused]" in text


def test_an_old_deep_gemm(sidecar: Sidecar) -> None:
    assert "[kernel-api]" in refusal(lambda: Takeover(sidecar, model(Moe(Slots(supported=False), mlp())), "0.31.0"))


def test_widths(sidecar: Sidecar) -> None:
    text = refusal(lambda: Takeover(sidecar, model(Moe(Parameters(384))), "0.33.0"))
    assert "--target vllm-0.33" in text
    assert "[width-mismatch]" in refusal(lambda: Takeover(sidecar, model(Moe(Slots(384), mlp())), "0.31.0"))
    assert "[width-mismatch]" in refusal(lambda: Takeover(sidecar, model(Moe(Slots(640), mlp())), "0.30.0"))


def test_a_release_that_pads_otherwise_than_known(sidecar: Sidecar) -> None:
    block = Moe(Slots(512, pad=768), mlp())
    takeover = Takeover(sidecar, model(block), "0.32.0")
    with takeover:
        give(block, marker(LAYERS[0]))
    text = refusal(takeover.finish)
    assert "this server's routed experts 768" in text


@pytest.mark.parametrize("experts", [Parameters, Slots])
def test_what_must_not_arrive(sidecar: Sidecar, experts: type[nn.Module]) -> None:
    block = Moe(experts(), mlp() if experts is Slots else None)
    takeover = Takeover(sidecar, model(block), "0.32.0")
    with takeover:
        text = refusal(lambda: give(block, torch.zeros(2, 2)))
        assert "0: the model owns this layer, the sidecar does not hold its shared experts [sidecar-layer]" in text
        give(block, marker(LAYERS[0]))
        assert "into one layer" in refusal(lambda: give(block, marker(LAYERS[1])))


def test_layers_left_out_and_taken_twice(sidecar: Sidecar) -> None:
    blocks = [Moe(Parameters()), Moe(Slots(), mlp())]
    takeover = Takeover(sidecar, model(*blocks), "0.33.0")
    with takeover:
        give(blocks[0], marker(LAYERS[0]))
    assert "1: 1 of 2 layers did not get their shared experts" in refusal(takeover.finish)
    takeover = Takeover(sidecar, model(Moe(Parameters()), Moe(Parameters())), "0.33.0")
    with takeover:
        for block in takeover.blocks:
            give(block.module, marker(LAYERS[0]))
    assert "two layers of the model took the same shared experts" in refusal(takeover.finish)


def test_parameters_of_another_kind(sidecar: Sidecar) -> None:
    experts = Parameters()
    experts.shared_l1_weight = nn.Parameter(torch.zeros(2 * S, H, dtype=torch.bfloat16), requires_grad=False)
    takeover = Takeover(sidecar, model(Moe(experts)), "0.33.0")
    with takeover:
        text = refusal(lambda: give(Moe(experts), marker(LAYERS[0])))
    assert "[layout-mismatch]" in text
    assert "torch.bfloat16" in text


@pytest.mark.parametrize("experts", [Parameters, Slots])
@pytest.mark.parametrize(("changed", "code"), [("fse", "sidecar-damaged"), (".", "sidecar-stale")])
def test_bytes_that_the_conversion_did_not_write(
    sidecar: Sidecar, tmp_path: Path, experts: type[nn.Module], changed: str, code: str
) -> None:
    """In the kernel layout, or in the shards beside it; the sizes are the same."""
    out = Path(shutil.copytree(sidecar.folder, tmp_path / "out"))
    for shard in (out / changed).glob("*.safetensors"):
        flip_payload(shard)
    block = Moe(experts(), mlp() if experts is Slots else None)
    takeover = Takeover(open_sidecar(out), model(block), "0.33.0")

    def load() -> None:
        with takeover:
            give(block, marker(LAYERS[0]))
        takeover.finish()

    text = refusal(load)
    assert f"[{code}]" in text
    assert str(out) in text
    assert not vars(block.experts).keys() & {"load_shared_expert_weight", "finalize_weights"}


def test_everything_is_put_back_after_an_error(sidecar: Sidecar) -> None:
    blocks = [Moe(Parameters()), Moe(Slots(), mlp())]
    with pytest.raises(KeyError), Takeover(sidecar, model(*blocks), "0.33.0"):
        raise KeyError
    assert not {"load_shared_expert_weight", "finalize_weights"} & (set(vars(blocks[0].experts)) | set(vars(blocks[1].experts)))


def test_generations() -> None:
    assert not Block("", Moe(Parameters())).slots
    assert Block("", Moe(Slots())).slots
