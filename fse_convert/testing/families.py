"""Tensors of families beside DeepSeek V4: DeepSeek V3, whose names Kimi-K2 has too, GLM-4.5 and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from fse_convert.testing.parts import Entry, Group, Spec, experts, linear, mlp, moe, plain

PROJECTIONS = "gate_proj down_proj up_proj"


def v3_layer(spec: Spec, layer: int, *, mtp: bool) -> Iterator[Entry]:
    """Yield a V3 layer: multi-head latent attention, then a dense MLP or the experts."""
    c, prefix = spec.text, f"model.layers.{layer}"
    attn, hidden, heads, rank = f"{prefix}.self_attn", c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    yield from linear(spec, f"{attn}.q_a_proj", c["q_lora_rank"], hidden)
    yield from linear(spec, f"{attn}.q_b_proj", heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), c["q_lora_rank"])
    yield from linear(spec, f"{attn}.kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], hidden)
    yield from linear(spec, f"{attn}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
    yield from linear(spec, f"{attn}.o_proj", hidden, heads * c["v_head_dim"])
    yield plain(f"{attn}.q_a_layernorm.weight", c["q_lora_rank"])
    yield plain(f"{attn}.kv_a_layernorm.weight", rank)
    yield plain(f"{prefix}.input_layernorm.weight", hidden)
    yield plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield from _mlp_or_moe(spec, layer, mtp=mtp)


def _mlp_or_moe(spec: Spec, layer: int, *, mtp: bool) -> Iterator[Entry]:
    c, prefix = spec.text, f"model.layers.{layer}.mlp"
    if layer < c["first_k_dense_replace"]:
        yield from mlp(spec, spec.traits.storage.linear, prefix, c["intermediate_size"], PROJECTIONS)
    else:
        yield plain(f"{prefix}.gate.e_score_correction_bias", experts(spec, mtp), dtype="F32")
        yield from moe(spec, prefix, mtp=mtp, names=PROJECTIONS)


def v3_groups(spec: Spec, layer_of: Callable[..., Iterator[Entry]] = v3_layer) -> Iterator[Group]:
    """Yield V3 by shard: embedding, decoder layers, head, and the MTP layers under the numbers that follow."""
    hidden, vocab, layers = (spec.text[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    yield [plain("model.embed_tokens.weight", vocab, hidden)]
    for layer in range(layers):
        yield list(layer_of(spec, layer, mtp=False))
    yield [plain("model.norm.weight", hidden), plain("lm_head.weight", vocab, hidden)]
    for layer in range(layers, layers + spec.mtp):
        prefix = f"model.layers.{layer}"
        group = [*layer_of(spec, layer, mtp=True), plain(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)]
        group += (plain(f"{prefix}.{name}.weight", hidden) for name in ("enorm", "hnorm", "shared_head.norm"))
        group += (plain(f"{prefix}.{name}.weight", vocab, hidden) for name in ("embed_tokens", "shared_head.head"))
        yield group


def glm_layer(spec: Spec, layer: int, *, mtp: bool) -> Iterator[Entry]:
    """Yield a GLM-4.5 layer: grouped attention with biases and norms of queries and keys, then a dense MLP or the experts."""
    c, prefix = spec.text, f"model.layers.{layer}"
    attn, hidden, width = f"{prefix}.self_attn", c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    for name, rows in (("q", width), *((name, c["num_key_value_heads"] * c["head_dim"]) for name in "kv")):
        yield from linear(spec, f"{attn}.{name}_proj", rows, hidden)
        yield plain(f"{attn}.{name}_proj.bias", rows)
    yield from linear(spec, f"{attn}.o_proj", hidden, width)
    yield plain(f"{attn}.q_norm.weight", c["head_dim"])
    yield plain(f"{attn}.k_norm.weight", c["head_dim"])
    yield plain(f"{prefix}.input_layernorm.weight", hidden)
    yield plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield from _mlp_or_moe(spec, layer, mtp=mtp)


glm_groups = partial(v3_groups, layer_of=glm_layer)
"""GLM-4.5 by shard, as V3."""


def qwen_layer(spec: Spec, prefix: str, *, mtp: bool, full: bool) -> Iterator[Entry]:
    """Yield a Qwen3.5 layer: full or linear attention, the experts, and the gate of the shared one."""
    c, hidden = spec.text, spec.text["hidden_size"]
    yield from _full_attention(spec, f"{prefix}.self_attn") if full else _linear_attention(spec, f"{prefix}.linear_attn")
    yield plain(f"{prefix}.input_layernorm.weight", hidden)
    yield plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield from moe(spec, f"{prefix}.mlp", mtp=mtp, names=PROJECTIONS)
    shared, width = spec.traits.storage.shared, c["shared_expert_intermediate_size"]
    yield from mlp(spec, shared, f"{prefix}.mlp.shared_expert", width, PROJECTIONS)
    yield plain(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden)


def _full_attention(spec: Spec, attn: str) -> Iterator[Entry]:
    """Yield attention whose queries come with gates of the output."""
    c, hidden = spec.text, spec.text["hidden_size"]
    width, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    for name, rows in (("q", 2 * width), ("k", kv), ("v", kv)):
        yield from linear(spec, f"{attn}.{name}_proj", rows, hidden)
    yield from linear(spec, f"{attn}.o_proj", hidden, width)
    yield plain(f"{attn}.q_norm.weight", c["head_dim"])
    yield plain(f"{attn}.k_norm.weight", c["head_dim"])


def _linear_attention(spec: Spec, attn: str) -> Iterator[Entry]:
    """Yield a gated delta net."""
    c, hidden, heads = spec.text, spec.text["hidden_size"], spec.text["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    for name, rows in (("qkv", 2 * keys + values), ("z", values), ("b", heads), ("a", heads)):
        yield from linear(spec, f"{attn}.in_proj_{name}", rows, hidden)
    yield plain(f"{attn}.conv1d.weight", 2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield plain(f"{attn}.A_log", heads, dtype="F32")
    yield plain(f"{attn}.dt_bias", heads)
    yield plain(f"{attn}.norm.weight", c["linear_value_head_dim"], dtype="F32")
    yield from linear(spec, f"{attn}.out_proj", hidden, values)


def qwen_groups(spec: Spec) -> Iterator[Group]:
    """Yield the language model of Qwen3.5 by shard: embedding, decoder layers, head, and the MTP layers; no vision tower."""
    c, hidden, text = spec.text, spec.text["hidden_size"], "model.language_model"
    yield [plain(f"{text}.embed_tokens.weight", c["vocab_size"], hidden)]
    for layer in range(c["num_hidden_layers"]):
        full = (layer + 1) % c["full_attention_interval"] == 0
        yield list(qwen_layer(spec, f"{text}.layers.{layer}", mtp=False, full=full))
    yield [plain(f"{text}.norm.weight", hidden), plain("lm_head.weight", c["vocab_size"], hidden)]
    if spec.mtp:
        shared = [plain("mtp.fc.weight", hidden, 2 * hidden), plain("mtp.norm.weight", hidden)]
        shared += (plain(f"mtp.pre_fc_norm_{name}.weight", hidden) for name in ("embedding", "hidden"))
        layers = (qwen_layer(spec, f"mtp.layers.{k}", mtp=True, full=True) for k in range(spec.mtp))
        yield [*shared, *(entry for layer in layers for entry in layer)]
