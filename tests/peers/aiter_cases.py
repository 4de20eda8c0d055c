"""Configs for `test_aiter_vllm.py`: a grid over families, quantisation methods, exclusions, MTP and AITER MegaMoE."""

from __future__ import annotations

from typing import Any

from fse_convert.servers.aiter.families import AITER_FAMILIES

FAMILIES = {family.name: family for family in AITER_FAMILIES if family.since}
CLASSES = {
    "DeepSeek-V4": "models/deepseek_v4/amd/model.py:DeepseekV4ForCausalLM",
    "DeepSeek-V4 (vision)": "models/deepseek_v4/amd/model.py:DeepseekV4ForCausalLM",  # the text model inside configures again
    "DeepSeek-V4.1": "models/deepseek_v41/amd/vl_model.py:DeepseekV41ForCausalLM",
    "Kimi-K2.5": "model_executor/models/deepseek_v2.py:DeepseekV2ForCausalLM",  # likewise
    "Kimi-VL": "model_executor/models/deepseek_v2.py:DeepseekV2ForCausalLM",
    "DeepSeek-V3": "model_executor/models/deepseek_v2.py:DeepseekV3ForCausalLM",
    "GLM-4-MoE": "model_executor/models/glm4_moe.py:Glm4MoeForCausalLM",
    "GLM-5-Next": "models/glm5next/common/model.py:Glm5NextForCausalLM",
    "GLM-5-Next (vision)": "models/glm5next/common/model.py:Glm5NextForConditionalGeneration",
    "MiniMax-M3": "models/minimax_m3/amd/model.py:MiniMaxM3SparseForCausalLM",
    "MiniMax-M3 (vision)": "models/minimax_m3/amd/model.py:MiniMaxM3SparseForConditionalGeneration",
    "Qwen3-Next": "model_executor/models/qwen3_next.py:Qwen3NextForCausalLM",
    "Qwen3.5": "model_executor/models/qwen3_5.py:Qwen3_5MoeForCausalLM",
    "Qwen3.5 (vision)": "model_executor/models/qwen3_5.py:Qwen3_5MoeForConditionalGeneration",
    "Qwen4-Exp": "models/qwen4_exp/amd/model.py:Qwen4ExpForCausalLM",
    "Qwen4-Exp (vision)": "models/qwen4_exp/amd/model.py:Qwen4ExpForConditionalGeneration",
    "AXK1": "model_executor/models/AXK1.py:AXK1ForCausalLM",
    "Alice AI": "model_executor/models/alice_ai.py:AliceAIForCausalLM",
}
TYPES = {"DeepSeek-V4": "deepseek_v4", "DeepSeek-V4 (vision)": "deepseek_v4", "DeepSeek-V4.1": "deepseek_v41"}
LAYERS = 43

# Schemes ---------------------------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
MXFP4_SPEC = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
MXFP4_INPUT = {**MXFP4_SPEC, "is_dynamic": True}
BLOCK_SPEC = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_block",
    "block_size": [128, 128],
    "symmetric": True,
    "scale_type": "float8_e8m0fnu",
}
BLOCK_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "symmetric": True, "is_dynamic": True}
MXFP4 = {"weight": MXFP4_SPEC, "input_tensors": MXFP4_INPUT, "output_tensors": None, "bias": None}
FP8_BLOCK = {"weight": BLOCK_SPEC, "input_tensors": BLOCK_INPUT, "output_tensors": None, "bias": None}
MXFP8 = {
    "weight": {**MXFP4_SPEC, "dtype": "fp8_e4m3"},
    "input_tensors": {**MXFP4_INPUT, "dtype": "fp8_e4m3"},
    "output_tensors": None,
    "bias": None,
}
EXPORT = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": MXFP4,
    "exclude": [],
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "export": EXPORT,
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
MINIMAX = {"quant_method": "mxfp8", "ignored_layers": []}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def single_tensor(dtype: str, **more: Any) -> dict[str, Any]:
    return {**MXFP4, "weight": {"dtype": dtype, "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}, **more}


def schemes() -> dict[str, dict[str, Any] | None]:
    """Every way of quantising a whole model: what picks the class, and what its constructor refuses."""
    fp8_input = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
    return {
        "none": None,
        "no-method": without(FP8, "quant_method"),
        "fp8-block": FP8,
        "fp8-32": {**FP8, "weight_block_size": [32, 32]},
        "fp8-upper": {**FP8, "quant_method": "FP8"},
        "fp8-tensor": without(FP8, "weight_block_size"),
        "fp8-static": {**without(FP8, "weight_block_size"), "activation_scheme": "static"},
        "fp8-static-block": {**FP8, "activation_scheme": "static"},
        "fp8-no-scheme": without(FP8, "activation_scheme"),
        "fp8-odd-scheme": {**FP8, "activation_scheme": "token"},
        "fp8-one-block": {**FP8, "weight_block_size": [128]},
        "fp8-store": {**FP8, "store_dtype": "mxfp4"},
        "fp8-expert-fp4": {**FP8, "expert_dtype": "fp4"},
        "fp8-expert-fp8": {**FP8, "expert_dtype": "fp8"},
        "fp8-expert-odd": {**FP8, "expert_dtype": "int4"},
        "fp8-nvfp4": {**FP8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "ignore": ["*.ffn.shared_experts.*"]},
        "fp8-with-quark": {**FP8, **without(QUARK, "quant_method")},
        "deepseek-v4-fp8": {**FP8, "quant_method": "deepseek_v4_fp8"},
        "quark-mxfp4": QUARK,
        "quark-mxfp8": {**QUARK, "global_quant_config": MXFP8},
        "quark-fp8-block": {**QUARK, "global_quant_config": FP8_BLOCK},
        "quark-fp8": {**QUARK, "global_quant_config": single_tensor("fp8_e4m3", input_tensors=fp8_input)},
        "quark-int8": {**QUARK, "global_quant_config": single_tensor("int8", input_tensors={**fp8_input, "dtype": "int8"})},
        "quark-odd": {**QUARK, "global_quant_config": single_tensor("int3")},
        "quark-no-export": without(QUARK, "export"),
        "quark-no-exclude": without(QUARK, "exclude"),
        "quark-null-exclude": {**QUARK, "exclude": None},
        "quark-no-global": without(QUARK, "global_quant_config"),
        "quark-no-group": {**QUARK, "export": without(EXPORT, "kv_cache_group")},
        "quark-kv": {
            **QUARK,
            "export": {**EXPORT, "kv_cache_group": ["*k_proj"]},
            "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}},
        },
        "quark-kv-shared": {
            **QUARK,
            "export": {**EXPORT, "kv_cache_group": ["*shared*"]},
            "layer_quant_config": {"*shared*": {**MXFP4, "output_tensors": {"dtype": "fp8_e4m3"}}},
        },
        "fp8-two-lists": {
            **FP8,
            "ignored_layers": ["lm_head"],
            "modules_to_not_convert": ["re:none", "model.layers.3.mlp.experts"],
        },
        "quark-kv-missing": {**QUARK, "export": {**EXPORT, "kv_cache_group": ["*k_proj"]}},
        "modelopt-mxfp8": MODELOPT,
        "modelopt-lower": {**MODELOPT, "quant_algo": "mxfp8"},
        "modelopt-exclude": {**without(MODELOPT, "ignore"), "exclude_modules": ["lm_head"]},
        "modelopt-null-ignore": {**MODELOPT, "ignore": None},
        "modelopt-odd": {**MODELOPT, "quant_algo": "XMXFP8"},
        "modelopt-fp8": {**MODELOPT, "quant_algo": "FP8"},
        "modelopt-nvfp4": {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
        "modelopt-mxfp8-method": {**MODELOPT, "quant_method": "modelopt_mxfp8"},
        "modelopt-inner": {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []},
        },
        "modelopt-inner-short": {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}},
        "minimax-mxfp8": MINIMAX,
        "minimax-null": {**MINIMAX, "ignored_layers": None},
        "mxfp4": {"quant_method": "mxfp4"},
        "compressed": {"quant_method": "compressed_tensors", "format": "float-quantized", "config_groups": {}, "ignore": []},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        "humming": {"quant_method": "humming"},
        "unknown": {"quant_method": "my_quant"},
    }


# Exclusions ------------------------------------------------------------------------------------------------------------------


def checkpoint_block(name: str, index: int) -> str:
    """The MoE block's name in a checkpoint's config, where it is another than the server's."""
    block = FAMILIES[name].block.format(index=index)
    if name.startswith("DeepSeek-V4"):
        return f"layers.{index}.ffn"
    return block.replace("language_model.model.", "model.language_model.") if "Qwen" in name or "GLM-5" in name else block


def shard_names(name: str) -> tuple[str, ...]:
    """What a family's checkpoints call gate and up projection."""
    return FAMILIES[name].packed.get("gate_up_proj", ("gate_proj", "up_proj"))


def exclusions(name: str, index: int) -> dict[str, list[Any]]:
    """Lists that exporters write or could write, for one layer of one family."""
    family = FAMILIES[name]
    block, server, shared = checkpoint_block(name, index), family.block.format(index=index), family.shared
    gate, up = shard_names(name)
    down = "w2" if name.startswith("DeepSeek-V4") else "down_proj"
    own = f"{block}.{shared}"
    return {
        "other": ["lm_head", f"{block}.gate", f"{server}.gate"],
        "shared-all": [f"{own}.{gate}", f"{own}.{up}", f"{own}.{down}"],
        "shared-fused": [f"{server}.{shared}.gate_up_proj", f"{server}.{shared}.down_proj"],
        "shared-gate": [f"{own}.{gate}"],
        "shared-down": [f"{own}.{down}"],
        "shared-weights": [f"{own}.{part}.weight" for part in (gate, up, down)],
        "shared-gate-up": [f"{own}.{gate}", f"{own}.{up}"],
        "shared-bare": [own],
        "routed": [f"{block}.experts"],
        "routed-one": [f"{block}.experts.7.{gate}"],
        "both": [f"{block}.experts", f"{own}.{gate}", f"{own}.{up}", f"{own}.{down}"],
        "shared-gate-tensor": [f"{block}.{shared}_gate"],
        "glob-shared": [f"*.{shared}.*"],
        "glob-star": [f"{own}*"],
        "glob-layer": [f"{block}*"],
        "regex-shared": [f"re:.*{shared}.*"],
        "regex-start": [f"re:{own}"],
        "regex-server": [f"re:{server}.{shared}"],
        "regex-gate": [f"re:.*{shared}.{gate}"],
        "regex-class": [f"re:.*{shared}\\.({gate}|{up})$"],
        "regex-all-layers": [r"re:.*layers\.\d+\..*experts.*"],
        "prefix-layer": [f"{checkpoint_block(name, 1)}.{shared}"],
        "mtp": [f"mtp.0.ffn.{shared}", f"mtp.0.mlp.{shared}"],
        "substring": [shared],
    }


def layer_schemes(name: str, index: int) -> dict[str, dict[str, Any]]:
    """Quark's per-module schemes for one layer of one family."""
    family = FAMILIES[name]
    block, server, shared = checkpoint_block(name, index), family.block.format(index=index), family.shared
    gate, up = shard_names(name)
    return {
        "shared-exact": {f"{server}.{shared}.{gate}": FP8_BLOCK},
        "shared-checkpoint": {f"{block}.{shared}.{gate}": FP8_BLOCK, f"{block}.{shared}.{up}": FP8_BLOCK},
        "shared-glob": {f"*{shared}*": FP8_BLOCK},
        "shared-same": {f"*{shared}*": dict(MXFP4)},
        "shared-regex": {f"re:.*{shared}.*": FP8_BLOCK},
        "shared-regex-mtp": {r"re:mtp\.0\.ffn\.experts\.\d+\.w1": MXFP4, r"re:mtp\.0\.ffn\.shared_experts\.w1": FP8_BLOCK},
        "all-experts": {"*experts*": FP8_BLOCK},
        "routed-only": {"*.experts": FP8_BLOCK},
        "longer-name": {f"{server}.{shared}.{gate}.extra": FP8_BLOCK},
        "shorter-name": {f"{server}.{shared}": FP8_BLOCK},
        "first-wins": {f"*{shared}.{gate}": MXFP4, f"*{shared}*": FP8_BLOCK},
        "empty": {f"*{shared}*": {}},
        "w1-name": {f"{block}.{shared}.w1": FP8_BLOCK},
        "w1-empty": {f"{block}.{shared}.w1": {}},
        "weight-list": {f"{block}.{shared}.w1": {"weight": [MXFP4_SPEC, BLOCK_SPEC]}},
    }


MEGA_MOE = {"moe_backend": "aiter_mega_moe", "online": {"targets": {"*shared_experts*": "mxfp4"}}}
"""How a server with AITER MegaMoE is started."""


# Cases -----------------------------------------------------------------------------------------------------------------------


def case(name: str, scheme: dict[str, Any] | None, label: str, index: int = 3, **more: Any) -> dict[str, Any]:
    family = FAMILIES[name]
    config: dict[str, Any] = {"architectures": sorted(family.architectures), "model_type": TYPES.get(name, "other")}
    sizes = {"num_hidden_layers": LAYERS, "n_shared_experts": 1}
    config |= {"text_config": {"model_type": "deepseek_v41_text", **sizes}} if name == "DeepSeek-V4.1" else sizes
    if scheme is not None:
        config["quantization_config"] = scheme
        if TYPES.get(name) == "deepseek_v4" and "expert_dtype" in scheme:
            config["expert_dtype"] = scheme["expert_dtype"]
    mtp = more.pop("mtp", None)
    block = family.block.format(index=index) if mtp is None else family.mtp_block.format(k=mtp, next=LAYERS + mtp)
    more = {"mtp": 3 if mtp is not None and family.v4 else None, "mtp_layer": mtp} | more
    config |= more.pop("config", {})
    made = {
        "id": f"{name}/{label}",
        "family": name,
        "config": config,
        "model_class": CLASSES[name],
        "block": block,
        "shared": family.shared,
    }
    return made | more


def grid() -> list[dict[str, Any]]:
    cases = [case(name, scheme, label) for name in FAMILIES for label, scheme in schemes().items()]
    with_lists = {"fp8": (FP8, "ignored_layers"), "fp8-alt": (FP8, "modules_to_not_convert"), "quark": (QUARK, "exclude")}
    with_lists |= {"modelopt": (MODELOPT, "ignore"), "minimax": (MINIMAX, "ignored_layers")}
    for name in FAMILIES:
        for method, (scheme, key) in with_lists.items():
            cases += [case(name, {**scheme, key: value}, f"{method}/{label}") for label, value in exclusions(name, 3).items()]
        cases += [
            case(name, {**QUARK, "layer_quant_config": value}, f"quark-layers/{label}")
            for label, value in layer_schemes(name, 3).items()
        ]
    inside = [name for name, family in FAMILIES.items() if not family.v4]
    cases += [nested(name, label, scheme) for name in inside for label, scheme in (("fp8", FP8), ("quark", QUARK))]
    return cases + deepseek_grid() + mega_moe_grid() + odd_cases()


def nested(name: str, label: str, scheme: dict[str, Any]) -> dict[str, Any]:
    """A drafter layer of a model that has its sizes in ``text_config``."""
    made = case(name, scheme, f"nested/{label}", mtp=0)
    text = {**made["config"].get("text_config", {}), "num_hidden_layers": LAYERS, "n_shared_experts": 1}
    config = {**without(made["config"], *text), "model_type": made["config"]["model_type"], "text_config": text}
    return made | {"config": config, "mtp": None}


MODULES = ("attn.wq_a", "attn.wkv", "attn.wo_b", "attn.indexer.wq_b", "ffn.shared_experts.w1")


def quark_modules() -> list[dict[str, Any]]:
    """Quark's schemes of FP8 modules, spelled in several ways, for a decoder layer and the drafter's second."""

    def spelled(at: str, way: str) -> list[str]:
        exact = [f"{at}.{m}" for m in MODULES]
        return {"exact": exact, "regex": [rf"re:{at}\..*"], "glob": [f"{at}.*"], "any": ["*attn*", "*shared*"]}[way]

    cases = []
    for mtp, at in ((None, "layers.3"), (1, "mtp.1")):
        for way in ("exact", "regex", "glob", "any"):
            for also in ("", f"layers.{LAYERS + 1}"):
                names = spelled(at, way) + (spelled(also, way) if also else [])
                server = f"model.layers.{3 if mtp is None else LAYERS + mtp}"
                more = {"modules": [f"{server}.{m}" for m in MODULES], "stored": [f"{at}.{m}" for m in MODULES]}
                scheme = {**QUARK, "layer_quant_config": dict.fromkeys(names, FP8_BLOCK)}
                cases.append(case("DeepSeek-V4", scheme, f"modules/{at}/{way}/{also}", mtp=mtp, **more))
    return cases


def deepseek_grid() -> list[dict[str, Any]]:
    """DeepSeek-V4 and V4.1: its own rule, which a Quark scheme inside an FP8 config reaches, decoder layers and MTP."""
    inner = {**FP8, **without(QUARK, "quant_method")}
    cases = []
    for name in ("DeepSeek-V4", "DeepSeek-V4.1"):
        for index, mtp in ((0, None), (3, None), (LAYERS - 1, None), (0, 0), (0, 2)):
            where = f"layer{index}" if mtp is None else f"mtp{mtp}"
            lists = {
                **exclusions(name, index),
                "mtp-w1": [f"mtp.{mtp}.ffn.shared_experts.w1"],
                "short": ["layers"],
                "odd": [7, None],
            }
            for label, exclude in lists.items():
                cases.append(case(name, {**inner, "exclude": exclude}, f"inner/{where}/{label}", index, mtp=mtp))
            for label, layers in layer_schemes(name, index).items():
                cases.append(case(name, {**inner, "layer_quant_config": layers}, f"inner-layers/{where}/{label}", index, mtp=mtp))
            named = {f"mtp.{mtp}.ffn.shared_experts.{part}": FP8_BLOCK for part in ("w1", "w2", "w3")}
            cases.append(case(name, {**QUARK, "layer_quant_config": named}, f"quark-named/{where}", index, mtp=mtp))
            cases.append(case(name, {**QUARK, "exclude": list(named)}, f"quark-exclude-named/{where}", index, mtp=mtp))
            cases.append(case(name, {**FP8, "ignored_layers": list(named)}, f"fp8-named/{where}", index, mtp=mtp))
            twins = {key.replace(f"mtp.{mtp}.", f"layers.{LAYERS + (mtp or 0)}."): FP8_BLOCK for key in named}
            for label, layers in (("twins", named | twins), ("globs", {f"mtp.{mtp}.ffn.shared_experts*": FP8_BLOCK})):
                cases.append(case(name, {**QUARK, "layer_quant_config": layers}, f"quark-{label}/{where}", index, mtp=mtp))
        for label, dtype in (("fp4", "fp4"), ("fp8", "fp8"), ("odd", "bf16"), ("null", None)):
            cases.append(case(name, FP8, f"top-expert-dtype/{label}", config={"expert_dtype": dtype}))
        cases.append(case(name, {**FP8, "expert_dtype": "fp8"}, "expert-dtype-conflict", config={"expert_dtype": "fp4"}))
        text = {"model_type": "deepseek_v41_text", "num_hidden_layers": LAYERS}
        cases.append(case(name, None, "text-config", config={"text_config": {**text, "quantization_config": FP8}}))
        cases.append(case(name, None, "compression-config", config={"compression_config": FP8, "num_hidden_layers": LAYERS}))
        cases.append(case(name, FP8, "two-numbers", block="model.layers.3.ffn.4"))
    return cases


def mega_moe_grid() -> list[dict[str, Any]]:
    bases = {
        "quark": QUARK,
        "quark-mxfp8": {**QUARK, "global_quant_config": MXFP8},
        "quark-mxfp8-2d": {**QUARK, "global_quant_config": {**MXFP8, "weight": {**BLOCK_SPEC, "block_size": [32, 32]}}},
        "quark-weight-only": {**QUARK, "global_quant_config": {**MXFP4, "input_tensors": None}},
        "quark-routed-out": {**QUARK, "exclude": ["re:.*experts"]},
        "quark-child-out": {**QUARK, "exclude": ["model.layers.3.ffn.experts.5.down_proj"]},
        "quark-fp8": {**QUARK, "global_quant_config": FP8_BLOCK},
        "quark-layers": {
            **QUARK,
            "layer_quant_config": {f"{at}.experts.0": FP8_BLOCK for at in ("layers.3.ffn", "model.layers.3.mlp")},
        },
        "quark-no-types": {**QUARK, "layer_type_quant_config": None},
        "quark-outputs": {**QUARK, "global_quant_config": {**MXFP4, "output_tensors": {"dtype": "fp8_e4m3"}}},
        "fp8": FP8,
        "modelopt": MODELOPT,
        "none": None,
    }
    cases = [case("DeepSeek-V4", scheme, f"mega/{base}", **MEGA_MOE) for base, scheme in {**schemes(), **bases}.items()]
    return cases + [
        case(name, scheme, f"backend/{base}", moe_backend="triton") for name in FAMILIES for base, scheme in bases.items()
    ]


def odd_cases() -> list[dict[str, Any]]:
    """ModelOpt's own file."""
    producer = {"producer": {"name": "modelopt"}}
    algos = ("FP8", "fp8_pb_wo", "NVFP4", "MXFP8", "MIXED_PRECISION", "W4A8")
    files = {
        algo: {
            **producer,
            "quantization": {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": [], "group_size": 16},
        }
        for algo in algos
    }
    cases = [case("DeepSeek-V3", None, f"file/{algo}", quant_config=file) for algo, file in files.items()]
    cases.append(case("DeepSeek-V4", None, "file/deepseek", quant_config=FP8))
    cases.append(case("DeepSeek-V3", MODELOPT, "file-and-config", quant_config=files["FP8"]))
    return cases
