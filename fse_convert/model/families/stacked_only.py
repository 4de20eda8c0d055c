"""Families whose releases hold all routed experts of a layer in one tensor. As data, a row each."""

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
    TRANSPOSED,
    Family,
    Sparse,
    Stack,
)
from fse_convert.model.moe import Role

EACH = tuple(Stack(name, (role,)) for name, role in PROJ_NAMES.items())
"""Gate, up and down in a tensor each."""

GRANITE = Family(
    name="Granite-MoE",
    model_types=("granitemoe",),
    source="vLLM 0.33 model_executor/models/granitemoe.py; SGLang 0.5.23 models/granitemoe.py:329;"
    " transformers 5.24 granitemoe, conversion_mapping.py:915-928",
    block=SPARSE,
    shared="",
    widths=width_keys.INTERMEDIATE,
    n_routed_keys=("num_local_experts",),
    n_shared_keys=(),
    stacked=(Stack("input_linear", GATE_UP), Stack("output_linear", (Role.DOWN,))),
    mtp_key=None,
    sparse=EVERY_LAYER,
)

GRANITE_SHARED = replace(
    GRANITE,
    name="Granite-MoE shared",
    model_types=("granitemoeshared", "granitemoehybrid"),
    source="vLLM 0.33 model_executor/models/granitemoeshared.py:106-110, granitemoehybrid.py; SGLang 0.5.23"
    " models/granitemoe.py:329-335; transformers 5.24 granitemoehybrid:745-775",
    shared="shared_mlp",
    beside=True,
    shared_names={"output_linear": Role.DOWN},
    widths=width_keys.GRANITE_SHARED,
    fused=(Stack("input_linear", GATE_UP),),
)

INKLING_2 = Family(
    name="Inkling 2",
    model_types=("inkling2", "inkling2_text"),
    source="transformers 5.24 inkling2:757-767, conversion_mapping.py:359-375 (intermediate_size is another name of the width)",
    layers=r"model\.llm\.layers",
    shared="",
    widths=width_keys.EITHER_NAME,
    n_routed_keys=("n_routed_experts", "num_local_experts"),
    n_shared_keys=(),
    stacked=(Stack("experts.w13_weight", GATE_UP, interleaved=True), Stack("experts.w2_weight", (Role.DOWN,))),
    mtp_key=None,
    sparse=EVERY_LAYER,
)

STACKED_ONLY: tuple[Family, ...] = (
    GRANITE,
    GRANITE_SHARED,
    replace(
        GRANITE_SHARED,
        name="Granite-MoE SWA",
        model_types=("granitemoe_swa",),
        source="transformers 5.24 granitemoe_swa:69, 360",
        stacked=STACKED,
    ),
    Family(
        name="gpt-oss",
        model_types=("gpt_oss",),
        source="vLLM 0.33 model_executor/models/gpt_oss.py:394, 577-585, 859-900, 1382-1396; transformers 5.24 gpt_oss:68",
        shared="",
        widths=width_keys.INTERMEDIATE,
        n_routed_keys=("num_local_experts",),
        n_shared_keys=(),
        stacked=(
            Stack("experts.gate_up_proj", GATE_UP, transposed=True, interleaved=True, biased=True),
            replace(TRANSPOSED[1], biased=True),
        ),
        mtp_key=None,
        sparse=EVERY_LAYER,
    ),
    Family(
        name="Qwen3-VL-MoE",
        model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
        source="vLLM 0.33 model_executor/models/qwen3_vl_moe.py:76; transformers 5.24 conversion_mapping.py:1450-1461,"
        " core_model_loading.py:372-377 (turns what is not square)",
        shared="",
        n_routed_keys=("num_experts", "num_local_experts"),
        n_shared_keys=(),
        stacked=tuple(replace(stack, by_shape=True) for stack in TRANSPOSED),
        mtp_key=None,
        sparse=STEPPED,
    ),
    INKLING_2,
    replace(
        INKLING_2,
        name="Inkling",
        model_types=("inkling_model", "inkling_mm_model", "inkling_text"),
        source="vLLM 0.33 models/inkling/nvidia/moe.py:6-17, 280-309, 421-470, configs.py:85-96; transformers 5.24 inkling",
        refused=(
            "Inkling's shared experts have weights from the router and stand in one tensor, which is neither padded nor fused",
            "serve it as it is, on a number of ranks that its width is a multiple of",
        ),
    ),
    Family(
        name="Llama 4",
        model_types=("llama4", "llama4_text"),
        stacked=TRANSPOSED,
        source="vLLM 0.33 model_executor/models/llama4.py:107-155; transformers 5.24 llama4 (stacked routed experts)",
        block="feed_forward",
        shared="shared_expert",
        widths=width_keys.INTERMEDIATE,
        n_routed_keys=("num_local_experts",),
        n_shared_keys=(),
        mtp_key=None,
        sparse=Sparse(step="interleave_moe_layer_step", ahead=1, listed="moe_layers"),  # transformers 5.24 llama4:175-182
    ),
    Family(
        name="Aria",
        model_types=("aria", "aria_text"),
        source="vLLM 0.33 model_executor/models/aria.py; transformers 5.24 aria:227-288, conversion_mapping.py:905-914",
        widths=width_keys.INTERMEDIATE,
        n_routed_keys=("moe_num_experts",),
        n_shared_keys=("moe_num_shared_experts",),
        stacked=(Stack("experts.fc1", GATE_UP, transposed=True), Stack("experts.fc2", (Role.DOWN,), transposed=True)),
        mtp_key=None,
        sparse=EVERY_LAYER,
    ),
    Family(
        name="Step-5",
        model_types=("step5", "step3p5", "step3p7"),
        stacked=EACH,
        source="vLLM 0.33 models/step5/nvidia/model.py:183-186, 2173-2190 (stacked routed experts), 1762 (share_expert_dim)",
        layers=BARE_LAYERS,
        block="moe",
        shared="share_expert",
        beside=True,
        widths=width_keys.STEP_5,
        n_routed_keys=("moe_num_experts", "n_routed_experts"),
        n_shared_keys=(),
        sparse=None,
    ),
    Family(
        name="Step-3",
        model_types=("step3_text", "step3_vl"),
        stacked=EACH,
        source="vLLM 0.33 model_executor/models/step3_text.py:72-83, 260, 423-487, transformers_utils/configs/step3_vl.py:57;"
        " SGLang 0.5.23 models/step3_vl.py:139, 354",
        block="moe",
        shared="share_expert",
        beside=True,
        widths=width_keys.STEP_3,
        n_routed_keys=("moe_num_experts",),
        n_shared_keys=(),
        mtp_key=None,
        sparse=None,
    ),
)
