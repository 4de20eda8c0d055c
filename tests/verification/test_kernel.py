"""Level 3 with a stand-in for what this machine lacks: the GPU and the compiled module. Layout, calls and verdicts are real.

`FakeDeepGemm` has the signatures of sgl-deep-gemm 0.2.5 and computes with its own torch code, from the writer's inverse
maps, in FP32. The tests marked ``gpu`` run the published code where there is a GPU for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fse_convert.layout import megamoe, ue8m0
from fse_convert.model.moe import Role
from fse_convert.verification import kernel as level3
from fse_convert.verification.addresses import KernelLayout, SourceLayout
from fse_convert.verification.kernel import KernelResult, check_kernel, probe, shared_scale_rows
from fse_convert.verification.numerics import sample_hidden_states

SM100, SM90 = ("NVIDIA B200", (10, 0)), ("NVIDIA H200", (9, 0))


class FakeBuffer:
    def __init__(self, group: Any, experts: int, capacity: int, top_k: int, hidden: int, width: int, shared: int) -> None:
        assert (group.size(), group.rank(), group.barrier()) == (1, 0, None)
        self.num_max_tokens_per_rank = -(-capacity // 1920) * 1920
        rows = self.num_max_tokens_per_rank // 8 * 128
        self.hidden, self.width, self.shared = hidden, width, shared
        self.x = torch.zeros(self.num_max_tokens_per_rank, hidden, dtype=torch.float8_e4m3fn)
        self.x_sf = torch.zeros(self.num_max_tokens_per_rank, hidden // 128, dtype=torch.int32)
        self.topk_idx = torch.zeros(self.num_max_tokens_per_rank, top_k, dtype=torch.int64)
        self.topk_weights = torch.ones(self.num_max_tokens_per_rank, top_k)
        self.shared_l1_acts_sf = torch.zeros(hidden // 128, rows, dtype=torch.int32).T
        self.destroyed = False

    def destroy(self) -> None:
        self.destroyed = True


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    full = torch.exp2(scale.float() - 127).repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return codes.view(torch.float8_e4m3fn).float() * full


class FakeDeepGemm(types.ModuleType):
    """sgl-deep-gemm 0.2.5 without a GPU; ``width_multiple`` 512 makes it the older contract."""

    __version__ = "0.2.5"
    __file__ = "/somewhere/deep_gemm/__init__.py"

    def __init__(self, block_m: int = 16, width_multiple: int = 128) -> None:
        super().__init__("deep_gemm")
        self.block_m, self.width_multiple = block_m, width_multiple
        self.widths: list[int] = []
        self.buffers: list[FakeBuffer] = []
        self.gain = 1.0

    def get_symm_buffer_for_mega_moe(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        use_fp8_dispatch: bool | None = None,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
    ) -> FakeBuffer:
        assert (mma_type, activation, use_fp8_dispatch) == ("fp8xfp4", "swiglu", None)
        if intermediate_hidden % self.width_multiple:
            raise RuntimeError("Assertion error (layout/mega_moe.cuh:287): num_bytes % 16 == 0\nmore")
        self.buffers.append(
            FakeBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, num_shared_experts)
        )
        return self.buffers[-1]

    def get_block_m_for_mega_moe(
        self,
        num_ranks: int,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_tokens: int,
        num_topk: int,
        mma_type: str = "fp8xfp4",
        global_num_tokens: int | None = None,
    ) -> int:
        assert num_ranks == 1
        assert num_max_tokens_per_rank == self.buffers[-1].num_max_tokens_per_rank
        return self.block_m

    def fp8_fp4_mega_moe(
        self,
        y: Tensor,
        l1_weights: tuple[Tensor, Tensor],
        l2_weights: tuple[Tensor, Tensor],
        sym_buffer: FakeBuffer,
        shared_l1_weights: tuple[Tensor, Tensor] | None = None,
        shared_l2_weights: tuple[Tensor, Tensor] | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        recipe: tuple[int, int, int] = (1, 1, 32),
        activation: str = "swiglu",
        activation_clamp: float | None = None,
        fast_math: bool = True,
    ) -> None:
        assert shared_l1_weights is not None
        assert shared_l2_weights is not None
        assert (recipe, activation, fast_math, sym_buffer.destroyed) == ((1, 1, 32), "swiglu", False, False)
        hidden, width, tokens = sym_buffer.hidden, sym_buffer.width, len(y)
        assert (sym_buffer.topk_idx[:tokens] == -1).all()
        assert not sym_buffer.topk_weights[:tokens].any()
        for (weight, scale), (n, k) in zip((l1_weights, l2_weights), ((2 * width, hidden), (hidden, width)), strict=True):
            experts = weight.shape[0]
            assert (weight.dtype, tuple(weight.shape)) == (torch.int8, (experts, n, k // 2))
            assert weight.is_contiguous()
            assert not weight.any()
            self.check_scale(scale[0], n, k)
            assert (scale == 0x7F7F7F7F).all()
        shared = sym_buffer.shared * width
        l1, l1_sf = shared_l1_weights
        l2, l2_sf = shared_l2_weights
        assert tuple(l1.shape) == (2 * shared, hidden)
        assert tuple(l2.shape) == (hidden, shared)
        assert l1.dtype == l2.dtype == torch.float8_e4m3fn
        assert l1.is_contiguous()
        assert l2.is_contiguous()
        self.check_scale(l1_sf, 2 * shared, hidden)
        self.check_scale(l2_sf, hidden, shared)
        self.widths.append(shared)
        y.copy_(self.gain * self.shared_expert(l1, l1_sf, l2, l2_sf, self.read_x(sym_buffer, tokens), activation_clamp))

    @staticmethod
    def check_scale(scale: Tensor, n: int, k: int) -> None:
        assert (scale.dtype, tuple(scale.shape)) == (torch.int32, (n, k // 128))
        assert scale.stride(0) == 1
        assert k == 128 or scale.stride(1) == n

    def read_x(self, buffer: FakeBuffer, tokens: int) -> Tensor:
        """Token by token, as DeepGEMM's test fills it; the routed copy of the scales must be the same."""
        rows = []
        for t in range(tokens):
            block, m = divmod(t, self.block_m)
            aligned = (self.block_m + 127) // 128 * 128
            rows.append(block * aligned + (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32)
        packed = buffer.shared_l1_acts_sf[rows]
        assert torch.equal(packed, buffer.x_sf[:tokens])
        return dequantize(buffer.x[:tokens], packed.contiguous().view(torch.uint8))

    @staticmethod
    def shared_expert(l1: Tensor, l1_sf: Tensor, l2: Tensor, l2_sf: Tensor, x: Tensor, clamp: float | None) -> Tensor:
        halves = zip(megamoe.deinterleave(l1.view(torch.uint8)), megamoe.l1_scale_inverse(l1_sf.T), strict=True)
        gate, up = ((x @ dequantize(w, sf).T).bfloat16() for w, sf in halves)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        a = torch.nn.functional.silu(gate.float()) * up.float()
        groups = a.view(len(a), -1, 32)
        scale = torch.exp2(torch.log2(groups.abs().amax(2) / 448).ceil().clamp(-127))
        q = (groups / scale[:, :, None]).to(torch.float8_e4m3fn).float() * scale[:, :, None]
        return q.view(a.shape) @ dequantize(l2.view(torch.uint8), megamoe.l2_scale_inverse(l2_sf.T)).T

    def transform_weights_for_mega_moe(
        self, l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The published code's steps, on three axes only, as upstream has it."""

        def interleave(t: Tensor) -> Tensor:
            g, n, k = t.shape
            halves = t.reshape(g, 2, n // 16, 8, k).transpose(1, 2)
            return torch.empty_like(t).copy_(halves.reshape(g, n, k))

        def utccp(t: Tensor) -> Tensor:
            g, n, k = t.shape
            return torch.empty_like(t).copy_(t.reshape(g, n // 128, 4, 32, k).transpose(2, 3).reshape(g, n, k))

        return (
            (interleave(l1_weights[0]), utccp(interleave(l1_weights[1]))),
            (l2_weights[0], utccp(l2_weights[1])),
        )


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


def check(kernel: KernelLayout, source: SourceLayout, tokens: int = 5, limit: float | None = 10.0, shared: int = 1) -> KernelResult:
    return check_kernel(kernel, source, sample_hidden_states(tokens, kernel.hidden), shared=shared, limit=limit, device="cpu")


# --- probing


@pytest.mark.parametrize("facts", [SM100, ("NVIDIA B300", (10, 3))])
def test_import_failures_are_reasons(monkeypatch, device, facts):
    device(facts)
    raised = {
        "deep_gemm": OSError("libnvrtc.so.13: cannot open shared object file"),
        "vllm.third_party.deep_gemm": ImportError("_C.abi3.so: undefined symbol: x\nsecond line"),
    }

    def fail(name: str) -> Any:
        print("noise that must not reach standard output")
        raise raised[name]

    monkeypatch.setattr(importlib, "import_module", fail)
    found = probe()
    assert found.status == "unavailable"
    for part in ("libnvrtc.so.13", "undefined symbol", f"torch {torch.__version__}", "CUDA", "OSError", "ImportError"):
        assert part in found.reason
    assert "second line" not in found.reason
    assert (found.device_name, found.version) == (facts[0], None)


def test_importing_prints_nothing(monkeypatch, device, capsys):
    device(SM100)

    def load(name: str) -> Any:
        print("Failed to load mega kernels")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return FakeDeepGemm()

    monkeypatch.setattr(importlib, "import_module", load)
    assert probe().status == "ready"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [RuntimeError("ABI"), AssertionError(), AttributeError("torch has no x")])
def test_any_other_import_error_is_a_reason_too(monkeypatch, device, error):
    device(SM100)

    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert type(error).__name__ in probe().reason


def test_the_vendored_module_is_found_second(monkeypatch, device):
    device(SM100)
    fake = FakeDeepGemm()

    def load(name: str) -> Any:
        if name == "deep_gemm":
            raise ModuleNotFoundError("No module named 'deep_gemm'")
        assert name == "vllm.third_party.deep_gemm"
        return fake

    monkeypatch.setattr(importlib, "import_module", load)
    found = probe()
    assert (found.status, found.version) == ("ready", "0.2.5")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (SM90, "NVIDIA H200 is SM90"),
        (("NVIDIA L40S", (8, 9)), "NVIDIA L40S is SM89"),
        (("NVIDIA RTX PRO 6000", (12, 0)), "is SM120"),
        (None, "no CUDA device"),
    ],
)
def test_other_devices_are_named_and_nothing_is_imported(monkeypatch, device, facts, expected):
    device(facts)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    found = probe()
    assert found.status == "unavailable"
    assert "needs an SM100 GPU" in found.reason
    assert expected in found.reason


def test_a_driver_that_warns_is_quoted(monkeypatch):
    def broken() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert "driver on your system is too old" in probe().reason


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: system not yet initialized"), AssertionError("no CUDA")])
def test_a_device_that_raises_is_quoted(monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def raises(device: Any = None) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_name", raises)
    found = probe()
    assert found.status == "unavailable"
    assert f"CUDA is broken: {type(error).__name__}: {error}" in found.reason


def test_here_and_now_the_probe_answers():
    found = probe()
    assert found.status in ("ready", "unavailable")
    if not torch.cuda.is_available():
        assert "torch sees no CUDA device" in found.reason


def without(name: str, parameter: str | None = None) -> Any:
    fake = FakeDeepGemm()
    if parameter is None:
        setattr(fake, name, None)
    else:
        setattr(fake, name, lambda *args: None)
    return fake


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("get_symm_buffer_for_mega_moe", "num_shared_experts"),
        ("fp8_fp4_mega_moe", "shared_l1_weights"),
        ("get_block_m_for_mega_moe", None),
        ("transform_weights_for_mega_moe", None),
    ],
)
def test_a_deep_gemm_without_shared_experts_is_unavailable(device, deep_gemm, make_source, make_kernel, name, parameter):
    device(SM100)
    deep_gemm(without(name, parameter))
    found = probe()
    assert found.status == "unavailable"
    assert name in found.reason
    assert FakeDeepGemm.__file__ in found.reason
    source = make_source(256, 128)
    result = check(make_kernel(source, 128), source)
    assert (result.status, result.reason, result.figures) == ("not-run", found.reason, {})


def test_a_function_without_a_signature_counts_as_missing(device, deep_gemm):
    device(SM100)
    fake = FakeDeepGemm()
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(type)
    fake.fp8_fp4_mega_moe = type  # type: ignore[method-assign,assignment]
    deep_gemm(fake)
    assert "fp8_fp4_mega_moe(shared_l1_weights)" in probe().reason


def test_an_empty_module_lacks_everything(device, deep_gemm):
    device(SM100)
    deep_gemm(types.ModuleType("deep_gemm"))
    found = probe()
    assert (found.status, found.version) == ("unavailable", None)
    assert all(name in found.reason for name, _ in level3.FEATURES)


# --- SM100


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 192, 240])
def test_the_kernel_gets_what_it_reads(device, deep_gemm, make_source, make_kernel, block_m):
    device(SM100)
    fake = deep_gemm(FakeDeepGemm(block_m))
    source = make_source(256, 128, (128, 128))
    result = check(make_kernel(source, 256), source, tokens=300)
    assert result.status == "passed", result.reason
    assert fake.widths == [256, 128, 256]
    assert all(buffer.destroyed for buffer in fake.buffers)
    assert 0 <= result.figures["relative_l2"] <= level3.TARGET_RELATIVE_L2
    assert result.figures["within_target"] is True
    assert result.figures["unpadded_output_differing"] == 0
    for name in ("l1_weight", "l1_scale", "l2_weight", "l2_scale"):
        assert result.figures[f"transform_{name}_differing"] == 0


def test_rows_of_the_token_scales_stay_in_their_block_and_do_not_collide():
    for block_m in (8, 16, 32, 64, 96, 128, 192, 240):
        rows = shared_scale_rows(1000, block_m)
        assert len(rows.unique()) == 1000
        aligned = -(-block_m // 128) * 128
        assert torch.equal(rows // aligned, torch.arange(1000) // block_m)
    assert shared_scale_rows(4, 240).tolist() == [0, 4, 8, 12]
    assert shared_scale_rows(250, 240)[[31, 32, 127, 128, 239, 240]].tolist() == [124, 1, 127, 128, 128 + 63, 256]


def test_two_shared_experts_are_one_width(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    fake = deep_gemm(FakeDeepGemm())
    source = make_source(256, 256)
    result = check(make_kernel(source, 512), source, shared=2)
    assert result.status == "passed", result.reason
    assert [(b.width, b.shared) for b in fake.buffers] == [(256, 2), (128, 2), (256, 2)]


@pytest.mark.parametrize(
    ("width", "padded", "expected"),
    [(256, 256, "nothing was padded"), (160, 256, "width 160 is not a multiple of 128")],
)
def test_an_unpadded_run_that_makes_no_sense_is_not_run(device, deep_gemm, make_source, make_kernel, width, padded, expected):
    device(SM100)
    deep_gemm(FakeDeepGemm())
    source = make_source(256, width)
    result = check(make_kernel(source, padded), source)
    assert result.status == "passed"
    assert expected in str(result.figures["unpadded"])


def test_the_older_contract_refuses_the_unpadded_width_only(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    deep_gemm(FakeDeepGemm(width_multiple=512))
    source = make_source(256, 384)
    result = check(make_kernel(source, 512), source)
    assert result.status == "passed"
    assert "384 is refused: RuntimeError: Assertion error" in str(result.figures["unpadded"])
    assert "more" not in str(result.figures["unpadded"])


def test_a_kernel_that_refuses_the_layout_has_not_run(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    deep_gemm(FakeDeepGemm(width_multiple=512))
    source = make_source(256, 256)
    result = check(make_kernel(source, 256), source)
    assert result.status == "not-run"
    assert "DeepGEMM raised RuntimeError: Assertion error" in result.reason


@pytest.mark.parametrize(("gain", "passed"), [(1.004, True), (1.02, False), (0.98, False), (float("nan"), False)])
def test_the_bound_against_level_2(device, deep_gemm, make_source, make_kernel, gain, passed):
    device(SM100)
    deep_gemm(FakeDeepGemm()).gain = gain
    source = make_source(256, 256)
    result = check(make_kernel(source, 256), source)
    assert result.status == ("passed" if passed else "failed")
    assert passed or "against level 2" in result.reason


def test_one_output_element_that_is_not_written_fails(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    fake = deep_gemm(FakeDeepGemm())
    real = fake.fp8_fp4_mega_moe

    def forgetful(y: Tensor, l1: Any, l2: Any, buffer: Any, shared_l1_weights: Any, shared_l2_weights: Any, **options: Any) -> None:
        whole = torch.empty_like(y)
        real(whole, l1, l2, buffer, shared_l1_weights, shared_l2_weights, **options)
        y.view(-1)[1:] = whole.view(-1)[1:]

    fake.fp8_fp4_mega_moe = forgetful
    source = make_source(256, 128)
    result = check(make_kernel(source, 128), source, tokens=300)
    assert result.status == "failed"
    assert "relative L2 nan" in result.reason


@pytest.mark.parametrize("name", ["l1_weight", "l2_weight", "l1_scale", "l2_scale"])
def test_other_bytes_than_deep_gemm_makes_fail(device, deep_gemm, make_source, make_kernel, name):
    device(SM100)
    deep_gemm(FakeDeepGemm())
    source = make_source(256, 128)
    kernel = make_kernel(source, 256)
    changed = getattr(kernel, name).clone()
    changed[0, 5] ^= 1
    result = check(dataclasses.replace(kernel, **{name: changed}), source)
    assert result.status == "failed"
    assert f"transform_{name}: 1 of" in result.reason


def test_one_wrong_block_scale_or_two_swapped_rows_exceed_the_bound(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    deep_gemm(FakeDeepGemm())
    source = make_source(512, 512, (128, 128))
    scale = source.gate_scale.clone()
    scale[1, 2] += 1
    rows = source.gate.clone()
    rows[[3, 4]] = source.gate[[4, 3]]
    for changed in ({"gate_scale": scale}, {"gate": rows}):
        spoiled = make_kernel(dataclasses.replace(source, **changed), 512)
        result = check(spoiled, source, tokens=16, limit=None)
        assert result.status == "failed"
        assert result.figures["relative_l2"] > 2 * level3.MAX_RELATIVE_L2


def test_a_wrong_layout_stays_a_failure_when_the_kernel_then_raises(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    fake = deep_gemm(FakeDeepGemm(width_multiple=512))
    source = make_source(256, 256)
    kernel = make_kernel(source, 256)
    result = check(dataclasses.replace(kernel, l2_weight=kernel.l2_weight ^ 0x80), source)
    assert result.status == "failed"
    assert "transform_l2_weight" in result.reason
    assert "DeepGEMM raised" in result.reason
    assert fake.widths == []


def test_padded_and_unpadded_must_give_the_same_bits(device, deep_gemm, make_source, make_kernel):
    device(SM100)
    fake = deep_gemm(FakeDeepGemm())
    real = fake.shared_expert
    fake.shared_expert = lambda l1, *rest: real(l1, *rest) * (1 if l1.shape[0] == 512 else 1.01)
    source = make_source(256, 128)
    result = check(make_kernel(source, 256), source)
    assert result.status == "failed"
    assert "unpadded_output" in result.reason


@pytest.mark.parametrize("shared", [0, 2, 3])
def test_experts_that_do_not_fit_the_width_are_refused(make_source, make_kernel, shared):
    source = make_source(256, 128)
    with pytest.raises(ValueError, match="does not hold"):
        check(make_kernel(source, 128), source, shared=shared)


# --- the real thing


@pytest.mark.gpu
def test_the_published_kernel(make_source, make_kernel):
    found = probe()
    if found.status != "ready":
        pytest.skip(found.reason)
    source = make_source(5120, 2304, (32, 32))
    kernel = make_kernel(source, 2560)
    for tokens in (32, 300):
        result = check_kernel(kernel, source, sample_hidden_states(tokens, 5120, seed=tokens), limit=10.0)
        assert result.status == "passed", result.reason


@pytest.fixture
def sm90_deep_gemm() -> Any:
    """DeepGEMM on SM90, which runs no fused kernel: its functions around it can be compared all the same."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an SM90 GPU")
    module, trouble = level3._import_deep_gemm()
    return module or pytest.skip(trouble)


@pytest.mark.gpu
def test_published_transform_and_packing_make_the_same_bytes_on_sm90(sm90_deep_gemm, make_source, make_kernel):
    compare_transform_and_packing(sm90_deep_gemm, make_source, make_kernel, torch.device("cuda"))


@pytest.mark.gpu
def test_published_fp8_product_gives_padded_and_unpadded_the_same_bits_on_sm90(sm90_deep_gemm, make_source, make_kernel):
    compare_products(sm90_deep_gemm, make_source, make_kernel, torch.device("cuda"))


def compare_transform_and_packing(deep_gemm: Any, make_source: Any, make_kernel: Any, device: torch.device) -> None:
    source = make_source(5120, 2304, (128, 128)).to(device)
    kernel = make_kernel(source, 2560)
    rows = level3.pad_source(source, kernel.width)
    if hasattr(deep_gemm, "transform_weights_for_mega_moe"):
        (l1_weight, l1_scale), (l2_weight, l2_scale) = level3.deep_gemm_layout(deep_gemm, *rows)
        assert torch.equal(l1_weight.view(torch.uint8), kernel.l1_weight)
        assert torch.equal(l1_scale.T, kernel.l1_scale)
        assert torch.equal(l2_weight.view(torch.uint8), kernel.l2_weight)
        assert torch.equal(l2_scale.T, kernel.l2_scale)
    for _, scale in rows:
        packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(ue8m0.to_fp32(scale))
        assert torch.equal(packed, megamoe.pack(scale).T)


def compare_products(deep_gemm: Any, make_source: Any, make_kernel: Any, device: torch.device) -> None:
    """FP32 scales: per token and 128 columns on the left, per block of 128x128 on the right."""
    source = make_source(5120, 2304, (128, 128)).to(device)
    kernel = make_kernel(source, 2560)

    def multiply(x: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        codes, scale = rows
        y = torch.empty(len(x), len(codes), dtype=torch.bfloat16, device=device)
        ones = torch.ones(len(x), x.shape[1] // 128, device=device)
        right = codes.view(torch.float8_e4m3fn), ue8m0.to_fp32(scale[::128, ::4].contiguous())
        deep_gemm.fp8_gemm_nt((x.to(torch.float8_e4m3fn), ones), right, y)
        return y

    x, activation = (sample_hidden_states(32, k, seed=k).to(device) for k in (5120, 2304))
    padded = torch.nn.functional.pad(activation, (0, kernel.width - source.width))
    for role in (Role.GATE, Role.UP):
        y = multiply(x, kernel.rows(role, 0, kernel.width))
        assert torch.equal(y[:, : source.width], multiply(x, source.rows(role, 0, source.width)))
        assert not y[:, source.width :].any()
    assert torch.equal(multiply(padded, kernel.rows(Role.DOWN, 0, 5120)), multiply(activation, source.rows(Role.DOWN, 0, 5120)))
