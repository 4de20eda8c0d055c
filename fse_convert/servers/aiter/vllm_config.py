"""The quantisation object that vLLM builds from a checkpoint's configs on ROCm, reduced to what decides fusion.

Read in the wheels of vLLM 0.29 to 0.33; what differs between them are columns of `RELEASES`. Module names stay as the
config spells them: a model's own renaming is applied where names are matched (`aiter/quant_compatible.py`). For classes
that no fusion rule knows, only the name is worked out, not whether vLLM could build them.

To add a release, add a row to `RELEASES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from fse_convert.model.quantization import MODELOPT, Quantization
from fse_convert.servers.aiter.patterns import ServerError, UnclearError, VerdictError
from fse_convert.servers.verdict import Verdict

_IN_FILE = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """The differences between vLLM releases in how quantisation decides AITER shared-expert fusion.

    * ``quark_as_deepseek``: a Quark MXFP4 export of DeepSeek-V4 becomes the DeepSeek class (deepseek_v4/quant_config).
    * ``v41_class``: on ROCm ``deepseek_v4_fp8`` is the class of models/deepseek_v41 (quantization/__init__.py).
    * ``v41_class_checked``: the fusion check knows that class; else it counts as any FP8 config (config_utils.py).
    * ``fp4_only``: the DeepSeek rule refuses any expert_dtype but fp4 instead of passing it on to the FP8 rule.
    * ``label``: how messages call the model.
    * ``mega_moe``: the check knows the backend AITER MegaMoE, whose shared experts are requantised while loading.
    * ``heterogeneous``: DeepSeek-V4's class has the fusion of `fse_convert.servers.aiter.heterogeneous`.
    * ``mxfp8``: there is a rule for ModelOpt MXFP8.
    * ``exclude_by_name``: any Quark exclude with the word "shared_expert" counts, whatever it matches.
    * ``modelopt_exclude``: the keys of config.json that list what ModelOpt leaves out (modelopt.py).
    * ``modelopt_file``: what ``hf_quant_config.json`` may say as ``quant_algo`` (model_arch_config_convertor.py).
    * ``mtp_names``: DeepSeek-V4's drafter re-keys entries for ``mtp.N`` (``align_mtp_quant_config``).
    """

    name: str
    quark_as_deepseek: bool = False
    v41_class: bool = True
    v41_class_checked: bool = False
    fp4_only: bool = True
    label: str = "DeepSeek-V4"
    mega_moe: bool = False
    heterogeneous: bool = True
    mxfp8: bool = False
    exclude_by_name: bool = False
    modelopt_exclude: tuple[str, ...] = ("ignore",)
    modelopt_file: tuple[str, ...] = _IN_FILE
    mtp_names: bool = False


RELEASES: Mapping[str, VllmRelease] = {
    release.name: release
    for release in (
        VllmRelease("0.29", quark_as_deepseek=True, v41_class=False, heterogeneous=False, exclude_by_name=True),
        VllmRelease("0.30", quark_as_deepseek=True),
        VllmRelease("0.31"),
        VllmRelease("0.32"),
        VllmRelease(
            "0.33",
            v41_class_checked=True,
            fp4_only=False,
            label="DeepSeek-V4/V4.1",
            mega_moe=True,
            mxfp8=True,
            modelopt_exclude=("ignore", "exclude_modules"),
            modelopt_file=(*_IN_FILE, "MIXED_PRECISION"),
            mtp_names=True,
        ),
    )
}
"""vLLM releases whose AITER rules are known, oldest first."""

NEWEST = list(RELEASES)[-1]
"""The last of them."""


class VllmQuantKind(str, Enum):
    """The classes of quantisation that the fusion check tells apart."""

    NONE = "none"
    DEEPSEEK_V4 = "deepseek-v4"
    FP8 = "fp8"
    QUARK = "quark"
    MXFP8 = "mxfp8"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class VllmQuant:
    """The quantisation object of a server: its kind, its Python class, and the values that the fusion check reads.

    ``ignored`` holds the modules left out, as the config spells them. ``from_quark``: a Quark export that is read as FP8.
    ``instead``: the verdict where the server raises instead of building the object, or the config is outside these rules.
    """

    kind: VllmQuantKind
    class_name: str = ""
    ignored: tuple[Any, ...] = ()
    block: tuple[Any, ...] | None = None
    store_dtype: str | None = None
    quark: Mapping[str, Any] = field(default_factory=dict)
    from_quark: bool = False
    instead: Verdict | None = None


class ConfigRefusedError(ServerError):
    """The server raises on this config; the message is the server's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "aiter-config-refused")


CLASSES = {
    "awq": "AutoAWQConfig",
    "awq_marlin": "AutoAWQConfig",
    "auto_awq": "AutoAWQConfig",
    "fp8": "Fp8Config",
    "fbgemm_fp8": "FBGEMMFp8Config",
    "modelopt": "ModelOptFp8Config",
    "modelopt_fp4": "ModelOptNvFp4Config",
    "modelopt_mxfp8": "ModelOptMxFp8Config",
    "modelopt_mixed": "ModelOptMixedPrecisionConfig",
    "auto_gptq": "AutoGPTQConfig",
    "gptq": "AutoGPTQConfig",
    "compressed-tensors": "CompressedTensorsConfig",
    "quark": "QuarkConfig",
    "torchao": "TorchAOConfig",
    "inc": "INCConfig",
    "mxfp4": "Mxfp4Config",
    "gpt_oss_mxfp4": "GptOssMxfp4Config",
    "deepseek_v4_fp8": "DeepseekV4FP8Config",
    "mxfp8": "ModelOptMxFp8Config",
}
"""Class by method name, of the methods that platforms/rocm.py supports (quantization/__init__.py)."""

# fmt: off
METHODS = [
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed",
    "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", "compressed-tensors", "experts_int8", "quark",
    "moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "online", "fp8_per_tensor",
    "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
]
"""Every method name of 0.33, in its order (``QUANTIZATION_METHODS``)."""
# fmt: on

DEEPSEEK_V4_TYPES = ("deepseek_v4",)
DEEPSEEK_V41_TYPES = ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")


def build_vllm_quant(quantization: Quantization, model_type: str, release: VllmRelease) -> VllmQuant:
    """Build what vLLM's ``get_quant_config`` returns on ROCm; never raises.

    ``model_type`` is config.json's own, at the top level. Sources: config/model.py ``_verify_quantization`` and the
    ``from_config`` of each class.
    """
    try:
        if quantization.malformed:
            raise UnclearError("quantization_config is not an object")
        method = _method(quantization.raw, model_type, release) if quantization.quantized else None
        return _build(method, quantization.raw, release) if method else VllmQuant(VllmQuantKind.NONE)
    except VerdictError as error:
        return VllmQuant(VllmQuantKind.OTHER, instead=error.verdict)


def is_quark_mxfp4(raw: Mapping[str, Any]) -> bool:
    """Tell whether a config's global Quark scheme is MXFP4 in groups of 32 (``_is_quark_mxfp4_ocp``)."""
    weight = as_mapping(raw.get("global_quant_config") or {}, "global_quant_config").get("weight")
    return isinstance(weight, Mapping) and is_mxfp4(weight)


def is_mxfp4(weight: Mapping[str, Any]) -> bool:
    """Tell whether a Quark specification of weights is MXFP4 in groups of 32."""
    return weight.get("dtype") == "fp4" and weight.get("qscheme") == "per_group" and weight.get("group_size") == 32


def as_mapping(value: object, what: str) -> Mapping[str, Any]:
    """Return a value that has to be an object; raises UnclearError for anything else."""
    if not isinstance(value, Mapping):
        raise UnclearError(f"{what} must be an object, found {type(value).__name__}")
    return value


def _method(raw: Mapping[str, Any], model_type: str, release: VllmRelease) -> str:
    """Return the method whose class is built; empty where the config names none."""
    written = raw.get("quant_method", "")
    if not isinstance(written, str):
        raise UnclearError(f"quant_method must be a string, found {type(written).__name__}")
    written = _modelopt_file_method(raw, release) or written.lower().replace("compressed_tensors", "compressed-tensors")
    method = _override(written, raw, model_type, release) or written
    if not method:
        return ""
    if method not in METHODS:
        raise ConfigRefusedError(f"Unknown quantization method: {method}. Must be one of {METHODS}.")
    if method not in CLASSES:
        raise ConfigRefusedError(f"{method} quantization is currently not supported in rocm.")
    if method == "fbgemm_fp8":
        raise ConfigRefusedError(
            "The quantization method fbgemm_fp8 is deprecated and will be removed in future versions of vLLM. To bypass, "
            "set `--allow-deprecated-quantization`."
        )
    return method


def _modelopt_file_method(raw: Mapping[str, Any], release: VllmRelease) -> str | None:
    """Name the method of ModelOpt's own file (``hf_quant_config.json``), which has no ``quant_method``."""
    inner, producer = raw.get("quantization", {}), raw.get("producer", {})
    legacy = isinstance(inner, Mapping) and "modelopt_quant_config" in inner
    if not legacy and as_mapping(producer, "producer").get("name") != "modelopt":
        return None
    algo = as_mapping(inner, "quantization").get("quant_algo")
    if algo is None:
        return None
    if str(algo).upper() not in release.modelopt_file:
        raise ConfigRefusedError(f"Unknown ModelOpt quant algo: {algo}")
    return MODELOPT[str(algo).upper()][0]


def _override(written: str, raw: Mapping[str, Any], model_type: str, release: VllmRelease) -> str | None:
    """Return the method that some class takes instead of the written one, in vLLM's order of asking."""
    if written in ("gptq", "awq"):
        return f"auto_{written}"
    if written == "auto-round":
        return "inc"
    if modelopt := _modelopt_override(written, raw):
        return modelopt
    if written in ("mxfp4", "gpt_oss_mxfp4") and model_type == "gpt_oss":
        return "gpt_oss_mxfp4"
    types = DEEPSEEK_V41_TYPES if release.v41_class else DEEPSEEK_V4_TYPES
    quark = release.quark_as_deepseek and written == "quark" and is_quark_mxfp4(raw)
    if model_type in types and (quark or written in ("fp8", "deepseek_v4_fp8")):
        return "deepseek_v4_fp8"
    return None


def _modelopt_override(written: str, raw: Mapping[str, Any]) -> str | None:
    if not written.startswith("modelopt"):
        return None
    inner = raw.get("quantization", raw)
    algo = str(inner.get("quant_algo", "")).upper() if isinstance(inner, Mapping) else ""
    if algo == "FP8":
        return "modelopt"
    if "FP4" in algo:
        return "modelopt_fp4"
    if "MXFP8" in algo:
        return "modelopt_mxfp8"
    return "modelopt_mixed" if algo == "MIXED_PRECISION" else None


def _build(method: str, raw: Mapping[str, Any], release: VllmRelease) -> VllmQuant:
    name = CLASSES[method]
    if method == "deepseek_v4_fp8":
        return _deepseek(raw, release)
    if method == "fp8":
        return _fp8(raw, VllmQuantKind.FP8, name)
    if method == "quark":
        return VllmQuant(VllmQuantKind.QUARK, name, quark=_quark(raw))
    if name == "ModelOptMxFp8Config":
        return VllmQuant(VllmQuantKind.MXFP8 if release.mxfp8 else VllmQuantKind.OTHER, name, ignored=_mxfp8(raw, release))
    return VllmQuant(VllmQuantKind.OTHER, name)


def _deepseek(raw: Mapping[str, Any], release: VllmRelease) -> VllmQuant:
    from_quark = raw.get("quant_method") == "quark"
    if from_quark:
        exclude = [name for name in raw.get("exclude") or [] if isinstance(name, str)]
        raw = {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "ignored_layers": exclude}
    known = release.v41_class_checked or not release.v41_class
    built = _fp8(raw, VllmQuantKind.DEEPSEEK_V4 if known else VllmQuantKind.FP8, "DeepseekV4FP8Config")
    return replace(built, from_quark=from_quark)


def _fp8(raw: Mapping[str, Any], kind: VllmQuantKind, name: str) -> VllmQuant:
    """Read what ``Fp8Config.from_config`` reads, with its checks in its order."""
    if "activation_scheme" not in raw:
        raise ConfigRefusedError("Cannot find any of ['activation_scheme'] in the model's quantization config.")
    scheme, block = raw["activation_scheme"], raw.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        raise ConfigRefusedError(f"Unsupported activation scheme {scheme}")
    if block is not None:
        if not isinstance(block, (list, tuple)):
            raise UnclearError(f"weight_block_size must be a list, found {type(block).__name__}")
        if len(block) != 2:
            raise ConfigRefusedError(
                f"The quantization block size of weight must have 2 dimensions, but got {len(block)} dimensions"
            )
        if scheme != "dynamic":
            raise ConfigRefusedError(
                f"The block-wise quantization only supports dynamic activation scheme for now, but got {scheme} activation scheme."
            )
    ignored = _string_list(raw.get("ignored_layers") or raw.get("modules_to_not_convert") or [], "ignored_layers")
    return VllmQuant(kind, name, ignored, tuple(block) if block is not None else None, raw.get("store_dtype"))


def _string_list(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UnclearError(f"{what} must be a list of strings")
    return tuple(value)


def _mxfp8(raw: Mapping[str, Any], release: VllmRelease) -> tuple[Any, ...]:
    """Read the excluded modules as ``ModelOptMxFp8Config.from_config`` does, from any of its three spellings."""
    if "quantization" in raw:
        inner = raw["quantization"]
        if not isinstance(inner, Mapping):
            raise ConfigRefusedError("Expected 'quantization' to be a dictionary in config")
        algo, exclude = inner.get("quant_algo"), inner.get("exclude_modules", [])
        missing = [key for key in ("kv_cache_quant_algo", "exclude_modules") if key not in inner]
    elif raw.get("quant_algo"):
        algo, missing = raw["quant_algo"], []
        exclude = next((raw[key] for key in release.modelopt_exclude if key in raw), [])
    else:
        algo, exclude, missing = "MXFP8", raw.get("ignored_layers", []) or [], []
    if not algo:
        raise ConfigRefusedError("Missing 'quant_algo' in quantization config")
    if not isinstance(exclude, list):
        raise ConfigRefusedError(f"exclude_modules must be a list, got {type(exclude)}")
    if str(algo).upper() not in MODELOPT:
        raise ConfigRefusedError(
            f"ModelOpt currently only supports: {list(MODELOPT)} quantizations in vLLM. Please check the "
            "`hf_quant_config.json` file for your model's quant configuration."
        )
    if missing:
        raise ConfigRefusedError(f"MXFP8 quantization requires the following fields in hf_quant_config.json: {missing}")
    return _string_list(exclude, "exclude_modules")


def _quark(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dictionary that ``QuarkConfig.from_config`` keeps: KV-cache layers lose their ``output_tensors``."""
    export = raw.get("export")
    if export is None:
        raise ConfigRefusedError("The export key should be included in the configurations of Quark quantized model")
    group = as_mapping(export, "export").get("kv_cache_group")
    if group is None:
        raise ConfigRefusedError("object of type 'NoneType' has no len()")
    layers = raw.get("layer_quant_config")
    if not group:
        return raw
    layers = as_mapping(layers, "layer_quant_config")
    names = _string_list(group, "kv_cache_group")
    matched = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in names)]
    if not matched and not set(names) <= set(layers):
        raise ConfigRefusedError(
            "The Quark quantized model has the kv_cache_group parameter setting, but no kv_cache quantization settings "
            "were found in the quantization configuration."
        )
    outputs = [as_mapping(layers[name], name).get("output_tensors") for name in matched]
    if any(output != outputs[0] for output in outputs):
        raise ConfigRefusedError(
            "The quantization method used for kv_cache should be the same, but the quantization method for the "
            "kv_cache layer in the config is different."
        )
    if not outputs or outputs[0] is None:
        raise ConfigRefusedError("The kv_cache quantization configuration is empty.")
    cleared = {name: {**layers[name], "output_tensors": None} for name in layers if name in matched or name == "*q_proj"}
    return {**raw, "layer_quant_config": {**layers, **cleared}}
