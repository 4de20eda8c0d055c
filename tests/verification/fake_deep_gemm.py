"""sgl-deep-gemm 0.2.5 without a GPU: its signatures, computed with torch from the writer's inverse maps, in FP32."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from fse_convert.layout import megamoe
from fse_convert.verification.addresses import KernelLayout
from fse_convert.verification.gpu_kernel import KernelResult, check_kernel
from fse_convert.verification.numerics import sample_hidden_states
from tests.verification.source_layout import SourceLayout

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


def check(kernel: KernelLayout, source: SourceLayout, tokens: int = 5, limit: float | None = 10.0, shared: int = 1) -> KernelResult:
    return check_kernel(kernel, source, sample_hidden_states(tokens, kernel.hidden), shared=shared, limit=limit, device="cpu")
