"""Heterogeneous fusion (FHMoE): one AITER kernel runs FP8 shared experts beside MXFP4 routed ones, and requantises nothing.

``_heterogeneous_shared_expert_enabled`` of models/deepseek_v4/amd/model.py, the same in vLLM 0.30 (:210) to 0.33 (:225): for
DeepSeek-V4-Pro's sizes alone, on gfx950 at TP 8. The drafter (amd/mtp.py) never asks for it: its layers are judged as any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fse_convert.servers.aiter.quant_compatible import AiterQuestion

MODEL: Mapping[str, object] = {
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "hidden_act": "silu",
    "expert_dtype": "fp4",
    "topk_method": "noaux_tc",
}
"""What config.json must say."""
DEFAULTS: Mapping[str, object] = {"num_experts_per_tok": 6, "n_shared_experts": 1, "hidden_act": "silu"}
"""Those of them that transformers' DeepseekV4Config has by itself (5.24)."""


def objections(question: AiterQuestion) -> Iterator[str]:
    """Yield why vLLM does not take this path for a DeepSeek-V4 model, worded as it logs them.

    It then goes on as without it: the answer is that of the target without ``-fhmoe``.
    """
    for key, expected in MODEL.items():
        if question.read(key, DEFAULTS.get(key)) != expected:
            yield f"{key} is not {expected!r}"
    quant = question.quant
    if quant.class_name != "DeepseekV4FP8Config":
        yield "the DeepSeek V4 FP8 quantization config is not active"
        return
    raw = question.read("quantization_config") or {}
    if str(raw.get("moe_quant_algo") or "").upper() == "NVFP4":
        yield "routed experts use NVFP4"
    if quant.block != (128, 128):
        yield "shared experts are not block-128 FP8"
    if quant.ignored:
        yield "the quantization config has ignored layers"
