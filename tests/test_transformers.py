"""Real input that no one here wrote: models saved by transformers, padded, loaded by unmodified transformers, compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fse_convert.testing.patch import poke

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")

Run = Callable[..., tuple[int, str, str]]
COMMON = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128,
}  # fmt: skip
COUNTED = {k: v for k, v in COMMON.items() if k != "n_routed_experts"} | {"num_experts": 8, "moe_topk": 2, "head_dim": 128}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek-v3": ("DeepseekV3", {**COMMON, **LATENT, "n_shared_experts": 1}, ""),
    "deepseek-v3 two shared": ("DeepseekV3", {**COMMON, **LATENT, "n_shared_experts": 2}, ""),
    "glm-4-moe": ("Glm4Moe", {**COMMON, "head_dim": 64, "n_shared_experts": 1}, ""),
    "hunyuan": ("HunYuanMoEV1", {**COUNTED, "intermediate_size": 320, "num_shared_expert": 1}, "intermediate_size"),
    "hunyuan list": (
        "HunYuanMoEV1",
        {**COUNTED, "intermediate_size": 320, "moe_intermediate_size": [320] * 3},
        "intermediate_size",
    ),
    "hunyuan-v3": (
        "HYV3",
        {**COUNTED, "expert_hidden_dim": 320, "num_shared_experts": 1, "first_k_dense_replace": 1},
        "expert_hidden_dim",
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**COUNTED, "shared_expert_intermediate_size": 320, "layer_types": ["full_attention"] * 3},
        "shared_expert_intermediate_size",
    ),
    "ernie-4.5": ("Ernie4_5_Moe", {**COMMON, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2}, ""),
    "dots-1": ("Dots1", {**COMMON, "n_shared_experts": 2, "head_dim": 128}, ""),
}
"""Class, config, and the keys beside moe_intermediate_size that state the width of its experts to some loader."""
WIDER = {"320": 512, "[320, 320, 320]": [512] * 3}


def save(name: str, root: Path) -> None:
    family, config, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))
    for parameter in model.parameters():  # larger than the initial values, so that experts matter in the logits
        torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(root, max_shard_size="5MB")


def logits(root: Path, dtype: torch.dtype) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(root, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.filterwarnings("ignore")  # transformers' own, while it saves and loads
@pytest.mark.parametrize("name", MODELS)
def test_padded_model_gives_the_same_logits(name: str, tmp_path: Path, run: Run) -> None:
    root, out = tmp_path / "source", tmp_path / "out"
    save(name, root)
    assert len(list(root.glob("*.safetensors"))) > 2
    code, _, err = run(root, out)
    assert code == 3, "BF16 shared experts do not fuse, and nothing is written unless asked for"
    assert "error[not-fusable]" in err
    assert run(root, out, "--allow-unfused")[0] == 0
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (root, out))
    keys = [key for key in ("moe_intermediate_size", MODELS[name][2]) if key]
    assert {k: v for k, v in new.items() if v != old[k]} == {k: WIDER[str(old[k])] for k in keys}
    before, after = json.loads((root / INDEX).read_text())["metadata"], json.loads((out / INDEX).read_text())["metadata"]
    assert after["total_size"] - before["total_size"] == 2 * (after["total_parameters"] - before["total_parameters"]) > 0
    assert torch.equal(logits(root, torch.bfloat16), logits(out, torch.bfloat16))
    # In FP32 the sum over K may be cut differently at another K: equal up to the last bits.
    torch.testing.assert_close(logits(root, torch.float32), logits(out, torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_sees_one_wrong_byte(tmp_path: Path, run: Run) -> None:
    root, out = tmp_path / "source", tmp_path / "out"
    save("glm-4-moe", root)
    assert run(root, out, "--allow-unfused")[0] == 0
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    (sign,) = poke(out, name, 1, b"\0")
    poke(out, name, 1, bytes([sign ^ 0x80]))  # the sign of the first weight
    assert not torch.equal(logits(root, torch.bfloat16), logits(out, torch.bfloat16))


INDEX = "model.safetensors.index.json"
