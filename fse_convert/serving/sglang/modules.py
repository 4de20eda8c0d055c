"""What the SGLang plugin does to modules: find them in a checkpoint, compare, free, and keep others from reading what is freed.

Needs torch, not SGLang: every function takes the modules as they are. Sources: paths below ``sglang/srt/`` of release 0.5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from fse_convert.layout.sizes import GROUP
from fse_convert.serving.sidecar import KernelShared, refuse

if TYPE_CHECKING:
    from torch import Tensor

NAME = "fse-convert"
"""Of the plugin, in ``SGLANG_PLUGINS``, and of the distribution."""
SWITCH = "FSE_CONVERT_SGLANG"
"""Environment variable: ``off`` leaves SGLang as it is."""
KEEP = f"{SWITCH}=off keeps the originals"
UNPLACED = f"serve without the plugin: {KEEP}"
CAP = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
FUSE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS"
SEALED = "_fse_convert_freed"
LINEAR = ("weight", "weight_scale_inv", "weight_scale_inv_swizzled", "weight_scale_inv_deepgemm", "weight_scale_inv_shuffled")
"""Tensors of a shared expert's linear that only its own forward reads (layers/quantization/fp8.py:857-1110)."""
ROUTED_SCALES = ("w13_weight_scale_inv", "w2_weight_scale_inv")
UTCCP_SCALES = ("mega_w13_weight_scale_utccp", "mega_w2_weight_scale_utccp")
"""The kernel's copies of the routed scales; 0.5.23 registers them, so that EPLB moves them (layers/moe/mega_moe.py:692-701)."""
ROWS_AT_ONCE = 32
VALUE_TOLERANCE = 1e-3
"""Of the largest value in 32 rows. Requantising blocks below 1e-4 changes values by less, another weight by far more."""

PREFIXES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"model\.layers\.(\d+)\.mlp\.shared_experts\.gate_up_proj"), "layers.{}.ffn.experts"),
    (re.compile(r"stages\.(\d+)\.mlp\.shared_experts\.gate_up_proj"), "mtp.{}.ffn.experts"),
    (re.compile(r"mtp\.(\d+)\.mlp\.shared_experts\.gate_up_proj"), "mtp.{}.ffn.experts"),
)
"""Module prefix -> checkpoint prefix (models/deepseek_v4.py:3830, deepseek_v4_dspark.py:792 and 1192, deepseek_v4_nextn.py:100)."""
NEXTN = "model.decoder.mlp.shared_experts.gate_up_proj"
"""The one layer of a NextN draft, whatever its number in the checkpoint (models/deepseek_v4_nextn.py:102)."""


def checkpoint_prefix(module_prefix: str, layers: Iterable[str]) -> str:
    """Name a module's layer as the checkpoint does: ``model.layers.3.mlp.shared_experts.gate_up_proj`` -> ``layers.3.ffn.experts``.

    ``layers``: those in kernel layout. Raises NotServable for a prefix that is not known, a layer that is not there, or a
    NextN draft of a checkpoint with more than one MTP layer.
    """
    names = list(layers)
    if module_prefix == NEXTN:
        drafts = [n for n in names if n.startswith("mtp.")]
        if len(drafts) == 1:
            return drafts[0]
        message = f"a NextN draft needs exactly one MTP layer in kernel layout, fse/ has {drafts}"
        refuse("prefix-ambiguous", message, module_prefix, UNPLACED)
    matches = ((pattern.fullmatch(module_prefix), template) for pattern, template in PREFIXES)
    name = next((template.format(match[1]) for match, template in matches if match), None)
    if name is None:
        refuse("prefix-unknown", "the plugin does not know which layer of the checkpoint this is", module_prefix, UNPLACED)
    if name not in names:
        refuse("prefix-missing", f"{name} is not in kernel layout", module_prefix, UNPLACED)
    return name


def check_shapes(shared_experts: Any, hidden: int, width: int, target: str) -> None:
    """Refuse a module that is not what the sidecar holds: gate and up ``[2 * width, hidden]``, down ``[hidden, width]``.

    Raises NotServable, with the target to convert for.
    """
    actual = (tuple(shared_experts.gate_up_proj.weight.shape), tuple(shared_experts.down_proj.weight.shape))
    expected = ((2 * width, hidden), (hidden, width))
    if actual != expected:
        message = f"the model's shared experts are {actual[0]} and {actual[1]}, fse/ holds {expected[0]} and {expected[1]}"
        hint = f"serve the config.json that was written beside fse/, or convert again with --target {target}"
        refuse("width-mismatch", message, shared_experts.gate_up_proj.prefix, hint)


def check_contents(shared_experts: Any, shared: KernelShared) -> None:
    """Refuse a sidecar that holds other weights than those just loaded: stale, of another layer, or of another checkpoint.

    ``shared``: on the modules' device. Weights are compared byte for byte, scales one by one; where SGLang has requantised
    128x128 blocks (packed scales, layers/quantization/fp8_utils.py:2147), the values. Weights shuffled for FlashInfer are not
    compared, nor their scales. Raises NotServable.
    """
    import torch

    from fse_convert.layout import megamoe, ue8m0

    gate_up, down = shared_experts.gate_up_proj, shared_experts.down_proj
    if any(getattr(linear, "weight_scale_inv_shuffled", None) is not None for linear in (gate_up, down)):
        return
    # Views alone, since copies would add to the peak of loading. Rows in groups of 8, which alternate between gate and up in L1.
    h, s = shared.l2_weight.shape
    ours, theirs, ours_l2, theirs_l2 = (
        t.view(torch.uint8) for t in (shared.l1_weight, gate_up.weight.data, shared.l2_weight, down.weight.data)
    )
    l1, loaded = ours.view(-1, 2, megamoe.INTERLEAVE, h), theirs.view(2, -1, megamoe.INTERLEAVE, h)
    l2, loaded_l2 = (t.view(-1, megamoe.INTERLEAVE, s) for t in (ours_l2, theirs_l2))
    weights = ((loaded[0], l1[:, 0]), (loaded[1], l1[:, 1]), (loaded_l2, l2))
    scales = (*megamoe.l1_scale_inverse(shared.l1_scale.t()), megamoe.l2_scale_inverse(shared.l2_scale.t()))
    loaded_scales = (*_row_scales(gate_up, 2 * s, h).chunk(2), _row_scales(down, h, s))
    same = _same_values if down.weight_scale_inv.dtype == torch.int32 else _same_bits
    if not all(same(*w, a, ue8m0.to_fp32(b)) for w, a, b in zip(weights, loaded_scales, scales, strict=True)):
        message = "fse/ holds other weights than the shards beside it"
        hint = f"convert the checkpoint again after every change to its weights; {KEEP}"
        refuse("sidecar-stale", message, gate_up.prefix, hint)


def _row_scales(linear: Any, n: int, k: int) -> Tensor:
    """Return the loaded scales of a linear, FP32 ``[n, k / 32]``.

    They are per block, FP32 or E8M0 bytes, as SGLang's builder of the kernel's tensors takes them (layers/moe/mega_moe.py:732),
    or int32 with a byte per row and 128 columns of K.
    """
    import torch

    from fse_convert.layout import ue8m0

    loaded = linear.weight_scale_inv.data
    if loaded.dtype == torch.int32:
        shifts = torch.tensor([0, 8, 16, 24], device=loaded.device, dtype=torch.int32)
        loaded, rows, columns = ((loaded[:, :, None] >> shifts) & 0xFF).flatten(1).to(torch.uint8), 1, 128
    else:
        rows, columns = linear.quant_method.quant_config.weight_block_size
    values = ue8m0.to_fp32(loaded) if loaded.dtype in {torch.uint8, torch.float8_e8m0fnu} else loaded.float()
    return values.repeat_interleave(rows, 0).repeat_interleave(columns // GROUP, 1)[:n, : k // GROUP]


def _same_bits(loaded: Tensor, ours: Tensor, loaded_scale: Tensor, scale: Tensor) -> bool:
    import torch

    return torch.equal(loaded, ours) and torch.equal(loaded_scale, scale)


def _same_values(loaded: Tensor, ours: Tensor, loaded_scale: Tensor, scale: Tensor) -> bool:
    """Compare the values of weights that SGLang has requantised, a few rows at a time.

    Weights: uint8 ``[n / 8, 8, k]``; scales: FP32 ``[n, k / 32]``.
    """
    import torch

    def values(weight: Tensor, scales: Tensor, row: int) -> Tensor:
        codes = weight[row // weight.shape[1] : (row + ROWS_AT_ONCE) // weight.shape[1]].flatten(0, 1)
        factors = scales[row : row + ROWS_AT_ONCE]
        return codes.view(torch.float8_e4m3fn).float() * factors.repeat_interleave(codes.shape[1] // factors.shape[1], 1)

    for row in range(0, scale.shape[0], ROWS_AT_ONCE):
        theirs, right = values(loaded, loaded_scale, row), values(ours, scale, row)
        if not (theirs - right).abs().max() <= VALUE_TOLERANCE * right.abs().max() + 1e-12:
            return False
    return True


def to_device(shared: KernelShared, device: Any) -> KernelShared:
    """Copy a layer's tensors to a device. Scales keep their MN-major strides ``(1, n)``: they move as stored, transposed after."""
    l1, l1_scale, l2, l2_scale = shared
    moved = (l1.to(device, copy=True), l1_scale.t().to(device, copy=True).t())
    return type(shared)(*moved, l2.to(device, copy=True), l2_scale.t().to(device, copy=True).t())


def free(module: Any, names: Iterable[str], kept: Iterable[Tensor] = ()) -> int:
    """Replace tensors of a module by empty ones of the same type; return the bytes that this gives back.

    ``kept``: tensors that may share a storage with them, so that it stays. Names that the module lacks are skipped.
    """
    import torch

    storages = {t.untyped_storage().data_ptr() for t in kept}
    freed = 0
    for name in names:
        tensor = getattr(module, name, None)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            if tensor.untyped_storage().data_ptr() not in storages:
                freed += tensor.numel() * tensor.element_size()
            tensor.data = tensor.new_empty(0)
    return freed


def free_shared(shared_experts: Any, kept: Iterable[Tensor]) -> int:
    """Free a shared MLP, seal it, and return the bytes of its second copies: all but the weight of down, held once either way.

    ``kept``: the kernel's tensors, one of which may be the MLP's own.
    """
    kept = tuple(kept)
    gate_up, down = shared_experts.gate_up_proj, shared_experts.down_proj
    freed = free(gate_up, LINEAR, kept) + free(down, LINEAR[1:], kept)
    free(down, LINEAR[:1])
    for linear in (gate_up, down):
        if getattr(linear, "block_fp8_mxfp8_ready", False):
            linear.block_fp8_mxfp8_ready = False  # else FlashInfer's autotuner would run it (models/deepseek_v4.py:4746)
    seal(shared_experts, gate_up.prefix.removesuffix(".gate_up_proj"))
    return freed


def has_routed_copies(experts: Any) -> bool:
    """Tell whether the kernel has its own copies of the routed scales, so that only the unfused path reads the originals.

    Only for MXFP4 weights with FP8 activations on SM100, where the kernel's tuples hold the registered UTCCP parameters
    (0.5.23 layers/moe/mega_moe.py:566-582, 670-701). SM90, ROCm, NVFP4, FP4 activations and earlier releases have none.
    """
    if getattr(experts, "_mega_moe_nvfp4", False) or getattr(experts, "_mega_moe_w4a4", False):
        return False
    pairs = [getattr(experts, name, None) for name in ("mega_l1_weights", "mega_l2_weights")]
    copies = [getattr(experts, name, None) for name in UTCCP_SCALES]
    return all(
        pair is not None and copy is not None and pair[1].data_ptr() == copy.data_ptr()
        for pair, copy in zip(pairs, copies, strict=True)
    )


def free_routed(experts: Any) -> int:
    """Free the routed scales, seal the module, and return the bytes; see `has_routed_copies`."""
    freed = free(experts, ROUTED_SCALES, (experts.mega_l1_weights[1], experts.mega_l2_weights[1]))
    seal(experts, f"experts of layer {getattr(experts, 'layer_id', '?')}")
    return freed


def seal(module: Any, name: str) -> None:
    """Make whatever would still read a freed module fail with what to change.

    Its forward, the way past MegaMoE, raises. SGLang's own marks refuse online weight updates and exports
    (model_executor/model_runner_components/weight_updater.py:73, weight_exporter.py:29).
    """
    setattr(module, SEALED, name)
    module._derived_weight_cache_error = reason("online weight updates")
    module._weight_export_error = reason("weight exports")
    for method in ("forward", "forward_impl", "run_moe_core"):
        if hasattr(module, method):
            setattr(module, method, _raising(name))


def reason(what: str) -> str:
    """Say why something that reads all weights is refused."""
    return f"fse-convert: {what} read weights that were freed, because MegaMoE has its own copy. Restart SGLang: {KEEP}"


def _raising(name: str) -> Callable[..., NoReturn]:
    def forward(*_args: object, **_kwargs: object) -> NoReturn:
        cap = os.environ.get(CAP, "its default")
        raise RuntimeError(
            f"fse-convert: {name} was asked for outside of MegaMoE, and its own weights are freed. A batch has more tokens than "
            f"{CAP} ({cap}): raise it, or lower --chunked-prefill-size or --max-running-requests; {KEEP}"
        )

    return forward


def sealed_modules(model: Any) -> list[str]:
    """Name the modules of a model that were freed."""
    return [name for m in model.modules() if (name := getattr(m, SEALED, None))]


def fused_layers(model: Any) -> Mapping[str, bool]:
    """List every MoE layer that MegaMoE runs and that has a shared MLP, and whether it is fused (models/deepseek_v2.py:858-860).

    Shared experts that SGLang routes as one more expert (slot fusion) have no MLP of their own.
    """
    layers: dict[str, bool] = {}
    for name, module in model.named_modules():
        has_mlp = getattr(module, "shared_experts", None) is not None and hasattr(module, "mega_shared_l1_weights")
        if has_mlp and getattr(module.experts, "_mega_moe_weights_built", False):
            layers[name] = module.mega_shared_l1_weights is not None
    return layers
