"""Families whose models have no shared experts: nothing to fuse, experts to pad. As data, a row each."""

from __future__ import annotations

from dataclasses import replace

from fse_convert.model.families import width_keys
from fse_convert.model.families.family import (
    EVERY_LAYER,
    SPARSE,
    STACKED,
    STEPPED,
    W_NAMES,
    Family,
    Sparse,
)

MIXTRAL = Family(
    name="Mixtral",
    model_types=("mixtral", "phimoe", "minimax"),
    source="vLLM 0.33 model_executor/models/mixtral.py:247-250, phimoe.py:404; transformers 5.24 mixtral, phimoe, minimax",
    block=SPARSE,
    shared="",
    routed_names=W_NAMES,
    widths=width_keys.INTERMEDIATE,
    n_routed_keys=("num_local_experts",),
    n_shared_keys=(),
    mtp_key=None,
    sparse=EVERY_LAYER,
)
QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe", "sdar_moe"),
    source="vLLM 0.33 model_executor/models/qwen3_moe.py:150-209, 387; SGLang 0.5.23 models/qwen3_moe.py:270, sdar_moe.py:99",
    shared="",
    n_routed_keys=("num_experts", "num_local_experts"),  # transformers 5.24 saves the latter
    n_shared_keys=(),
    mtp_key=None,
    sparse=STEPPED,
)

ROUTED_ONLY: tuple[Family, ...] = (
    MIXTRAL,
    replace(
        MIXTRAL,
        name="MiniMax-M2",
        model_types=("minimax_m2",),
        source="vLLM 0.33 model_executor/models/minimax_m2.py:80-112; SGLang 0.5.23 models/minimax_m2.py:520-541",
    ),
    QWEN3_MOE,
    replace(
        QWEN3_MOE,
        name="MiMo-V2",
        model_types=("mimo_v2", "mimo_v2_flash"),
        source="vLLM 0.33 model_executor/models/mimo_v2.py:134-177, 493, mimo_v2_mtp.py; SGLang 0.5.23 models/mimo_v2.py:457, 1009",
        mtp=r"model\.mtp\.layers",
        n_routed_keys=("n_routed_experts",),
        mtp_key="num_nextn_predict_layers",
        sparse=Sparse(step="moe_layer_freq", flags=True),
    ),
    replace(
        QWEN3_MOE,
        name="OLMoE",
        model_types=("olmoe", "flex_olmo"),
        source="vLLM 0.33 model_executor/models/olmoe.py:232-235; transformers 5.24 olmoe, flex_olmo",
        widths=width_keys.INTERMEDIATE,
        sparse=EVERY_LAYER,
    ),
    replace(
        QWEN3_MOE,
        name="Mellum",
        model_types=("mellum",),
        source="SGLang 0.5.23 models/mellum.py:396-442; transformers 5.24 mellum",
        sparse=None,
    ),
    replace(
        QWEN3_MOE,
        name="LFM2-MoE",
        model_types=("lfm2_moe",),
        source="vLLM 0.33 model_executor/models/lfm2_moe.py:110-145, 295; transformers 5.24 lfm2_moe:482",
        block="feed_forward",
        routed_names=W_NAMES,
        n_routed_keys=("num_experts",),
        sparse=Sparse(first="num_dense_layers"),
    ),
    replace(
        QWEN3_MOE,
        name="LongCat-Flash",
        model_types=("longcat_flash",),
        source="vLLM 0.33 model_executor/models/longcat_flash.py:157-206, 303-319; transformers 5.24 longcat_flash",
        widths=width_keys.LONGCAT,
        depth_keys=("num_layers", "num_hidden_layers"),
        n_routed_keys=("n_routed_experts",),
        sparse=EVERY_LAYER,
    ),
    replace(
        QWEN3_MOE,
        name="Beam",
        model_types=("beam",),
        source="vLLM 0.33 models/beam/nvidia/model.py:101-113; SGLang 0.5.23 models/beam.py:334-345; transformers 5.24 beam",
        n_routed_keys=("num_experts",),
        sparse=None,
    ),
    replace(
        QWEN3_MOE,
        name="Intern-S1-Pro",
        model_types=("interns1_pro", "interns1_pro_text"),
        source="vLLM 0.33 model_executor/models/interns1_pro.py:149-178, 410-424, 627;"
        " SGLang 0.5.23 models/interns1pro.py (Qwen3-MoE's layers)",
        n_routed_keys=("num_experts",),
    ),
    replace(
        QWEN3_MOE,
        name="Gemma 4",
        model_types=("gemma4", "gemma4_text"),
        source="vLLM 0.33 model_executor/models/gemma4.py:636-653 (beside a dense MLP that every token passes);"
        " SGLang 0.5.23 models/gemma4_causal.py:287, 1268-1290 (both ways of storing them)",
        block="",
        stacked=STACKED,
        widths=width_keys.GEMMA_4,
        n_routed_keys=("num_experts",),
        sparse=None,
    ),
    replace(
        QWEN3_MOE,
        name="Muse Spark",
        model_types=("muse_spark", "muse_spark_text"),
        stacked=STACKED,
        source="vLLM 0.33 models/muse_spark/nvidia/model.py:390-488, 598; SGLang 0.5.23 models/muse_spark.py:475-509;"
        " transformers 5.24 muse_spark (experts work on moe_hidden_size)",
        n_routed_keys=("num_local_experts",),
        hidden_key="moe_hidden_size",
        sparse=None,
    ),
    replace(
        QWEN3_MOE,
        name="Jamba",
        model_types=("jamba",),
        source="vLLM 0.33 model_executor/models/jamba.py; transformers 5.24 jamba (dense layers have the same width)",
        block="feed_forward",
        widths=width_keys.DENSE_TOO,
        sparse=None,
    ),
)
