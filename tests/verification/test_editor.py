"""An editor who changes an output and makes its digests again: ``verify --source`` tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.testing.patch import ShardPatch, flip, read_shard, write_shard
from tests.verification.editing import INDEX, SIDECAR, Manifest, into, load, seal

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
LAYERS = ("layers.0.ffn", "layers.1.ffn", "mtp.0.ffn")


def drop_layers(out: Path, layers: tuple[str, ...]) -> None:
    """Take the kernel layout of some layers out, and say that they do not fit."""
    manifest = load(out)
    for layer in manifest["layers"]:
        if layer["name"] in layers:
            layer |= {"verdict": "unfused", "reasons": [{"code": "width", "message": "does not fit"}]}
    with ShardPatch(out / SIDECAR) as shard:
        dropped = tuple(f"{layer}." for layer in layers)
        shard.tensors = {name: stored for name, stored in shard.tensors.items() if not name.startswith(dropped)}
    index = out / "fse/model.safetensors.index.json"
    size = sum(len(stored.data) for stored in shard.tensors.values())
    if size:
        weight_map = dict.fromkeys(sorted(shard.tensors), SIDECAR[4:])
        index.write_bytes(encode_json({"metadata": {"total_size": size}, "weight_map": weight_map}))
        manifest["proof"]["numerics"]["layers"] -= len(layers)
    else:
        (out / SIDECAR).unlink()
        index.unlink()
        manifest["proof"]["numerics"] = {"status": "not-run", "reason": "no layer has the kernel layout"}
    manifest["proof"]["storage"]["tensors"]["kernel"] -= 4 * len(layers)
    seal(out, manifest)


@pytest.mark.parametrize("layers", [LAYERS[:1], LAYERS[2:], LAYERS])
def test_dropped_layers_fail_every_level(layers: tuple[str, ...], out: Path, verify: Run) -> None:
    drop_layers(out, layers)
    for level in ("storage", "numerics", "kernel"):
        code, text, _ = verify("--level", level)
        assert code == 1
        assert "storage: FAILED: " in text
        for i, name in enumerate(LAYERS):
            assert (f'layers[{i}].verdict "fused", found "unfused"' in text) is (name in layers)
            assert (f"mismatch[tensor-missing]: {name}.experts.shared_l1_weight " in text) is (name in layers)
    assert f"numerics: FAILED: {3 - len(layers)} of 3 layers bit-equal" in text
    report = json.loads(verify("--json")[1])
    assert report["storage"]["layers"] == {"moe": 3, "in_kernel_layout": 3, "left_out": []}
    assert report["numerics"]["moe_layers"] == report["numerics"]["of_layers"] == 3


def test_layers_that_do_not_fit_are_in_the_denominator(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("quark-mxfp4", experts=1), tmp_path / "out"
    for command in ((root, out, "--allow-unfused"), ("verify", out, "--source", root)):
        code, text, _ = run(*command)
        assert code == 0
        assert "  kernel layout: 1 of 3 MoE layers; 2 do not fit: " in text
        line = next(line for line in text.splitlines() if line.startswith("numerics: "))
        assert line.startswith("numerics: passed: 1 of 3 MoE layers bit-equal to the source")
        assert "; 2 do not fit: " in line


def test_no_layer_that_fits(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("bf16", experts=1), tmp_path / "out"
    assert run(root, out, "--allow-unfused")[0] == 0
    code, text, _ = run("verify", out, "--source", root)
    assert code == 0
    assert "kernel layout: 0 of 3 MoE layers; 3 do not fit: " in text
    layers = json.loads(run("verify", out, "--source", root, "--json")[1])["storage"]["layers"]
    assert (layers["moe"], layers["in_kernel_layout"], len(layers["left_out"])) == (3, 0, 3)
    assert all(layer["reason"] for layer in layers["left_out"])


KERNEL = {"status": "passed", "layers": 3, "relative_l2": 1e-4, "device": "NVIDIA B200", "deep_gemm": "2.8.2"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (into(server={"target": "vllm-0.33", "verdict": "fused"}), "server null"),
        (into("layers", 0, reasons=[{"code": "x", "message": "y"}]), "layers[0].reasons"),
        (into("layers", 1, "routed", format="BF16"), "layers[1].routed.format"),
        (into(signed_by="DeepSeek"), "no key signed_by"),
        (into("source", url="https://x"), "source.url nothing"),
        (into("tool", name="x"), 'tool.name "fse-convert"'),
        (into("arguments", target="vllm-0.30"), 'server {"target": "vllm-0.30"'),
        (into("arguments", target="zz"), "arguments by which the source converts"),
        (into("arguments", tp=64), "model.width.main 2048"),
        (into("contract", width_multiple=128), "contract.width_multiple 512"),
        (into("proof", kernel={**KERNEL, "layers": 999}), "proof.kernel.layers 3"),
        (into("proof", kernel={**KERNEL, "relative_l2": float("nan")}), "proof.kernel.relative_l2"),
        (into("proof", kernel={"status": "not-run", "reason": "no need"}), "proof.kernel.reason"),
        (into("proof", "numerics", layers=999), "proof.numerics.layers 3"),
        (into("proof", "numerics", tokens=10**6), "proof.numerics.tokens 16"),
        (into("proof", "storage", bytes=1), "proof.storage.bytes"),
        (into("proof", "storage", files=1000), "proof.storage.files"),
        (into("proof", more=1), "proof.more nothing"),
        pytest.param(lambda m: m.pop("proof"), "a key proof", id="no proof"),
        (into("proof", storage={"status": "not-run", "reason": "not asked for"}), "proof.storage"),
    ],
)
def test_what_a_manifest_states_must_follow_from_the_source(
    edit: Callable[[Manifest], Any], said: str, out: Path, verify: Run
) -> None:
    manifest = load(out)
    edit(manifest)
    seal(out, manifest)
    code, text, _ = verify("--level", "storage")
    assert code == 1
    assert "mismatch[manifest]: fse/manifest.json: expected " in text
    assert said in text


def test_a_sample_checks_what_the_manifest_states_too(out: Path, verify: Run) -> None:
    assert verify("--sample", "2")[0] == 0
    manifest = load(out)
    manifest["proof"]["storage"]["tensors"]["kernel"] = 8
    seal(out, manifest)
    code, text, _ = verify("--sample", "2")
    assert code == 1
    assert "proof.storage.tensors.kernel 12, found 8" in text


def test_the_manifests_kernel_result_is_never_this_runs(out: Path, verify: Run, run: Run) -> None:
    manifest = load(out)
    manifest["proof"]["kernel"] = KERNEL
    seal(out, manifest)
    said = "kernel: stated by the manifest, not checked here: passed for 3 layers on NVIDIA B200, DeepGEMM 2.8.2"
    code, text, _ = verify()
    assert code == 0
    assert said in text
    assert "kernel: passed" not in text
    assert said in run("verify", out)[1]
    report = json.loads(verify("--json")[1])
    assert report["kernel"] is None
    assert report["storage"]["kernel_stated"] == "passed for 3 layers on NVIDIA B200, DeepGEMM 2.8.2"


def test_another_version_is_noted(out: Path, verify: Run) -> None:
    manifest = load(out)
    manifest["tool"]["version"] = "99\ud800"
    seal(out, manifest)
    code, text, _ = verify("--level", "storage")
    assert code == 0
    assert 'note: written by fse-convert "99\\ud800", compared with what' in text


@pytest.mark.parametrize(
    ("version", "key", "text", "expected"),
    [("0.0.1", "message", "in other words", 0), ("", "message", "in other words", 1), ("0.0.1", "code", "width", 1)],
)
def test_another_version_may_give_a_reason_in_other_words(
    version: str, key: str, text: str, expected: int, root: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "unfused"
    assert run(root, out, "--target", "vllm-0.29", "--allow-unfused")[0] == 0
    manifest = load(out)
    manifest["tool"]["version"] = version or manifest["tool"]["version"]
    assert manifest["server"]["reasons"][0][key] != text
    manifest["server"]["reasons"][0][key] = text
    seal(out, manifest)
    assert run("verify", out, "--source", root, "--level", "storage")[0] == expected


def test_wider_than_needed_is_told(root: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "wide"
    assert run(root, out, "--target", "megamoe-512", "--tp", "3")[0] == 0
    manifest = load(out)
    assert manifest["model"]["width"]["kernel"] == 1536
    manifest["arguments"]["tp"] = 1
    seal(out, manifest)
    code, text, _ = run("verify", out, "--source", root)
    assert code == 1
    assert "model.width.main 512, found 1536" in text


def add_an_empty_file(out: Path) -> None:
    write_shard(out / "fse/extra.safetensors", {"__metadata__": read_shard(out / SIDECAR)[0]["__metadata__"]}, b"")


def rename_the_shard(out: Path) -> None:
    (out / SIDECAR).rename(out / "fse/another.safetensors")
    index = out / "fse/model.safetensors.index.json"
    value = json.loads(index.read_text())
    index.write_bytes(encode_json({**value, "weight_map": dict.fromkeys(value["weight_map"], "another.safetensors")}))


def reorder(out: Path) -> None:
    with ShardPatch(out / SIDECAR) as shard:
        shard.tensors = dict(reversed(shard.tensors.items()))


def cut_the_tripwire(out: Path) -> None:
    with ShardPatch(out / SIDECAR) as shard:
        wire = next(name for name, stored in shard.tensors.items() if stored.shape == [0])
        del shard.tensors[wire]
    index = out / f"fse/{INDEX}"
    value = json.loads(index.read_text())
    value["weight_map"].pop(wire)
    index.write_bytes(encode_json(value))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (cut_the_tripwire, "tensor-missing"),
        (add_an_empty_file, "file-unexpected"),
        (rename_the_shard, "tensor-misplaced"),
        (reorder, "header"),
    ],
)
def test_the_sidecar_is_as_a_conversion_writes_it(change: Callable[[Path], None], code: str, out: Path, verify: Run) -> None:
    change(out)
    seal(out)
    status, text, _ = verify("--level", "storage")
    assert status == 1
    assert f"mismatch[{code}]" in text


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/modeling.cpython-312.pyc",
        "inference/__pycache__/model.cpython-312.pyc",
        "fse/.git/x",
        ".cache/evil",
        ".cache/huggingface/evil.py",
        ".cache/huggingface/download/__pycache__/x.pyc",
    ],
)
def test_hidden_files_are_told(name: str, out: Path, verify: Run, run: Run) -> None:
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(b"x")
    for code, text, _ in (verify("--level", "storage"), run("verify", out)):
        assert code == 1
        assert f"mismatch[file-unexpected]: {name}" in text


def test_a_clone_of_the_output_has_a_git_folder(out: Path, verify: Run, run: Run) -> None:
    (out / ".git").mkdir()
    (out / ".git/config").write_bytes(b"x")
    assert [verify("--level", "storage")[0], run("verify", out)[0]] == [0, 0]
    code, text, _ = run("verify", out, "--strict")
    assert (code, "mismatch[file-unexpected]: .git/config" in text) == (1, True)


def test_what_the_hubs_client_leaves_is_a_note(out: Path, verify: Run, run: Run) -> None:
    (out / ".cache/huggingface/download/fse").mkdir(parents=True)
    for name in (".gitignore", "download/config.json.metadata", "download/fse/manifest.json.lock"):
        (out / ".cache/huggingface" / name).write_bytes(b"x")
    for code, text, _ in (verify("--level", "storage"), run("verify", out)):
        assert code == 0
        assert "note: left out: 3 files of the hub client's bookkeeping in .cache/huggingface" in text


def test_a_sample_is_another_one_every_time(out: Path, verify: Run) -> None:
    first, second = (json.loads(verify("--sample", "6", "--level", "storage", "--json")[1])["storage"] for _ in range(2))
    assert first["seed"] != second["seed"]
    code, text, _ = verify("--sample", "1", "--seed", "7")
    assert code == 0
    assert "a sample of 1: 1 of " in text
    assert "(1 in kernel layout)" in text
    assert "--seed 7 repeats this one" in text
    assert "numerics: passed: a sample of 1: 1 of 3 layers bit-equal" in text


def test_no_byte_hides_from_every_sample(out: Path, verify: Run) -> None:
    flip(out / SIDECAR, -1)
    seal(out)
    codes = {verify("--sample", "3", "--seed", str(seed), "--level", "storage")[0] for seed in range(40)}
    assert codes == {0, 1}
