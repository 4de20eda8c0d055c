"""The files that the factory writes: valid for every kind, and the same for the same knobs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fse_convert.testing import checkpoints
from fse_convert.testing.checkpoints import parse_size
from fse_convert.testing.kinds import KINDS
from tests.testing.small import TINY, header, headers, tensors, tiny

Digest = Callable[[Path], dict[str, str]]
LAYERS = {
    **dict.fromkeys(("v3", "kimi-k2-quark", "glm-4.5-quark"), "model.layers.2.mlp"),
    "qwen3.5-quark": "model.language_model.layers.2.mlp",
}
"""The block of experts of a layer, of kinds that do not name it as DeepSeek V4 does."""


@pytest.mark.parametrize("kind", KINDS)
def test_index_headers_and_library_agree(tmp_path: Path, kind: str) -> None:
    tiny(tmp_path, kind)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = 0
    seen = {}
    for shard in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118
                assert name not in seen
                seen[name] = shard.name
                total += opened.get_tensor(name).nbytes
    assert seen == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(seen.values())


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_valid_and_never_zero(tmp_path: Path, kind: str) -> None:
    for name, value in tensors(tiny(tmp_path, kind)).items():
        raw = value.reshape(-1).view(torch.uint8)
        if value.dtype == torch.float8_e4m3fn:
            assert not torch.isin(raw, torch.tensor([0x00, 0x80, 0x7F, 0xFF], dtype=torch.uint8)).any(), name
        elif value.dtype == torch.float8_e8m0fnu or name.endswith("weight_scale"):
            assert raw.min() >= 0x70, name
            assert raw.max() <= 0x7A, name
        elif value.dtype in (torch.int8, torch.uint8):
            assert raw.all(), name
            assert raw.unique().numel() > 200, name
        elif value.dtype == torch.int64:
            assert value.min() >= 0, name
            assert value.max() == TINY["experts"] - 1, name
        else:
            assert value.isfinite().all(), name
            assert value.all(), name


@pytest.mark.parametrize("kind", ["v4-flash", "v4.1-flash", "v3", "nvfp4"])
def test_a_shard_is_what_the_library_would_write(tmp_path: Path, kind: str) -> None:
    paths = sorted(tiny(tmp_path, kind).glob("*.safetensors"))
    for path in paths:
        if any(".engram." in name for name in header(path)):
            continue  # the published ones are not in the library's order, nor are ours
        save_file(load_file(path), tmp_path / "again", metadata={"format": "pt"})
        assert (tmp_path / "again").read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_look_like_weights(tmp_path: Path, kind: str) -> None:
    """Dequantised routed and shared experts have a standard deviation near 0.02."""
    state = tensors(tiny(tmp_path, kind))
    layer, gate = LAYERS.get(kind, "layers.2.ffn"), "gate_proj" if kind in LAYERS else "w1"
    for expert in ("experts.0", "shared_expert" if kind == "qwen3.5-quark" else "shared_experts"):
        parts = {name.rpartition(".")[2]: value for name, value in state.items() if f"{layer}.{expert}.{gate}" in name}
        assert 0.004 < float(dequantised(parts).std()) < 0.1, (expert, sorted(parts))


def dequantised(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = parts["weight"]
    scale = next((value for name, value in parts.items() if "scale" in name and value.ndim == 2), None)
    if weight.dtype in (torch.int8, torch.uint8):
        codes = weight.view(torch.uint8)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        value = grid[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
    else:
        value = weight.float()
    if scale is None:
        return value
    factor = 2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    for dim in (0, 1):
        factor = factor.repeat_interleave(math.ceil(value.shape[dim] / factor.shape[dim]), dim)
    return value * factor[: value.shape[0], : value.shape[1]] * parts.get("weight_scale_2", 1.0)


def test_same_knobs_same_bytes_and_another_seed_others(tmp_path: Path, digest: Digest) -> None:
    one, two = digest(tiny(tmp_path / "1", "v4.1-flash")), digest(tiny(tmp_path / "2", "v4.1-flash"))
    other = digest(tiny(tmp_path / "3", "v4.1-flash", seed=1))
    assert one == two
    assert {name for name in one if one[name] != other[name]} == {name for name in one if name.endswith(".safetensors")}


def test_a_tensors_values_depend_on_its_name_and_the_seed_alone(tmp_path: Path) -> None:
    whole = tensors(tiny(tmp_path / "1", "v4-flash"))
    cut = tensors(tiny(tmp_path / "2", "v4-flash", experts=2, mtp=0, shard_size=50_000))
    same = "layers.2.ffn.experts.1.w2.weight"
    assert torch.equal(whole[same], cut[same])
    assert not torch.equal(whole[same], whole["layers.2.ffn.experts.0.w2.weight"])


def test_chunks_do_not_show(tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest(tiny(tmp_path / "1", "nvfp4"))
    monkeypatch.setattr(checkpoints, "CHUNK", 1 << 10)
    assert digest(tiny(tmp_path / "2", "nvfp4")) == whole


def test_values_are_these(tmp_path: Path) -> None:
    """The bytes are part of the interface: benchmarks and reports name digests."""
    state = tensors(tiny(tmp_path, "v4-flash"))
    joined = hashlib.sha256()
    for name in ("layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.shared_experts.w1.weight", "norm.weight"):
        joined.update(bytes(state[name].flatten().view(torch.uint8).tolist()))
    assert joined.hexdigest()[:16] == "3967fd09c943154e"


def test_shard_size_cuts_between_any_two_tensors(tmp_path: Path) -> None:
    tiny(tmp_path, "v4-flash", shard_size="64KB")
    largest = max(math.prod(entry["shape"]) for entry in headers(tmp_path).values())
    paths = sorted(tmp_path.glob("*.safetensors"))
    sizes = [max(entry["data_offsets"][1] for name, entry in header(path).items() if name != "__metadata__") for path in paths]
    assert all(total <= 64_000 or len(header(path)) == 2 for path, total in zip(paths, sizes, strict=True))
    assert max(sizes) >= largest
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(where[name] != where[name.removesuffix("weight") + "scale"] for name in where if f"{name[:-6]}scale" in where)


def test_single_file_has_no_index(tmp_path: Path) -> None:
    tiny(tmp_path / "one", "v4.1-flash", single_file=True)
    assert [path.name for path in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    assert headers(tmp_path / "one").keys() == headers(tiny(tmp_path / "many", "v4.1-flash")).keys()


def test_sparse_has_the_headers_and_the_sizes(tmp_path: Path) -> None:
    hole, dense = tiny(tmp_path / "hole", "v4.1-flash", sparse=True), tiny(tmp_path / "dense", "v4.1-flash")
    assert headers(hole) == headers(dense)
    for shard in dense.glob("*.safetensors"):
        assert (hole / shard.name).stat().st_size == shard.stat().st_size
        assert not any(value.reshape(-1).view(torch.uint8).any() for value in load_file(hole / shard.name).values())


def test_repository_files(tmp_path: Path) -> None:
    tiny(tmp_path, "v4-flash-0731")
    for name in ("tokenizer_config.json", "README.md", "encoding/encoding_dsv4.py", "encoding/tests/test_input_1.json"):
        assert (tmp_path / name).stat().st_size
    flat = json.loads((tmp_path / "inference" / "config.json").read_text())
    assert flat["moe_inter_dim"] == 128
    assert (flat["n_mtp_layers"], flat["dtype"]) == (3, "fp8")
    assert "model_type" not in flat


def test_headers_without_metadata(tmp_path: Path) -> None:
    tiny(tmp_path, "v4-flash", header_metadata=False)
    assert all("__metadata__" not in header(shard) for shard in tmp_path.glob("*.safetensors"))


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(FileExistsError):
        tiny(tmp_path, "v4-flash")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("4096", 4096), ("7B", 7)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected
