"""Model families as data: how each names its experts, and which config keys hold their widths.

To add a family, add a row. Sources: model files of vLLM 0.33 and transformers 5.24, named per row; transformers'
``conversion_mapping.py`` says how checkpoints spell names that its modules spell differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fse_convert.model.moe import Role

W_NAMES = {"w1": Role.GATE, "w3": Role.UP, "w2": Role.DOWN}
PROJ_NAMES = {"gate_proj": Role.GATE, "up_proj": Role.UP, "down_proj": Role.DOWN}
MODEL_LAYERS = r"(?:language_model\.)?model\.(?:language_model\.)?layers"
BARE_LAYERS = r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers"
SPARSE = "block_sparse_moe"


@dataclass(frozen=True)
class Sparse:
    """The keys that say which decoder layers have experts; None: the family has no such key.

    Layer i has some from ``first`` to ``last`` if ``i + ahead`` is a multiple of ``step``, unless ``dense`` lists it. ``step`` may
    also hold a flag per layer. A list ``mlp_layer_types``, as transformers 5 writes it, decides before all of them.
    """

    first: str | None = None
    last: str | None = None
    step: str | None = None
    ahead: int = 0
    dense: str | None = None


EVERY_LAYER = Sparse()
DENSE_PREFIX = Sparse(first="first_k_dense_replace", step="moe_layer_freq")
"""vLLM 0.33 model_executor/models/deepseek_v2.py, and those that follow it."""
QWEN = Sparse(step="decoder_sparse_step", ahead=1, dense="mlp_only_layers")
"""transformers 5.24 qwen3_next/modeling_qwen3_next.py."""
ERNIE = Sparse(first="moe_layer_start_index", last="moe_layer_end_index", step="moe_layer_interval", ahead=1)
"""transformers 5.24 ernie4_5_moe/modeling_ernie4_5_moe.py."""


@dataclass(frozen=True)
class Family:
    """One way of naming a MoE model's experts and of writing their sizes into config.json.

    ``layers`` and ``mtp`` are regular expressions for what stands before a layer's number, ``block`` for the MoE block
    behind it. With ``mtp`` None, MTP layers are numbered on from the decoder layers (DeepSeek-V3). ``beside``: the
    shared expert stands beside the block, not inside it. ``sections`` are the config's nested sections that may hold
    the keys, tried in order. ``shared_width_key`` None: the shared width is ``width_key`` times ``n_shared_key``.
    ``fixed_shared`` is the number of shared experts of families that have no key for it. ``gated``: a gate of its own
    scales the shared expert's output. ``sparse``: which layers have experts, None where that is not known. ``mtp_routed_key``:
    routed experts of MTP layers, where they have a key of their own. ``routed_per_layer_key``: a list of their number, one per
    decoder layer.
    """

    name: str
    model_types: frozenset[str]
    source: str
    layers: str = MODEL_LAYERS
    mtp: str | None = None
    block: str = "mlp"
    shared: str = "shared_experts"
    beside: bool = False
    routed_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    shared_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    width_key: str = "moe_intermediate_size"
    shared_width_key: str | None = None
    n_routed_key: str = "n_routed_experts"
    n_shared_key: str | None = "n_shared_experts"
    mtp_key: str | None = "num_nextn_predict_layers"
    fixed_shared: int | None = None
    gated: bool = False
    sparse: Sparse | None = DENSE_PREFIX
    mtp_routed_key: str | None = None
    routed_per_layer_key: str | None = None
    sections: tuple[str, ...] = ("", "text_config")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the prefix of a MoE block, ``layers.3.ffn``: groups layer, number, mtp, block."""
        mtp = f"(?P<mtp>{self.mtp})" if self.mtp else "(?P<mtp>(?!))"
        block = rf"(?:\.(?P<block>{self.block}))" + ("?" if self.beside else "")
        return re.compile(rf"(?P<layer>(?:{mtp}|{self.layers})\.(?P<number>\d+)){block}")

    def section(self, config: Mapping[str, Any]) -> str:
        """Name of the config section that holds ``width_key``; empty for the top level."""
        for name in self.sections:
            inner = config.get(name) if name else config
            if isinstance(inner, Mapping) and self.width_key in inner:
                return name
        return ""

    def value(self, config: Mapping[str, Any], key: str | None) -> object:
        """Read a key from the section that holds the widths, else from any other section; None when absent."""
        for name in (self.section(config), "", *self.sections):
            place = config.get(name) if name else config
            if key and isinstance(place, Mapping) and place.get(key) is not None:
                return place[key]
        return None

    def number(self, config: Mapping[str, Any], key: str | None) -> int | None:
        """Read an integer key as `value` does; a list of equal integers counts as one; None when absent or not an integer."""
        value = self.value(config, key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def _types(*names: str) -> frozenset[str]:
    return frozenset(names)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="DeepSeek-V4",
        model_types=_types("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text"),
        source="vLLM 0.33 models/deepseek_v4/nvidia/model.py, models/deepseek_v41/nvidia/model.py",
        layers="layers",
        mtp="mtp",
        block="ffn",
        routed_names=W_NAMES,
        shared_names=W_NAMES,
        sparse=EVERY_LAYER,
        mtp_routed_key="dspark_n_routed_experts",
    ),
    Family(
        name="DeepSeek-V3",
        model_types=_types("deepseek_v2", "deepseek_v3", "deepseek_v32"),
        source="vLLM 0.33 model_executor/models/deepseek_v2.py, models/deepseek_v32",
    ),
    Family(
        name="Kimi-K2",
        model_types=_types("kimi_k2", "kimi_k25"),
        source="vLLM 0.33 model_executor/models/kimi_k25.py (DeepSeek-V3 layout)",
    ),
    Family(
        name="GLM-4-MoE",
        model_types=_types("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text"),
        source="vLLM 0.33 model_executor/models/glm4_moe.py, glm4_moe_lite.py",
    ),
    Family(
        name="GLM-5",
        model_types=_types("glm_moe_dsa", "glm5_next", "glm5_next_text"),
        source="vLLM 0.33 models/glm5next/common/model.py; transformers 5.24 glm_moe_dsa, glm5_next",
    ),
    Family(
        name="AXK1",
        model_types=_types("axk1", "axk2"),
        source="vLLM 0.33 model_executor/models/AXK1.py; transformers 5.24 axk2",
    ),
    Family(
        name="dots",
        model_types=_types("dots1"),
        source="transformers 5.24 dots1",
    ),
    Family(
        name="dots3-note",
        model_types=_types("dots3_note", "dots3_note_text"),
        source="transformers 5.24 dots3_note: shared width is shared_experts_intermediate_size x n_shared_experts",
        shared_width_key="shared_experts_intermediate_size",
        routed_per_layer_key="pyramid_num_routed",
    ),
    Family(
        name="MiniMax-M3",
        model_types=_types("minimax_m3", "minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"),
        source="vLLM 0.33 models/minimax_m3/nvidia/model.py, mtp.py; transformers_utils/configs/minimax_m3.py",
        mtp=r"(?:language_model\.)?model\.mtp\.layers",
        block=SPARSE,
        routed_names=W_NAMES,
        width_key="intermediate_size",
        shared_width_key="shared_intermediate_size",
        n_routed_key="num_local_experts",
        mtp_key="num_mtp_modules",
        sections=("text_config", ""),
    ),
    Family(
        name="Kimi-Linear",
        model_types=_types("kimi_linear"),
        source="transformers 5.24 conversion_mapping.py kimi_linear; vLLM 0.33 transformers_utils/configs/kimi_linear.py",
        block=f"{SPARSE}|mlp",
        routed_names=W_NAMES,
        n_routed_key="num_experts",
        n_shared_key="num_shared_experts",
    ),
    Family(
        name="Kimi-K3",
        model_types=_types("kimi_k3"),
        source="vLLM 0.33 models/kimi_k3/nvidia/model.py (latent: routed_expert_hidden_size), mtp.py",
        layers=BARE_LAYERS,
        block=SPARSE,
        routed_names=W_NAMES,
        n_routed_key="num_experts",
        n_shared_key="num_shared_experts",
    ),
    Family(
        name="Qwen3-Next",
        model_types=_types("qwen3_next"),
        source="vLLM 0.33 model_executor/models/qwen3_next.py:151-160, qwen3_next_mtp.py",
        mtp=r"mtp\.layers",
        shared="shared_expert",
        shared_width_key="shared_expert_intermediate_size",
        n_routed_key="num_experts",
        n_shared_key=None,
        fixed_shared=1,
        gated=True,
        sparse=QWEN,
    ),
    Family(
        name="Qwen3.5",
        model_types=_types("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
        source="vLLM 0.33 model_executor/models/qwen3_5.py, qwen3_5_mtp.py, models/qwen4_exp",
        mtp=r"mtp\.layers",
        shared="shared_expert",
        shared_width_key="shared_expert_intermediate_size",
        n_routed_key="num_experts",
        n_shared_key=None,
        mtp_key="mtp_num_hidden_layers",
        fixed_shared=1,
        gated=True,
        sparse=QWEN,
    ),
    Family(
        name="Alice AI",
        model_types=_types("alice_ai"),
        source="vLLM 0.33 model_executor/models/alice_ai.py:208-289",
        mtp=r"mtp\.layers",
        shared="shared_expert",
        shared_width_key="shared_expert_intermediate_size",
        n_routed_key="num_experts",
        n_shared_key=None,
        fixed_shared=1,
        gated=True,
        sparse=QWEN,
    ),
    Family(
        name="Ernie-4.5",
        model_types=_types("ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        source="vLLM 0.33 model_executor/models/ernie45_moe.py:133-184; transformers 5.24 ernie4_5_vl_moe (list-valued widths)",
        n_routed_key="moe_num_experts",
        n_shared_key="moe_num_shared_experts",
        sparse=ERNIE,
    ),
    Family(
        name="Llama 4",
        model_types=_types("llama4", "llama4_text"),
        source="vLLM 0.33 model_executor/models/llama4.py:107-155; transformers 5.24 llama4 (stacked routed experts)",
        block="feed_forward",
        shared="shared_expert",
        width_key="intermediate_size",
        n_routed_key="num_local_experts",
        n_shared_key=None,
        mtp_key=None,
        fixed_shared=1,
        sparse=None,
        sections=("text_config", ""),
    ),
    Family(
        name="Hunyuan",
        model_types=_types("hunyuan_v1_moe"),
        source="transformers 5.24 hunyuan_v1_moe (shared_mlp); num_shared_expert and moe_intermediate_size may be lists",
        shared="shared_mlp",
        n_routed_key="num_experts",
        n_shared_key="num_shared_expert",
        mtp_key=None,
        sparse=None,
    ),
    Family(
        name="Hunyuan-V3",
        model_types=_types("hy_v3"),
        source="transformers 5.24 conversion_mapping.py hy_v3 (shared_mlp); vLLM 0.33 model_executor/models/hy_v3.py:164-199",
        shared="shared_mlp",
        n_routed_key="num_experts",
        n_shared_key="num_shared_experts",
    ),
    Family(
        name="Hunyuan-V4",
        model_types=_types("hy_v4", "hy_v4_vl", "hy_v4_vl_text"),
        source="vLLM 0.33 models/hy_v4/nvidia/model.py; transformers 5.24 hy_v4",
    ),
    Family(
        name="Step-5",
        model_types=_types("step5", "step3p5", "step3p7"),
        source="vLLM 0.33 models/step5/nvidia/model.py:183-186, 2173-2190 (stacked routed experts), 1762 (share_expert_dim)",
        layers=BARE_LAYERS,
        block="moe",
        shared="share_expert",
        beside=True,
        shared_width_key="share_expert_dim",
        n_routed_key="moe_num_experts",
        n_shared_key=None,
        fixed_shared=1,
        sparse=None,
    ),
)


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Find the family by ``model_type``, at the top level or in ``text_config``; None when no row has it."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for family in FAMILIES:
            if str(place.get("model_type")) in family.model_types:
                return family
    return None
