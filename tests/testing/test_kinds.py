"""The kinds of checkpoint: at full size they are the published ones, to the tensor and to the byte."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from fse_convert.testing.checkpoints import make_checkpoint, make_spec, shards, size
from fse_convert.testing.kinds import KINDS
from fse_convert.testing.parts import Entry, Spec
from tests.testing.small import TINY, header, headers, tensors, tiny


def entries(spec: Spec) -> list[Entry]:
    return [entry for shard in shards(spec).values() for entry in shard]


@functools.cache
def real(kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {entry.name: (entry.dtype, entry.shape) for entry in entries(make_spec(kind, real=True))}


@functools.cache
def totals(kind: str) -> tuple[int, int, int, dict[str, int]]:
    spec = make_spec(kind, real=True)
    tensors = entries(spec)
    return len(tensors), sum(map(size, tensors)), len(shards(spec)), dict(Counter(entry.dtype for entry in tensors))


SHAPES = {
    "v4-flash": {
        "layers.3.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
        "layers.3.ffn.experts.255.w3.scale": ("F8_E8M0", (2048, 128)),
        "layers.3.ffn.experts.255.w2.weight": ("I8", (4096, 1024)),
        "layers.3.ffn.experts.255.w2.scale": ("F8_E8M0", (4096, 64)),
        "layers.3.ffn.shared_experts.w1.weight": ("F8_E4M3", (2048, 4096)),
        "layers.3.ffn.shared_experts.w1.scale": ("F8_E8M0", (16, 32)),
        "layers.3.ffn.shared_experts.w2.weight": ("F8_E4M3", (4096, 2048)),
        "layers.3.ffn.shared_experts.w2.scale": ("F8_E8M0", (32, 16)),
        "layers.3.attn.wq_a.weight": ("F8_E4M3", (1024, 4096)),
        "layers.3.attn.wq_a.scale": ("F8_E8M0", (8, 32)),
        "layers.3.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
        "layers.3.attn.wo_a.scale": ("F8_E8M0", (64, 32)),
        "layers.2.ffn.gate.tid2eid": ("I64", (129280, 6)),
        "layers.3.ffn.gate.bias": ("F32", (256,)),
        "layers.3.ffn.gate.weight": ("BF16", (256, 4096)),
        "mtp.0.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
        "mtp.0.e_proj.scale": ("F8_E8M0", (32, 32)),
        "hc_head_fn": ("F32", (4, 16384)),
    },
    "v4-pro": {
        "layers.60.ffn.experts.383.w1.weight": ("I8", (3072, 3584)),
        "layers.60.ffn.experts.383.w1.scale": ("F8_E8M0", (3072, 224)),
        "layers.60.ffn.experts.383.w2.weight": ("I8", (7168, 1536)),
        "layers.60.ffn.experts.383.w2.scale": ("F8_E8M0", (7168, 96)),
        "layers.60.ffn.shared_experts.w3.weight": ("F8_E4M3", (3072, 7168)),
        "layers.60.ffn.shared_experts.w3.scale": ("F8_E8M0", (24, 56)),
        "layers.60.ffn.shared_experts.w2.weight": ("F8_E4M3", (7168, 3072)),
        "layers.60.ffn.shared_experts.w2.scale": ("F8_E8M0", (56, 24)),
        "layers.60.attn.wq_a.weight": ("F8_E4M3", (1536, 7168)),
        "layers.60.attn.wq_a.scale": ("F8_E8M0", (12, 56)),
        "layers.60.attn.wo_a.weight": ("F8_E4M3", (16384, 4096)),
        "layers.60.attn.wo_a.scale": ("F8_E8M0", (128, 32)),
    },
    "v4-flash-base": {
        "layers.0.ffn.experts.0.w1.weight": ("F8_E4M3", (2048, 4096)),
        "layers.0.ffn.experts.0.w1.scale": ("F32", (16, 32)),
        "layers.0.ffn.experts.0.w2.weight": ("F8_E4M3", (4096, 2048)),
        "layers.0.ffn.experts.0.w2.scale": ("F32", (32, 16)),
        "layers.0.ffn.shared_experts.w1.scale": ("F32", (16, 32)),
        "layers.0.ffn.shared_experts.w2.scale": ("F32", (32, 16)),
    },
    "v4.1-flash": {
        "layers.39.ffn.experts.383.w1.weight": ("I8", (2304, 2560)),
        "layers.39.ffn.experts.383.w3.scale": ("F8_E8M0", (2304, 160)),
        "layers.39.ffn.experts.383.w2.weight": ("I8", (5120, 1152)),
        "layers.39.ffn.experts.383.w2.scale": ("F8_E8M0", (5120, 72)),
        "layers.39.ffn.shared_experts.w1.weight": ("F8_E4M3", (2304, 5120)),
        "layers.39.ffn.shared_experts.w1.scale": ("F8_E8M0", (72, 160)),
        "layers.39.ffn.shared_experts.w2.weight": ("F8_E4M3", (5120, 2304)),
        "layers.39.ffn.shared_experts.w2.scale": ("F8_E8M0", (160, 72)),
        "layers.39.attn.wq_a.weight": ("F8_E4M3", (1280, 5120)),
        "layers.39.attn.wq_a.scale": ("F8_E8M0", (40, 160)),
        "layers.1.engram.embed.weight": ("F8_E4M3", (384006168, 256)),
        "layers.1.engram.embed.scale": ("F8_E8M0", (384006168, 8)),
        "layers.14.engram.wkv.weight": ("F8_E4M3", (25600, 6144)),
        "layers.14.engram.wkv.scale": ("F8_E8M0", (800, 192)),
        "layers.0.ffn.gate.bias_vl": ("F32", (384,)),
        "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 15360)),
        "mtp.2.ffn.experts.127.w1.weight": ("I8", (2304, 2560)),
        "mtp.2.ffn.shared_experts.w1.scale": ("F8_E8M0", (72, 160)),
    },
    "v3": {
        "model.layers.3.mlp.experts.255.gate_proj.weight": ("F8_E4M3", (2048, 7168)),
        "model.layers.3.mlp.experts.255.gate_proj.weight_scale_inv": ("F32", (16, 56)),
        "model.layers.3.mlp.shared_experts.down_proj.weight": ("F8_E4M3", (7168, 2048)),
        "model.layers.3.mlp.shared_experts.down_proj.weight_scale_inv": ("F32", (56, 16)),
        "model.layers.2.mlp.up_proj.weight": ("F8_E4M3", (18432, 7168)),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (5, 56)),
        "model.layers.61.mlp.shared_experts.up_proj.weight": ("F8_E4M3", (2048, 7168)),
        "model.layers.61.eh_proj.weight": ("BF16", (7168, 14336)),
        "model.layers.61.shared_head.head.weight": ("BF16", (129280, 7168)),
        "lm_head.weight": ("BF16", (129280, 7168)),
    },
    "quark-mxfp4": {
        "layers.0.ffn.experts.0.w1.weight": ("U8", (2048, 2048)),
        "layers.0.ffn.experts.0.w1.weight_scale": ("U8", (2048, 128)),
        "layers.0.ffn.shared_experts.w2.weight": ("U8", (4096, 1024)),
        "layers.0.ffn.shared_experts.w2.weight_scale": ("U8", (4096, 64)),
        "mtp.0.ffn.experts.0.w1.weight": ("U8", (2048, 2048)),
        "mtp.0.ffn.shared_experts.w1.weight": ("F8_E4M3", (2048, 4096)),
        "mtp.0.ffn.shared_experts.w1.weight_scale": ("F8_E8M0", (16, 32)),
        "layers.0.attn.wq_a.weight_scale": ("F8_E8M0", (8, 32)),
    },
    "v4-flash-fp8": {
        "layers.0.ffn.experts.0.w1.weight": ("F8_E4M3", (2048, 4096)),
        "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", (16, 32)),
        "layers.0.ffn.shared_experts.w2.scale": ("F8_E8M0", (32, 16)),
        "mtp.0.ffn.experts.255.w2.scale": ("F8_E8M0", (32, 16)),
    },
    "kimi-k2-quark": {
        "model.layers.60.mlp.experts.383.gate_proj.weight": ("U8", (2048, 3584)),
        "model.layers.60.mlp.experts.383.gate_proj.weight_scale": ("U8", (2048, 224)),
        "model.layers.60.mlp.shared_experts.down_proj.weight": ("BF16", (7168, 2048)),
        "model.layers.0.mlp.up_proj.weight": ("BF16", (18432, 7168)),
        "model.layers.1.self_attn.q_b_proj.weight": ("BF16", (12288, 1536)),
    },
    "glm-4.5-quark": {
        "model.layers.91.mlp.experts.159.down_proj.weight": ("U8", (5120, 768)),
        "model.layers.91.mlp.experts.159.down_proj.weight_scale": ("U8", (5120, 48)),
        "model.layers.91.mlp.shared_experts.up_proj.weight": ("BF16", (1536, 5120)),
        "model.layers.92.mlp.experts.0.up_proj.weight": ("BF16", (1536, 5120)),
        "model.layers.3.self_attn.q_proj.weight": ("BF16", (12288, 5120)),
        "model.layers.3.self_attn.k_proj.bias": ("BF16", (1024,)),
    },
    "qwen3.5-quark": {
        "model.language_model.layers.59.mlp.experts.511.up_proj.weight": ("U8", (1024, 2048)),
        "model.language_model.layers.59.mlp.shared_expert.down_proj.weight": ("BF16", (4096, 1024)),
        "model.language_model.layers.59.mlp.shared_expert_gate.weight": ("BF16", (1, 4096)),
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": ("BF16", (12288, 4096)),
        "model.language_model.layers.3.self_attn.q_proj.weight": ("BF16", (16384, 4096)),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight_scale": ("U8", (1024, 128)),
    },
    "nvfp4": {
        "layers.0.ffn.experts.0.w1.weight": ("U8", (2304, 2560)),
        "layers.0.ffn.experts.0.w1.weight_scale": ("F8_E4M3", (2304, 320)),
        "layers.0.ffn.experts.0.w1.weight_scale_2": ("F32", ()),
        "layers.0.ffn.experts.0.w1.input_scale": ("F32", ()),
        "layers.0.ffn.experts.0.w2.weight_scale": ("F8_E4M3", (5120, 144)),
        "layers.0.ffn.shared_experts.w1.weight": ("F8_E4M3", (2304, 5120)),
        "layers.0.ffn.shared_experts.w1.scale": ("F8_E8M0", (72, 160)),
        "mtp.0.ffn.experts.0.w1.weight": ("I8", (2304, 2560)),
        "mtp.0.ffn.experts.0.w1.scale": ("F8_E8M0", (2304, 160)),
    },
    "bf16": {
        "layers.0.ffn.experts.0.w1.weight": ("BF16", (2048, 4096)),
        "layers.0.ffn.shared_experts.w2.weight": ("BF16", (4096, 2048)),
        "layers.0.attn.wq_a.weight": ("BF16", (1024, 4096)),
    },
}
ABSENT = {
    "v4-flash": ("layers.2.ffn.gate.bias", "layers.3.ffn.gate.tid2eid", "layers.0.attn.compressor.ape", "mtp.1.norm.weight"),
    "v4.1-flash": ("hc_head_fn", "layers.3.attn.compressor.wkv.weight", "layers.20.attn.compressor.wgate.weight"),
    "v3": ("model.layers.2.mlp.shared_experts.up_proj.weight", "model.layers.62.enorm.weight"),
    "bf16": ("layers.0.ffn.experts.0.w1.scale",),
    "kimi-k2-quark": ("model.layers.61.enorm.weight", "model.layers.0.mlp.gate.weight"),
    "qwen3.5-quark": ("model.language_model.layers.3.linear_attn.A_log", "model.visual.pos_embed.weight"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_published_shapes(kind: str) -> None:
    inventory = real(kind)
    assert SHAPES[kind].items() <= inventory.items()
    assert not inventory.keys() & set(ABSENT.get(kind, ()))


@pytest.mark.parametrize(
    ("kind", "count", "total", "shards"),
    [
        ("v4-flash", 69_187, 159_609_485_896, 46),
        ("v4-flash-0731", 72_317, 166_878_536_440, 48),
        ("v4-pro", 145_116, 864_704_792_696, 64),  # bytes: see the files below
        ("v4.1-flash", 96_085, 510_286_023_000, 48),
        ("v3", 91_991, 688_574_839_360, 64),  # count as published, in 163 shards
    ],
)
def test_published_tensor_counts_and_bytes(kind: str, count: int, total: int, shards: int) -> None:
    assert totals(kind)[:3] == (count, total, shards)


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("v4-flash-0731", {"BF16": 445, "F32": 433, "F8_E4M3": 390, "F8_E8M0": 35_718, "I64": 3, "I8": 35_328}),
        ("v4.1-flash", {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}),
    ],
)
def test_published_tensors_by_dtype(kind: str, dtypes: dict[str, int]) -> None:
    assert totals(kind)[3] == dtypes


def test_v41_experts_are_counted() -> None:
    names = list(real("v4.1-flash"))
    assert sum(".ffn.experts." in name and name.startswith("layers.") for name in names) == 40 * 384 * 3 * 2
    assert sum(".ffn.experts." in name and name.startswith("mtp.") for name in names) == 3 * 128 * 3 * 2 == 2 * 1_152
    assert sum(".shared_experts." in name and name.startswith("layers.") for name in names) == 240
    assert sum(".shared_experts." in name and name.startswith("mtp.") for name in names) == 18
    assert sum(name.startswith(("vision.", "aligner.", "image_")) for name in names) == 266


V41_FILES = (  # bytes of the published shards: later ones override
    dict.fromkeys(range(3, 13), 7_389_759_032)  # decoder layers 0 to 9
    | dict.fromkeys(range(13, 43), 7_389_761_368)  # and 10 to 39, with longer names
    | {5: 7_405_953_784, 11: 7_405_953_784, 17: 7_405_956_128, 23: 7_400_713_088}  # KV sources
    | dict.fromkeys((27, 31, 35, 39), 7_395_337_384)  # index sources
    | {1: 970_533_624, 2: 1_323_858_272, 43: 1_323_837_624, 44: 2_652_728_736, 45: 2_573_998_176, 46: 2_706_402_896}
    | {47: 101_535_150_936, 48: 101_537_926_640}  # engrams
)


def test_v41_files_are_the_published_ones_but_for_the_values(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "v4.1-flash", real=True, sparse=True, header_metadata=False)
    sizes = {int(path.name[6:11]): path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert sizes == V41_FILES
    assert sum(path.stat().st_blocks for path in tmp_path.glob("*.safetensors")) * 512 < 64 << 20
    assert len(header(tmp_path / "model-00003-of-00048.safetensors")) == 2_334
    assert len(header(tmp_path / "model-00005-of-00048.safetensors")) == 2_342
    assert len(header(tmp_path / "model-00023-of-00048.safetensors")) == 2_341
    assert len(header(tmp_path / "model-00027-of-00048.safetensors")) == 2_337
    config = (tmp_path / "config.json").read_bytes()
    assert hashlib.sha256(config).hexdigest() == "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    assert len(index) == 7_470_294
    assert json.loads(index)["metadata"] == {"total_size": 510_286_023_000}


@pytest.mark.parametrize(("kind", "total"), [("v4-flash-0731", 166_886_535_336), ("v4-pro", 864_721_029_744)])
def test_published_bytes_of_all_shards(tmp_path: Path, kind: str, total: int) -> None:
    make_checkpoint(tmp_path, kind, real=True, sparse=True, header_metadata=False)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) == total


@pytest.mark.parametrize("kind", KINDS)
def test_the_demonstration_keeps_the_experts_and_is_under_a_gigabyte(kind: str) -> None:
    small = {entry.name: entry for entry in entries(make_spec(kind))}
    inventory = real(kind)
    shared = [entry for name, entry in small.items() if ".experts." in name or ".shared_experts." in name]
    assert sum(map(size, small.values())) < 1_000_000_000
    offset = {"v3": 59, "glm-4.5-quark": 90}.get(kind, 0)  # the drafter's number
    for entry in shared:
        name = re.sub(r"layers\.2\.", f"layers.{2 + offset}.", entry.name)
        name = re.sub(r"model\.layers\.1\.", "model.layers.3.", name)
        assert inventory[name] == (entry.dtype, entry.shape)


def test_configs_say_what_the_headers_say(tmp_path: Path) -> None:
    flash, v41 = make_spec("v4-flash", layers=5).config, make_spec("v4.1-flash", layers=15, mtp=3, experts=9)
    assert (flash["expert_dtype"], flash["n_routed_experts"], flash["num_nextn_predict_layers"]) == ("fp4", 8, 1)
    assert flash["compress_ratios"] == [0, 0, 4, 128, 4, 0]
    assert flash["quantization_config"]["weight_block_size"] == [128, 128]
    assert "expert_dtype" not in v41.config
    assert "moe_intermediate_size" not in v41.config
    assert v41.config["quantization_config"]["expert_dtype"] == "fp4"
    assert v41.text["moe_intermediate_size"] == 2304
    assert (v41.text["n_routed_experts"], v41.text["dspark_n_routed_experts"]) == (9, 3)
    assert v41.text["kv_source_layer_ids"] == [2, 8, 14]
    assert v41.text["engram_layer_ids"] == [1, 14]
    assert len(v41.text["compress_ratios"]) == 18
    assert make_spec("v4-flash-base").config["expert_dtype"] == "fp8"
    assert "expert_dtype" not in make_spec("v4-pro").config
    assert "quantization_config" not in make_spec("bf16").config


def test_v4_flash_0731_has_three_drafters_and_says_one() -> None:
    spec = make_spec("v4-flash-0731")
    assert spec.config["num_nextn_predict_layers"] == 1
    assert {name.split(".")[1] for name in real("v4-flash-0731") if name.startswith("mtp.")} == {"0", "1", "2"}


def test_engram_is_in_another_shard_than_its_layer(tmp_path: Path) -> None:
    tiny(tmp_path, "v4.1-flash")
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    of_layer = {shard for name, shard in where.items() if name.startswith("layers.1.") and ".engram." not in name}
    assert len(of_layer) == 1
    assert where["layers.1.engram.embed.weight"] == "model-00008-of-00008.safetensors" not in of_layer


def test_quark_config_marks_the_drafters_shared_expert(tmp_path: Path) -> None:
    quark = make_spec("quark-mxfp4").config["quantization_config"]
    layers = quark["layer_quant_config"]
    assert quark["quant_method"] == "quark"
    assert quark["global_quant_config"]["weight"] | {"dtype": "fp4", "group_size": 32} == quark["global_quant_config"]["weight"]
    assert layers["mtp.0.ffn.shared_experts.w1"]["weight"]["block_size"] == [128, 128]


def test_quark_config_names_every_fp8_module_exactly_and_mtp_layers_twice(tmp_path: Path) -> None:
    """As the later layers of the model too, which is where vLLM 0.31 and 0.32 look for the drafter's."""
    folder = tiny(tmp_path, "quark-mxfp4")
    config = json.loads((folder / "config.json").read_text())
    named = config["quantization_config"]["layer_quant_config"]
    stored = {name.removesuffix(".weight") for name, value in tensors(folder).items() if value.dtype == torch.float8_e4m3fn}
    twins = {name.replace("mtp.0.", f"layers.{config['num_hidden_layers']}.") for name in stored if name.startswith("mtp.0.")}
    assert set(named) == stored | twins
    assert {spec["weight"]["dtype"] for spec in named.values()} == {"fp8_e4m3"}


@pytest.mark.parametrize(
    ("kind", "excluded"),
    [
        ("kimi-k2-quark", ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.2.mlp.shared_experts.up_proj"]),
        ("glm-4.5-quark", ["model.layers.3.mlp.experts.2.down_proj", "model.layers.1.self_attn.q_proj"]),
        (
            "qwen3.5-quark",
            ["model.language_model.layers.1.mlp.shared_expert_gate", "mtp.layers.0.mlp.shared_expert.up_proj"],
        ),
    ],
)
def test_quark_of_other_families_lists_what_is_stored_unquantised(tmp_path: Path, kind: str, excluded: list[str]) -> None:
    """But for embeddings: it lists linear layers."""
    folder = tiny(tmp_path, kind)
    quark = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert set(excluded) <= set(quark["exclude"])
    for name, value in tensors(folder).items():
        if value.ndim == 2 and "embed_tokens" not in name:
            quantised = value.dtype == torch.uint8
            assert quantised == (name.rpartition(".")[0] not in quark["exclude"]), name


def test_nvfp4_gate_and_up_have_one_global_scale(tmp_path: Path) -> None:
    state = tensors(tiny(tmp_path, "nvfp4"))
    for expert in range(TINY["experts"]):
        prefix = f"layers.0.ffn.experts.{expert}"
        gate, up, down = (state[f"{prefix}.{name}.weight_scale_2"] for name in ("w1", "w3", "w2"))
        assert gate.shape == ()
        assert gate == up != down
        assert not torch.equal(state[f"{prefix}.w1.weight"], state[f"{prefix}.w3.weight"])
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert set(config["quantized_layers"]) == {f"layers.{layer}.ffn.experts" for layer in range(3)}


@pytest.mark.parametrize(
    ("kind", "knobs", "exact"),
    [
        ("v4-flash-base", {}, True),
        ("v4-flash-base", {"power_of_two": False}, False),
        ("v3", {}, False),
        ("v3", {"power_of_two": True}, True),
    ],
    ids=["V4 base as published", "V4 base, any scale", "V3 as published", "V3, powers of two"],
)
def test_f32_scales_are_powers_of_two_or_none_is(tmp_path: Path, kind: str, knobs: dict[str, bool], exact: bool) -> None:
    scales = [value for name, value in tensors(tiny(tmp_path, kind, **knobs)).items() if "scale" in name and value.ndim == 2]
    mantissas = torch.cat([scale.flatten().view(torch.int32) & 0x7FFFFF for scale in scales])
    assert (mantissas == 0).all() if exact else mantissas.all()


def test_v3_numbers_its_drafter_after_the_layers(tmp_path: Path) -> None:
    names = headers(tiny(tmp_path, "v3", layers=3, dense=2))
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.shared_experts.gate_proj.weight" not in names
    assert "model.layers.2.mlp.shared_experts.gate_proj.weight" in names
    assert "model.layers.3.eh_proj.weight" in names
    assert "model.layers.3.mlp.shared_experts.gate_proj.weight" in names


def test_several_shared_experts_are_one_wide_mlp(tmp_path: Path) -> None:
    names = headers(tiny(tmp_path, "v4.1-flash", shared=3))
    assert names["layers.0.ffn.shared_experts.w1.weight"]["shape"] == [3 * 128, 256]
    assert names["mtp.0.ffn.shared_experts.w2.weight"]["shape"] == [256, 3 * 128]
    assert names["layers.0.ffn.experts.0.w1.weight"]["shape"] == [128, 128]
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["n_shared_experts"] == 3


def test_partial_blocks_count_as_blocks(tmp_path: Path) -> None:
    names = headers(tiny(tmp_path, "v4-flash", width=200, hidden=320))
    assert names["layers.0.ffn.shared_experts.w1.scale"]["shape"] == [2, 3]
    assert names["layers.0.ffn.experts.0.w2.scale"]["shape"] == [320, 7]
    assert names["layers.0.ffn.experts.0.w2.weight"]["shape"] == [320, 100]


def test_any_number_of_the_config_is_a_knob() -> None:
    spec = make_spec("v4.1-flash", q_lora_rank=96, engram_n_heads=2)
    assert spec.text["q_lora_rank"] == 96
    with pytest.raises(TypeError, match="v4-flash has nothing that 'q_rank' would set"):
        make_spec("v4-flash", q_rank=1)
    with pytest.raises(TypeError, match="engram_num_embeddings"):
        make_spec("v4-flash", engram_rows=1)
