"""The module names of vLLM's ROCm models that AITER shared-expert fusion asks about, as data.

One row per model class of vLLM 0.33; ``since`` is the first release whose class asks at all. The renames are what is
left of the class's ``hf_to_vllm_mapper`` without stacked and dropped weights; of ``packed_modules_mapping`` only
``gate_up_proj`` matters here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fse_convert.model.families.family import SECTIONS, place
from fse_convert.servers.aiter.patterns import Renames
from fse_convert.servers.subject import vllm_class_names

GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
W1_W3 = {"gate_up_proj": ("w1", "w3")}
NO_RENAMES = Renames()
NO_EP = "expert parallelism must be off"

_V4_PARTS = ("layers.", "embed.", "norm.", "hc_head", "mtp.")
_V4_DOWN = ((".shared_experts.w2", ".shared_experts.down_proj"),)
_GLM_NEEDS = ("gfx950", "tensor parallel size 4 or 8", "data and prefill-context parallel size 1", NO_EP)
_VL_RENAMES = Renames(
    prefixes=(
        ("model.visual.", "visual."),
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
    )
)


@dataclass(frozen=True, slots=True)
class AiterFamily:
    """One model class: the places of its MoE blocks, and its renaming of a config's modules.

    ``block`` and ``mtp_block`` are prefixes of a MoE block, with ``{index}`` for a decoder layer's number, ``{k}`` for
    a drafter layer's own number and ``{next}`` for the number it has after the decoder layers. ``flat`` families read
    ``text_config`` as if it stood at the top level. ``v4``: DeepSeek-V4's class, which alone has AITER MegaMoE and heterogeneous
    fusion, and whose drafter re-keys ``mtp.N`` since 0.33. ``needs`` are conditions outside the checkpoint, for people. ``since``
    None: the class never fuses this way. ``exists_since``: the first release that has the class. ``names_since``: the first
    release whose class has the two mappings; before, ``packed`` and ``renames`` are empty. ``activation``: the one
    ``hidden_act`` that the class takes.
    """

    name: str
    source: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    block: str = "model.layers.{index}.mlp"
    mtp_block: str = "model.layers.{next}.mlp"
    shared: str = "shared_experts"
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GATE_UP)
    renames: Renames = NO_RENAMES
    flat: bool = False
    v4: bool = False
    needs: tuple[str, ...] = ()
    since: str | None = "0.29"
    exists_since: str = "0.29"
    names_since: str = "0.29"
    activation: str = "silu"


DEEPSEEK_V4 = AiterFamily(
    name="DeepSeek-V4",
    source="models/deepseek_v4/amd/model.py, amd/mtp.py",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    block="model.layers.{index}.ffn",
    mtp_block="model.layers.{next}.ffn",
    packed=W1_W3,
    renames=Renames(
        regexes=((r"(\.experts\.\d+\.w[123])\.scale$", r"\1.weight_scale"), (r"\.scale$", ".weight_scale_inv")),
        substrings=_V4_DOWN,
        prefixes=tuple((part, f"model.{part}") for part in _V4_PARTS),
        suffixes=(
            ("head.weight", "lm_head.weight"),
            ("embed.weight", "embed_tokens.weight"),
            (".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"),
            (".input_scale", ".input_scale_2"),
        ),
    ),
    v4=True,
    needs=(NO_EP, "data parallel size 1 (newer releases raise a ValueError otherwise)", "n_shared_experts 1"),
)

AITER_FAMILIES: tuple[AiterFamily, ...] = (
    DEEPSEEK_V4,
    replace(
        DEEPSEEK_V4,
        name="DeepSeek-V4 (vision)",
        source="models/deepseek_v4/common/vl_model.py: the text model inside keeps its own renaming of config entries",
        architectures=("DeepseekV4ForConditionalGeneration",),
        model_types=(),
        block="language_model.model.layers.{index}.ffn",
        since="0.30",
        exists_since="0.30",
    ),
    replace(
        DEEPSEEK_V4,
        name="DeepSeek-V4.1",
        source="models/deepseek_v41/amd/vl_model.py, amd/dspark.py",
        architectures=("DeepseekV41ForCausalLM",),
        model_types=("deepseek_v41",),
        block="language_model.model.layers.{index}.ffn",
        renames=Renames(
            substrings=_V4_DOWN,
            prefixes=tuple((part, f"language_model.model.{part}") for part in _V4_PARTS),
        ),
        flat=True,
        v4=False,
        since="0.30",
        exists_since="0.30",
        names_since="0.31",
    ),
    AiterFamily(
        name="Kimi-K2.5",
        source="model_executor/models/kimi_k25.py:311-320, 376-381: builds DeepseekV2ForCausalLM, 0.29:370-376 alike",
        architectures=("KimiK25ForConditionalGeneration",),
        model_types=("kimi_k25",),
        block="language_model.model.layers.{index}.mlp",
        renames=Renames(prefixes=(("language_model.layers.", "language_model.model.layers."),)),
    ),
    AiterFamily(
        name="Kimi-VL",
        source="model_executor/models/kimi_vl.py:336-341: builds DeepseekV2ForCausalLM, 0.29:340-345 alike",
        architectures=("KimiVLForConditionalGeneration",),
        model_types=("kimi_vl",),
        block="language_model.model.layers.{index}.mlp",
    ),
    AiterFamily(
        name="DeepSeek-V3",
        source="model_executor/models/deepseek_v2.py, models/deepseek_v32/amd",
        architectures=(
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM",
        ),
        model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"),
    ),
    AiterFamily(
        name="GLM-4-MoE",
        source="model_executor/models/glm4_moe.py, glm4_moe_lite.py",
        architectures=("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
        model_types=("glm4_moe", "glm4_moe_lite"),
    ),
    AiterFamily(
        name="GLM-5-Next",
        source="models/glm5next/common/model.py",
        architectures=("Glm5NextForCausalLM",),
        model_types=("glm5_next", "glm5_next_text"),
        packed={},  # the text-only class has no packed_modules_mapping: its gate_up_proj matches by the fused name alone
        needs=_GLM_NEEDS,
        since="0.32",
        exists_since="0.30",
    ),
    AiterFamily(
        name="GLM-5-Next (vision)",
        source="models/glm5next/common/model.py",
        architectures=("Glm5NextForConditionalGeneration",),
        block="language_model.model.layers.{index}.mlp",
        renames=_VL_RENAMES,
        needs=_GLM_NEEDS,
        since="0.32",
        exists_since="0.30",
    ),
    AiterFamily(
        name="MiniMax-M3",
        activation="swigluoai",
        source="models/minimax_m3/amd/model.py",
        architectures=("MiniMaxM3SparseForCausalLM",),
        model_types=("minimax_m3", "minimax_m3_text"),
        block="model.layers.{index}.block_sparse_moe",
        mtp_block="model.layers.{k}.block_sparse_moe",
        needs=(NO_EP,),
    ),
    AiterFamily(
        name="MiniMax-M3 (vision)",
        activation="swigluoai",
        source="models/minimax_m3/amd/model.py",
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        model_types=("minimax_m3_vl",),
        block="language_model.model.layers.{index}.block_sparse_moe",
        mtp_block="model.layers.{k}.block_sparse_moe",
        renames=Renames(
            substrings=((".mlp.fc1", ".fc1"), (".mlp.fc2", ".fc2")),
            prefixes=(
                ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
                ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
            ),
        ),
        needs=(NO_EP,),
    ),
    AiterFamily(
        name="Qwen3-Next",
        source="model_executor/models/qwen3_next.py",
        architectures=("Qwen3NextForCausalLM",),
        model_types=("qwen3_next",),
        mtp_block="mtp.layers.{k}.mlp",
        shared="shared_expert",
    ),
    AiterFamily(
        name="Qwen3.5",
        source="model_executor/models/qwen3_5.py",
        architectures=("Qwen3_5MoeForCausalLM",),
        model_types=("qwen3_5_moe_text",),
        mtp_block="mtp.layers.{k}.mlp",
        shared="shared_expert",
        renames=Renames(prefixes=(("model.language_model.", "model."),)),
    ),
    AiterFamily(
        name="Qwen3.5 (vision)",
        source="model_executor/models/qwen3_5.py",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        model_types=("qwen3_5_moe",),
        block="language_model.model.layers.{index}.mlp",
        mtp_block="mtp.layers.{k}.mlp",
        shared="shared_expert",
        renames=_VL_RENAMES,
    ),
    AiterFamily(
        name="Qwen4-Exp",
        source="models/qwen4_exp/amd/model.py",
        architectures=("Qwen4ExpForCausalLM",),
        model_types=("qwen4_exp", "qwen4_exp_text"),
        mtp_block="mtp.layers.{next}.mlp",
        shared="shared_expert",
        renames=Renames(prefixes=(("model.language_model.", "model."),)),
    ),
    AiterFamily(
        name="Qwen4-Exp (vision)",
        source="models/qwen4_exp/amd/model.py",
        architectures=("Qwen4ExpForConditionalGeneration",),
        block="language_model.model.layers.{index}.mlp",
        mtp_block="mtp.layers.{next}.mlp",
        shared="shared_expert",
        renames=_VL_RENAMES,
    ),
    AiterFamily(
        name="AXK1",
        source="model_executor/models/AXK1.py",
        architectures=("AXK1ForCausalLM",),
        model_types=("axk1",),
    ),
    AiterFamily(
        name="Alice AI",
        source="model_executor/models/alice_ai.py",
        architectures=("AliceAIForCausalLM",),
        model_types=("alice_ai",),
        shared="shared_expert",
        since="0.33",
        exists_since="0.33",
    ),
    AiterFamily(
        name="Kimi-K3",
        source="models/kimi_k3/amd/linear.py: routed experts work on a hidden size of their own",
        architectures=("KimiK3ForConditionalGeneration",),
        model_types=("kimi_k3",),
        block="model.layers.{index}.block_sparse_moe",
        since=None,
    ),
)


def find_aiter_family(config: Mapping[str, Any]) -> AiterFamily | None:
    """Find the model class by its name; a config that names none by its ``model_type``, at the top level or in ``text_config``."""
    wanted = set(vllm_class_names(config))
    types = {str(place(config, name).get("model_type")) for name in SECTIONS}
    found = (f for f in AITER_FAMILIES if (wanted.intersection(f.architectures) if wanted else types.intersection(f.model_types)))
    return next(found, None)
