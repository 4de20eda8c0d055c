"""The checkpoint factory: real names, dtypes, shapes, config and shards; random values.

By default a demonstration: expert shapes as published, but few layers and experts, and small ranks and tables. The bytes are
part of the interface (same kind, knobs and seed, same files), since benchmarks and reports name their digests.
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fse_convert.checkpoint.encoding import encode_header, header_entries
from fse_convert.checkpoint.header import BITS
from fse_convert.testing.kinds import KINDS
from fse_convert.testing.parts import CONFIGS, Entry, Kind, Spec

if TYPE_CHECKING:
    import torch

ORDER = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8", "U8")
"""Dtypes in the order in which the safetensors library writes a shard."""
CHUNK = 1 << 22  # elements in memory at a time
KNOBS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "width": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense": "first_k_dense_replace",
    "vocab": "vocab_size",
}
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
WRITTEN = ("power_of_two", "shard_size", "seed", "single_file", "sparse", "header_metadata")
"""Knobs that no config says: they are fields of `Spec`."""
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


def make_checkpoint(out: Path | str, kind: str = "v4.1-flash", **knobs: Any) -> Path:
    """Write a checkpoint into the new or empty folder `out` and return it; `make_spec` says what the knobs are."""
    spec, out = make_spec(kind, **knobs), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    files = shards(spec)
    for name, entries in files.items():
        write_shard(out / name, entries, spec)
    if not spec.single_file:
        index = {
            "metadata": {"total_size": sum(size(entry) for entries in files.values() for entry in entries)},
            "weight_map": dict(sorted((entry.name, name) for name, entries in files.items() for entry in entries)),
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, content in other_files(spec).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")
    return out


def make_spec(
    kind: str = "v4.1-flash",
    *,
    real: bool = False,
    mtp: int | None = None,
    mtp_experts: int | None = None,
    engram_rows: int | None = None,
    vision_layers: int | None = None,
    stored: Mapping[str, str] | None = None,
    **knobs: Any,
) -> Spec:
    """Return the checkpoint that the knobs describe; what is left out is as published (`real`) or as in the demonstration.

    Other knobs: those of KNOBS (layers, experts, hidden, width, shared, dense, vocab), any integer key of the language model's
    config, and those of WRITTEN. `width` is of one expert; `shared` of them make one shared MLP. `stored`: formats other than the
    kind's, by fields of `Storage`. `sparse` leaves the values a hole in the file. `power_of_two` is about F32 scales.
    `header_metadata` False: no `__metadata__`, as in the published DeepSeek shards. `shard_size` is in bytes, or "2GiB". Raises
    TypeError for a knob that the kind does not have, ValueError for a text that is not a size.
    """
    traits = KINDS[kind]
    if stored:
        traits = replace(traits, storage=traits.storage._replace(**stored))
    config = copy.deepcopy(dict(traits.config))
    c: dict[str, Any] = config.get("text_config", config)
    vision: dict[str, Any] = config.get("vision_config", {})
    everywhere = c[traits.experts_key] // c.get("dspark_n_routed_experts", c[traits.experts_key])
    if not real:
        c |= {key: value for key, value in (CONFIGS["demo"] | {traits.experts_key: traits.demo_experts}).items() if key in c}
        vision |= CONFIGS["demo-vision"] if vision else {}
    fields = {"power_of_two": traits.power_of_two} | {key: knobs.pop(key) for key in WRITTEN if key in knobs}
    if isinstance(fields.get("shard_size"), str):
        fields["shard_size"] = parse_size(fields["shard_size"])
    for knob, value in knobs.items():
        _put(c, kind, traits.experts_key if knob == "experts" else KNOBS.get(knob, knob), value)
    if vision_layers is not None:
        _put(vision, kind, "num_hidden_layers", vision_layers)
    if engram_rows is not None:
        _put(c, kind, "engram_num_embeddings", [engram_rows] * 2)
    if mtp is None:
        stated = next(c[key] for key in MTP_KEYS if key in c)
        mtp = traits.real_mtp or (stated if real else min(stated, 1))
    if mtp_experts is None:
        mtp_experts = max(1, c[traits.experts_key] // everywhere)
    _fit(c, traits, mtp, mtp_experts)
    spec = Spec(kind=kind, traits=traits, config=config, mtp=mtp, mtp_experts=mtp_experts, **fields)
    if traits.quantization:
        config["quantization_config"] = traits.quantization(spec)
    return spec


def _put(config: dict[str, Any], kind: str, key: str, value: int | list[int]) -> None:
    if key not in config:
        raise TypeError(f"{kind} has nothing that {key!r} would set")
    config[key] = value


def _fit(c: dict[str, Any], traits: Kind, mtp: int, mtp_experts: int) -> None:
    """Put into a config what follows from its number of layers and experts, and from their width."""
    layers = c["num_hidden_layers"]
    follows = {
        **dict.fromkeys(MTP_KEYS, 1 if traits.real_mtp else mtp),
        "num_experts_per_tok": min(c["num_experts_per_tok"], c[traits.experts_key]),
        "num_key_value_heads": min(c["num_key_value_heads"], c["num_attention_heads"]),
        "shared_expert_intermediate_size": c["moe_intermediate_size"],
        "first_k_dense_replace": min(c.get("first_k_dense_replace", 0), layers),
        "compress_ratios": [traits.ratio(layer) for layer in range(layers)] + [0] * mtp,
        "dspark_target_layer_ids": list(range(max(0, layers - (mtp or 3)), layers)),
        "dspark_n_routed_experts": mtp_experts,
        "dspark_num_experts_per_tok": min(c.get("dspark_num_experts_per_tok", 0), mtp_experts),
    }
    c |= {key: value for key, value in follows.items() if key in c}
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if key in c:
            c[key] = [layer for layer in c[key] if layer < layers]
    if "engram_layer_ids" in c:
        c["engram_num_embeddings"] = c["engram_num_embeddings"][: len(c["engram_layer_ids"])]


def shards(spec: Spec) -> dict[str, list[Entry]]:
    """Return the tensors of every shard by file name: as published, or cut wherever the next tensor would exceed the shard size.

    In a shard they are ordered as the safetensors library does, by dtype, then by name; published V4.1 engrams are not.
    """
    groups = list(spec.traits.groups(spec))
    entries = [entry for group in groups for entry in group]
    if spec.single_file:
        return {"model.safetensors": _ordered(entries)}
    if spec.shard_size is None:
        cut = [list(group) if isinstance(group, tuple) else _ordered(group) for group in groups]
    else:
        cut, room = [], 0
        for entry in entries:
            if not cut or size(entry) > room:
                cut.append([])
                room = spec.shard_size
            cut[-1].append(entry)
            room -= size(entry)
        cut = [_ordered(shard) for shard in cut]
    return {f"model-{number:05d}-of-{len(cut):05d}.safetensors": shard for number, shard in enumerate(cut, 1)}


def _ordered(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (ORDER.index(entry.dtype), entry.name))


def size(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    return math.prod(entry.shape) * BITS[entry.dtype] // 8


def parse_size(text: str) -> int:
    """Return the bytes of "2GiB", "500MB", "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B|B)?", text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1 if unit else 0))


def other_files(spec: Spec) -> dict[str, str]:
    """Return what a repository holds beside weights and index, by path; inference/config.json is no model config."""
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


def _bits(n_bytes: int, stream: torch.Generator) -> torch.Tensor:
    """Return random bytes, [n_bytes] U8."""
    import torch

    words = torch.empty(-(-n_bytes // 8), dtype=torch.int64)
    return words.random_(-(2**63), None, generator=stream).view(torch.uint8)[:n_bytes]


@functools.cache
def _table(name: str) -> torch.Tensor:
    """Return 65,536 equally likely values: the quantiles of a distribution."""
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
    """Return seven powers of two from 2^(lowest - 127), the middle ones likelier."""
    bits = _bits(n, stream)
    return (bits & 3).add_((bits >> 2) & 3).add_(lowest)


def fill(name: str, n: int, stream: torch.Generator) -> torch.Tensor:
    """Return [n] values of a fill in the dtype of its bytes: valid, never zero, such that a forward pass gives sane numbers."""
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
    """Write a safetensors file, streamed: u64 header length, header, payload."""
    metadata = {"format": "pt"} if spec.header_metadata else None
    header = encode_header(header_entries((entry.name, entry.dtype, entry.shape) for entry in entries), metadata)
    with path.open("xb") as file:
        file.write(header)
        if spec.sparse:
            file.truncate(len(header) + sum(map(size, entries)))
        else:
            for entry in entries:
                _write_values(file, entry, spec.seed)


def _write_values(file: BinaryIO, entry: Entry, seed: int) -> None:
    """Write a tensor's payload, a chunk at a time."""
    import torch

    digest = hashlib.sha256(f"{seed}:{entry.seed}".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    left = math.prod(entry.shape)
    while left:
        n = min(left, CHUNK)
        values = fill(entry.fill, n, stream).contiguous()
        file.write((ctypes.c_char * (n * BITS[entry.dtype] // 8)).from_address(values.data_ptr()))
        left -= n
