"""Online quantisation of shared experts: ``--quantization-config`` beside a quantised checkpoint, as of vLLM 0.32.

Quantisation keys are the strings that vLLM prints for its ``QuantKey`` values, with FP8 as gfx950 has it (e4m3fn).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fse_convert.servers.aiter.patterns import (
    Packed,
    PatternUnclearError,
    ServerError,
    listed,
    matches_by_shard,
    quark_layer_config,
)

MXFP4 = "QuantKey(u8,scale(u8,static,GroupShape(row=1, col=32)),symmetric)"
MXFP4_DYNAMIC = "QuantKey(u8,scale(u8,dynamic,GroupShape(row=1, col=32)),symmetric)"
MXFP8 = "QuantKey(f8e4m3fn,scale(u8,static,GroupShape(row=1, col=32)),symmetric)"
MXFP8_DYNAMIC = "QuantKey(f8e4m3fn,scale(u8,dynamic,GroupShape(row=1, col=32)),symmetric)"
FP8_TENSOR = "QuantKey(f8e4m3fn,scale(f32,static,per_tensor),symmetric)"
FP8_CHANNEL = "QuantKey(f8e4m3fn,scale(f32,static,per_channel),symmetric)"
FP8_BLOCK = "QuantKey(f8e4m3fn,scale(f32,static,GroupShape(row=128, col=128)),symmetric)"
FP8_BLOCK_E8M0 = "QuantKey(f8e4m3fn,scale(f8e8m0fnu,static,GroupShape(row=128, col=128)),symmetric)"
INT8_TENSOR = "QuantKey(i8,scale(f32,static,per_tensor),symmetric)"
INT8_CHANNEL = "QuantKey(i8,scale(f32,static,per_channel),symmetric)"
OTHER_ACTIVATION = "another"
"""Stands for every activation key but MXFP4's: nothing else can match an online MXFP4 projection."""

LINEAR = {
    "fp8_per_tensor": FP8_TENSOR,
    "fp8_per_block": FP8_BLOCK,
    "fp8_per_channel": FP8_CHANNEL,
    "mxfp8": MXFP8_DYNAMIC,
    "mxfp4": MXFP4,
}
"""Weight key of a linear layer by online shorthand (config/quantization.py ``_ONLINE_SHORTHANDS``)."""

MOE_ONLY = ("int8_per_channel_weight_only", "nvfp4_per_token")
"""Shorthands that say nothing about linear layers."""


@dataclass(frozen=True, slots=True)
class OnlineQuantization:
    """The part of ``--quantization-config`` that concerns linear layers.

    ``targets`` maps module patterns to shorthands; without it ``linear`` holds for every layer that ``ignore`` does not
    match.
    """

    targets: Mapping[str, str] | None = None
    linear: str | None = None
    ignore: tuple[str, ...] = ()


def online_weight_key(online: OnlineQuantization, name: str, packed: Packed) -> str | None:
    """Return the weight key that a linear layer is quantised to while loading, None where it is left as it is.

    ``resolve_quant_method_cls`` of quantization/online/base.py. Raises ServerError where vLLM raises.
    """
    ignored = listed(name, online.ignore, packed, globs=True)
    if online.targets is None:
        return None if ignored or online.linear is None else _shorthand_key(online.linear)
    pattern = _target(online.targets, name, packed)
    if ignored and pattern is not None:
        raise ServerError(
            "ValueError",
            f"Layer {name} matches both quantization_config.ignore and quantization_config.targets ({[pattern]}); a "
            "layer may not be referenced by both.",
        )
    if ignored or pattern is None:
        return None
    shorthand = online.targets[pattern]
    if shorthand in MOE_ONLY:
        raise ServerError(
            "ValueError",
            f"targets pattern {pattern} = {shorthand} does not define a QuantSpec for LinearBase layers (matched at {name}).",
        )
    return _shorthand_key(shorthand)


def _shorthand_key(shorthand: str) -> str:
    if shorthand not in LINEAR:
        raise PatternUnclearError(f"the online quantisation {shorthand!r} is not known")
    return LINEAR[shorthand]


def _target(targets: Mapping[str, str], name: str, packed: Packed) -> str | None:
    by_shard = matches_by_shard(name, list(targets), packed, globs=True)
    if not any(by_shard):
        return None
    if not all(by_shard):
        raise ServerError(
            "ValueError",
            f"Found unmatched shards for {name}: {by_shard}. vLLM requires all shards of a fused layer to match a target.",
        )
    if any(len(found) > 1 for found in by_shard):
        raise ServerError(
            "ValueError",
            f"Found multiple quantization_config.targets matches for the shards of {name}: {by_shard}. Each shard may "
            "match at most one target.",
        )
    patterns = [next(iter(found)) for found in by_shard]
    if len({targets[pattern] for pattern in patterns}) > 1:
        raise ServerError(
            "ValueError",
            f"Found different quantization_config.targets values for the shards of {name}: {patterns}. vLLM requires all "
            "shards of a fused layer to use the same target.",
        )
    return patterns[0]


def quark_routed_keys(
    quark: Mapping[str, Any], exclude: Sequence[str], configs: Mapping[str, Any], name: str, packed: Packed, *, row_scales: bool
) -> tuple[str | None, str | None]:
    """Return weight and activation key of the routed experts of a Quark checkpoint.

    ``exclude`` and ``configs`` (``layer_quant_config``) are in the server's names.
    ``get_quant_method_target`` of quantization/quark/quark.py for RoutedExperts, where one excluded expert excludes all,
    and ``get_moe_method_target`` of quark_moe.py. Weight key None: not quantised. ``row_scales``: MXFP8 experts need a
    scale per row (since 0.33).
    """
    children = (entry for entry in exclude if not entry.startswith("re:"))
    if any(entry == name or entry.startswith(f"{name}.") for entry in children) or listed(name, exclude, packed):
        return None, None
    if quark.get("layer_type_quant_config") is None:
        raise ServerError("AttributeError", "'NoneType' object has no attribute 'get'")
    config = quark_layer_config(name, configs)
    if config is None:
        config = quark.get("global_quant_config")
    if not isinstance(config, Mapping):
        raise PatternUnclearError(f"the Quark scheme of {name} is not an object")
    if config.get("output_tensors") or config.get("bias"):
        raise ServerError("NotImplementedError", "Currently, Quark models with output_tensors and bias quantized are not supported")
    weight = _single(config.get("weight"))
    keys = _scheme_keys(weight, _single(config.get("input_tensors")))
    if keys is None or weight is None:
        raise ServerError("RuntimeError", "Unsupported FusedMoe scheme")
    if row_scales and keys[0] == MXFP8 and weight.get("qscheme") == "per_block":
        raise ServerError(
            "NotImplementedError",
            "Quark MXFP8 MoE experts support only the 1-D per_group (group_size=32, e8m0) weight spelling, got "
            f"{dict(weight)} for {name}",
        )
    return keys


def _single(spec: object) -> Mapping[str, Any] | None:
    """Unwrap a specification that may stand alone in a list; several (NVFP4, INT4 over FP8) are not covered."""
    if isinstance(spec, list):
        if len(spec) > 1:
            raise PatternUnclearError("Quark schemes of several steps are not covered beside online quantisation")
        spec = spec[0] if spec else None
    return spec if isinstance(spec, Mapping) else None


def _scheme_keys(weight: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None) -> tuple[str, str | None] | None:
    if weight is None:
        return None
    if inputs is not None and weight.get("dtype") == inputs.get("dtype") == "fp8_e4m3":
        key = _fp8_key(weight, inputs)
        if key is not None:
            return key, OTHER_ACTIVATION
    if weight.get("dtype") in ("int4", "uint4"):
        raise PatternUnclearError("Quark INT4 schemes are not covered beside online quantisation")
    return _mx_keys(weight, inputs) or _int8_keys(weight, inputs)


def _fp8_key(weight: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    """Return the key of FP8 weights with FP8 activations (``_is_fp8_w8a8``)."""
    if weight.get("is_dynamic"):
        return None
    scheme, dynamic = weight.get("qscheme"), inputs.get("is_dynamic")
    if scheme == "per_block" and list(weight.get("block_size") or []) == [128, 128] and weight.get("symmetric") is True:
        per_group = inputs.get("qscheme") == "per_group" and inputs.get("group_size") == 128
        if not dynamic or not per_group or inputs.get("symmetric") is not True:
            return None
        return FP8_BLOCK_E8M0 if weight.get("scale_type") == "float8_e8m0fnu" else FP8_BLOCK
    if scheme not in ("per_tensor", "per_channel") or not (dynamic or inputs.get("qscheme") == "per_tensor"):
        return None
    return FP8_CHANNEL if scheme == "per_channel" else FP8_TENSOR


def _mx_keys(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[str, str | None] | None:
    """Return the keys of OCP MX weights (``_is_w_ocp_mx_a_x``); FP6 is left to the caller as not covered."""
    dtype, scheme = weight.get("dtype"), weight.get("qscheme")
    grouped = scheme == "per_group" and weight.get("group_size") == 32 and weight.get("scale_format") == "e8m0"
    if grouped and dtype in ("fp6_e3m2", "fp6_e2m3"):
        raise PatternUnclearError("Quark FP6 schemes are not covered beside online quantisation")
    if not (grouped and dtype in ("fp4", "fp8_e4m3")) and not (dtype == "fp8_e4m3" and _mxfp8_block(weight)):
        return None
    key = MXFP4 if dtype == "fp4" else MXFP8
    if inputs is None:
        return key, None
    if not inputs.get("is_dynamic"):
        per_tensor = inputs.get("dtype") == "fp8_e4m3" and inputs.get("qscheme") == "per_tensor"
        return (key, OTHER_ACTIVATION) if per_tensor and inputs.get("symmetric") is True else None
    if inputs.get("dtype") not in ("fp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3"):
        raise PatternUnclearError(f"Quark activations of {inputs.get('dtype')!r} are not covered")
    return key, MXFP4_DYNAMIC if inputs.get("dtype") == "fp4" else OTHER_ACTIVATION


def _mxfp8_block(weight: Mapping[str, Any]) -> bool:
    """Tell whether FP8 weights have E8M0 scales for R x 32 blocks, MXFP8's two-dimensional spelling."""
    block = list(weight.get("block_size") or [])
    return (
        weight.get("qscheme") == "per_block"
        and len(block) == 2
        and block[1] == 32
        and weight.get("scale_type") == "float8_e8m0fnu"
        and weight.get("symmetric") is True
        and not weight.get("is_dynamic")
    )


def _int8_keys(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[str, str | None] | None:
    """Return the keys of INT8 weights with INT8 activations (``_is_w8a8_int8``)."""
    if inputs is None or weight.get("dtype") != "int8" or inputs.get("dtype") != "int8":
        return None
    scheme = weight.get("qscheme")
    static = inputs.get("qscheme") == "per_tensor" and not inputs.get("is_dynamic") and not weight.get("is_dynamic")
    dynamic = inputs.get("qscheme") == "per_channel" and inputs.get("is_dynamic") is True
    if scheme not in ("per_tensor", "per_channel") or weight.get("symmetric") is not True or not (static or dynamic):
        return None
    return INT8_CHANNEL if scheme == "per_channel" else INT8_TENSOR, OTHER_ACTIVATION
