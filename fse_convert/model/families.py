"""Model families as data: how each names its experts, and which config keys hold their widths.

To add a family, add a row. Sources: model files of vLLM 0.33 and transformers 5.24, named per row; transformers'
``conversion_mapping.py`` says how checkpoints spell names that its modules spell differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
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


class Share(Enum):
    """Whose width a key states."""

    ROUTED = "a routed expert"
    SHARED = "the shared MLP"
    ONE_SHARED = "one shared expert"


@dataclass(frozen=True)
class Width:
    """A key from which some loader builds experts: padding edits every one that is there.

    ``assumed``: the width that loaders take where the key is missing; empty where they then read another key. ``optional``:
    some loaders never read it. ``dense``: dense MLPs of decoder layers are built from it too.
    """

    key: str
    share: Share = Share.ROUTED
    assumed: str = ""
    optional: bool = False
    dense: bool = False

    def of(self, routed: int | None, shared: int | None, n_shared: int) -> int | None:
        """Return what the key must say of experts so wide, ``n_shared`` of them shared; None where no integer says it."""
        if self.share is Share.ROUTED:
            return routed
        if self.share is Share.SHARED or shared is None:
            return shared
        return shared // n_shared if n_shared and shared % n_shared == 0 else None


DEFAULT = "a default of their own"
MOE = Width("moe_intermediate_size", assumed=DEFAULT)
EITHER = Width("intermediate_size", assumed=DEFAULT)
SECTIONS = ("", "text_config")
"""Where config.json keeps the text model's keys: at the top level, or nested."""


@dataclass(frozen=True)
class Stated:
    """A key that config.json has, and the section that it stands in. ``number``: the one integer that ``value`` means, if any."""

    section: str
    key: str
    value: Any
    number: int | None

    @property
    def path(self) -> str:
        """The key as people write it."""
        return f"{self.section}.{self.key}" if self.section else self.key


@dataclass(frozen=True)
class Family:
    """One way of naming a MoE model's experts and of writing their sizes into config.json.

    ``layers`` and ``mtp`` are regular expressions for what stands before a layer's number, ``block`` for the MoE block
    behind it. With ``mtp`` None, MTP layers are numbered on from the decoder layers (DeepSeek-V3). ``beside``: the
    shared expert stands beside the block, not inside it. ``widths``: the keys that state how wide experts are.
    ``n_routed_keys``, ``n_shared_keys``: the names of either number (without one for shared experts there is one);
    ``per_modality``: as a list it has a part per modality. ``gated``: a gate of its own scales the shared expert's output.
    ``sparse``: which layers have experts, None where that is not known. ``mtp_routed_key``: routed experts of MTP layers, where
    they have a key of their own.
    """

    name: str
    model_types: tuple[str, ...]
    source: str
    layers: str = MODEL_LAYERS
    mtp: str | None = None
    block: str = "mlp"
    shared: str = "shared_experts"
    beside: bool = False
    routed_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    shared_names: Mapping[str, Role] = field(default_factory=lambda: PROJ_NAMES)
    widths: tuple[Width, ...] = (MOE,)
    n_routed_keys: tuple[str, ...] = ("n_routed_experts",)
    n_shared_keys: tuple[str, ...] = ("n_shared_experts",)
    per_modality: bool = False
    mtp_key: str | None = "num_nextn_predict_layers"
    gated: bool = False
    sparse: Sparse | None = DENSE_PREFIX
    mtp_routed_key: str | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the prefix of a MoE block, ``layers.3.ffn``: groups layer, number, mtp, block."""
        mtp = f"(?P<mtp>{self.mtp})" if self.mtp else "(?P<mtp>(?!))"
        block = rf"(?:\.(?P<block>{self.block}))" + ("?" if self.beside else "")
        return re.compile(rf"(?P<layer>(?:{mtp}|{self.layers})\.(?P<number>\d+)){block}")

    def section(self, config: Mapping[str, Any]) -> str:
        """Name of the config section that holds the width of a routed expert; empty for the top level."""
        return next((name for name in SECTIONS for w in self.widths if place(config, name).get(w.key) is not None), "")

    def stated(self, config: Mapping[str, Any], *keys: str | None) -> Iterator[Stated]:
        """Yield every statement of some keys that mean the same, those in the section that holds the widths first."""
        for name in dict.fromkeys((self.section(config), *SECTIONS)):
            for key in keys:
                if key and (value := place(config, name).get(key)) is not None:
                    yield Stated(name, key, value, self._number(key, value))

    def value(self, config: Mapping[str, Any], key: str | None) -> object:
        """Read a key wherever it stands; None when absent."""
        return next((s.value for s in self.stated(config, key)), None)

    def number(self, config: Mapping[str, Any], *keys: str | None) -> int | None:
        """Read an integer under any of its names; None when absent or not an integer."""
        return next((s.number for s in self.stated(config, *keys)), None)

    def shared_count(self, config: Mapping[str, Any]) -> int:
        """Return the number of shared experts per layer: 0 where the key is null, one where the config does not say."""
        written = self.number(config, *self.n_shared_keys)
        if written is not None:
            return written
        null = any(place(config, name).get(key, 1) is None for name in SECTIONS for key in self.n_shared_keys)
        return 0 if null else 1

    def _number(self, key: str, value: object) -> int | None:
        """Return an integer: itself, a list of equal ones (one per layer), the sum of a list per modality; None of others."""
        if isinstance(value, list) and value and all(type(v) is int for v in value):
            if self.per_modality and key in (*self.n_routed_keys, *self.n_shared_keys):
                return sum(value)
            value = value[0] if len(set(value)) == 1 else None
        return value if type(value) is int else None


def place(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section of config.json, the whole of it for an empty name; empty where there is none."""
    found = config.get(section) if section else config
    return found if isinstance(found, Mapping) else {}


DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    model_types=("deepseek_v4", "deepseek_v4_text"),
    source="vLLM 0.33 models/deepseek_v4/nvidia/model.py; transformers 5.24 deepseek_v4 (intermediate_size, where it is, wins)",
    layers="layers",
    mtp="mtp",
    block="ffn",
    routed_names=W_NAMES,
    shared_names=W_NAMES,
    widths=(MOE, Width("intermediate_size")),
    sparse=EVERY_LAYER,
    mtp_routed_key="dspark_n_routed_experts",
)

QWEN3_NEXT = Family(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    source="vLLM 0.33 model_executor/models/qwen3_next.py:151-160, qwen3_next_mtp.py",
    mtp=r"mtp\.layers",
    shared="shared_expert",
    widths=(MOE, Width("shared_expert_intermediate_size", Share.SHARED, assumed=DEFAULT)),
    n_routed_keys=("num_experts",),
    n_shared_keys=(),
    gated=True,
    sparse=Sparse(step="decoder_sparse_step", ahead=1, dense="mlp_only_layers"),  # transformers 5.24 modeling_qwen3_next.py
)

FAMILIES: tuple[Family, ...] = (
    DEEPSEEK_V4,
    replace(
        DEEPSEEK_V4,
        model_types=("deepseek_v41", "deepseek_v41_text"),
        source="vLLM 0.33 models/deepseek_v41/nvidia/model.py, transformers_utils/configs/deepseek_v41.py",
        widths=(MOE,),
    ),
    Family(
        name="DeepSeek-V3",
        model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32"),
        source="vLLM 0.33 model_executor/models/deepseek_v2.py, models/deepseek_v32",
    ),
    Family(
        name="Kimi-K2",
        model_types=("kimi_k2", "kimi_k25"),
        source="vLLM 0.33 model_executor/models/kimi_k25.py (DeepSeek-V3 layout)",
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
    ),
    Family(name="AXK1", model_types=("axk1", "axk2"), source="vLLM 0.33 model_executor/models/AXK1.py; transformers 5.24 axk2"),
    Family(name="dots", model_types=("dots1",), source="transformers 5.24 dots1"),
    Family(
        name="dots3-note",
        model_types=("dots3_note", "dots3_note_text"),
        source="transformers 5.24 dots3_note; vLLM 0.33 models/dots3_note/nvidia/model.py:64-126 (pads a narrower shared MLP)",
        widths=(
            MOE,
            Width("shared_experts_intermediate_size", Share.ONE_SHARED, assumed="1536 (transformers 5.24)", optional=True),
            Width("moe_shared_expert_intermediate_size", Share.ONE_SHARED),
        ),
    ),
    Family(
        name="MiniMax-M3",
        model_types=("minimax_m3", "minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"),
        source="vLLM 0.33 models/minimax_m3/nvidia/model.py, mtp.py; transformers_utils/configs/minimax_m3.py",
        mtp=r"(?:language_model\.)?model\.mtp\.layers",
        block=SPARSE,
        routed_names=W_NAMES,
        widths=(
            EITHER,
            Width("shared_intermediate_size", Share.SHARED, assumed="3072 (transformers 5.24)", optional=True),
        ),
        n_routed_keys=("num_local_experts",),
        mtp_key="num_mtp_modules",
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
        model_types=("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
        source="vLLM 0.33 model_executor/models/qwen3_5.py, qwen3_5_mtp.py, models/qwen4_exp",
        mtp_key="mtp_num_hidden_layers",
    ),
    replace(
        QWEN3_NEXT,
        name="Alice AI",
        model_types=("alice_ai",),
        source="vLLM 0.33 model_executor/models/alice_ai.py:208-289",
    ),
    Family(
        name="Ernie-4.5",
        model_types=("ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        source="vLLM 0.33 model_executor/models/ernie45_moe.py:133-184; transformers 5.24 ernie4_5_vl_moe (list-valued widths)",
        n_routed_keys=("moe_num_experts",),
        n_shared_keys=("moe_num_shared_experts",),
        per_modality=True,
        # transformers 5.24 ernie4_5_moe/modeling_ernie4_5_moe.py
        sparse=Sparse(first="moe_layer_start_index", last="moe_layer_end_index", step="moe_layer_interval", ahead=1),
    ),
    Family(
        name="Llama 4",
        model_types=("llama4", "llama4_text"),
        source="vLLM 0.33 model_executor/models/llama4.py:107-155; transformers 5.24 llama4 (stacked routed experts)",
        block="feed_forward",
        shared="shared_expert",
        widths=(EITHER,),
        n_routed_keys=("num_local_experts",),
        n_shared_keys=(),
        mtp_key=None,
        sparse=None,
    ),
    Family(
        name="Hunyuan",
        model_types=("hunyuan_v1_moe",),
        source="transformers 5.24 hunyuan_v1_moe:71, 253 (intermediate_size); SGLang 0.5.23 models/hunyuan.py:142-180 (both keys)",
        widths=(Width("intermediate_size", assumed=DEFAULT, dense=True), Width("moe_intermediate_size")),
        shared="shared_mlp",
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_expert",),
        mtp_key=None,
        sparse=None,
    ),
    Family(
        name="Hunyuan-V3",
        model_types=("hy_v3",),
        source="transformers 5.24 conversion_mapping.py hy_v3 (shared_mlp); vLLM 0.33 model_executor/models/hy_v3.py:144-199",
        shared="shared_mlp",
        widths=(MOE, Width("expert_hidden_dim")),
        n_routed_keys=("num_experts",),
        n_shared_keys=("num_shared_experts",),
    ),
    Family(
        name="Hunyuan-V4",
        model_types=("hy_v4", "hy_v4_vl", "hy_v4_vl_text"),
        source="vLLM 0.33 models/hy_v4/nvidia/model.py; transformers 5.24 hy_v4",
    ),
    Family(
        name="Step-5",
        model_types=("step5", "step3p5", "step3p7"),
        source="vLLM 0.33 models/step5/nvidia/model.py:183-186, 2173-2190 (stacked routed experts), 1762 (share_expert_dim)",
        layers=BARE_LAYERS,
        block="moe",
        shared="share_expert",
        beside=True,
        widths=(
            MOE,
            Width("share_expert_dim", Share.SHARED, assumed="moe_intermediate_size x moe_top_k (vLLM 0.33)"),
            Width("share_expert_dims", Share.SHARED),
        ),
        n_routed_keys=("moe_num_experts", "n_routed_experts"),
        n_shared_keys=(),
        sparse=None,
    ),
)


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Find the family by ``model_type``, at the top level or in ``text_config``; None when no row has it."""
    types = [str(place(config, name).get("model_type")) for name in SECTIONS]
    return next((family for written in types for family in FAMILIES if written in family.model_types), None)
