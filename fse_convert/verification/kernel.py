"""Level 3 of the proof: DeepGEMM's own MegaMoE kernel, on a GPU of compute capability 10 (SM100), routing masked.

With every token's experts set to -1 the kernel returns the shared expert alone, and its output is compared with level 2.
One GPU and one process are enough: for a group of one rank DeepGEMM allocates plain device memory, and it asks the group
for nothing but size, rank and a barrier (sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py, ``SymmBuffer``).

On SM90 MegaMoE takes no shared experts and another layout. Only DeepGEMM's helpers run there: its packing of scales, its
weight transform, and its FP8 matrix product over padded and unpadded weights. They can fail the check, but never pass it.

deep_gemm is imported only once a suitable GPU is found: without CUDA's libraries the import itself fails.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fse_convert.layout import megamoe, ue8m0
from fse_convert.verification.experts import GROUP, KernelLayout, Rows, SourceLayout
from fse_convert.verification.reference import (
    PAD_SCALE,
    PAD_WEIGHT,
    decode_scales,
    quantize_input,
    relative_l2,
    swiglu,
)

MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Where DeepGEMM may be, in vLLM's order: sgl-deep-gemm and upstream install the first, vLLM brings the second."""
FEATURES = (
    ("get_symm_buffer_for_mega_moe", "num_shared_experts"),
    ("fp8_fp4_mega_moe", "shared_l1_weights"),
    ("get_block_m_for_mega_moe", None),
    ("transform_weights_for_mega_moe", None),
)
MMA_TYPE = "fp8xfp4"
"""FP4 routed weights, as servers run it; the shared expert is FP8, in the layout that fp8xfp8 has too."""
EXPERTS, TOP_K = 8, 2
MAX_RELATIVE_L2 = 0.01
"""Against level 2. FP32 accumulation in another order gives 1e-4, one wrong 128x128 block scale 4e-2."""
TARGET_RELATIVE_L2 = 0.005

Status = Literal["ready", "helpers-only", "unavailable"]
Figures = dict[str, bool | int | float | str]
Pair = tuple[Tensor, Tensor]
"""A weight float8_e4m3fn ``[n, k]`` and its packed scale int32 ``[n, k / 128]``, MN-major (strides ``(1, n)``)."""


@dataclass(frozen=True)
class KernelProbe:
    """What is there to run on: ``ready`` (SM100 and DeepGEMM), ``helpers-only`` (SM90 and DeepGEMM) or ``unavailable``."""

    status: Status
    reason: str
    module_file: str | None
    version: str | None
    torch_version: str
    cuda_version: str | None
    device_name: str | None
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class KernelResult:
    """Level 3's answer. ``passed`` only when the fused kernel itself ran; ``figures`` hold what was measured."""

    status: Literal["passed", "failed", "not-run"]
    reason: str
    figures: Figures
    probe: KernelProbe


@dataclass
class _Findings:
    figures: Figures = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def compare(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        count = int((ours != theirs).sum())
        self.figures[f"{name}_differing"] = count
        if count:
            self.problems.append(f"{name}: {count} of {ours.numel()} elements differ")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _look_at_device(device: torch.device | None) -> tuple[str | None, tuple[int, int] | None, str]:
    """Name and capability of the device, or why there is none: a broken driver warns or raises, by its fault."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), ""
        except (RuntimeError, AssertionError, OSError) as error:
            return None, None, f"CUDA is broken: {_first_line(error)}"
    why = "; ".join(str(w.message).strip().splitlines()[0] for w in caught if str(w.message).strip())
    return None, None, f"torch sees no CUDA device{f' ({why})' if why else ''}"


def _import_deep_gemm() -> tuple[Any, str]:
    """Import the first DeepGEMM there is, as vLLM would; else say what each import raised."""
    troubles = []
    for name in MODULES:
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(name), ""
        except Exception as error:  # noqa: BLE001 - compiled code of others: OSError without CUDA, RuntimeError off its torch
            troubles.append(f"{name}: {_first_line(error)}")
    return None, f"no DeepGEMM can be imported ({'; '.join(troubles)})"


def _has(module: Any, function: str, parameter: str | None) -> bool:
    found = getattr(module, function, None)
    if found is None or parameter is None:
        return found is not None
    try:
        return parameter in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


def _judge(name: str, capability: tuple[int, int], module: Any) -> tuple[Status, str]:
    sm = f"{name} is SM{capability[0]}{capability[1]}"
    if capability[0] not in (9, 10):
        return "unavailable", f"needs an SM100 GPU: {sm}"
    if capability[0] == 9:
        return "helpers-only", f"needs an SM100 GPU: {sm}, where only DeepGEMM's helpers can be compared"
    missing = [f"{f}({p})" if p else f for f, p in FEATURES if not _has(module, f, p)]
    if missing:
        where = getattr(module, "__file__", None)
        return "unavailable", f"DeepGEMM at {where} has no fused shared expert: it lacks {', '.join(missing)}"
    return "ready", f"{sm}, with DeepGEMM {getattr(module, '__version__', 'of unknown version')}"


def _find(device: torch.device | None) -> tuple[KernelProbe, Any]:
    name, capability, trouble = _look_at_device(device)
    module = None
    status: Status
    if capability and capability[0] in (9, 10):
        module, trouble = _import_deep_gemm()
    if trouble or name is None or capability is None:
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        status, reason = "unavailable", f"needs an SM100 GPU and DeepGEMM: {trouble}; {versions}"
    else:
        status, reason = _judge(name, capability, module)
    file, version = getattr(module, "__file__", None), getattr(module, "__version__", None)
    found = KernelProbe(status, reason, file, version, torch.__version__, torch.version.cuda, name, capability)
    return found, module


def probe(device: torch.device | None = None) -> KernelProbe:
    """Find out whether the fused kernel can run on ``device`` (the current CUDA device by default); raises nothing.

    Features are found by signature, not by package name or version: four packages install a module ``deep_gemm``, and
    only some have shared experts (DeepGEMM >= 2.6, sgl-deep-gemm >= 0.1.6).
    """
    return _find(device)[0]


def check_kernel(
    kernel: KernelLayout,
    hidden_states: Tensor,
    reference: Tensor,
    *,
    source: SourceLayout | None = None,
    shared_experts: int = 1,
    limit: float | None = None,
    device: torch.device | None = None,
) -> KernelResult:
    """Run the fused kernel on the converted bytes and compare it with level 2.

    ``hidden_states`` BF16 ``[t, hidden]``; ``reference`` BF16 ``[t, hidden]``, `fused_expert`'s answer to them under the
    same ``limit``. With ``source``, DeepGEMM's own transform of the padded source must also give the same bytes, and the
    unpadded source must give the same output bits where the installed contract takes its width. ``shared_experts``: how
    many experts the width holds. ``device``: the current CUDA device by default.

    What DeepGEMM raises (no nvcc for its JIT compiler, a rejected shape) makes the result ``not-run`` with that reason.
    Raises ValueError when the width does not hold ``shared_experts`` experts in multiples of 128.
    """
    if shared_experts < 1 or kernel.width % (128 * shared_experts):
        raise ValueError(f"width {kernel.width} does not hold {shared_experts} experts in multiples of 128")
    found, module = _find(device)
    if found.status == "unavailable":
        return KernelResult("not-run", found.reason, {}, found)
    where = device or torch.device("cuda")
    findings = _Findings()
    kernel, source = kernel.to(where), source.to(where) if source else None
    x, reference = hidden_states.to(where), reference.to(where)
    try:
        if source:
            _check_transform(module, kernel, source, findings)
        if found.status == "ready":
            _check_fused(module, kernel, x, reference, shared_experts, limit, findings)
            if source:
                _check_unpadded(module, kernel, source, x, shared_experts, limit, findings)
        elif source:
            _check_packing(module, kernel, source, findings)
            _check_gemm(module, kernel, source, x, limit, findings)
    except Exception as error:  # noqa: BLE001 - whatever compiled code and its JIT raise must not read as a verdict
        raised = f"DeepGEMM raised {_first_line(error)}"
        if not findings.problems:
            return KernelResult("not-run", raised, findings.figures, found)
        findings.problems.append(raised)
    return _conclude(findings, found)


def _conclude(findings: _Findings, found: KernelProbe) -> KernelResult:
    if findings.problems:
        return KernelResult("failed", "; ".join(findings.problems), findings.figures, found)
    if found.status == "ready":
        reason = f"the fused kernel agrees, relative L2 {findings.figures['relative_l2']:.2g}"
        return KernelResult("passed", reason, findings.figures, found)
    return KernelResult("not-run", found.reason, findings.figures, found)


class _OneRank:
    """All that DeepGEMM asks of a process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def barrier(self) -> None:
        return None


def shared_scale_rows(tokens: int, block_m: int) -> Tensor:
    """Give the row of ``shared_l1_acts_sf`` in which the kernel looks for each token's scales: int64 ``[tokens]``.

    Rule: DeepGEMM 2.8.2 tests/test_mega_moe.py, ``_to_shared_mega_moe_sf_layout``; vLLM 0.33
    model_executor/layers/fused_moe/prepare_megamoe.py, ``_shared_sf_row``.
    """
    t = torch.arange(tokens)
    m = t % block_m
    return (t // block_m) * (-(-block_m // 128) * 128) + (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32


def _idle_experts(hidden: int, width: int, device: torch.device) -> tuple[Pair, Pair]:
    """Routed experts that no token goes to: FP4 zeros under unit scales."""

    def idle(n: int, k: int) -> Pair:
        weight = torch.zeros(EXPERTS, n, k // 2, dtype=torch.int8, device=device)
        return weight, torch.full((EXPERTS, k // 128, n), 0x7F7F7F7F, dtype=torch.int32, device=device).transpose(1, 2)

    return idle(2 * width, hidden), idle(hidden, width)


def _run(module: Any, l1: Pair, l2: Pair, x: Tensor, shared_experts: int, limit: float | None) -> Tensor:
    """Call the kernel for the shared expert alone: BF16 ``[t, hidden]``, NaN wherever it wrote nothing."""
    tokens, hidden = x.shape
    width = l2[0].shape[1] // shared_experts
    codes, scale = quantize_input(x)
    packed = scale.view(torch.int32)
    buffer = module.get_symm_buffer_for_mega_moe(
        _OneRank(), EXPERTS, tokens, TOP_K, hidden, width, num_shared_experts=shared_experts, mma_type=MMA_TYPE
    )
    capacity = buffer.num_max_tokens_per_rank
    block_m = module.get_block_m_for_mega_moe(1, EXPERTS, capacity, tokens, TOP_K, MMA_TYPE)
    buffer.x[:tokens].view(torch.uint8).copy_(codes)
    buffer.x_sf[:tokens].copy_(packed)
    buffer.topk_idx[:tokens].fill_(-1)
    buffer.topk_weights[:tokens].zero_()
    buffer.shared_l1_acts_sf[shared_scale_rows(tokens, block_m).to(x.device)] = packed
    y = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16, device=x.device)
    routed_l1, routed_l2 = _idle_experts(hidden, width, x.device)
    module.fp8_fp4_mega_moe(y, routed_l1, routed_l2, buffer, l1, l2, activation_clamp=limit, fast_math=False)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    buffer.destroy()
    return y


def _as_kernel_reads(kernel: KernelLayout) -> tuple[Pair, Pair]:
    return (
        (kernel.l1_weight.view(torch.float8_e4m3fn), kernel.l1_scale.T),
        (kernel.l2_weight.view(torch.float8_e4m3fn), kernel.l2_scale.T),
    )


def _check_fused(
    module: Any,
    kernel: KernelLayout,
    x: Tensor,
    reference: Tensor,
    shared_experts: int,
    limit: float | None,
    findings: _Findings,
) -> None:
    y = _run(module, *_as_kernel_reads(kernel), x, shared_experts, limit)
    error = relative_l2(y, reference)
    findings.figures |= {"relative_l2": error, "within_target": error <= TARGET_RELATIVE_L2}
    if not error <= MAX_RELATIVE_L2:  # NaN included
        findings.problems.append(f"relative L2 {error:.3g} against level 2, more than {MAX_RELATIVE_L2}")


def _padded(source: SourceLayout, width: int) -> tuple[Rows, Rows]:
    """Rows of gate then up, and of down, zero-padded to ``width`` channels, in the natural order."""
    s, extra = source.width, width - source.width

    def grow(rows: Rows, n: int, k: int) -> Rows:
        pad = torch.nn.functional.pad
        return pad(rows[0], (0, k, 0, n), value=PAD_WEIGHT), pad(rows[1], (0, k // GROUP, 0, n), value=PAD_SCALE)

    gate, up = (grow(read(0, s), extra, 0) for read in (source.gate_rows, source.up_rows))
    l1 = torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1]))
    return l1, grow(source.down_rows(0, source.hidden), 0, extra)


def _transform(module: Any, l1: Rows, l2: Rows) -> tuple[Pair, Pair]:
    """Let DeepGEMM make its layout of natural rows; upstream's transform wants a leading expert axis, the forks allow it."""
    l1_3d, l2_3d = ((codes.view(torch.float8_e4m3fn)[None], megamoe.pack(scale).T[None]) for codes, scale in (l1, l2))
    (l1_w, l1_sf), (l2_w, l2_sf) = module.transform_weights_for_mega_moe(l1_3d, l2_3d)
    return (l1_w[0], l1_sf[0]), (l2_w[0], l2_sf[0])


def _check_transform(module: Any, kernel: KernelLayout, source: SourceLayout, findings: _Findings) -> None:
    if not _has(module, "transform_weights_for_mega_moe", None):
        findings.figures["transform"] = "not run: this DeepGEMM has none"
        return
    (l1_w, l1_sf), (l2_w, l2_sf) = _transform(module, *_padded(source, kernel.width))
    findings.compare("transform_l1_weight", kernel.l1_weight, l1_w.view(torch.uint8))
    findings.compare("transform_l1_scale", kernel.l1_scale, l1_sf.T)
    findings.compare("transform_l2_weight", kernel.l2_weight, l2_w.view(torch.uint8))
    findings.compare("transform_l2_scale", kernel.l2_scale, l2_sf.T)


def _check_unpadded(
    module: Any,
    kernel: KernelLayout,
    source: SourceLayout,
    x: Tensor,
    shared_experts: int,
    limit: float | None,
    findings: _Findings,
) -> None:
    """Demand the same output bits of the padded and the unpadded expert, where this DeepGEMM takes the unpadded one."""
    if source.width == kernel.width or source.width % (128 * shared_experts):
        same = source.width == kernel.width
        why = "nothing was padded" if same else f"width {source.width} is no multiple of 128 per expert"
        findings.figures["unpadded"] = f"not run: {why}"
        return
    try:
        unpadded = _run(module, *_transform(module, *_padded(source, source.width)), x, shared_experts, limit)
    except Exception as error:  # noqa: BLE001 - the megamoe-512 contract rejects such widths, each version in its own way
        findings.figures["unpadded"] = f"not run: width {source.width} is refused: {_first_line(error)}"
        return
    padded = _run(module, *_as_kernel_reads(kernel), x, shared_experts, limit)
    findings.compare("unpadded_output", padded.view(torch.int16), unpadded.view(torch.int16))


def _check_packing(module: Any, kernel: KernelLayout, source: SourceLayout, findings: _Findings) -> None:
    """Compare DeepGEMM's packing of FP32 scales on the device with ours of bytes."""
    pack = getattr(module, "get_mn_major_tma_aligned_packed_ue8m0_tensor", None)
    if pack is None:
        findings.figures["packing"] = "not run: this DeepGEMM has no packing function"
        return
    for name, (_, scale) in zip(("l1", "l2"), _padded(source, kernel.width), strict=True):
        if bool(((scale == 0) | (scale == ue8m0.NAN)).any()):  # such FP32 scales trap on the device
            findings.figures[f"packing_{name}"] = "not run: scale bytes 0x00 or 0xFF have no normal FP32 value"
            continue
        findings.compare(f"packing_{name}", megamoe.pack(scale).T, pack(ue8m0.to_fp32(scale)))


def _check_gemm(
    module: Any, kernel: KernelLayout, source: SourceLayout, x: Tensor, limit: float | None, findings: _Findings
) -> None:
    """Demand the same bits of DeepGEMM's FP8 product over padded (kernel bytes) and unpadded (source) weights."""
    if not hasattr(module, "fp8_gemm_nt") or source.block != (128, 128) or source.width % 128 or source.hidden % 128:
        findings.figures["gemm"] = "not run: on SM90 it takes whole 128x128 blocks only"
        return
    s, outputs = source.width, []
    for weights in (kernel, source):
        width = weights.width
        gate, up, down = (weights.gate_rows(0, width), weights.up_rows(0, width), weights.down_rows(0, weights.hidden))
        l1 = _gemm(module, x, (torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1]))))
        activation = swiglu(l1[:, :width].contiguous(), l1[:, width:].contiguous(), limit).bfloat16()
        outputs.append((l1[:, :s], l1[:, width : width + s], _gemm(module, activation, down)))
    for name, ours, theirs in zip(("gemm_gate", "gemm_up", "gemm_down"), *outputs, strict=True):
        findings.compare(name, ours, theirs)


def _gemm(module: Any, x: Tensor, rows: Rows) -> Tensor:
    """Multiply with FP32 scales: per token and 128 columns on the left, per 128x128 block on the right."""
    codes, scale = quantize_input(x, 128)
    y = torch.empty(len(x), len(rows[0]), dtype=torch.bfloat16, device=x.device)
    left = codes.view(torch.float8_e4m3fn), decode_scales(scale).float()
    right = rows[0].view(torch.float8_e4m3fn), decode_scales(rows[1][::128, :: 128 // GROUP]).float().contiguous()
    module.fp8_gemm_nt(left, right, y)
    return y
