"""Families whose models have shared experts, as data: names and config keys, a row each."""

from __future__ import annotations

from dataclasses import replace

from fse_convert.model.families import width_keys
from fse_convert.model.families.family import (
    BARE_LAYERS,
    EVERY_LAYER,
    GATE_UP,
    PROJ_NAMES,
    SPARSE,
    STACKED,
    STEPPED,
    UNGATED,
    W_NAMES,
    Family,
    Sparse,
    Stack,
)
from fse_convert.model.moe import Role

DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    model_types=("deepseek_v4", "deepseek_v4_text"),
    source="vLLM 0.33 models/deepseek_v4/nvidia/model.py; SGLang 0.5.23 models/deepseek_v4_dspark.py;"
    " transformers 5.24 deepseek_v4 (intermediate_size, where it is, wins)",
    layers=r"(?:model\.)?layers",  # transformers 5.24 saves them under `model.`
    mtp="mtp",
    block="ffn",
    routed_names=W_NAMES,
    shared_names=W_NAMES,
    widths=width_keys.EITHER_NAME,
    sparse=EVERY_LAYER,
    mtp_routed_key="dspark_n_routed_experts",
)

DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    model_types=("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    source="vLLM 0.33 model_executor/models/deepseek_v2.py:362-380, models/deepseek_v32;"
    " SGLang 0.5.23 models/deepseek_v2.py:758, 870, deepseek.py:136-160",
)

QWEN3_NEXT = Family(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    source="vLLM 0.33 model_executor/models/qwen3_next.py:151-160, qwen3_next_mtp.py",
    mtp=r"mtp\.layers",
    shared="shared_expert",
    widths=width_keys.QWEN,
    n_routed_keys=("num_experts",),
    n_shared_keys=(),
    gated=True,
    sparse=STEPPED,
)

QWEN2 = replace(
    QWEN3_NEXT,
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    source="vLLM 0.33 model_executor/models/qwen2_moe.py:144-175; SGLang 0.5.23 qwen2_moe.py:333; transformers 5.24:279, 337",
    mtp=None,
    mtp_key=None,
)

LING = Family(
    name="Ling",
    model_types=("bailing_moe", "bailing_moe_v2", "llada2_moe"),
    source="vLLM 0.33 model_executor/models/bailing_moe.py:280-301; SGLang 0.5.23 models/bailing_moe.py:333, llada2.py:677-697",
    widths=width_keys.LING,
    n_routed_keys=("num_experts",),
    n_shared_keys=("num_shared_experts",),
)
NUMBERED = replace(DEEPSEEK_V3, n_routed_keys=("num_experts",), n_shared_keys=("num_shared_experts",))

ERNIE = Family(
    name="Ernie-4.5",
    model_types=("ernie4_5_moe",),
    source="vLLM 0.33 model_executor/models/ernie45_moe.py:133-184, ernie_mtp.py:153-160; transformers 5.24 ernie4_5_moe",
    mtp=r"model\.mtp_\w+",
    n_routed_keys=("moe_num_experts",),
    n_shared_keys=("moe_num_shared_experts",),
    lists="modality",
    # transformers 5.24 ernie4_5_moe/modeling_ernie4_5_moe.py
    sparse=Sparse(first="moe_layer_start_index", last="moe_layer_end_index", step="moe_layer_interval", ahead=1),
)

WITH_SHARED: tuple[Family, ...] = (
    DEEPSEEK_V4,
    replace(
        DEEPSEEK_V4,
        model_types=("deepseek_v41", "deepseek_v41_text"),
        source="vLLM 0.33 models/deepseek_v41/nvidia/model.py, models/deepseek_v4/nvidia/model.py, configs/deepseek_v41.py",
        widths=width_keys.MOE,
    ),
    DEEPSEEK_V3,
    replace(
        DEEPSEEK_V3,
        name="DeepSeek-VL2",
        model_types=("deepseek_vl_v2", "deepseek_ocr2", "unlimited-ocr", "unlimited_ocr"),
        source="vLLM 0.33 model_executor/models/deepseek_vl2.py:349, deepseek_ocr.py:366;"
        " SGLang 0.5.23 configs/deepseekvl2.py:675, deepseek_ocr.py:928; transformers 5.24 unlimited_ocr, deepseek_ocr2",
        layers=r"(?:language\.)?model\.(?:language_model\.)?layers",
        n_routed_keys=("n_routed_experts",),
        mtp_key=None,
    ),
    Family(
        name="Kimi-K2",
        model_types=("kimi_k2", "kimi_k25", "kimi_vl"),
        source="vLLM 0.33 model_executor/models/kimi_k25.py, kimi_vl.py, which build deepseek_v2.py",
    ),
    Family(
        name="GLM-4-MoE",
        model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text"),
        source="vLLM 0.33 model_executor/models/glm4_moe.py, glm4_moe_lite.py",
    ),
    Family(
        name="GLM-5",
        model_types=("glm_moe_dsa", "glm5_next", "glm5_next_text"),
        source="vLLM 0.33 models/glm5next/common/model.py; transformers 5.24 glm_moe_dsa, glm5_next",
        mtp_assumed=0,
    ),
    Family(name="AXK1", model_types=("axk1", "axk2"), source="vLLM 0.33 model_executor/models/AXK1.py; transformers 5.24 axk2"),
    Family(name="dots", model_types=("dots1",), source="transformers 5.24 dots1"),
    Family(
        name="dots3-note",
        model_types=("dots3_note", "dots3_note_text"),
        source="transformers 5.24 dots3_note; vLLM 0.33 models/dots3_note/nvidia/model.py:64-126 (pads a narrower shared MLP)",
        widths=width_keys.DOTS_3_NOTE,
    ),
    Family(
        name="MiniMax-M3",
        model_types=("minimax_m3", "minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"),
        source="vLLM 0.33 models/minimax_m3/nvidia/model.py, mtp.py; transformers_utils/configs/minimax_m3.py",
        mtp=r"(?:language_model\.)?model\.mtp\.layers",
        block=f"{SPARSE}|mlp",  # transformers 5.24 saves a text model alone under `mlp`
        stacked=STACKED,
        fused=(Stack("gate_up_proj", GATE_UP),),
        routed_names=W_NAMES,
        widths=width_keys.MINIMAX_M3,
        readings=width_keys.MINIMAX_M3_READINGS,
        n_routed_keys=("num_local_experts",),
        mtp_key="num_mtp_modules",
        sparse=Sparse(step="moe_layer_freq", flags=True),
    ),
    Family(
        name="Kimi-Linear",
        model_types=("kimi_linear",),
        source="transformers 5.24 conversion_mapping.py kimi_linear; vLLM 0.33 transformers_utils/configs/kimi_linear.py",
        block=f"{SPARSE}|mlp",
        routed_names=W_NAMES,
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_experts", "n_shared_experts"),
    ),
    Family(
        name="Kimi-K3",
        model_types=("kimi_k3",),
        source="vLLM 0.33 models/kimi_k3/nvidia/model.py (latent: routed_expert_hidden_size), mtp.py",
        layers=BARE_LAYERS,
        block=SPARSE,
        routed_names=W_NAMES,
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_experts",),
    ),
    QWEN3_NEXT,
    replace(
        QWEN3_NEXT,
        name="Qwen3.5",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text", "intern_s2_preview"),
        stacked=STACKED,
        source="vLLM 0.33 model_executor/models/qwen3_5.py, qwen3_5_mtp.py, interns2_preview.py, models/qwen4_exp",
        mtp_key="mtp_num_hidden_layers",
    ),
    replace(
        QWEN3_NEXT,
        name="Alice AI",
        model_types=("alice_ai",),
        source="vLLM 0.33 model_executor/models/alice_ai.py:208-289, 352",
        sparse=EVERY_LAYER,
    ),
    ERNIE,
    replace(
        ERNIE,
        name="Ernie-4.5-VL",
        model_types=("ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        refused=(
            "the experts of Ernie-4.5-VL are two pools, for text and for vision, each with a width of its own",
            "serve it as it is, on a number of ranks that both widths are multiples of",
        ),
        source="vLLM 0.33 model_executor/models/ernie45_vl_moe.py:237-306; SGLang 0.5.23 models/ernie45_moe_vl.py:222-266;"
        " transformers 5.24 ernie4_5_vl_moe (list-valued widths)",
    ),
    Family(
        name="Hunyuan",
        model_types=("hunyuan_v1_moe",),
        source="transformers 5.24 hunyuan_v1_moe:71, 253 (intermediate_size); SGLang 0.5.23 models/hunyuan.py:142-180 (both keys)",
        widths=width_keys.HUNYUAN,
        readings=width_keys.HUNYUAN_READINGS,
        shared="shared_mlp",
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_expert",),
        lists="layer",
        mtp_key=None,
        sparse=EVERY_LAYER,
    ),
    Family(
        name="Hunyuan-V3",
        model_types=("hy_v3",),
        source="transformers 5.24 conversion_mapping.py hy_v3 (shared_mlp); vLLM 0.33 model_executor/models/hy_v3.py:144-199",
        shared="shared_mlp",
        widths=width_keys.HUNYUAN_V3,
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_experts",),
    ),
    Family(
        name="Hunyuan-V4",
        model_types=("hy_v4", "hy_v4_vl", "hy_v4_vl_text"),
        stacked=STACKED,
        shared_names={"linear_gate": Role.GATE, **PROJ_NAMES},  # transformers 5.24 saves gate_proj so, conversion_mapping.py:176
        source="vLLM 0.33 models/hy_v4/nvidia/model.py; transformers 5.24 hy_v4",
    ),
    LING,
    replace(
        LING,
        name="Ling-3",
        model_types=("bailing_hybrid", "bailing_moe_v3_vl"),
        source="vLLM 0.33 model_executor/models/bailing_moe_v3.py:396, 1187-1204; SGLang 0.5.23 models/bailing_moe_v3.py:617;"
        " transformers 5.24 bailing_hybrid:840",
        readings=width_keys.LING_3_READINGS,
        n_shared_keys=("num_shared_experts", "n_shared_experts"),
    ),
    replace(
        LING,
        name="Sarvam",
        model_types=("sarvam_moe", "sarvam_mla"),
        source="vLLM 0.33 model_executor/models/sarvam.py:332-355; SGLang 0.5.23 models/sarvam_moe.py:281-307 (reads no own width);"
        " transformers 5.24 sarvam_moe, sarvam_mla (other names of the numbers of experts)",
        readings=width_keys.SARVAM_READINGS,
        n_routed_keys=("num_experts", "n_routed_experts"),
        n_shared_keys=("num_shared_experts", "n_shared_experts"),
    ),
    replace(
        LING,
        name="Param2",
        model_types=("param2moe",),
        source="vLLM 0.33 model_executor/models/param2moe.py:307-336 (the shared width is of all shared experts together)",
        widths=width_keys.PARAM_2,
    ),
    Family(
        name="Nemotron-H",
        model_types=("nemotron_h", "nemotron_h_puzzle", "nemotron_h_omni"),
        source="vLLM 0.33 model_executor/models/nemotron_h.py:150-234, nemotron_h_mtp.py:247;"
        " SGLang 0.5.23 models/nemotron_h.py:258-311, configs/nemotron_h.py:540; transformers 5.24 nemotron_h:666, 733",
        layers=r"(?:language_model\.)?backbone\.layers",
        mtp=r"(?:language_model\.)?mtp\.layers",
        block="mixer",
        routed_names=UNGATED,
        shared_names=UNGATED,
        widths=width_keys.NEMOTRON_H,
        readings=width_keys.NEMOTRON_H_READINGS,
        depth_keys=("num_hidden_layers", "layers_block_type"),
        sparse=Sparse(words=("layers_block_type", "hybrid_override_pattern")),
        mtp_routed_key="mtp_n_routed_experts",
    ),
    replace(
        NUMBERED,
        name="EXAONE-MoE",
        model_types=("exaone_moe",),
        source="vLLM 0.33 model_executor/models/exaone_moe.py:81-135; SGLang 0.5.23 exaone_moe.py:165; transformers 5.24:277, 319",
        mtp=r"mtp\.layers",
    ),
    replace(
        NUMBERED,
        name="AFMoE",
        model_types=("afmoe",),
        source="vLLM 0.33 model_executor/models/afmoe.py:76-126, 310; SGLang 0.5.23 afmoe.py:198; transformers 5.24:165, 209",
        mtp_key=None,
        sparse=Sparse(first="num_dense_layers"),
    ),
    replace(
        NUMBERED,
        name="K2-Horizon",
        model_types=("k2_horizon", "xllm"),
        source="vLLM 0.33 model_executor/models/k2_horizon.py:468-526, 996 (value experts of attention have widths of their own);"
        " SGLang 0.5.23 models/xllm.py",
        mtp_key=None,
        sparse=STEPPED,
    ),
    QWEN2,
    replace(
        QWEN2,
        name="Laguna",
        model_types=("laguna",),
        source="vLLM 0.33 model_executor/models/laguna.py:143-219; SGLang 0.5.23 laguna.py:159; transformers 5.24:186, 223",
        gated=False,
        sparse=None,
    ),
    replace(
        QWEN2,
        name="Flint",
        model_types=("flint",),
        source="vLLM 0.33 models/flint/model.py:151-188, 493; transformers 5.24 flint:113, 150, 315",
        gated=False,
    ),
    replace(
        QWEN2,
        name="Kolibri",
        model_types=("kolibri1",),
        source="transformers 5.24 kolibri1:235, 307; vLLM 0.33 runs it by transformers' modules",
        shared="shared_experts",
        n_routed_keys=("num_local_experts", "num_experts"),
        gated=False,
        sparse=EVERY_LAYER,
    ),
    replace(
        DEEPSEEK_V3,
        name="openPangu",
        model_types=("pangu_ultra_moe",),
        source="vLLM 0.33 model_executor/models/openpangu.py:149-199, 885",
        n_routed_keys=("n_routed_experts",),
    ),
    replace(
        DEEPSEEK_V3,
        name="Mistral 4",
        model_types=("mistral4",),
        source="transformers 5.24 mistral4:178, 220",
        stacked=STACKED,
        mtp_key=None,
    ),
    replace(
        DEEPSEEK_V3,
        name="Mistral Large 4",
        model_types=("mistral_large4", "mistral_large4_text"),
        source="transformers 5.24 mistral_large4:566, 608, conversion_mapping.py",
        layers="layers",
        block="",
        routed_names=W_NAMES,
        shared_names=W_NAMES,
        n_routed_keys=("n_routed_experts", "num_experts"),
        mtp_key=None,
    ),
    replace(
        DEEPSEEK_V3,
        name="Solar Open",
        model_types=("solar_open",),
        source="transformers 5.24 solar_open:152, 194",
        mtp_key=None,
        sparse=EVERY_LAYER,
    ),
    replace(
        NUMBERED,
        name="Cohere2-MoE",
        model_types=("cohere2_moe",),
        source="vLLM 0.33 model_executor/models/cohere2_moe.py:325-355, 447; SGLang 0.5.23 models/cohere2_moe.py:289-308;"
        " transformers 5.24 cohere2_moe:109, 179, 353",
        widths=width_keys.COHERE_2,
        mtp_key=None,
    ),
    replace(
        NUMBERED,
        name="XVERSE-MoE",
        model_types=("xverse",),
        source="SGLang 0.5.23 models/xverse_moe.py:104-146",
        widths=width_keys.INTERMEDIATE,
        mtp_key=None,
        sparse=EVERY_LAYER,
    ),
)
