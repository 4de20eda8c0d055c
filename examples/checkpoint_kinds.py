"""The kinds of checkpoint that make_checkpoint.py synthesises, as data: names, dtypes, shapes, and published configs.

A kind is a function that lists its tensors by shard (DeepSeek V4, V4.1 or V3), a storage format for each sort of
matrix, and the published config.json. Every dimension of a tensor is read from the config.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HC = 4  # residual streams (hc_mult)
HC_MIX = (2 + HC) * HC
PATCH = 3 * 14 * 14  # values of an image patch; an aligner joins 3x3 of them


class Entry(NamedTuple):
    """A tensor to write: `fill` names its values, `seed` their random stream (its name, unless two must be equal)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str
    seed: str


Group = list[Entry] | tuple[Entry, ...]  # a shard's tensors; a tuple's are stored in its order


class Part(NamedTuple):
    """One stored tensor of a matrix: an element stands for `block` = (rows, columns) of it; no block means 0-d."""

    suffix: str
    dtype: str
    fill: str
    block: tuple[int, ...]
    tied: bool = False  # gate and up have the same value


class Storage(NamedTuple):
    """The format of each sort of matrix; empty: as in the decoder layers."""

    routed: str = "bf16"
    shared: str = "bf16"
    linear: str = "bf16"  # attention and all others
    mtp_routed: str = ""
    mtp_shared: str = ""


@dataclass(frozen=True)
class Spec:
    """One checkpoint to write: `config` is its config.json, `shard_size` in bytes (none: shards as published)."""

    kind: str
    config: Mapping[str, Any]
    mtp: int
    mtp_experts: int
    power_of_two: bool = False  # of F32 scales
    seed: int = 0
    shard_size: int | None = None
    single_file: bool = False
    sparse: bool = False
    header_metadata: bool = True

    @property
    def traits(self) -> Kind:
        """The kind's row of the table."""
        return KINDS[self.kind]

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return text_of(self.config)


@dataclass(frozen=True)
class Kind:
    """One published checkpoint: its tensors by shard, its config, how its matrices are stored."""

    groups: Callable[[Spec], Iterator[Group]]
    config: Mapping[str, Any]
    storage: Storage
    dspark: bool = False  # the MTP layers are the stages of one drafter
    ratio: Callable[[int], int] = lambda _: 0  # KV compression of a layer
    power_of_two: bool = False
    real_mtp: int = 0  # MTP layers in the files, where the config says another number
    demo_experts: int = 8


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    return config.get("text_config", config)  # type: ignore[no-any-return]


def _fp8(scale: str, block: tuple[int, int], dtype: str = "F8_E8M0") -> tuple[Part, ...]:
    fill = "f32-scale" if dtype == "F32" else "e8m0-of-fp8"
    return Part("weight", "F8_E4M3", "e4m3", (1, 1)), Part(scale, dtype, fill, block)


FORMATS: Mapping[str, tuple[Part, ...]] = {
    "bf16": (Part("weight", "BF16", "normal-bf16", (1, 1)),),
    "fp8-128": _fp8("scale", (128, 128)),
    "fp8-32": _fp8("scale", (32, 32)),
    "fp8-row32": _fp8("scale", (1, 32)),
    "fp8-128-f32": _fp8("scale", (128, 128), "F32"),
    "fp8-128-inv": _fp8("weight_scale_inv", (128, 128), "F32"),
    "fp8-128-quark": _fp8("weight_scale", (128, 128)),
    "mxfp4": (Part("weight", "I8", "fp4", (1, 2)), Part("scale", "F8_E8M0", "e8m0-of-fp4", (1, 32))),
    "mxfp4-quark": (Part("weight", "U8", "fp4", (1, 2)), Part("weight_scale", "U8", "e8m0-of-fp4", (1, 32))),
    "nvfp4": (
        Part("weight", "U8", "fp4", (1, 2)),
        Part("weight_scale", "F8_E4M3", "e4m3-scale", (1, 16)),
        Part("weight_scale_2", "F32", "global-f32", (), tied=True),
        Part("input_scale", "F32", "global-f32", (), tied=True),
    ),
}


# Tensors: one generator for each piece of a model. `c` is the language model's config.


def linear(spec: Spec, storage: str, prefix: str, rows: int, cols: int) -> Iterator[Entry]:
    """The stored tensors of the matrix `prefix` [rows, cols]; a partial block counts as one."""
    for part in FORMATS[storage]:
        fill = "f32-scale-pow2" if part.fill == "f32-scale" and spec.power_of_two else part.fill
        shape = tuple(-(-size // block) for size, block in zip((rows, cols), part.block, strict=False))
        stream = prefix.removesuffix("w3") + "w1" if part.tied and prefix.endswith("w3") else prefix
        yield Entry(f"{prefix}.{part.suffix}", part.dtype, shape, fill, f"{stream}.{part.suffix}")


def mlp(spec: Spec, storage: str, prefix: str, width: int, names: str = "w1 w2 w3") -> Iterator[Entry]:
    """Gate and up [width, hidden], down [hidden, width]; `names` are those of gate, down, up."""
    gate, down, up = (f"{prefix}.{name}" for name in names.split())
    hidden = spec.text["hidden_size"]
    yield from linear(spec, storage, gate, width, hidden)
    yield from linear(spec, storage, down, hidden, width)
    yield from linear(spec, storage, up, width, hidden)


def plain(name: str, *shape: int, dtype: str = "BF16", fill: str = "") -> Entry:
    """A tensor that is never quantised; norms are near one."""
    return Entry(name, dtype, shape, fill or ("unit-" if "norm" in name else "normal-") + dtype.lower(), name)


def experts(spec: Spec, mtp: bool) -> int:
    """Routed experts of a decoder or of an MTP layer."""
    return spec.mtp_experts if mtp else int(spec.text["n_routed_experts"])


def moe(spec: Spec, prefix: str, *, mtp: bool, names: str = "w1 w2 w3") -> Iterator[Entry]:
    """The router's matrix, the routed experts, and the shared ones as one MLP of `n_shared_experts` times the width."""
    c, formats = spec.text, spec.traits.storage
    width, shared = c["moe_intermediate_size"], c["n_shared_experts"]
    routed_format = (mtp and formats.mtp_routed) or formats.routed
    shared_format = (mtp and formats.mtp_shared) or formats.shared
    yield plain(f"{prefix}.gate.weight", experts(spec, mtp), c["hidden_size"])
    for expert in range(experts(spec, mtp)):
        yield from mlp(spec, routed_format, f"{prefix}.experts.{expert}", width, names)
    if shared:
        yield from mlp(spec, shared_format, f"{prefix}.shared_experts", shared * width, names)


def v4_layer(spec: Spec, prefix: str, *, mtp: bool) -> Iterator[Entry]:
    """What a V4 and a V4.1 layer have in common: attention, hyper-connections, experts."""
    c, attn = spec.text, f"{prefix}.attn"
    hidden, queries, out = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["o_groups"] * c["o_lora_rank"]
    for name, rows, cols in (
        ("wq_a", c["q_lora_rank"], hidden),
        ("wq_b", queries, c["q_lora_rank"]),
        ("wkv", c["head_dim"], hidden),
        ("wo_a", out, queries // c["o_groups"]),
        ("wo_b", hidden, out),
    ):
        yield from linear(spec, spec.traits.storage.linear, f"{attn}.{name}", rows, cols)
    yield plain(f"{attn}.q_norm.weight", c["q_lora_rank"])
    yield plain(f"{attn}.kv_norm.weight", c["head_dim"])
    yield plain(f"{attn}.attn_sink", c["num_attention_heads"], dtype="F32")
    for part in ("attn", "ffn"):
        yield plain(f"{prefix}.{part}_norm.weight", hidden)
        yield plain(f"{prefix}.hc_{part}_fn", HC_MIX, HC * hidden, dtype="F32")
        yield plain(f"{prefix}.hc_{part}_base", HC_MIX, dtype="F32")
        yield plain(f"{prefix}.hc_{part}_scale", 3, dtype="F32")
    yield from moe(spec, f"{prefix}.ffn", mtp=mtp)


def hc_head(prefix: str, hidden: int) -> Iterator[Entry]:
    """V4 merges the residual streams before every head."""
    yield plain(f"{prefix}hc_head_fn", HC, HC * hidden, dtype="F32")
    yield plain(f"{prefix}hc_head_base", HC, dtype="F32")
    yield plain(f"{prefix}hc_head_scale", 1, dtype="F32")


def compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Iterator[Entry]:
    """V4's KV compressor; at ratio 4 its windows overlap and it has twice the channels."""
    channels = dim * (2 if ratio == 4 else 1)
    yield plain(f"{prefix}.ape", ratio, channels, dtype="F32")
    yield plain(f"{prefix}.wkv.weight", channels, hidden)
    yield plain(f"{prefix}.wgate.weight", channels, hidden)
    yield plain(f"{prefix}.norm.weight", dim)


def indexer(spec: Spec, prefix: str) -> Iterator[Entry]:
    """The part of an indexer that V4 and V4.1 have in common."""
    c = spec.text
    yield from linear(
        spec, spec.traits.storage.linear, f"{prefix}.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"]
    )
    yield plain(f"{prefix}.weights_proj.weight", c["index_n_heads"], c["hidden_size"])


def draft(spec: Spec, stage: int) -> Iterator[Entry]:
    """What an MTP layer has beyond a decoder layer; a DSpark drafter has it at its first and last stage."""
    c, prefix, last = spec.text, f"mtp.{stage}", not spec.traits.dspark or stage == spec.mtp - 1
    hidden, store, v4 = c["hidden_size"], spec.traits.storage.linear, spec.traits.groups is v4_groups
    if not spec.traits.dspark:
        for side in ("e", "h"):
            yield from linear(spec, store, f"{prefix}.{side}_proj", hidden, hidden)
            yield plain(f"{prefix}.{side}norm.weight", hidden)
    elif stage == 0:
        yield from linear(spec, store, f"{prefix}.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
        yield plain(f"{prefix}.main_norm.weight", hidden)
    if spec.traits.dspark and last:
        for name in ("markov_w1", "markov_w2") if v4 else ("embed", "head"):
            yield plain(f"{prefix}.markov_head.{name}.weight", c["vocab_size"], c["dspark_markov_rank"])
        yield plain(f"{prefix}.confidence_head.proj.weight", 1, hidden + c["dspark_markov_rank"])
    if last:
        yield plain(f"{prefix}.norm.weight", hidden)
        if v4:
            yield from hc_head(f"{prefix}.", hidden)


def v4_groups(spec: Spec) -> Iterator[Group]:
    """V4 by shard: embedding, one decoder layer each, head, one MTP layer each."""
    c = spec.text
    hidden, routed = c["hidden_size"], c["n_routed_experts"]
    yield [plain("embed.weight", c["vocab_size"], hidden)]
    for layer in range(c["num_hidden_layers"]):
        prefix, ratio = f"layers.{layer}", c["compress_ratios"][layer]
        group = list(v4_layer(spec, prefix, mtp=False))
        if layer < c["num_hash_layers"]:
            shape, ids = (c["vocab_size"], c["num_experts_per_tok"]), f"id-below-{routed}"
            group.append(plain(f"{prefix}.ffn.gate.tid2eid", *shape, dtype="I64", fill=ids))
        else:
            group.append(plain(f"{prefix}.ffn.gate.bias", routed, dtype="F32"))
        if ratio:
            group += compressor(f"{prefix}.attn.compressor", ratio, c["head_dim"], hidden)
        if ratio == 4:
            group += indexer(spec, f"{prefix}.attn.indexer")
            group += compressor(f"{prefix}.attn.indexer.compressor", ratio, c["index_head_dim"], hidden)
        yield group
    yield [plain("norm.weight", hidden), plain("head.weight", c["vocab_size"], hidden), *hc_head("", hidden)]
    for stage in range(spec.mtp):
        bias = plain(f"mtp.{stage}.ffn.gate.bias", spec.mtp_experts, dtype="F32")
        yield [*v4_layer(spec, f"mtp.{stage}", mtp=True), bias, *draft(spec, stage)]


def v41_layer(spec: Spec, prefix: str, *, mtp: bool) -> Iterator[Entry]:
    """A V4.1 layer: every router has two biases, and few layers own a KV compressor or an indexer."""
    c, attn, layer = spec.text, f"{prefix}.attn", -1 if mtp else int(prefix.rpartition(".")[2])
    yield from v4_layer(spec, prefix, mtp=mtp)
    for name in ("bias", "bias_vl"):
        yield plain(f"{prefix}.ffn.gate.{name}", experts(spec, mtp), dtype="F32")
    if layer in c["kv_source_layer_ids"]:
        yield plain(f"{attn}.compressor.wkv.weight", c["head_dim"], c["hidden_size"])
        yield plain(f"{attn}.compressor.norm.weight", c["head_dim"])
        if c["compress_ratios"][layer] > 1:
            yield plain(f"{attn}.compressor.wgate.weight", c["head_dim"], c["hidden_size"])
        yield plain(f"{attn}.indexer.wk.weight", c["index_head_dim"], c["head_dim"])
        yield plain(f"{attn}.indexer.k_norm.weight", c["index_head_dim"])
    if layer in c["index_source_layer_ids"]:
        yield from indexer(spec, f"{attn}.indexer")


def vision(spec: Spec) -> Iterator[Entry]:
    """The vision tower and its aligner, in BF16."""
    v, hidden = spec.config["vision_config"], spec.text["hidden_size"]
    dim, width = v["hidden_size"], v["intermediate_size"]
    yield plain("vision.patch_embed.proj.weight", dim, PATCH)
    yield plain("vision.patch_embed.proj.bias", dim)
    for block in range(v["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}"
        for name, rows, cols in (("wqkv", 3 * dim, dim), ("wo", dim, dim)):
            yield plain(f"{prefix}.attn.{name}.weight", rows, cols)
            yield plain(f"{prefix}.attn.{name}.bias", rows)
        yield plain(f"{prefix}.mlp.w1.weight", 2 * width, dim)
        yield plain(f"{prefix}.mlp.w2.weight", dim, width)
        yield plain(f"{prefix}.norm1.weight", dim)
        yield plain(f"{prefix}.norm2.weight", dim)
    yield plain("vision.norm.weight", dim)
    for name, cols in (("w1", v["downsample_ratio"] ** 2 * dim), ("w2", hidden)):
        yield plain(f"aligner.{name}.weight", hidden, cols)
        yield plain(f"aligner.{name}.bias", hidden)


def v41_groups(spec: Spec) -> Iterator[Group]:
    """V4.1 by shard: vision, embedding, decoder layers, head, MTP layers, then the engrams, away from their layers."""
    c = spec.text
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield list(vision(spec))
    yield [plain("embed.weight", vocab, hidden), *(plain(f"image_{at}", hidden) for at in ("start", "end", "newline"))]
    for layer in range(c["num_hidden_layers"]):
        yield list(v41_layer(spec, f"layers.{layer}", mtp=False))
    yield [plain("norm.weight", hidden), plain("head.weight", vocab, hidden)]
    for stage in range(spec.mtp):
        yield [*v41_layer(spec, f"mtp.{stage}", mtp=True), *draft(spec, stage)]
    looked_up = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
    for layer, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
        prefix = f"layers.{layer}.engram"
        yield (
            *linear(spec, "fp8-row32", f"{prefix}.embed", rows, c["engram_head_dim"]),
            *linear(spec, spec.traits.storage.linear, f"{prefix}.wkv", (HC + 1) * hidden, looked_up),
            *(plain(f"{prefix}.{side}_weight", HC, hidden) for side in ("q", "k")),
        )


def v3_layer(spec: Spec, layer: int, *, mtp: bool) -> Iterator[Entry]:
    """A V3 layer: multi-head latent attention, then a dense MLP or the experts."""
    c, prefix, names, storage = (
        spec.text,
        f"model.layers.{layer}",
        "gate_proj down_proj up_proj",
        spec.traits.storage.linear,
    )
    attn, hidden, heads, rank = f"{prefix}.self_attn", c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    for name, rows, cols in (
        ("q_a_proj", c["q_lora_rank"], hidden),
        ("q_b_proj", heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), c["q_lora_rank"]),
        ("kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], hidden),
        ("kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
        ("o_proj", hidden, heads * c["v_head_dim"]),
    ):
        yield from linear(spec, storage, f"{attn}.{name}", rows, cols)
    yield plain(f"{attn}.q_a_layernorm.weight", c["q_lora_rank"])
    yield plain(f"{attn}.kv_a_layernorm.weight", rank)
    yield plain(f"{prefix}.input_layernorm.weight", hidden)
    yield plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    if layer < c["first_k_dense_replace"]:
        yield from mlp(spec, storage, f"{prefix}.mlp", c["intermediate_size"], names)
    else:
        yield plain(f"{prefix}.mlp.gate.e_score_correction_bias", experts(spec, mtp), dtype="F32")
        yield from moe(spec, f"{prefix}.mlp", mtp=mtp, names=names)


def v3_groups(spec: Spec) -> Iterator[Group]:
    """V3: embedding, decoder layers, head, and the MTP layers under the numbers that follow."""
    hidden, vocab, layers = (spec.text[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    yield [plain("model.embed_tokens.weight", vocab, hidden)]
    for layer in range(layers):
        yield list(v3_layer(spec, layer, mtp=False))
    yield [plain("model.norm.weight", hidden), plain("lm_head.weight", vocab, hidden)]
    for layer in range(layers, layers + spec.mtp):
        prefix = f"model.layers.{layer}"
        group = [*v3_layer(spec, layer, mtp=True), plain(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)]
        group += (plain(f"{prefix}.{name}.weight", hidden) for name in ("enorm", "hnorm", "shared_head.norm"))
        group += (plain(f"{prefix}.{name}.weight", vocab, hidden) for name in ("embed_tokens", "shared_head.head"))
        yield group


# Published configs. What depends on the knobs is put in by make_checkpoint.py.

_V4: dict[str, Any] = json.loads("""{
"architectures": ["DeepseekV4ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
"eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
"hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
"initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
"num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3,
"num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
"qk_rope_head_dim": 64, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
"beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"}, "rope_theta": 10000,
"routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
"tie_word_embeddings": false, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
"use_cache": true, "vocab_size": 129280, "compress_rope_theta": 160000, "compress_ratios": []}""")
_V4_PRO: dict[str, Any] = _V4 | json.loads("""{
"hidden_size": 7168, "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_hidden_layers": 61,
"num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024, "routed_scaling_factor": 2.5}""")
_DSPARK: dict[str, Any] = json.loads("""{
"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [], "dspark_markov_rank": 256}""")
_V41: dict[str, Any] = json.loads("""{
"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
"transformers_version": "5.6.0", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, "text_config": {"model_type": "deepseek_v41_text", "vocab_size": 129280,
"hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 64,
"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
"o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": false,
"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": true, "tie_word_embeddings": false,
"max_position_embeddings": 1048576, "rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", "factor": 16,
"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}, "n_routed_experts": 384,
"n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
"norm_topk_prob": true, "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_ratios": [],
"compress_rope_theta": 160000, "kv_source_layer_ids": [2, 8, 14, 20],
"index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
"index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "engram_layer_ids": [1, 14],
"engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000,
"engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
"num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
"dspark_target_layer_ids": [], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
"dspark_num_experts_per_tok": 3}, "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32,
"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000,
"downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": null}}""")
_V3: dict[str, Any] = json.loads("""{
"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config":
{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
"rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
"v_head_dim": 128, "vocab_size": 129280}""")


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _csa(layer: int) -> int:
    return 0 if layer < 2 else (4, 128)[layer % 2]


def _csa_pro(layer: int) -> int:
    return 128 if layer < 2 else (4, 128)[layer % 2]


def _csa2(layer: int) -> int:
    return 0 if layer < 2 else 2 if layer < 20 else 1


_MX = Storage("mxfp4", "fp8-128", "fp8-128")
_MX32 = Storage("mxfp4", "fp8-32", "fp8-32")
_NV = Storage("nvfp4", "fp8-32", "fp8-32", mtp_routed="mxfp4")
_QUARK = Storage("mxfp4-quark", "mxfp4-quark", "fp8-128-quark", mtp_shared="fp8-128-quark")
_F32 = Storage("fp8-128-f32", "fp8-128-f32", "fp8-128-f32")
_INV = Storage("fp8-128-inv", "fp8-128-inv", "fp8-128-inv")
_BF16 = _without(_V4, "quantization_config", "expert_dtype")

KINDS: Mapping[str, Kind] = {
    "v4-flash": Kind(v4_groups, _V4, _MX, ratio=_csa),
    "v4-flash-0731": Kind(v4_groups, _V4 | _DSPARK, _MX, ratio=_csa, dspark=True, real_mtp=3),
    "v4-pro": Kind(v4_groups, _without(_V4_PRO, "expert_dtype"), _MX, ratio=_csa_pro, demo_experts=6),
    "v4-flash-base": Kind(v4_groups, _V4 | {"expert_dtype": "fp8"}, _F32, ratio=_csa, power_of_two=True),
    "v4.1-flash": Kind(v41_groups, _V41, _MX32, ratio=_csa2, dspark=True),
    "v3": Kind(v3_groups, _V3, _INV, demo_experts=6),
    "quark-mxfp4": Kind(v4_groups, _V4, _QUARK, ratio=_csa),
    "nvfp4": Kind(v41_groups, _V41, _NV, ratio=_csa2, dspark=True),
    "bf16": Kind(v4_groups, _BF16, Storage(), ratio=_csa, demo_experts=4),
}
