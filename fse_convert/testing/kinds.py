"""Kinds of checkpoint that `make_checkpoint` writes, as data: names, dtypes and shapes of their tensors, and published configs.

A kind is a function that lists its tensors by shard (DeepSeek V4, V4.1 or V3, GLM-4.5, Qwen3.5), a storage format for each sort of
matrix, and the published config.json (configs.json holds them as published). Every dimension of a tensor is read from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fse_convert.testing.families import glm_groups, qwen_groups, v3_groups
from fse_convert.testing.parts import CONFIGS, Entry, Group, Kind, Spec, Storage, experts, linear, moe, plain

HC = 4  # residual streams (hc_mult)
HC_MIX = (2 + HC) * HC
PATCH = 3 * 14 * 14  # values of an image patch; an aligner joins 3x3 of them
QUARK_REST = {"output_tensors": None, "bias": None, "target_device": None}


def v4_layer(spec: Spec, prefix: str, *, mtp: bool) -> Iterator[Entry]:
    """Yield what a V4 and a V4.1 layer have in common: attention, hyper-connections, experts."""
    c, attn = spec.text, f"{prefix}.attn"
    hidden, queries, out = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["o_groups"] * c["o_lora_rank"]
    yield from linear(spec, f"{attn}.wq_a", c["q_lora_rank"], hidden)
    yield from linear(spec, f"{attn}.wq_b", queries, c["q_lora_rank"])
    yield from linear(spec, f"{attn}.wkv", c["head_dim"], hidden)
    yield from linear(spec, f"{attn}.wo_a", out, queries // c["o_groups"])
    yield from linear(spec, f"{attn}.wo_b", hidden, out)
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
    """Yield what merges V4's residual streams before every head."""
    yield plain(f"{prefix}hc_head_fn", HC, HC * hidden, dtype="F32")
    yield plain(f"{prefix}hc_head_base", HC, dtype="F32")
    yield plain(f"{prefix}hc_head_scale", 1, dtype="F32")


def compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Iterator[Entry]:
    """Yield V4's KV compressor; at ratio 4 its windows overlap and it has twice the channels."""
    channels = dim * (2 if ratio == 4 else 1)
    yield plain(f"{prefix}.ape", ratio, channels, dtype="F32")
    yield plain(f"{prefix}.wkv.weight", channels, hidden)
    yield plain(f"{prefix}.wgate.weight", channels, hidden)
    yield plain(f"{prefix}.norm.weight", dim)


def indexer(spec: Spec, prefix: str) -> Iterator[Entry]:
    """Yield the part of an indexer that V4 and V4.1 have in common."""
    c = spec.text
    yield from linear(spec, f"{prefix}.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
    yield plain(f"{prefix}.weights_proj.weight", c["index_n_heads"], c["hidden_size"])


def draft(spec: Spec, stage: int) -> Iterator[Entry]:
    """Yield what an MTP layer has beyond a decoder layer; a DSpark drafter has it at its first and last stage."""
    c, prefix, last = spec.text, f"mtp.{stage}", not spec.traits.dspark or stage == spec.mtp - 1
    hidden, v4 = c["hidden_size"], spec.traits.groups is v4_groups
    if not spec.traits.dspark:
        for side in ("e", "h"):
            yield from linear(spec, f"{prefix}.{side}_proj", hidden, hidden)
            yield plain(f"{prefix}.{side}norm.weight", hidden)
    elif stage == 0:
        yield from linear(spec, f"{prefix}.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
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
    """Yield V4 by shard: embedding, one decoder layer each, head, one MTP layer each."""
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
    """Yield a V4.1 layer: every router has two biases, and few layers own a KV compressor or an indexer."""
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
    """Yield the vision tower and its aligner, in BF16."""
    v, hidden = spec.config["vision_config"], spec.text["hidden_size"]
    dim, width = v["hidden_size"], v["intermediate_size"]
    yield plain("vision.patch_embed.proj.weight", dim, PATCH)
    yield plain("vision.patch_embed.proj.bias", dim)
    for block in range(v["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}"
        for name, rows in (("wqkv", 3 * dim), ("wo", dim)):
            yield plain(f"{prefix}.attn.{name}.weight", rows, dim)
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
    """Yield V4.1 by shard: vision, embedding, decoder layers, head, MTP layers, then the engrams, away from their layers."""
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
            *linear(spec, f"{prefix}.embed", rows, c["engram_head_dim"], "fp8-row32"),
            *linear(spec, f"{prefix}.wkv", (HC + 1) * hidden, looked_up),
            *(plain(f"{prefix}.{side}_weight", HC, hidden) for side in ("q", "k")),
        )


def quark(spec: Spec) -> dict[str, Any]:
    """Return AMD Quark's config: MXFP4 everywhere, but for attention and the MTP layers' shared experts, which stay block FP8.

    Modules are named exactly, those of MTP layers also as the layers after the last one: so every vLLM since 0.29 reads them.
    """
    c, mx = spec.text, CONFIGS["quark-mxfp4"]
    fp8 = {"input_tensors": mx | CONFIGS["quark-tokens"], "weight": mx | CONFIGS["quark-blocks"], **QUARK_REST}
    attn = [f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")]
    draft = [*attn, "e_proj", "h_proj", *(f"ffn.shared_experts.w{number}" for number in (1, 2, 3))]
    count = c["num_hidden_layers"]
    names = [f"layers.{layer}.{name}" for layer in range(count) for name in attn]
    names += [f"layers.{layer}.attn.indexer.wq_b" for layer in range(count) if c["compress_ratios"][layer] == 4]
    names += [f"{at}.{name}" for k in range(spec.mtp) for at in (f"mtp.{k}", f"layers.{count + k}") for name in draft]
    return CONFIGS["quark"] | {"global_quant_config": quark_fp4(), "layer_quant_config": dict.fromkeys(names, fp8)}


def quark_experts(spec: Spec) -> dict[str, Any]:
    """Return AMD Quark's config where routed experts alone are quantised, with the names of all other linear layers."""
    entries = (entry for group in spec.traits.groups(spec) for entry in group)
    matrices = (entry.name for entry in entries if entry.dtype == "BF16" and len(entry.shape) == 2)
    exclude = [name.removesuffix(".weight") for name in matrices if "embed_tokens" not in name]
    return CONFIGS["quark"] | {"global_quant_config": quark_fp4(), "layer_quant_config": {}, "exclude": exclude}


def quark_fp4() -> dict[str, Any]:
    """Return AMD Quark's scheme of MXFP4 weights and inputs."""
    mx = CONFIGS["quark-mxfp4"]
    return {"input_tensors": mx | {"is_dynamic": True}, "weight": mx, **QUARK_REST}


def nvfp4(spec: Spec) -> dict[str, Any]:
    """Return NVIDIA ModelOpt's config: the decoder layers' routed experts in NVFP4, everything else as DeepSeek has it."""
    names = (f"layers.{layer}.ffn.experts" for layer in range(spec.text["num_hidden_layers"]))
    return CONFIGS["nvfp4"] | {"quantized_layers": {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}}


def compression(first: int) -> Callable[[int], int]:
    """Return V4's KV compression by layer: that of the first two layers is given, then 4 and 128 take turns."""
    return lambda layer: first if layer < 2 else (4, 128)[layer % 2]


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


_V4, _V41 = CONFIGS["v4"], CONFIGS["v4.1"]
_V4_PRO = _without(_V4 | CONFIGS["v4-pro"], "expert_dtype")
_BF16 = _without(_V4, "quantization_config", "expert_dtype")
_MX = Storage("mxfp4", "fp8-128", "fp8-128")
_MX32 = Storage("mxfp4", "fp8-32", "fp8-32")
_NV = Storage("nvfp4", "fp8-32", "fp8-32", mtp_routed="mxfp4")
_QUARK = Storage("mxfp4-u8", "mxfp4-u8", "fp8-128-quark", mtp_shared="fp8-128-quark")
_EXPERTS = Storage(routed="mxfp4-u8")
_FP8 = Storage("fp8-128", "fp8-128", "fp8-128")
_F32 = Storage("fp8-128-f32-scale", "fp8-128-f32-scale", "fp8-128-f32-scale")
_INV = Storage("fp8-128-f32", "fp8-128-f32", "fp8-128-f32")
_CSA = compression(0)


def _csa2(layer: int) -> int:
    return 0 if layer < 2 else 2 if layer < 20 else 1


KINDS: Mapping[str, Kind] = {
    "v4-flash": Kind(v4_groups, _V4, _MX, ratio=_CSA),
    "v4-flash-0731": Kind(v4_groups, _V4 | CONFIGS["dspark"], _MX, ratio=_CSA, dspark=True, real_mtp=3),
    "v4-pro": Kind(v4_groups, _V4_PRO, _MX, ratio=compression(128), demo_experts=6),
    "v4-flash-base": Kind(v4_groups, _V4 | {"expert_dtype": "fp8"}, _F32, ratio=_CSA, power_of_two=True),
    "v4-flash-fp8": Kind(v4_groups, _V4 | {"expert_dtype": "fp8"}, _FP8, ratio=_CSA),
    "v4.1-flash": Kind(v41_groups, _V41, _MX32, ratio=_csa2, dspark=True),
    "v3": Kind(v3_groups, CONFIGS["v3"], _INV, demo_experts=6),
    "quark-mxfp4": Kind(v4_groups, _V4, _QUARK, ratio=_CSA, quantization=quark),
    "kimi-k2-quark": Kind(v3_groups, CONFIGS["kimi-k2"], _EXPERTS, demo_experts=4, quantization=quark_experts),
    "glm-4.5-quark": Kind(
        glm_groups, CONFIGS["glm-4.5"], _EXPERTS._replace(mtp_routed="bf16"), demo_experts=4, quantization=quark_experts
    ),
    "qwen3.5-quark": Kind(
        qwen_groups, CONFIGS["qwen3.5"], _EXPERTS, demo_experts=4, quantization=quark_experts, experts_key="num_experts"
    ),
    "nvfp4": Kind(v41_groups, _V41, _NV, ratio=_csa2, dspark=True, quantization=nvfp4),
    "bf16": Kind(v4_groups, _BF16, Storage(), ratio=_CSA, demo_experts=4),
}
