"""The manifest of a plan: its version, what it says of a change of format, and which texts of the source it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import CONFIG
from fse_convert.conversion.files import json_texts
from fse_convert.plan.manifest import draft_manifest
from fse_convert.plan.plan import Options
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import open_source
from fse_convert.servers.judge import find_any
from fse_convert.sidecar.manifest import ChangeRecord, Manifest
from fse_convert.testing.patch import read_shard

Make = Callable[..., Path]


def drafted(root: Path, target: str = "", **options: Any) -> Manifest:
    plan = make_plan(open_source(LocalFolder(root)), Options(find_any(target) if target else None, **options))
    return draft_manifest(plan, json_texts(plan))


def test_a_kernel_layout_alone_is_version_1(made: Make) -> None:
    manifest = drafted(made("v4-flash"), "megamoe-512")
    assert manifest.format_version == 1
    assert (manifest.changes, manifest.renamed) == (UNSET, UNSET)
    assert manifest.contract
    assert manifest.layout
    assert set(manifest.value()["arguments"]) == {"target", "experts", "tp", "allow_unfused"}


@pytest.mark.parametrize(
    ("kind", "target", "options", "changes", "renamed"),
    [
        ("v4-flash", "", {"routed_fp8": True}, {"routed-fp8": True}, False),
        ("v4-flash", "", {"shared_mxfp4": True, "lossy": True}, {"shared-mxfp4": False}, True),
        ("v4-flash-fp8", "vllm-0.33-aiter", {"drop_originals": True}, {"heal-fp8-scales": True}, False),
        ("kimi-k2-quark", "vllm-0.33-aiter", {"lossy": True}, {"shared-mxfp4": False}, False),
        ("v4-flash", "sglang-0.5.23-slots", {}, {}, False),
    ],
)
def test_version_2_says_what_changed(
    kind: str, target: str, options: dict[str, bool], changes: dict[str, bool], renamed: bool, made: Make
) -> None:
    manifest = drafted(made(kind, width=256), target, **options)
    assert (manifest.format_version, manifest.contract, manifest.layout) == (2, None, None)
    assert manifest.changes == ([ChangeRecord(name=name, lossless=kept) for name, kept in changes.items()] or UNSET)
    arguments = manifest.value()["arguments"]
    assert arguments == {"target": target, "experts": "all", "tp": 1, "allow_unfused": False, **options}
    assert (manifest.renamed is not UNSET) == renamed
    assert (manifest.server is None) == (target == "")
    assert manifest.config_edits == []
    assert manifest.padded == {}


def test_names_of_the_source_are_those_of_tensors_that_are_its_bytes(made: Make) -> None:
    root = made("v4-flash", width=256)
    renamed = drafted(root, shared_mxfp4=True, lossy=True).renamed
    assert isinstance(renamed, dict)
    assert all(new == old.removesuffix("scale") + "weight_scale" for new, old in renamed.items())
    assert "layers.0.attn.wkv.weight_scale" in renamed
    assert "layers.0.ffn.experts.0.w1.weight_scale" in renamed
    assert "mtp.0.ffn.shared_experts.w1.weight_scale" in renamed, "the drafter's stay FP8"
    assert "layers.0.ffn.shared_experts.w1.weight_scale" not in renamed, "these are new"


def test_headers_that_changed_are_kept_as_text_and_no_others(made: Make) -> None:
    root = made("v4-flash", width=256)
    kept = drafted(root, routed_fp8=True).source.originals
    shards = [name for name in kept if name.endswith(".safetensors")]
    assert set(kept) == {CONFIG, *shards}, "the index follows from the output's"
    for path in root.glob("*.safetensors"):
        header, _ = read_shard(path)
        changes = any(".experts." in name for name in header)
        assert (path.name in shards) == changes
        if changes:
            raw = path.read_bytes()
            assert kept[path.name].encode() == raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    assert kept[CONFIG] == (root / CONFIG).read_text()
