"""Level 3 of the proof: DeepGEMM's own MegaMoE kernel, on a GPU of compute capability 10 (SM100), routing masked.

With every token's experts set to -1 the kernel returns the shared expert alone, and its output is compared with level 2.
One GPU and one process are enough: for a group of one rank DeepGEMM allocates plain device memory, and it asks the group
for nothing but size, rank and a barrier (sgl-deep-gemm 0.2.5, deep_gemm/mega/__init__.py, ``SymmBuffer``).

On SM90 MegaMoE takes no shared experts and another layout, so there is nothing to run.

deep_gemm is imported only once a suitable GPU is found: without CUDA's libraries the import itself fails.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from fse_convert.model.moe import Role
from fse_convert.verification.addresses import GROUP, KernelLayout, Rows
from fse_convert.verification.code_of_one import E8M0_ONE
from fse_convert.verification.experts import StoredExpert
from fse_convert.verification.numerics import quantize_input, relative_l2, trace_expert

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

Figures = dict[str, bool | int | float | str]
Pair = tuple[Tensor, Tensor]
"""A weight float8_e4m3fn ``[n, k]`` and its packed scale int32 ``[n, k / 128]``, MN-major (strides ``(1, n)``)."""


@dataclass(frozen=True)
class KernelProbe:
    """What there is to run on: ``ready`` means an SM100 GPU and a DeepGEMM with shared experts. ``version``: DeepGEMM's."""

    status: Literal["ready", "unavailable"]
    reason: str
    version: str | None
    device_name: str | None


@dataclass(frozen=True)
class KernelResult:
    """Level 3's answer. ``passed`` only when the fused kernel itself ran; ``figures`` hold what was measured."""

    status: Literal["passed", "failed", "not-run"]
    reason: str
    figures: Figures


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def describe_device() -> tuple[str | None, tuple[int, int] | None, str]:
    """Return name and capability of the CUDA device, or why there is none: a broken driver warns or raises, by its fault."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return torch.cuda.get_device_name(), torch.cuda.get_device_capability(), ""
        except (RuntimeError, AssertionError, OSError) as error:
            return None, None, f"CUDA is broken: {_first_line(error)}"
    why = "; ".join(str(w.message).strip().splitlines()[0] for w in caught if str(w.message).strip())
    return None, None, f"torch sees no CUDA device{f' ({why})' if why else ''}"


def _import_deep_gemm() -> tuple[Any, str]:
    """Import the first DeepGEMM there is, as vLLM would; otherwise return what each import raised."""
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
    member = getattr(module, function, None)
    if member is None or parameter is None:
        return member is not None
    try:
        return parameter in inspect.signature(member).parameters
    except (TypeError, ValueError):
        return False


def _locate() -> tuple[KernelProbe, Any]:
    """Return what `probe` does, and the DeepGEMM module that was imported, if any."""
    name, capability, trouble = describe_device()
    sm = f"{name} is SM{capability[0]}{capability[1]}" if capability else ""
    if capability and capability[0] != 10:
        return KernelProbe("unavailable", f"needs an SM100 GPU: {sm}", None, name), None
    module, trouble = _import_deep_gemm() if capability else (None, trouble)
    version = getattr(module, "__version__", None)
    if module is None:
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        reason = f"needs an SM100 GPU and DeepGEMM: {trouble}; {versions}"
        return KernelProbe("unavailable", reason, version, name), None
    missing = [f"{f}({p})" if p else f for f, p in FEATURES if not _has(module, f, p)]
    if missing:
        where = getattr(module, "__file__", None)
        reason = f"DeepGEMM at {where} has no fused shared expert: it lacks {', '.join(missing)}"
        return KernelProbe("unavailable", reason, version, name), module
    return KernelProbe("ready", f"{sm}, with DeepGEMM {version or 'of unknown version'}", version, name), module


def probe() -> KernelProbe:
    """Find out whether the fused kernel can run on the current CUDA device; raises nothing.

    Features are found by signature, not by package name or version: four packages install a module ``deep_gemm``, and
    only some have shared experts (DeepGEMM >= 2.6, sgl-deep-gemm >= 0.1.6).
    """
    return _locate()[0]


def check_kernel(
    kernel: KernelLayout, source: StoredExpert, x: Tensor, *, shared: int = 1, limit: float | None = None, device: str = "cuda"
) -> KernelResult:
    """Run the fused kernel on the converted bytes and compare it with level 2.

    ``x``: hidden states BF16 ``[t, hidden]``. ``shared``: how many experts the width holds. ``limit``: the model's SwiGLU
    limit. The output must be close to what `trace_expert` computes of the source; DeepGEMM's own transform of the padded
    source must give the same bytes, and the unpadded source the same output bits where the installed contract takes its width.

    What DeepGEMM raises (no nvcc for its JIT compiler, a rejected shape) makes the result ``not-run`` with that reason.
    """
    probed, module = _locate()
    if probed.status == "unavailable":
        return KernelResult("not-run", probed.reason, {})
    where = torch.device(device)
    check = _Check(module, shared, limit, kernel.to(where), source.to(where), x.to(where))
    reference = trace_expert(check.x, check.source, limit).y
    try:
        check.transform()
        check.output(reference)
        check.unpadded()
    except Exception as error:  # noqa: BLE001 - whatever compiled code and its JIT raise must not read as a verdict
        raised = f"DeepGEMM raised {_first_line(error)}"
        if not check.problems:
            return KernelResult("not-run", raised, check.figures)
        check.problems.append(raised)
    if check.problems:
        return KernelResult("failed", "; ".join(check.problems), check.figures)
    return KernelResult("passed", f"the fused kernel agrees, relative L2 {check.figures['relative_l2']:.2g}", check.figures)


ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0, barrier=lambda: None)
"""All that DeepGEMM asks of a process group of one."""


def shared_scale_rows(tokens: int, block_m: int) -> Tensor:
    """Return the row of ``shared_l1_acts_sf`` in which the kernel looks for each token's scales: int64 ``[tokens]``.

    Rule: DeepGEMM 2.8.2 tests/test_mega_moe.py, ``_to_shared_mega_moe_sf_layout``; vLLM 0.33
    model_executor/layers/fused_moe/prepare_megamoe.py, ``_shared_sf_row``.
    """
    t = torch.arange(tokens)
    m = t % block_m
    return (t // block_m) * (-(-block_m // 128) * 128) + (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32


def _idle_experts(hidden: int, width: int, device: torch.device) -> tuple[Pair, Pair]:
    """Make routed experts that no token goes to: FP4 zeros under unit scales."""

    def idle(n: int, k: int) -> Pair:
        weight = torch.zeros(EXPERTS, n, k // 2, dtype=torch.int8, device=device)
        return weight, torch.full((EXPERTS, k // 128, n), 0x7F7F7F7F, dtype=torch.int32, device=device).transpose(1, 2)

    return idle(2 * width, hidden), idle(hidden, width)


def pad_source(source: StoredExpert, width: int) -> tuple[Rows, Rows]:
    """Return rows of gate then up, and of down, zero-padded to ``width`` channels, in the natural order."""
    extra = width - source.width

    def grow(rows: Rows, n: int, k: int) -> Rows:
        pad = torch.nn.functional.pad
        return pad(rows[0], (0, k, 0, n)), pad(rows[1], (0, k // GROUP, 0, n), value=E8M0_ONE)

    gate, up = (grow(source.rows(role, 0, source.width), extra, 0) for role in (Role.GATE, Role.UP))
    l1 = torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1]))
    return l1, grow(source.rows(Role.DOWN, 0, source.hidden), 0, extra)


def deep_gemm_layout(module: Any, l1: Rows, l2: Rows) -> tuple[Pair, Pair]:
    """Let DeepGEMM make its layout of natural rows; upstream's transform wants a leading expert axis, the forks allow it."""
    l1_3d, l2_3d = (
        (codes.view(torch.float8_e4m3fn)[None], scale.view(torch.int32).T.contiguous().T[None]) for codes, scale in (l1, l2)
    )
    (l1_w, l1_sf), (l2_w, l2_sf) = module.transform_weights_for_mega_moe(l1_3d, l2_3d)
    return (l1_w[0], l1_sf[0]), (l2_w[0], l2_sf[0])


@dataclass
class _Check:
    """The checks of one shared expert, and what they measured; ``x`` BF16 ``[t, hidden]``."""

    module: Any
    shared: int
    limit: float | None
    kernel: KernelLayout
    source: StoredExpert
    x: Tensor
    figures: Figures = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def transform(self) -> None:
        """Require the bytes that DeepGEMM's own transform makes of the padded source."""
        kernel = self.kernel
        (l1_w, l1_sf), (l2_w, l2_sf) = deep_gemm_layout(self.module, *pad_source(self.source, kernel.width))
        self._compare("transform_l1_weight", kernel.l1_weight, l1_w.view(torch.uint8))
        self._compare("transform_l1_scale", kernel.l1_scale, l1_sf.T)
        self._compare("transform_l2_weight", kernel.l2_weight, l2_w.view(torch.uint8))
        self._compare("transform_l2_scale", kernel.l2_scale, l2_sf.T)

    def output(self, reference: Tensor) -> None:
        """Require an output close to level 2's."""
        error = relative_l2(self._run_padded(), reference)
        self.figures |= {"relative_l2": error, "within_target": error <= TARGET_RELATIVE_L2}
        if not error <= MAX_RELATIVE_L2:  # NaN included
            self.problems.append(f"relative L2 {error:.3g} against level 2, more than {MAX_RELATIVE_L2}")

    def unpadded(self) -> None:
        """Require the same output bits of the padded and the unpadded expert, where this DeepGEMM takes the unpadded one."""
        source = self.source
        if source.width == self.kernel.width:
            self.figures["unpadded"] = "not run: nothing was padded"
            return
        if source.width % (128 * self.shared):
            self.figures["unpadded"] = f"not run: width {source.width} is not a multiple of 128 per expert"
            return
        try:
            unpadded = self._run(*deep_gemm_layout(self.module, *pad_source(source, source.width)))
        except Exception as error:  # noqa: BLE001 - the megamoe-512 contract rejects such widths, each version in its own way
            self.figures["unpadded"] = f"not run: width {source.width} is refused: {_first_line(error)}"
            return
        self._compare("unpadded_output", self._run_padded().view(torch.int16), unpadded.view(torch.int16))

    def _compare(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        count = int((ours != theirs).sum())
        self.figures[f"{name}_differing"] = count
        if count:
            self.problems.append(f"{name}: {count} of {ours.numel()} elements differ")

    def _run_padded(self) -> Tensor:
        kernel = self.kernel
        l1 = kernel.l1_weight.view(torch.float8_e4m3fn), kernel.l1_scale.T
        return self._run(l1, (kernel.l2_weight.view(torch.float8_e4m3fn), kernel.l2_scale.T))

    def _run(self, l1: Pair, l2: Pair) -> Tensor:
        """Call the kernel for the shared expert alone: BF16 ``[t, hidden]``, NaN wherever it wrote nothing."""
        module, x, count = self.module, self.x, self.shared
        tokens, hidden = x.shape
        width = l2[0].shape[1] // count
        codes, scale = quantize_input(x)
        packed = scale.view(torch.int32)
        buffer = module.get_symm_buffer_for_mega_moe(
            ONE_RANK, EXPERTS, tokens, TOP_K, hidden, width, num_shared_experts=count, mma_type=MMA_TYPE
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
        module.fp8_fp4_mega_moe(y, routed_l1, routed_l2, buffer, l1, l2, activation_clamp=self.limit, fast_math=False)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        buffer.destroy()
        return y
