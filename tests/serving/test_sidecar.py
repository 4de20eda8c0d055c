"""The reader of ``OUT/fse``: what it gives, and everything that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fse_convert.checkpoint.names import INDEX
from fse_convert.errors import NotServable
from fse_convert.servers.targets import MEGAMOE_128, MEGAMOE_512
from fse_convert.serving.sidecar import KernelShared, Sidecar, locate, open_sidecar
from fse_convert.sidecar.manifest import ExpertWidths
from fse_convert.sidecar.tensors import KernelTensorName
from fse_convert.testing.patch import ShardPatch, Stored, edit_manifest

Run = Callable[..., tuple[int, str, str]]
LAYERS = ("layers.0.ffn.experts", "layers.1.ffn.experts", "mtp.0.ffn.experts")
FITS: dict[str, Any] = {"hidden": 512, "routed_width": 512, "n_shared": 1, "contract": MEGAMOE_512}


STORAGE = ("megamoe-512", "v4.1-flash", "--verify", "storage")


@pytest.fixture
def folder(converted: Callable[..., Path]) -> Path:
    return converted(*STORAGE)


def merge(value: dict[str, Any], changes: dict[str, Any]) -> None:
    """Change keys of an object, and of the objects in it; the others stay."""
    for key, new in changes.items():
        if isinstance(new, dict):
            merge(value[key], new)
        else:
            value[key] = new


@pytest.fixture
def out(output: Callable[..., Path]) -> Path:
    return output(*STORAGE)


def shard(out: Path) -> Path:
    (found,) = (out / "fse").glob("*.safetensors")
    return found


@contextmanager
def rewritten(out: Path, *, index: bool = True) -> Iterator[ShardPatch]:
    """Change the sidecar's shard, and make index and manifest agree with it; layers that are gone stay in the manifest."""
    with ShardPatch(shard(out)) as patch:
        yield patch
    if index:
        weight_map = dict.fromkeys(patch.tensors, patch.path.name)
        (out / "fse" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_manifest(out, lambda manifest: manifest.update(files=None))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(NotServable) as e:
        call()
    return str(e.value)


def test_what_it_says(folder: Path) -> None:
    sidecar = open_sidecar(folder)
    written = sidecar.manifest
    assert (written.contract.name, written.layout.name, written.layout.version) == ("megamoe-512", "megamoe-fp8-shared", 1)
    assert written.model.width == ExpertWidths(source=384, main=512, kernel=512)
    assert (written.model.n_shared_experts, sidecar.width, sidecar.hidden, sidecar.layers) == (1, 512, 512, LAYERS)
    assert sum(t.nbytes for t in sidecar.tensors(LAYERS[0])) == 3 * 512 * 512 * 33 // 32
    assert written.tool.name == "fse-convert"


def test_tensors_are_as_the_kernel_takes_them(folder: Path) -> None:
    sidecar = open_sidecar(str(folder))
    with safe_open(shard(folder), framework="pt") as f:
        for prefix in LAYERS:
            tensors = sidecar.tensors(prefix)
            stored = {part: f.get_tensor(f"{prefix}.{part.value}") for part in KernelTensorName}
            expected = KernelShared(
                stored[KernelTensorName.L1_WEIGHT],
                stored[KernelTensorName.L1_SCALE].t(),
                stored[KernelTensorName.L2_WEIGHT],
                stored[KernelTensorName.L2_SCALE].t(),
            )
            for name, mine, his in zip(tensors._fields, tensors, expected, strict=True):
                assert (mine.dtype, mine.shape, mine.stride()) == (his.dtype, his.shape, his.stride()), name
                assert torch.equal(mine.contiguous().view(torch.uint8), his.contiguous().view(torch.uint8)), name
    assert tensors.l1_weight.dtype == torch.float8_e4m3fn
    assert (tensors.l1_scale.shape, tensors.l1_scale.stride()) == ((1024, 4), (1, 1024))
    assert (tensors.l2_scale.shape, tensors.l2_scale.stride()) == ((512, 4), (1, 512))
    sidecar.close()
    assert torch.equal(sidecar.tensor(LAYERS[0], KernelTensorName.L1_SCALE), sidecar.tensors(LAYERS[0]).l1_scale)


def test_opening_imports_neither_torch_nor_click(folder: Path) -> None:
    code = (
        "import sys; from fse_convert.serving import vllm; from fse_convert.serving.sidecar import open_sidecar; "
        f"open_sidecar({str(folder)!r}); print(sorted({{'torch', 'click', 'rich', 'vllm', 'safetensors'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_layer(folder: Path) -> None:
    text = refusal(lambda: open_sidecar(folder).tensors("layers.7.ffn.experts"))
    assert "no shared experts of layers.7.ffn.experts in kernel layout [sidecar-layer]" in text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param({"format": "other"}, "manifest-invalid", id="another format"),
        pytest.param({"format_version": 3}, "manifest-version", id="a later format version"),
        pytest.param({"layout": {"version": 2}}, "layout-unknown", id="a later layout version"),
        pytest.param({"layout": {"name": "other"}}, "layout-unknown", id="another layout"),
        pytest.param({"layout": None, "contract": None}, "sidecar-incomplete", id="no layout, and tensors in it"),
        pytest.param({"model": {"width": {"kernel": None}}}, "manifest-invalid", id="no kernel width"),
        pytest.param({"contract": {"name": "megamoe-128"}}, "layout-unknown", id="another contract than the shards'"),
        pytest.param({"model": {"n_shared_experts": 2}}, "sidecar-incomplete", id="twice the shared experts"),
        pytest.param({"unknown": "\ud800", "model": {"unknown": [1e400]}}, "", id="more keys"),
    ],
)
def test_manifests_that_are_not_ours(out: Path, changes: dict[str, Any], code: str) -> None:
    edit_manifest(out, lambda manifest: merge(manifest, changes))
    if code:
        assert f"[{code}]" in refusal(lambda: open_sidecar(out))
    else:
        assert open_sidecar(out).layers == LAYERS


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{"])
def test_manifests_that_are_no_json(out: Path, text: bytes) -> None:
    (out / "fse" / "manifest.json").write_bytes(text)
    assert "[manifest-invalid]" in refusal(lambda: open_sidecar(out))


def test_folders_that_were_not_converted(tmp_path: Path, folder: Path) -> None:
    for other in (tmp_path, tmp_path / "nowhere", folder / "fse"):
        text = refusal(lambda other=other: open_sidecar(other))
        assert "[sidecar-missing]" in text
        assert "fse-convert CHECKPOINT OUT" in text


def test_files_that_are_not_those_that_were_written(out: Path) -> None:
    main_shard = sorted(out.glob("*.safetensors"))[-1]
    with main_shard.open("ab") as f:
        f.write(b" ")
    text = refusal(lambda: open_sidecar(out))
    assert "[sidecar-stale]" in text
    assert str(main_shard) in text


def test_a_sidecar_that_lost_something(out: Path) -> None:
    first = f"{LAYERS[0]}.shared_l2_weight_scale"
    with rewritten(out) as patch:
        del patch.tensors[first]
    assert f"{first} is missing" in refusal(lambda: open_sidecar(out))
    with rewritten(out) as patch:
        patch.tensors[first] = Stored("I32", [3, 3], bytes(36))
    assert f"{first} is I32 [3, 3], expected I32 [4, 512]" in refusal(lambda: open_sidecar(out))
    with rewritten(out, index=False) as patch:
        del patch.tensors[first]
    assert "index and shards differ in" in refusal(lambda: open_sidecar(out))
    shard(out).unlink()
    assert "[sidecar-incomplete]" in refusal(lambda: open_sidecar(out))


def test_a_shard_of_another_conversion(out: Path) -> None:
    with rewritten(out) as patch:
        patch.metadata = {**(patch.metadata or {}), "fse_contract": "megamoe-128"}
    text = refusal(lambda: open_sidecar(out))
    assert "[layout-unknown]" in text
    assert "megamoe-128" in text


def test_a_truncated_shard(out: Path) -> None:
    edit_manifest(out, lambda manifest: manifest.update(files=None))
    raw = shard(out).read_bytes()
    shard(out).write_bytes(raw[:-1])
    assert "[shard-truncated]" in refusal(lambda: open_sidecar(out))
    shard(out).write_bytes(raw[:20])
    assert "[header-length]" in refusal(lambda: open_sidecar(out))


def test_an_index_that_leads_elsewhere(out: Path) -> None:
    index = out / "fse" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"{LAYERS[0]}.shared_l1_weight": "../model-00001-of-00001.safetensors"}}))
    assert "no weight_map from tensors to files of this folder" in refusal(lambda: open_sidecar(out))


def test_no_layer_in_kernel_layout(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(made("bf16"), out, "--allow-unfused", "--verify", "storage")[0] == 0
    sidecar = open_sidecar(out)
    assert (sidecar.layers, sidecar.hidden) == ((), 0)
    assert "[sidecar-empty]" in refusal(lambda: sidecar.check(**FITS))


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"contract": MEGAMOE_128}, []),
        ({"hidden": 1024}, ["hidden-mismatch"]),
        ({"n_shared": 2}, ["shared-count-mismatch"]),
        ({"routed_width": 384}, ["width-mismatch"]),
        ({"hidden": 1, "routed_width": 2, "n_shared": 3}, ["hidden-mismatch", "shared-count-mismatch", "width-mismatch"]),
    ],
)
def test_check(folder: Path, changes: dict[str, Any], codes: list[str]) -> None:
    sidecar = open_sidecar(folder)
    if not codes:
        sidecar.check(**{**FITS, **changes})
        return
    with pytest.raises(NotServable) as e:
        sidecar.check(**{**FITS, **changes}, target="vllm-0.30")
    assert [p.code for p in e.value.problems] == codes
    if "width-mismatch" in codes:
        assert "fse-convert CHECKPOINT OUT --target vllm-0.30" in str(e.value)
        assert "--experts" not in str(e.value), "all experts are padded already"


def shared_only(made: Callable[..., Path], run: Run, out: Path, *arguments: str) -> Sidecar:
    assert run(made("v4.1-flash", mtp=1), out, "--verify", "storage", *arguments)[0] == 0
    return open_sidecar(out)


def test_the_hint_of_a_mismatch_names_target_and_experts(made: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    padded = shared_only(made, run, tmp_path / "padded", "--experts", "shared")
    text = refusal(lambda: padded.check(**{**FITS, "routed_width": 384, "contract": MEGAMOE_128}, target="vllm-0.33"))
    assert "--target vllm-0.33; or without --experts shared" in text
    plain = shared_only(made, run, tmp_path / "plain", "--target", "megamoe-128")
    text = refusal(lambda: plain.check(**{**FITS, "routed_width": 384}))
    assert "made for megamoe-128: width 384 and hidden size 512" in text
    assert "[contract-mismatch]" in text
    assert "--target megamoe-512" in text


def test_locate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    assert locate(str(folder)) == folder
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate("some/model", cache=str(tmp_path)) == snapshot
