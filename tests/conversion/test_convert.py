"""Whole conversions, judged by the safetensors library and by padding written out here, kind by kind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fse_convert.layout import megamoe, ue8m0

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
EXPERT = re.compile(r"(.*)\.(experts\.\d+|shared_experts)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(\w+)")
FUSED = ["v4-flash", "v4.1-flash", "v4-flash-base"]
UNFUSED = ["v3", "bf16"]


def load(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's shards as raw bytes ``[..., row bytes]``, by the library; a name that occurs twice fails."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                assert name not in tensors
                tensor = f.get_tensor(name)
                tensors[name] = tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    return tensors


def fill_of(name: str, tensor: torch.Tensor, dtype: str) -> bytes:
    if not name.rsplit(".", maxsplit=1)[-1].startswith(("scale", "weight_scale")):
        return b"\0\0" if dtype == "BF16" else b"\0"
    return {"F32": b"\0\0\x80\x3f", "F8_E4M3": b"\x38"}.get(dtype, b"\x7f")


def expected(name: str, tensor: torch.Tensor, old: int, new: int, dtype: str) -> torch.Tensor:
    """Pad as the design says, from the name and the sizes alone: gate and up at the end of rows, down at the end of columns."""
    m = EXPERT.fullmatch(name)
    if m is None or tensor.ndim < 2 or m[4] in ("weight_scale_2", "input_scale"):
        return tensor
    down = m[3] in ("w2", "down_proj")
    rows, row_bytes = tensor.shape
    fill = torch.tensor(list(fill_of(name, tensor, dtype)), dtype=torch.uint8)
    if down:
        width = len(fill)
        columns = row_bytes // width
        per = next(b for b in (1, 2, 16, 32, 128) if -(-old // b) == columns)
        new_bytes = -(-new // per) * width
        tail = fill.repeat(rows * (new_bytes - row_bytes) // width).view(rows, -1)
        return torch.cat((tensor, tail), 1)
    block = next(b for b in (1, 32, 128) if -(-old // b) == rows)
    new_rows = -(-new // block)
    return torch.cat((tensor, fill.repeat((new_rows - rows) * row_bytes // len(fill)).view(-1, row_bytes)))


def dtypes(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in root.glob("*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        found |= {n: e["dtype"] for n, e in header.items() if n != "__metadata__"}
    return found


def check_standard(root: Path, out: Path, old: int, new: int, shared: int = 1) -> int:
    """Compare the standard layout of OUT with the padding written out here; returns how many tensors grew."""
    source, result, kinds = load(root), load(out), dtypes(root)
    assert source.keys() == result.keys()
    assert kinds == dtypes(out)
    grown = 0
    for name, tensor in source.items():
        n = shared if ".shared_experts." in name else 1
        want = expected(name, tensor, n * old, n * new, kinds[name]) if old != new else tensor
        assert torch.equal(result[name], want), name
        grown += want.shape != tensor.shape
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() for t in result.values())
    assert set(index["weight_map"]) == set(result)
    assert {p.name for p in out.glob("*.safetensors")} == set(index["weight_map"].values())
    return grown


def check_kernel(root: Path, out: Path, width: int, shared: int = 1) -> int:
    """Compare ``fse/`` with the layout functions that tests/layout and tests/peers judge; returns how many layers it has."""
    source, kinds = load(root), dtypes(root)
    kernel = load(out / "fse")
    (wire,) = (n for n, t in kernel.items() if not t.numel())
    assert wire in source, "a tensor of the model with no element stops loaders that take fse/ for a checkpoint"
    layers = sorted({n.rsplit(".", 1)[0] for n in kernel} - {wire.rpartition(".")[0]})
    size = shared * width
    for layer in layers:
        prefix = layer.removesuffix(".experts") + ".shared_experts."
        names = ("w1", "w3", "w2") if prefix + "w1.weight" in source else ("gate_proj", "up_proj", "down_proj")
        weights, scales = [], []
        for p in names:
            weight = source[f"{prefix}{p}.weight"]
            name = next(n for n in source if n.startswith(f"{prefix}{p}.") and "scale" in n)
            scale = source[name]
            if kinds[name] == "F32":
                scale = ue8m0.from_fp32(scale.view(torch.float32))
            (n, k), (sn, sk) = weight.shape, scale.shape
            block = next(b for b in (32, 128) if (-(-n // b), -(-k // b)) == (sn, sk))
            scale = ue8m0.expand(scale, n, k, block, block)
            n2, k2 = (n, size) if p in ("w2", "down_proj") else (size, k)
            weights.append(torch.nn.functional.pad(weight, (0, k2 - k, 0, n2 - n)))
            scales.append(torch.nn.functional.pad(scale, (0, k2 // 32 - scale.shape[1], 0, n2 - n), value=127))
        got = {p: kernel[f"{layer}.shared_{p}"] for p in ("l1_weight", "l1_weight_scale", "l2_weight", "l2_weight_scale")}
        assert torch.equal(got["l1_weight"], megamoe.interleave(*weights[:2]))
        assert torch.equal(got["l1_weight_scale"], megamoe.l1_scale(*scales[:2]).view(torch.uint8))
        assert torch.equal(got["l2_weight"], weights[2])
        assert torch.equal(got["l2_weight_scale"], megamoe.l2_scale(scales[2]).view(torch.uint8))
    return len(layers)


@pytest.mark.parametrize("kind", FUSED)
def test_pads_every_expert_and_writes_the_kernel_layout(kind: str, made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made(kind), tmp_path / "out"
    code, text, _ = run(root, out)
    assert code == 0
    assert "width 384 -> 512" in text
    assert check_standard(root, out, 384, 512) > 0
    assert check_kernel(root, out, 512) == 3
    config = json.loads((out / "config.json").read_text())
    assert config.get("text_config", config)["moe_intermediate_size"] == 512


@pytest.mark.parametrize("kind", [*UNFUSED, "quark-mxfp4", "nvfp4"])
def test_other_formats_are_padded_in_their_own_format(kind: str, made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made(kind), tmp_path / "out"
    code, _, err = run(root, out)
    assert code == 3
    assert "not-fusable" in err
    assert not out.exists()
    assert run(root, out, "--allow-unfused")[0] == 0
    assert check_standard(root, out, 384, 512) > 0
    if kind in UNFUSED:
        assert not list((out / "fse").glob("*.safetensors"))
    else:  # MTP layers hold an FP8 shared expert beside MXFP4 experts, which fuses
        assert check_kernel(root, out, 512) == 1


def test_two_shared_experts_are_one_mlp_padded_at_its_end(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4.1-flash", shared=2), tmp_path / "out"
    assert run(root, out)[0] == 0
    check_standard(root, out, 384, 512, shared=2)
    check_kernel(root, out, 512, shared=2)


@pytest.mark.parametrize(("kind", "width"), [("v4-flash", 448), ("v4-flash", 400), ("v4.1-flash", 400), ("v4-flash-base", 200)])
def test_a_width_with_a_partial_last_block(kind: str, width: int, made: Make, tmp_path: Path, run: Run) -> None:
    """448 = 3.5 x 128, 400 = 12.5 x 32: the last block's scale covers padding too, so fewer scales are added than blocks."""
    root, out = made(kind, width=width), tmp_path / "out"
    assert run(root, out)[0] == 0
    check_standard(root, out, width, 512)
    check_kernel(root, out, 512)


def test_megamoe_128_pads_nothing_and_carries_shards_over(
    made: Make, tmp_path: Path, run: Run, digest: Callable[[Path], Any]
) -> None:
    root, out = made("v4.1-flash"), tmp_path / "out"
    code, text, _ = run(root, out, "--target", "megamoe-128")
    assert code == 0
    assert "nothing to pad" in text
    before, after = digest(root), digest(out)
    assert {n: d for n, d in after.items() if not n.startswith("fse/")} == before
    assert check_kernel(root, out, 384) == 3


def test_experts_shared_leaves_the_shards_alone(made: Make, tmp_path: Path, run: Run, digest: Callable[[Path], Any]) -> None:
    root, out = made("v4.1-flash"), tmp_path / "out"
    assert run(root, out, "--experts", "shared")[0] == 0
    assert {n: d for n, d in digest(out).items() if not n.startswith("fse/")} == digest(root)
    assert check_kernel(root, out, 512) == 3


@pytest.mark.parametrize(("kind", "tp", "width"), [("v4-flash", 6, 1536), ("v4.1-flash", 12, 1536), ("v4.1-flash", 16, 512)])
def test_tp_makes_the_width_divide(kind: str, tp: int, width: int, made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made(kind), tmp_path / "out"
    assert run(root, out, "--tp", tp)[0] == 0
    check_standard(root, out, 384, width)
    assert width % (tp * (128 if kind == "v4-flash" else 32)) == 0


@pytest.mark.parametrize("target", ["vllm-0.30", "sglang-0.5.21", "vllm-0.33"])
def test_server_releases_name_their_contract(target: str, made: Make, tmp_path: Path, run: Run) -> None:
    code, out, _ = run(made("v4.1-flash"), tmp_path / "out", "--target", target, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["width"]["kernel"] == (384 if target == "vllm-0.33" else 512)
    assert not (tmp_path / "out").exists()


def test_single_file_checkpoint_stays_a_single_file(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4-flash", single_file=True), tmp_path / "out"
    assert run(root, out)[0] == 0
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert load(out).keys() == load(root).keys()


def test_expert_tensors_spread_over_shards(made: Make, tmp_path: Path, run: Run) -> None:
    """Shards cut by size put a weight and its scale, or gate and up, into different files."""
    root, out = made("v4.1-flash", shard_size=400_000), tmp_path / "out"
    assert len(list(root.glob("*.safetensors"))) > 8
    assert run(root, out)[0] == 0
    check_standard(root, out, 384, 512)
    check_kernel(root, out, 512)


def test_metadata_gets_format_pt_where_a_shard_is_rewritten(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4.1-flash", header_metadata=False), tmp_path / "out"
    assert run(root, out)[0] == 0
    with safe_open(out / "model-00003-of-00007.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_output_bytes_are_the_same_every_time(made: Make, tmp_path: Path, run: Run, digest: Callable[[Path], Any]) -> None:
    root = made("v4.1-flash")
    assert run(root, tmp_path / "a")[0] == 0
    assert run(root, tmp_path / "b", "--link", "hard")[0] == 0
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_hard_links_only_for_untouched_shards(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4.1-flash"), tmp_path / "out"
    assert run(root, out, "--link", "hard")[0] == 0
    linked = {p.name for p in out.glob("*.safetensors") if p.stat().st_nlink > 1}
    same = {p.name for p in out.glob("*.safetensors") if p.read_bytes() == (root / p.name).read_bytes()}
    assert linked == same
    assert len(linked) == 4


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_follow_the_umask(umask: int, made: Make, tmp_path: Path, run: Run) -> None:
    before = os.umask(umask)
    try:
        assert run(made("v4.1-flash"), tmp_path / "out")[0] == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_note_says_when_padding_buys_nothing(made: Make, tmp_path: Path, run: Run) -> None:
    _, _, err = run(made("v4.1-flash"), tmp_path / "out", "--dry-run")
    assert "note[padding-not-needed]" in err
    assert "--target megamoe-128" in err
    _, _, err = run(made("v4.1-flash"), tmp_path / "out", "--dry-run", "--target", "megamoe-128")
    assert "padding-not-needed" not in err


def test_json_is_one_object_and_names_every_file(made: Make, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    code, text, _ = run(made("v4.1-flash"), out, "--json")
    report = json.loads(text)
    assert code == 0
    assert report["ok"] is True
    assert report["schema_version"] == 1
    assert {v["verdict"] for v in report["layers"]} == {"fused"}
    assert set(report["files"]) == {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
