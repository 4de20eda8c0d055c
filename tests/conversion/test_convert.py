"""Whole conversions, judged by the safetensors library and by padding written out here, kind by kind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fse_convert.testing.patch import read_header, retype
from tests.conversion.expected import check_kernel, check_standard, load

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
FUSED = ["v4-flash", "v4.1-flash", "v4-flash-base"]
UNFUSED = ["v3", "bf16"]


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


def test_scales_of_four_dimensions_are_padded_as_those_of_two(source: Make, made: Make, tmp_path: Path, run: Run) -> None:
    """ModelOpt's FP8_PB_WO writes [rows, 1, columns, 1]; all else is as it was, down to the kernel layout and the way back."""
    flat, root = made("v4-flash-base"), source("v4-flash-base")
    shapes = {name: (rows, 1, columns, 1) for name, (rows, columns) in scale_shapes(flat).items()}
    for name, shape in shapes.items():
        retype(root, name, shape=shape)
    out, plain, back = tmp_path / "out", tmp_path / "plain", tmp_path / "back"
    assert run(root, out)[0] == run(flat, plain)[0] == 0
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(load(out).values(), load(plain).values(), strict=True))
    assert {n: (r, 1, c, 1) for n, (r, c) in scale_shapes(plain).items()} == scale_shapes(out)
    assert {n: t.shape for n, t in load(out / "fse").items()} == {n: t.shape for n, t in load(plain / "fse").items()}
    assert all(torch.equal(t, load(plain / "fse")[n]) for n, t in load(out / "fse").items())
    assert run("verify", out, "--source", root)[0] == 0
    assert run("restore", out, back)[0] == 0
    assert scale_shapes(back) == shapes
    assert all(torch.equal(t, load(root)[n]) for n, t in load(back).items())


def scale_shapes(root: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of experts' scales by name."""
    headers = [read_header(path)[0] for path in root.glob("*.safetensors")]
    return {n: tuple(h[n]["shape"]) for h in headers for n in h if "experts" in n and n.endswith(".scale")}


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
    assert run(root, out, "--target", "megamoe-512", "--tp", tp)[0] == 0
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
