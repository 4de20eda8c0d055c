"""Level 2 of the proof: what the fused shared expert computes, from the kernel's bytes and from the source's.

Two readers feed one computation: `KernelLayout` finds every byte by the address that the kernel reads it from,
`StoredExpert` by the checkpoint's blocks. A wrong byte, row, block or packing order therefore changes one side only.

Padded and unpadded agree bit for bit by construction, not by luck of a matrix library:

* An E4M3 value is a multiple of 2**-9 and at most 448, so a product of two is a multiple of 2**-18 and a sum of 32
  products stays below 2**23: 41 bits. float64 holds 53, so every partial sum over a group of 32 is exact, in any
  order, on any device.
* A group's sum is scaled by powers of two (exact) and added to a float64 accumulator, group after group along K,
  element by element: correctly rounded additions in an order that no width, chunk size or thread count can change.
* Rows of L1 do not see each other. Padded channels give ``+0``, in L2 they come last, and adding zero changes nothing.
* The one transcendental, exp, comes from a table over all 65536 BF16 gates: the tail of a vectorised loop cannot round differently.

The padded side computes its full width; nothing is cut away first. Equal sums alone would not show a non-zero gate row
that meets zero columns of down, so the padding's bytes are compared with their fill as well.

Rules: sgl-deep-gemm 0.2.5, deep_gemm/include/deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh (epilogue), common/math.cuh,
and deep_gemm/utils/math.py. The kernel adds in FP32 in the hardware's own order; here the sum is float64, rounded to
FP32 once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fse_convert.errors import EnvironmentFailure, Problem
from fse_convert.model.moe import Role
from fse_convert.verification.addresses import GROUP, KernelLayout, Rows
from fse_convert.verification.code_of_one import E8M0_ONE
from fse_convert.verification.decode import decode_codes, decode_scales
from fse_convert.verification.experts import StoredExpert, dequantize

AnyExpert = KernelLayout | StoredExpert
"""What a computation reads: rows of gate and up ``[width, hidden]`` and of down ``[hidden, width]``."""

E4M3_MAX = 448.0
WORKING_SET = 48 << 20
"""Bytes of decoded weights and group products that one step holds."""
HALF_STEP = 2.0**-4
"""Largest relative error of rounding to E4M3; the root mean square over uniform mantissas is 0.4 of it."""
BF16_HALF_STEP = 2.0**-9
SMALLEST, LARGEST = 2.0**-110, 2.0**127
"""Bounds of FP32 with room for rounding, and for an activation's smaller values to be normal numbers too."""


@functools.cache
def _sigmoid_table(device: torch.device) -> Tensor:
    """Return ``1 / (1 + exp(-g))`` in FP32 for every BF16 ``g``, by its bits; computed on the CPU: the same on every device."""
    g = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return (1 / (1 + torch.exp(-g.double()).float())).to(device)


def quantize_input(x: Tensor) -> Rows:
    """Quantise activations as servers do before the kernel.

    ``x`` BF16 ``[t, h]``. Returns codes uint8 ``[t, h]`` and scales uint8 ``[t, h / 32]``: the scale is
    ``2 ** ceil(log2(max(amax, 1e-4) / 448))`` with its byte within [1, 254], the codes are rounded to nearest even.
    Rule: sgl-deep-gemm 0.2.5, deep_gemm/utils/math.py, ``per_token_cast_to_fp8(use_ue8m0=True, gran_k=32)``.
    """
    groups = x.float().view(x.shape[0], -1, GROUP)
    bits = (groups.abs().amax(2).clamp(1e-4) / E4M3_MAX).view(torch.int32)
    exponent = (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()).clamp(1, 254)
    codes = (groups / (exponent << 23).view(torch.float32)[:, :, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(x.shape), exponent.to(torch.uint8)


def requantize(v: Tensor) -> Rows:
    """Requantise the activation between L1 and L2.

    ``v`` FP32 ``[t, s]``. Returns codes uint8 ``[t, s]`` and scales uint8 ``[t, s / 32]``: the scale is
    ``2 ** ceil(log2(amax * fp32(1 / 448)))`` without a lower clamp (amax 0 gives byte 0), the codes saturate at 448.
    Rule: sgl-deep-gemm 0.2.5, common/math.cuh, ``get_e4m3_sf_and_sf_inv``, and the cast after it.
    """
    groups = v.view(v.shape[0], -1, GROUP)
    inverse_max = torch.tensor(1 / E4M3_MAX, dtype=torch.float32, device=v.device)
    bits = (groups.abs().amax(2) * inverse_max).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    inverse = ((254 - exponent) << 23).view(torch.float32)
    codes = (groups * inverse[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(v.shape), exponent.to(torch.uint8)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Activate as the epilogue does: BF16 ``[t, s]`` twice to FP32 ``[t, s]``.

    With a ``limit``, gate is clamped from above and up from both sides, in BF16; then ``(gate * sigmoid(gate)) * up``
    in FP32. A NaN stays NaN (the kernel's clamp would drop it), so that it is reported.
    """
    if limit is not None:
        bound = torch.tensor(limit, dtype=torch.bfloat16, device=gate.device)
        gate, up = torch.minimum(gate, bound), torch.minimum(torch.maximum(up, -bound), bound)
    sigmoid = _sigmoid_table(gate.device)[gate.view(torch.int16).int() & 0xFFFF]
    return gate.float() * sigmoid * up.float()


def _chunks(n: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut rows, in whole groups: only the last group may be completed, so that every chunk has rows that are stored."""
    step = max(1, WORKING_SET // row_bytes // GROUP) * GROUP
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _linear(x: Rows, weights: AnyExpert, role: Role) -> Tensor:
    """Multiply ``x [t, k]`` by all ``n`` rows, float64 ``[t, n]``: exact in each group, then added in the order of K."""
    codes, scale = x
    n = weights.hidden if role is Role.DOWN else weights.width
    tokens, groups = scale.shape
    x_gtk = decode_codes(codes).view(tokens, groups, GROUP).transpose(0, 1).contiguous()
    x_scale_gt = decode_scales(scale).T[:, :, None]
    out = torch.empty(tokens, n, dtype=torch.float64, device=codes.device)
    for start, stop in _chunks(n, 8 * groups * (GROUP + tokens)):
        w_codes, w_scale = weights.rows(role, start, stop)
        w_gkn = decode_codes(w_codes).view(stop - start, groups, GROUP).permute(1, 2, 0)
        w_scale_gn = decode_scales(w_scale).T.contiguous()[:, None]
        products = torch.bmm(x_gtk, w_gkn).mul_(x_scale_gt).mul_(w_scale_gn)
        total = torch.zeros(tokens, stop - start, dtype=torch.float64, device=codes.device)
        for g in range(groups):
            total += products[g]
        out[:, start:stop] = total
    return out


@dataclass(frozen=True)
class Trace:
    """Every stage of one fused run.

    ``gate``, ``up`` float64 ``[t, s]`` and ``output`` float64 ``[t, h]`` are sums before any rounding to FP32 or BF16;
    ``codes`` uint8 ``[t, s]`` and ``scale`` uint8 ``[t, s / 32]`` are the requantised activation.
    """

    gate: Tensor
    up: Tensor
    codes: Tensor
    scale: Tensor
    output: Tensor

    @property
    def y(self) -> Tensor:
        """Return the output as the kernel writes it for tokens without routed experts: BF16 ``[t, h]``."""
        return self.output.float().bfloat16()


def trace_expert(x: Tensor, weights: AnyExpert, limit: float | None = None) -> Trace:
    """Compute the fused expert for ``x`` BF16 ``[t, h]``, on the device of ``weights``, and keep every stage.

    ``limit``: the model's SwiGLU limit, None for none. Memory grows with ``t``.
    """
    quantized = quantize_input(x)
    gate, up = (_linear(quantized, weights, role) for role in (Role.GATE, Role.UP))
    codes, scale = requantize(swiglu(gate.float().bfloat16(), up.float().bfloat16(), limit))
    return Trace(gate, up, codes, scale, _linear((codes, scale), weights, Role.DOWN))


@dataclass(frozen=True)
class Exact:
    """The expert without rounding inside, float64 ``[t, h]``, and the norm of the error that FP8 may add to it.

    ``in_range``: whether FP32 and BF16, in which servers compute, hold every stage.
    """

    output: Tensor
    noise: float
    in_range: bool


def exact_expert(x: Tensor, weights: StoredExpert, limit: float | None = None) -> Exact:
    """Compute the dequantised expert in float64 by plain matrix products: no BF16, no requantisation.

    ``x`` BF16 ``[t, h]`` is quantised first, as for the kernel: what is measured is the expert, not the rounding of
    its input. ``noise`` is the root mean square norm of the error when every activation ``a[t, j]`` is off by its
    largest possible rounding error ``d[t, j]`` (half a step of E4M3, plus BF16's of gate and up), with independent
    signs: ``sqrt(sum d[t, j] ** 2 * |down[:, j]| ** 2)``.
    """
    hidden, width = weights.hidden, weights.width
    x_th = dequantize(quantize_input(x))
    gate, up = (
        torch.cat([x_th @ weights.values(role, *rows).to(x.device).T for rows in _chunks(width, 16 * hidden)], 1)
        for role in (Role.GATE, Role.UP)
    )
    if limit is not None:
        bound = float(torch.tensor(limit, dtype=torch.bfloat16))
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
    a = gate * torch.sigmoid(gate) * up
    amax = a.abs().view(len(a), -1, GROUP).amax(2).repeat_interleave(GROUP, 1)
    relative = HALF_STEP + BF16_HALF_STEP * (2 + gate.abs())
    error = torch.maximum(a.abs() * relative, amax * (2 / E4M3_MAX) * 2**-10)  # the latter: half a subnormal step
    output, energy = [], torch.zeros(width, dtype=torch.float64, device=x.device)
    for rows in _chunks(hidden, 16 * width):
        w_ns = weights.values(Role.DOWN, *rows).to(x.device)
        output.append(a @ w_ns.T)
        energy += w_ns.square_().sum(0)
    total = torch.cat(output, 1)
    in_range = all(_in_range(stage) for stage in (gate, up, amax, total))
    return Exact(total, math.sqrt(float((error.square() @ energy).sum())), in_range)


def _in_range(stage: Tensor) -> bool:
    """Tell whether a stage's largest values ``[t]`` are zero or normal FP32 numbers, rounding included."""
    largest = stage.abs().amax(1)
    return bool(((largest == 0) | ((largest > SMALLEST) & (largest < LARGEST))).all())


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in float64: 0 if both are zero, infinity if only the reference is."""
    reference = reference.double()
    error = float(torch.linalg.vector_norm(value.double() - reference))
    norm = float(torch.linalg.vector_norm(reference))
    if norm == 0:
        return math.inf if error else 0.0
    return error / norm


@dataclass(frozen=True)
class Difference:
    """What was compared, how many elements are unequal, and the index of the first (row-major)."""

    what: str
    count: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class NumericsResult:
    """Level 2's answer for one shared expert.

    ``differences``: what is unequal, in the order of the computation, so that the first one says where to look: stages,
    output, and padding that does not hold its fill or contributes something. ``bit_equal``: the BF16 outputs are equal
    in every bit. ``finite``: no output is infinite or NaN. ``relative_l2``: of the fused output against `exact_expert`, which says
    nothing of an expert that is not ``in_range``: it is infinite, NaN or zero in servers, from the source's own bytes too.
    """

    differences: tuple[Difference, ...]
    bit_equal: bool
    finite: bool
    in_range: bool
    relative_l2: float
    bound: float
    device: str

    @property
    def passed(self) -> bool:
        """Whether nothing differs, all is finite, and ``relative_l2`` is within ``bound`` where it says something."""
        return not self.differences and self.finite and (self.relative_l2 <= self.bound or not self.in_range)

    @property
    def reason(self) -> str:
        """Return one sentence: the first thing that is wrong, or that nothing is."""
        if self.differences:
            d = self.differences[0]
            return f"{d.what}: {d.count} not as expected, the first at {d.first}"
        if not self.finite:
            return "the expert's output is not finite"
        if not self.passed:
            return f"relative L2 {self.relative_l2:.3g} against the exact expert, more than {self.bound:.3g}"
        beyond = "" if self.in_range else "; it overflows or vanishes in FP32 or BF16, from the source's bytes as from the output's"
        return f"the kernel's bytes and the source's compute the same bits{beyond}"


def pick_device(name: str) -> torch.device:
    """Turn ``--device`` into a device: ``auto`` is CUDA where it works. Raises EnvironmentFailure when CUDA is missing."""
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        message = f"device cuda was asked for, but torch {torch.__version__} sees no usable CUDA device"
        raise EnvironmentFailure(Problem("no-cuda", message, "--device", "leave --device away: numerics run on the CPU too"))
    return torch.device("cuda" if available else "cpu")


def sample_hidden_states(tokens: int, hidden: int, seed: int = 0) -> Tensor:
    """Draw what a norm layer hands to an expert: standard normal BF16 ``[tokens, hidden]``, on the CPU."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _difference(what: str, a: Tensor, b: Tensor | int, origin: tuple[int, int] = (0, 0)) -> list[Difference]:
    unequal = a != b if isinstance(b, int) else (a != b) & ~(a.isnan() & b.isnan())
    count = int(unequal.sum())
    if not count:
        return []
    row, column = divmod(int(unequal.flatten().int().argmax()), unequal.shape[1])
    return [Difference(what, count, (origin[0] + row, origin[1] + column))]


def _stages(ours: Trace, expected: Trace) -> list[Difference]:
    s = expected.gate.shape[1]
    return [
        *_difference("gate sums (token, channel)", ours.gate[:, :s], expected.gate),
        *_difference("up sums (token, channel)", ours.up[:, :s], expected.up),
        *_difference("activation codes (token, channel)", ours.codes[:, :s], expected.codes),
        *_difference("activation scales (token, group)", ours.scale[:, : s // GROUP], expected.scale),
        *_difference("output sums (token, hidden)", ours.output, expected.output),
    ]


def _padding(kernel: AnyExpert, ours: Trace, s: int) -> list[Difference]:
    """Compare everything beyond source width ``s`` with what it must be: the layout's bytes, and what the run made of them."""
    if kernel.width == s:
        return []
    g = s // GROUP
    different: list[Difference] = []
    for role in (Role.GATE, Role.UP):
        codes, scale = kernel.rows(role, s, kernel.width)
        different += _difference(f"{role.value} weight padding (channel, hidden)", codes, 0, (s, 0))
        different += _difference(f"{role.value} scale padding (channel, group)", scale, E8M0_ONE, (s, 0))
    for start, stop in _chunks(kernel.hidden, 16 * kernel.width):
        codes, scale = kernel.rows(Role.DOWN, start, stop)
        different += _difference("down weight padding (hidden, channel)", codes[:, s:], 0, (start, s))
        different += _difference("down scale padding (hidden, group)", scale[:, g:], E8M0_ONE, (start, g))
    different += _difference("activation codes in padding (token, channel)", ours.codes[:, s:], 0, (0, s))
    different += _difference("activation scales in padding (token, group)", ours.scale[:, g:], 0, (0, g))
    return different


def check_numerics(kernel: AnyExpert, source: StoredExpert, x: Tensor, limit: float | None = None) -> NumericsResult:
    """Prove that the kernel's bytes compute what the source does, bit for bit, and close to the exact expert.

    ``kernel``: the output's expert, in the kernel layout or as the standard layout has it after a change of format.
    ``x``: hidden states BF16 ``[t, hidden]``, on the device that computes. ``limit``: the model's SwiGLU limit.
    The float64 sums are compared as well as the output: one changed weight may drown in BF16 and FP8 on its way to the
    output, but not before. Memory beside the weights: about 150 MiB for up to 256 tokens.

    The bound on `relative_l2` is ``hypot(2**-4, noise / norm) + 2**-9``: requantisation errors may agree (all channels
    at the limit: at most half a step of E4M3), be independent (`exact_expert`'s noise, which grows with cancellation in
    down), and the output is rounded to BF16. Normal weights give 0.027 against a bound of 0.1; it catches a computation
    that is wrong on both sides; a wrong byte on one side is caught by the bit comparison.

    Raises ValueError when the hidden sizes differ or the kernel's width is smaller than the source's.
    """
    if kernel.hidden != source.hidden or kernel.width < source.width:
        raise ValueError(f"kernel {kernel.hidden}x{kernel.width} cannot hold source {source.hidden}x{source.width}")
    kernel, source = kernel.to(x.device), source.to(x.device)
    ours, expected = trace_expert(x, kernel, limit), trace_expert(x, source, limit)
    exact = exact_expert(x, source, limit)
    output = _difference("output (token, hidden)", ours.y.view(torch.int16), expected.y.view(torch.int16))
    differences = (*_stages(ours, expected), *output, *_padding(kernel, ours, source.width))
    norm = float(torch.linalg.vector_norm(exact.output))
    outputs = (exact.output, ours.y, expected.y) if exact.in_range else (exact.output,)
    return NumericsResult(
        differences=differences,
        bit_equal=not output,
        finite=all(bool(t.isfinite().all()) for t in outputs),
        in_range=exact.in_range,
        relative_l2=relative_l2(ours.y, exact.output),
        bound=math.hypot(HALF_STEP, exact.noise / norm if norm else 0.0) + BF16_HALF_STEP,
        device=str(x.device),
    )
