"""Level 3 with a stand-in for what this machine lacks: the GPU and the compiled module. Layout, calls and verdicts are real.

The tests marked ``gpu`` run the published code where there is a GPU for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fse_convert.layout import ue8m0
from fse_convert.model.moe import Role
from fse_convert.verification import gpu_kernel as level3
from fse_convert.verification.gpu_kernel import check_kernel, probe, shared_scale_rows
from fse_convert.verification.numerics import sample_hidden_states
from tests.layout import tensors
from tests.verification.fake_deep_gemm import SM100, FakeDeepGemm, check


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
        assert torch.equal(packed, tensors.pack(scale).T)


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
