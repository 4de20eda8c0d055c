"""Tensor names and config keys of one published checkpoint or more per family, as headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fse_convert.testing.memory import PROJ, Tensors, W, expert

HIDDEN, WIDTH, EXPERTS, LAYERS = 256, 128, 3, 2


@dataclass(frozen=True)
class Release:
    """One model type: its config, and prefixes of a decoder layer's block and of the drafter's."""

    family: str
    model_type: str
    decoder: str
    mtp: str = ""
    routed: tuple[str, str, str] = PROJ
    shared: str = "shared_experts"
    shared_names: tuple[str, str, str] = PROJ
    beside: str = ""
    shared_width: int = WIDTH
    n_shared: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    section: str = "text_config"
    gate: bool = False
    depth: str = "num_hidden_layers"


COUNT = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
OWN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 64}
LING = {"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH, "num_nextn_predict_layers": 1}
TOTAL = "moe_shared_expert_intermediate_size"
BOTH = {"num_experts": EXPERTS, "num_shared_experts": 1, "intermediate_size": WIDTH}
LOCAL = {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}
ROUTED = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
UP = ("", "up_proj", "down_proj")
V3, V3_MTP = "model.layers.{}.mlp", "model.layers.2.mlp"
VL = "model.language_model.layers.{}.mlp"
SPARSE = "model.layers.{}.block_sparse_moe"
RELEASES = (
    Release("DeepSeek-V4", "deepseek_v4", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT),
    Release("DeepSeek-V4", "deepseek_v41", "layers.{}.ffn", "mtp.0.ffn", W, shared_names=W, config=COUNT, nested=True),
    Release("DeepSeek-V3", "deepseek_v2", V3, config=COUNT | {"n_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("DeepSeek-V3", "deepseek", V3, config=COUNT | {"n_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("DeepSeek-V3", "deepseek_v3", V3, V3_MTP, config=COUNT),
    Release("DeepSeek-V3", "deepseek_v32", V3, V3_MTP, config=COUNT),
    Release("DeepSeek-VL2", "deepseek_vl_v2", "language.model.layers.{}.mlp", config=COUNT, nested=True, section="language_config"),
    Release("DeepSeek-VL2", "unlimited-ocr", V3, config=COUNT, nested=True, section="language_config"),
    Release("Kimi-K2", "kimi_k2", V3, config=COUNT),
    Release("Kimi-K2", "kimi_vl", "language_model.model.layers.{}.mlp", config=COUNT, nested=True),
    Release("Kimi-K2", "kimi_k25", "language_model.model.layers.{}.mlp", config=COUNT, nested=True),
    Release("GLM-4-MoE", "glm4_moe", V3, V3_MTP, config=COUNT),
    Release("GLM-4-MoE", "glm4v_moe", VL, config=COUNT, nested=True),
    Release("GLM-5", "glm_moe_dsa", V3, V3_MTP, config=COUNT),
    Release("GLM-5", "glm5_next", VL, config=COUNT, nested=True),
    Release("AXK1", "axk1", V3, config=COUNT),
    Release(
        "MiniMax-M3", "minimax_m3_vl", "language_model.model.layers.{}.block_sparse_moe",
        "language_model.model.mtp.layers.0.block_sparse_moe", W, nested=True,
        config={
            "num_local_experts": EXPERTS, "n_shared_experts": 1, "intermediate_size": WIDTH, "dense_intermediate_size": 512,
            "shared_intermediate_size": WIDTH, "num_mtp_modules": 1,
        },
    ),
    Release(
        "Kimi-Linear", "kimi_linear", SPARSE, routed=W,
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH},
    ),
    Release(
        "Kimi-K3", "kimi_k3", "language_model.layers.{}.block_sparse_moe", "language_model.layers.2.block_sparse_moe", W,
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH}, nested=True,
    ),
    Release("Qwen3-Next", "qwen3_next", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release(
        "Qwen3.5", "qwen3_5_moe", VL, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN,
        nested=True, gate=True,
    ),
    Release("Qwen3.5", "qwen4_exp_text", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release("Alice AI", "alice_ai", V3, "mtp.layers.0.mlp", shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release(
        "Ernie-4.5", "ernie4_5_moe", V3, shared_width=2 * WIDTH, n_shared=2,
        config={"moe_num_experts": EXPERTS, "moe_num_shared_experts": 2, "moe_intermediate_size": WIDTH},
    ),
    Release(
        "Hunyuan", "hunyuan_v1_moe", V3, shared="shared_mlp",
        config={"num_experts": EXPERTS, "num_shared_expert": [1, 1], "moe_intermediate_size": [WIDTH, WIDTH]},
    ),
    Release(
        "Hunyuan-V3", "hy_v3", V3, V3_MTP, shared="shared_mlp",
        config={"num_experts": EXPERTS, "num_shared_experts": 1, "moe_intermediate_size": WIDTH},
    ),
    Release("Hunyuan-V4", "hy_v4", V3, V3_MTP, config=COUNT),
    Release("dots", "dots1", V3, config=COUNT),
    Release("Ling", "bailing_moe_v2", V3, V3_MTP, config=LING | {TOTAL: 64}, shared_width=64),
    Release("Ling", "llada2_moe", V3, config=LING | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("Ling-3", "bailing_hybrid", V3, V3_MTP, config=LING | {TOTAL: WIDTH}),
    Release("Ling-3", "bailing_moe_v3_vl", VL, "model.language_model.layers.2.mlp", config=LING, nested=True),
    Release("Sarvam", "sarvam_moe", V3, config=LING),
    Release("Sarvam", "sarvam_mla", V3, config=COUNT),
    Release("Param2", "param2moe", V3, config=LING | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release(
        "Nemotron-H", "nemotron_h", "backbone.layers.{}.mixer", "mtp.layers.0.mixer", UP, shared_names=UP, shared_width=2 * WIDTH,
        config=COUNT | {TOTAL: 2 * WIDTH, "hybrid_override_pattern": "EE"},
    ),
    Release(
        "Nemotron-H", "nemotron_h_omni", "language_model.backbone.layers.{}.mixer", routed=UP, shared_names=UP,
        config=COUNT | {TOTAL: WIDTH, "hybrid_override_pattern": "EE"}, nested=True, section="llm_config",
    ),
    Release("EXAONE-MoE", "exaone_moe", V3, "mtp.layers.0.mlp", config=LING),
    Release("AFMoE", "afmoe", V3, config=LING | {"num_dense_layers": 0}),
    Release("K2-Horizon", "k2_horizon", V3, config=LING | {"mlp_only_layers": []}),
    Release("Qwen2-MoE", "qwen2_moe", V3, shared="shared_expert", shared_width=64, config=OWN, gate=True),
    Release("Laguna", "laguna", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Flint", "flint", V3, shared="shared_expert", shared_width=64, config=OWN),
    Release("Kolibri", "kolibri1", V3, shared_width=64, config={**OWN, "num_local_experts": EXPERTS}),
    Release("openPangu", "pangu_ultra_moe", V3, V3_MTP, config=COUNT),
    Release("Mistral 4", "mistral4", VL, config=COUNT, nested=True),
    Release("Mistral Large 4", "mistral_large4", "layers.{}", routed=W, shared_names=W, config=COUNT, nested=True),
    Release(
        "Qwen3.5", "intern_s2_preview", VL, shared="shared_expert", shared_width=64, config=OWN, nested=True, gate=True,
    ),
    Release("Solar Open", "solar_open", V3, config=COUNT),
    Release("Cohere2-MoE", "cohere2_moe", V3, config=BOTH),
    Release("XVERSE-MoE", "xverse", V3, config=BOTH | {"num_shared_experts": 2}, n_shared=2, shared_width=2 * WIDTH),
    Release("Mixtral", "mixtral", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Mixtral", "phimoe", SPARSE, routed=W, shared="", config=LOCAL),
    Release("MiniMax-M2", "minimax_m2", SPARSE, routed=W, shared="", config=LOCAL),
    Release("Qwen3-MoE", "qwen3_moe", V3, shared="", config=ROUTED),
    Release("Qwen3-MoE", "sdar_moe", V3, shared="", config={"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release(
        "MiMo-V2", "mimo_v2", V3, "model.mtp.layers.0.mlp", shared="",
        config={"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_layer_freq": [1, 1]},
    ),
    Release("Beam", "beam", V3, shared="", config=ROUTED | {"mlp_layer_types": ["sparse"] * 2}),
    Release("Intern-S1-Pro", "interns1_pro", VL, shared="", config=ROUTED, nested=True),
    Release(
        "Gemma 4", "gemma4", "model.language_model.layers.{}", shared="", config=ROUTED | {"intermediate_size": 512}, nested=True
    ),
    Release("OLMoE", "olmoe", V3, shared="", config={"num_experts": EXPERTS, "intermediate_size": WIDTH}),
    Release("Mellum", "mellum", V3, shared="", config={"num_local_experts": EXPERTS, "moe_intermediate_size": WIDTH}),
    Release(
        "LFM2-MoE", "lfm2_moe", "model.layers.{}.feed_forward", routed=W, shared="",
        config={"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "num_dense_layers": 0},
    ),
    Release(
        "LongCat-Flash", "longcat_flash", V3, shared="", depth="num_layers",
        config={"n_routed_experts": EXPERTS, "expert_ffn_hidden_size": WIDTH},
    ),
    Release(
        "Jamba", "jamba", "model.layers.{}.feed_forward", shared="",
        config={"num_experts": EXPERTS, "intermediate_size": WIDTH},
    ),
    Release("dots3-note", "dots3_note", V3, config=COUNT | {TOTAL: 64}, shared_width=64),
    Release("dots3-note", "dots3_note_text", V3, config=COUNT | {"shared_experts_intermediate_size": 64}, shared_width=64),
)  # fmt: skip


def tensors_of(release: Release) -> Tensors:
    found: Tensors = {
        "model.embed_tokens.weight": ("BF16", (8, HIDDEN)),
        "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (3,)),
    }
    for block in [*(release.decoder.format(i) for i in range(LAYERS)), *([release.mtp] if release.mtp else [])]:
        for e in range(EXPERTS):
            found |= expert(f"{block}.experts.{e}", "bf16", WIDTH, HIDDEN, release.routed)
        if release.shared:
            found |= expert(f"{block}.{release.shared}", "bf16", release.shared_width, HIDDEN, release.shared_names)
        if release.gate:
            found[f"{block}.{release.shared}_gate.weight"] = ("BF16", (1, HIDDEN))
    if release.mtp:
        found[f"{release.mtp.rpartition('.')[0]}.enorm.weight"] = ("BF16", (HIDDEN,))
    return found


def config_of(release: Release) -> dict[str, Any]:
    inner = {release.depth: LAYERS, "hidden_size": HIDDEN, **release.config}
    if not release.mtp:
        inner.pop("num_nextn_predict_layers", None)
    if release.nested:
        return {"model_type": release.model_type, release.section: {"model_type": f"{release.model_type}_text", **inner}}
    return {"model_type": release.model_type, **inner}
