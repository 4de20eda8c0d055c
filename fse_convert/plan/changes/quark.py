"""DeepSeek-V4 in the form that AMD Quark writes: names, dtypes, and the whole ``quantization_config``, worked out of the headers.

The form of AMD's own checkpoints (sgl-project/sglang#31054): MXFP4 everywhere, and an exact entry for every module that is FP8.
vLLM 0.29 to 0.33 and SGLang 0.5.22 and later load it. MXFP4 scales are U8, which is the one label under which SGLang loads them
(0.5.23 layers/quantization/quark); scales of FP8 blocks keep F8_E8M0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fse_convert.checkpoint.header import E8M0_DTYPES
from fse_convert.model.formats import FP4_WEIGHTS, FP8_WEIGHTS, Format, StorageKind
from fse_convert.model.grouping import ROUTED
from fse_convert.plan.changes.modules import Tensors, every_matrix, linears, relabelled, stored_alike, unquantised
from fse_convert.servers.subject import Subject

Scheme = Mapping[str, Any]
"""An entry of Quark's ``layer_quant_config``, or its ``global_quant_config``."""

_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "is_dynamic": False,
    "symmetric": None,
    "round_method": "half_even",
    "scale_type": "float",
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "is_scale_quant": False,
}
_REST = {"output_tensors": None, "bias": None, "target_device": None}
MXFP4_SCHEME: Scheme = {"weight": _MXFP4, "input_tensors": {**_MXFP4, "is_dynamic": True}, **_REST}
"""Weights in MXFP4, inputs quantised to MXFP4 while serving."""
_MODEL: Scheme = {
    "quant_method": "quark",
    "version": "0.13",
    "layer_type_quant_config": {},
    "export": {
        "kv_cache_group": [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder",
        "weight_format": "real_quantized",
        "weight_merge_groups": None,
    },
    "algo_config": None,
    "kv_cache_post_rope": False,
    "kv_cache_quant_config": {},
    "softmax_quant_spec": None,
}
_MTP = re.compile(r"mtp\.(\d+)\.")
_STORED = (StorageKind.PLAIN, StorageKind.MXFP4)


def fp8_scheme(block: tuple[int, int]) -> Scheme:
    """Return the scheme of FP8 weights with one E8M0 scale a block of rows and columns; inputs are quantised while serving.

    vLLM asks for ``symmetric`` true, ``is_dynamic`` just so and this ``scale_type`` (0.31 to 0.33 quantization/quark/quark.py).
    """
    weight = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_block",
        "block_size": list(block),
        "is_dynamic": False,
        "symmetric": True,
        "ch_axis": None,
        "group_size": None,
        "scale_type": "float8_e8m0fnu",
        "scale_format": None,
        "round_method": "half_even",
    }
    inputs = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_group",
        "group_size": block[1],
        "is_dynamic": True,
        "symmetric": True,
        "ch_axis": -1,
        "scale_type": "float",
    }
    return {"weight": weight, "input_tensors": inputs, **_REST}


def quark_tensors(subject: Subject, recoded: frozenset[str]) -> Tensors:
    """Return all quantised tensors under Quark's names and dtypes, bytes unchanged, but for those of ``recoded`` modules."""
    tensors: Tensors = {}
    for projection, f in every_matrix(subject):
        if f.scale is None or projection.name in recoded:
            continue
        weight, scale = projection.parts[f.weight], projection.parts[f.scale]
        mxfp4 = f.kind is StorageKind.MXFP4
        tensors |= relabelled(weight, f"{projection.name}.weight", "U8" if mxfp4 else weight.dtype)
        tensors |= relabelled(scale, f"{projection.name}.weight_scale", "U8" if mxfp4 else "F8_E8M0")
    return tensors


def quark_config(subject: Subject, recoded: frozenset[str]) -> dict[str, Any]:
    """Return the whole ``quantization_config``; modules of ``recoded`` are MXFP4 in the output.

    Modules of an MTP layer are named twice, as ``mtp.K`` and as the layer after the last one: vLLM 0.31 and 0.32 look the drafter's
    up under the second name.
    """
    fp8 = {p.name: fp8_scheme(f.block) for p, f in linears(subject) if f.block and _is_e8m0(f) and p.name not in recoded}
    return {
        **_MODEL,
        "global_quant_config": MXFP4_SCHEME,
        "layer_quant_config": with_twins(fp8, decoder_layers(subject) or 0),
        "exclude": [name for name in unquantised(subject) if name not in recoded],
    }


def quark_obstacle(subject: Subject, recoded: frozenset[str]) -> str:
    """Say which module has no place in Quark's form, and why; empty where every one has."""
    if decoder_layers(subject) is None:
        return "config.json has no num_hidden_layers, after which the modules of MTP layers are named"
    if not stored_alike(subject.description.layers, StorageKind.MXFP4):
        return "routed experts must be MXFP4 in every layer, those of MTP layers too"
    known = {p.name for p, _ in linears(subject)}
    for name, info in subject.tensors.items():
        module = name.removesuffix(".weight")
        if ROUTED not in name and module != name and info.dtype in (*FP8_WEIGHTS, *FP4_WEIGHTS) and module not in known:
            return f"{module} is stored in a way that is not understood"
    for projection, f in every_matrix(subject):
        if f.kind not in _STORED and not _is_e8m0(f) and projection.name not in recoded:
            return f"{projection.name} is stored as {f.label}, not in FP8 blocks with E8M0 scales"
    return ""


def decoder_layers(subject: Subject) -> int | None:
    """Return the number of decoder layers that config.json states."""
    family = subject.description.family
    return family.number(subject.config, "num_hidden_layers") if family else None


def with_twins(schemes: Mapping[str, Scheme], layers: int) -> dict[str, Scheme]:
    """Return schemes by module name, those of MTP layers also under the name that `twin` gives them."""
    return {name: scheme for module, scheme in schemes.items() for name in (module, twin(module, layers))}


def twin(module: str, layers: int) -> str:
    """Return the name of an MTP layer's module as one of the layers after the last one; of other modules the name itself."""
    return _MTP.sub(lambda found: f"layers.{layers + int(found[1])}.", module, count=1) if _MTP.match(module) else module


def _is_e8m0(f: Format) -> bool:
    return f.kind is StorageKind.FP8_BLOCK and f.scale_dtype in E8M0_DTYPES
