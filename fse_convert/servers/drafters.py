"""How many layers of a drafter servers build, and from which key; checkpoints may hold fewer.

A drafter in DeepSeek's DSpark form has its stages under ``mtp.N``: V4.1 always, V4 where config.json names the layers it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fse_convert.model.description import Description
from fse_convert.model.moe import LayerKind

Config = Mapping[str, Any]
V4, V41 = "deepseek_v4", "deepseek_v41"


@dataclass(frozen=True, slots=True)
class Drafter:
    """How one engine builds the drafter of some models, and what happens to layers without tensors.

    ``built``: the number of layers; 0 for a model that the row is not about.
    """

    engine: str
    message: str
    hint: str
    source: str
    built: Callable[[Description, Config], int]

    def is_short(self, engine: str, description: Description, config: Config) -> bool:
        """Tell whether a layer that the engine builds is not stored."""
        stored = {d.layer.index for d in description.layers if d.layer.kind is LayerKind.MTP}
        return engine.startswith(self.engine) and not stored.issuperset(range(self.built(description, config)))


def _number(description: Description, config: Config, *keys: str) -> int:
    family = description.family
    return (family.number(config, *keys) if family else None) or 0


def _watched(description: Description, config: Config) -> int:
    ids = description.family.value(config, "dspark_target_layer_ids") if description.family else None
    return len(ids) if isinstance(ids, list) and description.model_type in (V4, V41) else 0


def _promised(description: Description, config: Config) -> int:
    stages = description.model_type == V41 or _watched(description, config)
    return _number(description, config, *description.family.mtp_keys) if description.family and not stages else 0


def _of_v4(description: Description, config: Config) -> int:
    stages = description.model_type == V4 and _watched(description, config)
    return _number(description, config, "n_mtp_layers") or 3 if stages else 0


def _of_v41(description: Description, config: Config) -> int:
    stated = _number(description, config, "n_mtp_layers") or _number(description, config, "num_nextn_predict_layers")
    return stated or 3 if description.model_type == V41 else 0


DRAFTERS = (
    Drafter(
        "vLLM",
        "builds as many drafter layers as config.json promises, and some have no tensors: the load fails, or they stay empty",
        "fetch the missing layers, or serve without the drafter",
        "0.33 DeepSeek-V4 models/deepseek_v4/nvidia/mtp.py:218, 514, V3 model_executor/models/deepseek_mtp.py:152, 531 and"
        " MiniMax-M3 models/minimax_m3/nvidia/mtp.py:108, 319 raise; GLM-4-MoE model_executor/models/glm4_moe_mtp.py:136,"
        " Qwen3-Next qwen3_next_mtp.py:63 and Qwen3.5 qwen3_5_mtp.py:82 do not, but for unquantised models (default_loader.py:512)",
        _promised,
    ),
    Drafter(
        "vLLM",
        "builds three stages of DSpark, or n_mtp_layers where config.json states it; some have no tensors and stay empty",
        "fetch the missing stages, serve without the drafter, or state n_mtp_layers in config.json, if there are no more",
        "0.33 models/deepseek_v4/nvidia/dspark.py:106, amd/dspark.py:73; 0.29 and 0.30 :80 and :75, 0.31 :105, 0.32 :110",
        _of_v4,
    ),
    Drafter(
        "vLLM",
        "builds as many stages of DSpark as config.json promises, three without a promise; some have no tensors and stay empty",
        "fetch the missing stages, or serve without the drafter",
        "0.33 models/deepseek_v41/nvidia/dspark.py:85-89, amd/dspark.py:79; 0.30 :82, 0.31 :87, 0.32 :89",
        _of_v41,
    ),
    Drafter(
        "SGLang",
        "builds a DSpark stage for each of dspark_target_layer_ids; some have no tensors and stay empty",
        "fetch the missing stages, or serve without --speculative-algorithm DSPARK",
        "0.5.21 models/deepseek_v4_dspark.py:828, 0.5.22 :776, 0.5.23 :739; 0.5.20 was not read",
        _watched,
    ),
)
