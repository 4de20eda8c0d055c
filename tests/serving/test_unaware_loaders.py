"""The kernel layout in the hands of loaders that do not know it: never taken for a model. vLLM and SGLang: tests/peers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")

Run = Callable[..., tuple[int, str, str]]
MODEL = {
    "vocab_size": 64, "hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def output(made: Callable[..., Path], run: Run, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert run(made("v4-flash"), out, "--verify", "storage")[0] == 0
    return out


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_finds_no_model_in_the_sidecar(output: Path) -> None:
    for auto in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match="model_type"):
            auto.from_pretrained(output / "fse")
        with pytest.raises((OSError, ValueError)):
            auto.from_pretrained(output, subfolder="fse")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_output_without_the_sidecar(output: Path, run: Run, tmp_path: Path) -> None:
    """A sidecar that cannot even be opened makes no difference."""
    source, out = tmp_path / "v3", tmp_path / "v3-out"
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**MODEL)).to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="1MB")
    assert run(source, out, "--allow-unfused", "--verify", "storage")[0] == 0
    shutil.rmtree(out / "fse")
    shutil.copytree(output / "fse", out / "fse")
    (shard,) = (out / "fse").glob("*.safetensors")
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(SafetensorError):
        safe_open(shard, framework="pt").__enter__()
    assert torch.equal(logits(out), logits(source))


def logits(folder: Path) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.arange(16)[None]).logits
