"""Which experts of a layer a server leaves unquantised by the list of an FP8 config: each server matches names in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fse_convert.model.moe import LayerKind, MoELayer
from fse_convert.model.quantization import READ_BY
from fse_convert.servers.aiter.patterns import VerdictError, fp8_skipped
from fse_convert.servers.aiter.quant_compatible import PROJECTIONS, AiterQuestion
from fse_convert.servers.aiter.question import AiterTarget, ask_aiter, drafter
from fse_convert.servers.aiter.vllm_config import RELEASES
from fse_convert.servers.subject import Subject

SGLANG_SHARDS = ("gate_proj", "up_proj", "down_proj")
LeftOut = tuple[bool, bool]
"""Whether the routed experts, and whether any projection of the shared ones, are built unquantised."""


def vllm_left_out(about: Subject, layer: MoELayer, release: str, question: AiterQuestion | None = None) -> LeftOut | None:
    """Match a layer's modules as vLLM does; None where its module names are not known.

    Its classes for NVIDIA and AMD rename a config's modules alike (0.33 models/deepseek_v4/nvidia/model.py:1226, amd/model.py).
    """
    asked = question or ask_aiter(about.config, about.quant_config, about.quantization, AiterTarget("", RELEASES[release]))
    if not isinstance(asked, AiterQuestion) or asked.quant.instead:
        return None
    block, k = asked.family.block.format(index=layer.index), layer.index
    if layer.kind is LayerKind.MTP:
        if asked.decoder_layers is None:
            return None
        block = asked.family.mtp_block.format(k=k, next=asked.decoder_layers + k)
        asked = drafter(asked, k, asked.decoder_layers)
    entries = asked.renames.apply_all(asked.quant.ignored)
    try:
        shared = [fp8_skipped(f"{block}.{asked.family.shared}.{p}", entries, asked.packed) for p in PROJECTIONS]
    except VerdictError:  # some shards of a projection: vLLM raises
        shared = [True]
    return fp8_skipped(f"{block}.experts", entries, asked.packed), any(shared)


def sglang_left_out(quantization: Mapping[str, Any], layer: MoELayer) -> LeftOut | None:
    """Match a layer's modules as SGLang does for DeepSeek-V4, whose entries it does not rename; None for a drafter's later layers.

    0.5.21 to 0.5.23 layers/quantization/utils.py (``is_layer_skipped``, ``_module_path_match``), fp8.py (``from_config``, which
    takes the first of two keys that is there).
    """
    key = next((key for key in READ_BY["fp8"] if key in quantization), "")
    entries = [entry for entry in quantization.get(key) or () if isinstance(entry, str)]
    mtp = layer.kind is LayerKind.MTP
    if mtp and layer.index:
        return None
    block = "model.decoder.mlp" if mtp else f"model.layers.{layer.index}.mlp"
    bare = [entry.removeprefix("model.") for entry in entries]
    both = [*bare, *(f"model.{entry}" for entry in bare)]
    shared = any(_sglang_skips(f"{block}.shared_experts.{p}", both) for p in SGLANG_SHARDS)
    return _sglang_skips(f"{block}.experts", both), shared


def _sglang_skips(module: str, entries: Sequence[str]) -> bool:
    """Match a module by its path; experts as a part of an entry too, but not gate and up, which are one fused layer there."""
    in_part = not module.endswith(("gate_proj", "up_proj"))
    return any(
        f".{entry.rstrip('.')}." in f".{module}." or (in_part and "experts" in entry and module in entry) for entry in entries
    )
