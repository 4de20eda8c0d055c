"""Real input that no one here wrote: models saved by transformers, padded, loaded by unmodified transformers, compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fse_convert.model.families.find import FAMILIES
from fse_convert.testing.patch import poke
from tests.transformers_types import RUN

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")

Run = Callable[..., tuple[int, str, str]]
Config = dict[str, Any]
MOE, EITHER = "moe_intermediate_size", "intermediate_size"
TOTAL, OWN = "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"
COMMON: Config = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 384, MOE: 320, OWN: 320, TOTAL: 320,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "moe_topk": 2, "moe_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
}  # fmt: skip
"""Small values of keys that many families have; a config class takes those that it knows."""


@dataclass(frozen=True)
class Model:
    """A model type, keys of its own, and every key that must say the new width, with the number of experts it is wide.

    ``top``: keys beside those of the text model and of towers. ``options``: of a conversion that pads its experts to 512.
    ``original``: saved under the names of its releases, else under those of its modules. ``transposed``: releases hold the experts'
    tensors so, which transformers reads, and does not write. ``renamed``: a name that only it writes, and that of releases.
    """

    model_type: str
    own: Config = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=lambda: {MOE: 1})
    name: str = ""
    vision: Config = field(default_factory=dict)
    audio: Config = field(default_factory=dict)
    top: Config = field(default_factory=dict)
    options: tuple[str, ...] = ("--allow-unfused",)
    original: bool = True
    transposed: bool = False
    renamed: tuple[str, str] = ("", "")


TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 512}
TOWER_LAYERS = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
PIXTRAL = {**TOWER_LAYERS, "head_dim": 16}
TYPES = ["dense", "sparse", "sparse"]
FULL = {"layer_types": ["full_attention"] * 3}


def routed_only(model_type: str, key: str = MOE, **own: Any) -> Model:
    """A model without shared experts: padded for tensor parallelism alone, so widely that 320 becomes 512 here too."""
    return Model(model_type, {key: 320, **own}, {key: 1}, options=("--tp", "512"))


SHARED = "shared_intermediate_size"
STEP_TOWER = {**PIXTRAL, "image_size": 28, "patch_size": 14}
STACKED = (
    Model("qwen3_5_moe_text", FULL, {MOE: 1, OWN: 1}, name="stacked", original=False),
    Model("llama4_text", {EITHER: 320, "intermediate_size_mlp": 384, "head_dim": 128}, {EITHER: 1}),
    routed_only("gpt_oss", EITHER, head_dim=64),
    routed_only("granitemoe", EITHER),
    Model("granitemoeshared", {EITHER: 320, SHARED: 640}, {EITHER: 1, SHARED: 2}),
    Model("granitemoehybrid", {EITHER: 320, SHARED: 320}, {EITHER: 1, SHARED: 1}),
    Model("granitemoe_swa", {EITHER: 320, SHARED: 320}, {EITHER: 1, SHARED: 1}),
    Model("hy_v4"),
    Model("minimax_m3_vl_text", {EITHER: 320, SHARED: 320}, {EITHER: 1, SHARED: 1}),
    Model(
        "qwen3_vl_moe",
        {"hidden_size": 768, "head_dim": 128},
        vision={**TOWER, "out_hidden_size": 768},
        options=("--tp", "512"),
        transposed=True,
    ),
    Model(
        "qwen3_vl_moe",
        {"head_dim": 128},
        {MOE: 2},  # 512 wide, as hidden is, transformers would take down for one that is not transposed
        name="as wide as hidden",
        vision=TOWER,
        options=("--tp", "512"),
        transposed=True,
    ),
    replace(
        routed_only("inkling2", swa_num_attention_heads=4, swa_num_key_value_heads=4, unpadded_vocab_size=250),
        vision={**TOWER_LAYERS, "projection_hidden_dim": 32, "text_hidden_size": 512},
    ),
    Model("mistral4"),
    routed_only("gemma4_text", enable_moe_block=True, top_k_experts=2, head_dim=64, global_head_dim=64),
    Model("aria_text", {EITHER: 320}, {EITHER: 1}),
    replace(
        routed_only("muse_spark", moe_hidden_size=256, layer_types=["full_attention"] * 3),
        vision={**TOWER_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["full_attention"]},
        audio={"out_hidden_size": 512, "num_hidden_layers": 1, "patch_sizes": [16], "hidden_sizes": [32], "depths": [1]},
    ),
    Model(
        "step3p7",
        {"share_expert_dim": 320, "sliding_window": 64, "mlp_layer_types": TYPES, **FULL},
        {MOE: 1, "share_expert_dim": 1},
        vision=STEP_TOWER,
    ),
)
"""Models with all routed experts of a layer in one tensor, or in one per projection."""
SAM = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
    "mlp_dim": 32, "window_size": 2, "global_attn_indexes": [0], "downsample_channels": [16, 32],
}  # fmt: skip
ENCODER = {**TOWER_LAYERS, "num_key_value_heads": 2, "image_size": 28, "patch_size": 14}
TOWERS = (
    Model(
        "kimi_k25", vision={**TOWER_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4}, top={"projection_hidden_size": 32},
        renamed=("language_model.model.blocks", "language_model.model.layers"),
    ),
    Model("deepseek_ocr2", {"mlp_layer_types": TYPES}, vision={"sam_config": SAM, "encoder_config": {**ENCODER, "vocab_size": 32}}),
    Model("unlimited_ocr", vision={"sam_config": SAM, "encoder_config": ENCODER}),
    Model(
        "nemotron_h_omni", {TOTAL: 640}, {MOE: 1, TOTAL: 2},
        vision={**PIXTRAL, "image_size": 32, "max_img_size": 64, "video_temporal_patch_size": 2},
        top={"projector_hidden_size": 32, "vision_hidden_size": 32},
    ),
    Model(
        "dots3_note", {"shared_experts_intermediate_size": 320}, {MOE: 1, "shared_experts_intermediate_size": 1},
        vision={
            **TOWER_LAYERS, "moe_intermediate_size": 320, "num_local_experts": 4, "mlp_layer_types": ["sparse"],
            "adapter_in_dim": 32, "adapter_out_dim": 512,
        },
        audio={**TOWER_LAYERS, "downsample_hidden_size": 16, "adapter_input_size": 32, "adapter_out_dim": 512},
    ),
    Model(
        "hy_v4_vl", {"qk_rope_head_dim": 64, "index_head_dim": 64},
        vision={**TOWER_LAYERS, "out_hidden_size": 512, "max_image_size": 64},
    ),
)  # fmt: skip
"""Models with towers around the text model, which may have experts of their own."""
MODELS = (
    *STACKED,
    *TOWERS,
    Model("deepseek_v2"),
    Model("deepseek_v3"),
    Model("deepseek_v3", {"n_shared_experts": 2}, name="two shared"),
    Model("deepseek_v32"),
    Model("deepseek_v4", {"intermediate_size": 320, "head_dim": 64}),
    Model("glm4_moe"),
    Model("glm4_moe_lite"),
    Model("glm4v_moe", vision=TOWER),
    Model("glm_moe_dsa"),
    Model(
        "glm5_next",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "qk_rope_head_dim": 0, "linear_head_dim": 32, "linear_num_heads": 4},
        vision=TOWER,
    ),
    Model("axk1"),
    Model("axk2"),
    Model("dots1", {"n_shared_experts": 2}),
    Model("dots3_note_text", {"shared_experts_intermediate_size": 320}, {MOE: 1, "shared_experts_intermediate_size": 1}),
    Model("kimi_linear", FULL),
    Model("qwen3_next", FULL, {MOE: 1, OWN: 1}),
    Model("qwen3_5_moe_text", FULL, {MOE: 1, OWN: 1}),
    Model("qwen4_exp_text", {}, {MOE: 1, OWN: 1}),
    Model("ernie4_5_moe", {"moe_num_shared_experts": 2}),
    Model("hunyuan_v1_moe", {"intermediate_size": 320, "num_shared_expert": 1, "head_dim": 128}, {MOE: 1, "intermediate_size": 1}),
    Model(
        "hunyuan_v1_moe", {"intermediate_size": 320, MOE: [320] * 3, "head_dim": 128}, {MOE: 1, "intermediate_size": 1}, name="list"
    ),
    Model("hy_v3", {"expert_hidden_dim": 320}, {MOE: 1, "expert_hidden_dim": 1}),
    Model("sarvam_moe"),
    Model("sarvam_mla"),
    Model("bailing_hybrid", {TOTAL: 320, **FULL}, {MOE: 1, TOTAL: 1}),
    Model("nemotron_h", {TOTAL: 640}, {MOE: 1, TOTAL: 2}),
    Model("exaone_moe"),
    Model("afmoe"),
    Model("qwen2_moe", {OWN: 1280}, {MOE: 1, OWN: 4}),
    Model("laguna", {OWN: 640}, {MOE: 1, OWN: 2}),
    Model("laguna", {OWN: 448}, {MOE: 1, OWN: 1}, name="shared width of its own"),
    Model("qwen2_moe", {OWN: 1000}, {MOE: 1, OWN: 2}, name="shared width of its own"),
    Model("flint", {"mlp_only_layers": [0], **FULL}, {MOE: 1, OWN: 1}),
    Model("kolibri1", {}, {MOE: 1, OWN: 1}),
    Model("mistral_large4", {"head_dim": 16}, vision=PIXTRAL),
    Model("solar_open"),
    Model("cohere2_moe", {"intermediate_size": 320}, {"intermediate_size": 1}),
    routed_only("mixtral", EITHER),
    routed_only("phimoe", EITHER),
    routed_only("minimax", EITHER),
    routed_only("minimax_m2", EITHER),
    routed_only("qwen3_moe"),
    routed_only("mimo_v2_flash", **FULL),
    routed_only("beam", mlp_layer_types=TYPES),
    routed_only("olmoe", EITHER),
    routed_only("flex_olmo", EITHER),
    routed_only("mellum"),
    routed_only("lfm2_moe", **FULL),
    routed_only(
        "longcat_flash",
        "expert_ffn_hidden_size",
        num_layers=2,
        num_hidden_layers=4,
        ffn_hidden_size=384,
        zero_expert_num=0,
        head_dim=16,
    ),
    routed_only("jamba", EITHER, attn_layer_period=1, attn_layer_offset=0, expert_layer_period=1, expert_layer_offset=0),
)


def config_of(model: Model) -> Any:
    cls = transformers.CONFIG_MAPPING[model.model_type]
    known = cls().get_text_config()
    inner = {k: v for k, v in COMMON.items() if k in known.to_dict() or k in known.attribute_map} | model.own
    towers = {"vision_config": model.vision, "audio_config": model.audio}
    return cls(text_config=inner, **{name: t for name, t in towers.items() if t}, **model.top) if model.vision else cls(**inner)


def loader_of(config: Any) -> Any:
    loaders = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    return next(loader for loader in loaders if type(config) in loader._model_mapping)


def save(model: Model, root: Path) -> None:
    torch.manual_seed(0)
    config = config_of(model)
    built = loader_of(config).from_config(config)
    for parameter in built.parameters():  # larger than the initial values, so that experts matter in the logits
        torch.nn.init.normal_(parameter, std=0.05)
    built.to(torch.bfloat16).save_pretrained(root, max_shard_size="5MB", save_original_format=model.original)
    for path in root.glob("*.safetensors") if model.transposed or any(model.renamed) else ():
        turned = model.transposed
        stored = {n: t.transpose(1, 2).contiguous() if turned and ".experts." in n else t for n, t in load_file(path).items()}
        save_file({n.replace(*model.renamed): t for n, t in stored.items()}, path, metadata={"format": "pt"})
    (root / INDEX).write_text((root / INDEX).read_text().replace(*model.renamed))


def logits(root: Path, dtype: torch.dtype) -> torch.Tensor:
    loader = loader_of(transformers.AutoConfig.from_pretrained(root))
    model, info = loader.from_pretrained(root, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


def text_config(root: Path) -> Config:
    config: Config = json.loads((root / "config.json").read_text())
    return config.get("text_config", config)


def wide(value: int | list[int], width: int) -> int | list[int]:
    """The width in the form in which a config has it: one number, or one per layer."""
    return [width] * len(value) if isinstance(value, list) else width


@pytest.mark.filterwarnings("ignore")  # transformers' own, while it saves and loads
@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.model_type} {m.name}".strip())
def test_padded_model_gives_the_same_logits(model: Model, tmp_path: Path, run: Run) -> None:
    root, out = tmp_path / "source", tmp_path / "out"
    save(model, root)
    assert len(list(root.glob("*.safetensors"))) > 2
    code, _, err = run(root, out, *model.options)
    assert code == 0, err
    old, new = text_config(root), text_config(out)
    changed = {key: value for key, value in new.items() if value != old[key]}
    assert changed == {key: wide(old[key], 512 * times) for key, times in model.keys.items() if key in old}
    before, after = json.loads((root / INDEX).read_text())["metadata"], json.loads((out / INDEX).read_text())["metadata"]
    assert after["total_size"] - before["total_size"] == 2 * (after["total_parameters"] - before["total_parameters"]) > 0
    expected = logits(root, torch.bfloat16)
    assert expected.isfinite().all()
    assert torch.equal(expected, logits(out, torch.bfloat16))


def test_the_table_of_families_names_what_is_run_here() -> None:
    assert {m.model_type for m in MODELS} == RUN


def test_a_family_that_is_padded_is_run_wherever_transformers_has_a_model_of_it() -> None:
    unrun = [f for f in FAMILIES if not (f.refused or RUN.intersection(f.model_types))]
    assert [t for family in unrun for t in family.model_types if t in transformers.CONFIG_MAPPING] == []


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_sees_one_wrong_byte(tmp_path: Path, run: Run) -> None:
    root, out = tmp_path / "source", tmp_path / "out"
    save(Model("glm4_moe"), root)
    code, _, err = run(root, out)
    assert code == 3, "BF16 shared experts do not fuse, and nothing is written unless asked for"
    assert "error[not-fusable]" in err
    assert run(root, out, "--allow-unfused")[0] == 0
    # In FP32 the sum over K may be cut differently at another K: equal up to the last bits.
    torch.testing.assert_close(logits(root, torch.float32), logits(out, torch.float32), rtol=1e-5, atol=1e-5)
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    (sign,) = poke(out, name, 1, b"\0")
    poke(out, name, 1, bytes([sign ^ 0x80]))  # the sign of the first weight
    assert not torch.equal(logits(root, torch.bfloat16), logits(out, torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [m for m in MODELS if len(m.keys) > 1], ids=lambda m: f"{m.model_type} {m.name}".strip())
def test_a_model_with_one_of_its_keys_edited_alone_does_not_load(model: Model, tmp_path: Path, run: Run) -> None:
    """So every key that is edited is one that transformers reads, but for those that only other loaders do."""
    root, out = tmp_path / "source", tmp_path / "out"
    save(model, root)
    assert run(root, out, *model.options)[0] == 0
    old, path = text_config(root), out / "config.json"
    converted = path.read_text()
    for key in [k for k in model.keys if k in old and (model.model_type, k) not in UNREAD]:
        config = json.loads(converted)
        config.get("text_config", config)[key] = old[key]
        path.write_text(json.dumps(config))
        with pytest.raises((AssertionError, RuntimeError)):
            logits(out, torch.bfloat16)


UNREAD = {("hy_v3", "expert_hidden_dim"), ("bailing_hybrid", TOTAL), ("hunyuan_v1_moe", MOE)}
"""Keys that transformers does not read: vLLM and SGLang do."""
INDEX = "model.safetensors.index.json"
