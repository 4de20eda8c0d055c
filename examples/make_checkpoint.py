#!/usr/bin/env python3
"""Synthesises a MoE checkpoint: real names, dtypes, shapes, config and shards, random values.

    python examples/make_checkpoint.py OUT --kind v4.1-flash --layers 2
    python examples/make_checkpoint.py OUT --kind v4.1-flash --real --sparse     all 96,085 tensors, headers only

By default a demonstration: expert shapes as published, but few layers and experts, and small ranks and tables.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import json
import math
import re
import statistics
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from checkpoint_kinds import KINDS, Entry, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

# Bytes of an element, by dtype, in the order in which the safetensors library writes a shard.
BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3": 1, "I8": 1, "U8": 1}
ORDER = {dtype: rank for rank, dtype in enumerate(BYTES)}
CHUNK = 1 << 22  # elements in memory at a time

KNOBS = {
    "layers": "num_hidden_layers",
    "experts": "n_routed_experts",
    "hidden": "hidden_size",
    "width": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense": "first_k_dense_replace",
    "vocab": "vocab_size",
}
DEMO: dict[str, Any] = json.loads("""{
"num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 1024, "vocab_size": 1024,
"num_attention_heads": 8, "head_dim": 64, "v_head_dim": 32, "qk_nope_head_dim": 32,
"qk_rope_head_dim": 16, "q_lora_rank": 128, "kv_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "index_n_heads": 4,
"index_head_dim": 32, "num_hash_layers": 1, "dspark_markov_rank": 16, "engram_num_embeddings": [4096, 4128],
"engram_n_heads": 1}""")
DEMO_VISION = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 176}


def make_checkpoint(out: Path | str, kind: str = "v4.1-flash", **knobs: Any) -> Path:
    """Writes a checkpoint into the new or empty folder `out` and returns it; `make_spec` says what the knobs are."""
    spec, out = make_spec(kind, **knobs), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    shards = split(spec)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if spec.single_file:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_shard(out / name, shard, spec)
    if not spec.single_file:
        index = {
            "metadata": {"total_size": sum(size(entry) for shard in shards for entry in shard)},
            "weight_map": dict(sorted((entry.name, name) for name, shard in zip(names, shards, strict=True) for entry in shard)),
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, content in other_files(spec).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")
    return out


# What to write.


def make_spec(
    kind: str = "v4.1-flash",
    *,
    real: bool = False,
    mtp: int | None = None,
    mtp_experts: int | None = None,
    engram_rows: int | None = None,
    vision_layers: int | None = None,
    power_of_two: bool | None = None,
    shard_size: int | str | None = None,
    seed: int = 0,
    single_file: bool = False,
    sparse: bool = False,
    header_metadata: bool = True,
    **text: int,
) -> Spec:
    """The checkpoint that the knobs describe; what is left out is as published (`real`) or as in the demonstration.

    `text` takes the knobs of KNOBS (layers, experts, hidden, width, shared, dense, vocab) and any integer key of the
    language model's config. `width` is of one expert; `shared` of them make one shared MLP. `sparse` leaves the
    values a hole in the file. `power_of_two` is about F32 scales. `header_metadata` False: no `__metadata__`, as in
    the published DeepSeek shards. `shard_size` is in bytes, or "2GiB".
    """
    traits = KINDS[kind]
    config = copy.deepcopy(dict(traits.config))
    c: dict[str, Any] = config.get("text_config", config)
    vision: dict[str, Any] = config.get("vision_config", {})
    everywhere = c["n_routed_experts"] // c.get("dspark_n_routed_experts", c["n_routed_experts"])
    if not real:
        c |= {key: value for key, value in (DEMO | {"n_routed_experts": traits.demo_experts}).items() if key in c}
        vision |= DEMO_VISION if vision else {}
    for knob, value in text.items():
        _put(c, kind, KNOBS.get(knob, knob), value)
    if vision_layers is not None:
        _put(vision, kind, "num_hidden_layers", vision_layers)
    if engram_rows is not None:
        _put(c, kind, "engram_num_embeddings", [engram_rows] * 2)
    if mtp is None:
        mtp = traits.real_mtp or (c["num_nextn_predict_layers"] if real else 1)
    if mtp_experts is None:
        mtp_experts = max(1, c["n_routed_experts"] // everywhere)
    _fit(c, traits.ratio, mtp, mtp_experts, nextn=1 if traits.real_mtp else mtp)
    if kind in QUANTIZATION:
        config["quantization_config"] = QUANTIZATION[kind](c, mtp)
    return Spec(
        kind,
        config,
        mtp,
        mtp_experts,
        power_of_two=traits.power_of_two if power_of_two is None else power_of_two,
        seed=seed,
        shard_size=parse_size(shard_size) if isinstance(shard_size, str) else shard_size,
        single_file=single_file,
        sparse=sparse,
        header_metadata=header_metadata,
    )


def _put(config: dict[str, Any], kind: str, key: str, value: int | list[int]) -> None:
    if key not in config:
        raise TypeError(f"{kind} has nothing that {key!r} would set")
    config[key] = value


def _fit(c: dict[str, Any], ratio: Callable[[int], int], mtp: int, mtp_experts: int, nextn: int) -> None:
    """Puts into a config what follows from its number of layers and experts."""
    layers = c["num_hidden_layers"]
    follows = {
        "num_nextn_predict_layers": nextn,
        "num_experts_per_tok": min(c["num_experts_per_tok"], c["n_routed_experts"]),
        "num_key_value_heads": 1 if c["num_key_value_heads"] == 1 else c["num_attention_heads"],
        "first_k_dense_replace": min(c.get("first_k_dense_replace", 0), layers),
        "compress_ratios": [ratio(layer) for layer in range(layers)] + [0] * mtp,
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
        "dspark_n_routed_experts": mtp_experts,
        "dspark_num_experts_per_tok": min(c.get("dspark_num_experts_per_tok", 0), mtp_experts),
    }
    c |= {key: value for key, value in follows.items() if key in c}
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if key in c:
            c[key] = [layer for layer in c[key] if layer < layers]
    if "engram_layer_ids" in c:
        c["engram_num_embeddings"] = c["engram_num_embeddings"][: len(c["engram_layer_ids"])]


def split(spec: Spec) -> list[list[Entry]]:
    """The tensors of every shard: as published, or cut wherever the next tensor would exceed the shard size.

    In a shard they are ordered as the safetensors library does, by dtype, then by name; published V4.1 engrams are not.
    """
    groups = list(spec.traits.groups(spec))
    entries = [entry for group in groups for entry in group]
    if spec.single_file:
        return [sorted(entries, key=_place)]
    if spec.shard_size is None:
        return [list(group) if isinstance(group, tuple) else sorted(group, key=_place) for group in groups]
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or size(entry) > room:
            shards.append([])
            room = spec.shard_size
        shards[-1].append(entry)
        room -= size(entry)
    return [sorted(shard, key=_place) for shard in shards]


def _place(entry: Entry) -> tuple[int, str]:
    return ORDER[entry.dtype], entry.name


def size(entry: Entry) -> int:
    """Bytes of a tensor."""
    return math.prod(entry.shape) * BYTES[entry.dtype]


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500MB", "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B|B)?", text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1 if unit else 0))


# The config's quantization_config, where it is not DeepSeek's own; and the files beside the weights.

_MX: dict[str, Any] = json.loads("""{
"dtype": "fp4", "is_dynamic": false, "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "block_size": null,
"symmetric": null, "round_method": "half_even", "scale_type": "float", "scale_format": "e8m0",
"scale_calculation_mode": "even", "mx_element_dtype": null, "observer_cls": "PerBlockMXObserver",
"is_scale_quant": false}""")
_TOKENS: dict[str, Any] = json.loads("""{
"dtype": "fp8_e4m3", "is_dynamic": true, "group_size": 128, "symmetric": true, "scale_type": null,
"scale_format": null, "scale_calculation_mode": null, "observer_cls": "PerGroupMinMaxObserver"}""")
_BLOCKS: dict[str, Any] = json.loads("""{
"dtype": "fp8_e4m3", "qscheme": "per_block", "ch_axis": null, "group_size": null, "block_size": [128, 128],
"symmetric": true, "scale_type": "float8_e8m0fnu", "scale_format": null, "scale_calculation_mode": null,
"observer_cls": "PerBlock2DMinMaxObserver"}""")
_QUARK: dict[str, Any] = json.loads(r"""{
"quant_method": "quark", "quant_mode": "eager_mode", "version": "0.12", "algo_config": null,
"softmax_quant_spec": null, "layer_type_quant_config": {}, "kv_cache_quant_config": {}, "kv_cache_post_rope": false,
"exclude": ["embed", "head", "re:.*\\.ffn\\.gate$", "re:.*compressor.*", "re:.*weights_proj$"],
"export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
"weight_merge_groups": null}}""")
_NVFP4: dict[str, Any] = json.loads("""{
"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "expert_dtype": "fp4",
"activation_scheme": "dynamic", "group_size": 16, "scale_fmt": "ue8m0", "weight_block_size": [32, 32],
"kv_cache_quant_algo": null, "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
"producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}, "config_groups": {"group_0": {"targets": ["Linear"],
"weights": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"},
"input_activations": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"}}}}""")


def _quark(_: Mapping[str, Any], mtp: int) -> dict[str, Any]:
    """AMD Quark: MXFP4 everywhere, but for attention and the MTP layers' shared experts, which stay block FP8."""
    rest = {"output_tensors": None, "bias": None, "target_device": None}
    fp4 = {"input_tensors": _MX | {"is_dynamic": True}, "weight": _MX, **rest}
    fp8 = {"input_tensors": _MX | _TOKENS, "weight": _MX | _BLOCKS, **rest}
    layers = {r"re:(layers|mtp)\.\d+\.attn\..*": fp8, r"re:mtp\.\d+\.[eh]_proj": fp8}
    for stage in range(mtp):
        layers |= {rf"re:mtp\.{stage}\.ffn\.experts\.\d+\.w{number}": fp4 for number in (1, 2, 3)}
        layers |= {rf"re:mtp\.{stage}\.ffn\.shared_experts\.w{number}": fp8 for number in (1, 2, 3)}
    return _QUARK | {"global_quant_config": fp4, "layer_quant_config": layers}


def _nvfp4(c: Mapping[str, Any], _: int) -> dict[str, Any]:
    """NVIDIA ModelOpt: the decoder layers' routed experts in NVFP4, everything else as DeepSeek has it."""
    layers = range(c["num_hidden_layers"])
    return _NVFP4 | {"quantized_layers": {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in layers}}


QUANTIZATION: Mapping[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "quark-mxfp4": _quark,
    "nvfp4": _nvfp4,
}
INFERENCE = {  # the reference implementation's own names for keys of config.json
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    **{key: key for key in ("vocab_size", "n_routed_experts", "n_shared_experts", "head_dim", "swiglu_limit")},
    **{key: key for key in ("q_lora_rank", "o_lora_rank", "o_groups", "compress_ratios", "hc_mult")},
}


def other_files(spec: Spec) -> dict[str, str]:
    """What a repository holds beside weights and index, by path; inference/config.json is no model config."""
    name = spec.config["architectures"][0]
    tokenizer = {"add_bos_token": False, "model_max_length": 1048576, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        "config.json": _json(spec.config),
        "tokenizer_config.json": _json(tokenizer),
        "README.md": f"# Synthetic {spec.kind}\n\nRandom weights under the names of {name}: for tests, not for use.\n",
    }
    if "compress_ratios" in spec.text:
        inference = {flat: spec.text[key] for key, flat in INFERENCE.items() if key in spec.text}
        files |= {
            "encoding/encoding_dsv4.py": '"""Stands for the chat encoding of the published repository."""\n',
            "encoding/tests/test_input_1.json": _json({"messages": [{"role": "user", "content": "1 + 1?"}]}),
            "inference/config.json": _json(inference | {"n_mtp_layers": spec.mtp, "dtype": "fp8"}),
        }
    if "vision_config" not in spec.config:
        files["generation_config.json"] = _json({"bos_token_id": 0, "eos_token_id": 1, "do_sample": True})
    return files


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


# Values: valid, never zero, such that a forward pass gives sane numbers. Each fill is a 1-D function of n elements.


def _bits(n_bytes: int, stream: torch.Generator) -> torch.Tensor:
    """Random bytes, [n_bytes] U8."""
    import torch

    words = torch.empty(-(-n_bytes // 8), dtype=torch.int64)
    return words.random_(-(2**63), None, generator=stream).view(torch.uint8)[:n_bytes]


@functools.cache
def _table(name: str) -> torch.Tensor:
    """65,536 equally likely values: the quantiles of a distribution."""
    import torch

    quantile = statistics.NormalDist().inv_cdf
    steps = torch.tensor([quantile((i + 0.5) / 65536) for i in range(65536)], dtype=torch.float64)
    if name == "e4m3":
        codes = (steps * 80).float().to(torch.float8_e4m3fn).view(torch.uint8)  # at most 344 of 448
        return torch.where(codes & 0x7F == 0, codes | 1, codes)
    values = {
        "unit": 1 + 0.02 * steps,
        "normal": 0.02 * steps,
        "scale": (0.5 * steps).exp() * 2.0**-12,
        "global": torch.linspace(1, 2, 65536, dtype=torch.float64) * 2.0**-12,
    }[name.partition("-")[0]]
    return values.to(torch.bfloat16 if name.endswith("bf16") else torch.float32)


def _draw(name: str, n: int, stream: torch.Generator) -> torch.Tensor:
    import torch

    rows = _bits(2 * n, stream).view(torch.int16).to(torch.int32).add_(32768)
    return torch.index_select(_table(name), 0, rows)


def _e8m0(lowest: int, n: int, stream: torch.Generator) -> torch.Tensor:
    """Seven powers of two from 2^(lowest - 127), the middle ones likelier."""
    bits = _bits(n, stream)
    return (bits & 3).add_((bits >> 2) & 3).add_(lowest)


def _fill(name: str, n: int, stream: torch.Generator) -> torch.Tensor:
    """`n` values of a fill, in the dtype of its bytes."""
    import torch

    if name == "fp4":
        codes = _bits(n, stream)
        return codes.add_(codes.eq(0))
    if name == "f32-scale":
        return (_draw("scale", n, stream).view(torch.int32) | 1).view(torch.float32)  # never a power of two
    if name == "f32-scale-pow2":
        return (_e8m0(0x70, n, stream).to(torch.int32) << 23).view(torch.float32)
    if name == "e4m3-scale":
        bits = _bits(n, stream)
        return (bits & 15).add_((bits >> 4) & 7).add_(0x50)  # 8 to 56
    if name.startswith("e8m0"):
        return _e8m0(0x70 if name == "e8m0-of-fp8" else 0x74, n, stream)
    if name.startswith("id-below-"):
        return _bits(8 * n, stream).view(torch.int64).remainder_(int(name.rpartition("-")[2]))
    return _draw(name, n, stream)


def write_shard(path: Path, entries: list[Entry], spec: Spec) -> None:
    """A safetensors file, streamed: u64 header length, header, payload."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if spec.header_metadata else {}
    end = 0
    for entry in entries:
        start, end = end, end + size(entry)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if spec.sparse:
            file.truncate(8 + len(text) + end)
        else:
            for entry in entries:
                _write_values(file, entry, spec.seed)


def _write_values(file: BinaryIO, entry: Entry, seed: int) -> None:
    """A tensor's payload, a chunk at a time."""
    import torch

    digest = hashlib.sha256(f"{seed}:{entry.seed}".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    left = math.prod(entry.shape)
    while left:
        n = min(left, CHUNK)
        values = _fill(entry.fill, n, stream).contiguous()
        file.write((ctypes.c_char * (n * BYTES[entry.dtype])).from_address(values.data_ptr()))
        left -= n


COUNTS = {  # integer knobs of make_spec, and what the command line says about them
    "layers": "Decoder layers.",
    "mtp": "MTP layers.",
    "experts": "Routed experts of a decoder layer.",
    "mtp-experts": "Routed experts of an MTP layer.",
    "hidden": "Hidden size.",
    "width": "Width of one expert (moe_intermediate_size).",
    "shared": "Shared experts; their MLP is this many times the width.",
    "dense": "V3: leading layers without experts.",
    "vocab": "Rows of the embedding.",
    "engram-rows": "V4.1: rows of an engram's table.",
    "vision-layers": "V4.1: blocks of the vision tower.",
}


def _counts(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(COUNTS.items()):
        command = click.option(f"--{name}", type=click.IntRange(min=0), help=text)(command)
    return command


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--kind", type=click.Choice(list(KINDS)), default="v4.1-flash")
@click.option("--real", is_flag=True, help="Every shape that is not given as published (default: a demonstration).")
@_counts
@click.option("--seed", type=int, default=0)
@click.option("--shard-size", metavar="SIZE", help='Cut shards at this size, e.g. "2GiB" (default: as published).')
@click.option("--single-file", is_flag=True, help="One model.safetensors, no index.")
@click.option("--sparse", is_flag=True, help="True headers, values left a hole in the file.")
@click.option("--power-of-two/--any-scale", default=None, help="F32 scales: only powers of two, or none.")
@click.option("--header-metadata/--no-header-metadata", default=True, help='Whether headers say {"format": "pt"}.')
def main(out: Path, kind: str, **knobs: Any) -> None:
    """Writes a synthetic MoE checkpoint into the folder OUT."""
    start = time.monotonic()
    given = {name: value for name, value in knobs.items() if value is not None}
    try:
        spec = make_spec(kind, **given)
        make_checkpoint(out, kind, **given)
    except (FileExistsError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    shards = split(spec)
    sizes = [size(entry) for shard in shards for entry in shard]
    c = spec.text
    click.echo(
        f"{kind} in {out}: {c['num_hidden_layers']} layers with {c['n_routed_experts']} routed and "
        f"{c['n_shared_experts']} shared experts of width {c['moe_intermediate_size']} (hidden {c['hidden_size']}), "
        f"{spec.mtp} MTP layers with {spec.mtp_experts}: {len(sizes):,} tensors, {sum(sizes):,} bytes"
        f"{' (a hole: sparse)' if spec.sparse else ''}, {len(shards)} shards, {time.monotonic() - start:.1f} s."
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    main()
