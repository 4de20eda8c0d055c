"""An editor who changes an output and makes its digests again: ``verify --source`` tells, and no file ends in a bug."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.claims import read_claims
from fse_convert.manifest import DIGEST, own_digest
from fse_convert.originals import encode_json
from fse_convert.verify.demanded import Demand, demand
from fse_convert.verify.expected import open_source
from fse_convert.verify.layers import check_layers
from fse_convert.verify.stream import InputFiles

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Manifest = dict[str, Any]
INDEX = "model.safetensors.index.json"
SIDECAR = "fse/shared-00001-of-00001.safetensors"
LAYERS = ("layers.0.ffn", "layers.1.ffn", "mtp.0.ffn")
L1 = "layers.0.ffn.experts.shared_l1_weight"


def load(out: Path) -> Manifest:
    value: Manifest = json.loads((out / "fse/manifest.json").read_text())
    return value


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: dict[str, Any], payload: bytes) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def seal(out: Path, manifest: Manifest | None = None, *, digests: bool = True) -> None:
    """Make every digest of a manifest again, as an editor would."""
    value = load(out) if manifest is None else manifest
    if digests and value.get("files") is not None:
        names = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
        kept = [n for n in names if n != "fse/manifest.json" and not {".git", ".cache", "__pycache__"} & set(Path(n).parts)]
        contents = {n: (out / n).read_bytes() for n in kept}
        value["files"] = {n: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for n, raw in contents.items()}
        tensors = {}
        for name in kept:
            if name.endswith(".safetensors"):
                header, payload = read(out / name)
                for tensor, entry in header.items():
                    if tensor != "__metadata__":
                        start, end = entry["data_offsets"]
                        tensors[tensor] = xxhash.xxh3_128_hexdigest(payload[start:end])
        value["tensors"] = dict(sorted(tensors.items()))
    value.pop(DIGEST, None)
    (out / "fse/manifest.json").write_bytes(encode_json({**value, DIGEST: own_digest(value)}))


@pytest.fixture(scope="module")
def root(made: Make) -> Path:
    return made("v4.1-flash", experts=1)


@pytest.fixture(scope="module")
def converted(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fse_convert.cli import main

    out = tmp_path_factory.mktemp("converted") / "out"
    with pytest.raises(SystemExit) as stopped:
        main([str(root), str(out), "-q"])
    assert not stopped.value.code
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "out"))


@pytest.fixture
def verify(out: Path, root: Path, run: Run) -> Run:
    """``verify OUT --source SOURCE`` with more arguments."""
    return lambda *more: run("verify", out, "--source", root, "-q", *more)


def drop(out: Path, layers: tuple[str, ...]) -> None:
    """Take the kernel layout of some layers out, and say that they do not fit."""
    manifest = load(out)
    for layer in manifest["layers"]:
        if layer["name"] in layers:
            layer |= {"verdict": "unfused", "reasons": [{"code": "width", "message": "does not fit"}]}
    header, payload = read(out / SIDECAR)
    left: dict[str, Any] = {"__metadata__": header.pop("__metadata__")}
    kept = b""
    for name, entry in header.items():
        if not name.startswith(tuple(f"{layer}." for layer in layers)):
            start, end = entry["data_offsets"]
            left[name] = {**entry, "data_offsets": [len(kept), len(kept) + end - start]}
            kept += payload[start:end]
    index = out / "fse/model.safetensors.index.json"
    if kept:
        write(out / SIDECAR, left, kept)
        names = sorted(n for n in left if n != "__metadata__")
        index.write_bytes(encode_json({"metadata": {"total_size": len(kept)}, "weight_map": dict.fromkeys(names, SIDECAR[4:])}))
        manifest["proof"]["numerics"]["layers"] -= len(layers)
    else:
        (out / SIDECAR).unlink()
        index.unlink()
        manifest["proof"]["numerics"] = {"status": "not-run", "reason": "no layer has the kernel layout"}
    manifest["proof"]["storage"]["tensors"]["kernel"] -= 4 * len(layers)
    seal(out, manifest)


# Layers that were dropped.


@pytest.mark.parametrize("layers", [LAYERS[:1], LAYERS[2:], LAYERS])
def test_dropped_layers_fail_every_level(layers: tuple[str, ...], out: Path, verify: Run) -> None:
    drop(out, layers)
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


# A manifest that says what this source does not lead to.


def into(*path: str | int, **changes: Any) -> Callable[[Manifest], None]:
    """Change keys of the object at a path of a manifest."""

    def edit(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path:
            place = place[key]
        place.update(changes)

    return edit


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
        (lambda m: m.pop("proof"), "a key proof"),
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


def test_wider_than_needed_is_told(root: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "wide"
    assert run(root, out, "--tp", "3")[0] == 0
    manifest = load(out)
    assert manifest["model"]["width"]["kernel"] == 1536
    manifest["arguments"]["tp"] = 1
    seal(out, manifest)
    code, text, _ = run("verify", out, "--source", root)
    assert code == 1
    assert "model.width.main 512, found 1536" in text


# Names, count and order in fse/.


def add_an_empty_file(out: Path) -> None:
    write(out / "fse/extra.safetensors", {"__metadata__": read(out / SIDECAR)[0]["__metadata__"]}, b"")


def rename(out: Path) -> None:
    (out / SIDECAR).rename(out / "fse/another.safetensors")
    index = out / "fse/model.safetensors.index.json"
    value = json.loads(index.read_text())
    index.write_bytes(encode_json({**value, "weight_map": dict.fromkeys(value["weight_map"], "another.safetensors")}))


def reorder(out: Path) -> None:
    header, payload = read(out / SIDECAR)
    turned: dict[str, Any] = {"__metadata__": header.pop("__metadata__")}
    data = b""
    for name in reversed(header):
        start, end = header[name]["data_offsets"]
        turned[name] = {**header[name], "data_offsets": [len(data), len(data) + end - start]}
        data += payload[start:end]
    write(out / SIDECAR, turned, data)


def cut_the_tripwire(out: Path) -> None:
    header, payload = read(out / SIDECAR)
    wire = next(n for n, e in header.items() if e.get("shape") == [0])
    header.pop(wire)
    write(out / SIDECAR, header, payload)
    index = out / f"fse/{INDEX}"
    value = json.loads(index.read_text())
    value["weight_map"].pop(wire)
    index.write_bytes(encode_json(value))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (cut_the_tripwire, "tensor-missing"),
        (add_an_empty_file, "file-unexpected"),
        (rename, "tensor-misplaced"),
        (reorder, "header"),
    ],
)
def test_the_sidecar_is_as_a_conversion_writes_it(change: Callable[[Path], None], code: str, out: Path, verify: Run) -> None:
    change(out)
    seal(out)
    status, text, _ = verify("--level", "storage")
    assert status == 1
    assert f"mismatch[{code}]" in text


# Files in folders that are no part of a checkpoint.


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/modeling.cpython-312.pyc",
        "inference/__pycache__/model.cpython-312.pyc",
        ".git/config",
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


def test_what_the_hubs_client_leaves_is_a_note(out: Path, verify: Run, run: Run) -> None:
    (out / ".cache/huggingface/download/fse").mkdir(parents=True)
    for name in (".gitignore", "download/config.json.metadata", "download/fse/manifest.json.lock"):
        (out / ".cache/huggingface" / name).write_bytes(b"x")
    for code, text, _ in (verify("--level", "storage"), run("verify", out)):
        assert code == 0
        assert "note: 3 files of the hub client's bookkeeping in .cache/huggingface were left out" in text


# Samples.


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
    path = out / SIDECAR
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    seal(out)
    codes = {verify("--sample", "3", "--seed", str(seed), "--level", "storage")[0] for seed in range(40)}
    assert codes == {0, 1}


# Crafted outputs end in an answer, never in a bug.


def retype(name: str, **entry: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        header, payload = read(out / SIDECAR)
        header[name].update(entry)
        write(out / SIDECAR, header, payload)

    return change


def halve(out: Path) -> None:
    header, _ = read(out / SIDECAR)
    rows, columns = header[L1]["shape"]
    retype(L1, dtype="BF16", shape=[rows // 2, columns])(out)


def test_other_dtypes_in_the_sidecar_are_no_bug(out: Path, verify: Run) -> None:
    for change in (retype(f"{L1}_scale", dtype="F32"), halve):
        change(out)
        seal(out)
        code, text, _ = verify("--level", "numerics")
        assert code == 1
        assert "mismatch[tensor-shape]" in text
        assert "numerics: FAILED: 2 of 3 layers" in text


@pytest.mark.parametrize("width", [72, 128, 256])
def test_a_consistent_output_of_an_odd_width_is_no_bug(width: int, out: Path, verify: Run, run: Run) -> None:
    manifest, data = load(out), b""
    manifest["model"]["width"]["kernel"] = width
    header, _ = read(out / SIDECAR)
    for name, entry in header.items():
        if ".shared_l" in name:
            part = name.rpartition(".")[2]
            shapes = {
                "shared_l1_weight": [2 * width, 512],
                "shared_l1_weight_scale": [4, 2 * width],
                "shared_l2_weight": [512, width],
            }
            rows, columns = entry["shape"] = shapes.get(part, [width // 128, 512])
            size = rows * columns * (4 if entry["dtype"] == "I32" else 1)
            entry["data_offsets"] = [len(data), len(data) + size]
            data += bytes(size)
    write(out / SIDECAR, header, data)
    index = out / f"fse/{INDEX}"
    index.write_bytes(encode_json({**json.loads(index.read_text()), "metadata": {"total_size": len(data)}}))
    seal(out, manifest)
    code, text, _ = run("verify", out)
    assert code == 1
    assert f"expected shapes that the kernel takes, found width 512 -> {width}, hidden size 512" in text
    assert verify()[0] == 1


@pytest.mark.parametrize(
    "edit",
    [
        into("model", "width", kernel=float("inf")),
        into("model", "width", kernel=512.0),
        into("model", "width", kernel=True),
        into("model", "width", kernel="512"),
        into("model", "width", source=-1),
        into("files", "config.json", size=float("inf")),
        into("contract", name=[]),
        into("arguments", experts=[]),
        into("arguments", target={}),
        into("arguments", tp=0),
        into("arguments", tp=2.0),
        into("arguments", allow_unfused=1),
        into("source", originals={"config.json": "\ud800"}),
        into("source", files={}),
        into("config_edits", 0, section=[]),
        into("layers", 0, name=[]),
        into("layers", 0, verdict=[]),
        into(format_version=True),
        into(format_version=1.0),
        into(files=None),
        into(tensors=None),
    ],
)
def test_a_manifest_of_other_types_is_damaged(
    edit: Callable[[Manifest], None], out: Path, tmp_path: Path, verify: Run, run: Run
) -> None:
    manifest = load(out)
    edit(manifest)
    seal(out, manifest, digests=False)
    code, text, _ = verify("--level", "storage")
    assert code == 1
    assert "mismatch[manifest-damaged]" in text
    code, _, err = run("restore", out, tmp_path / "original")
    assert (code, "error[manifest-damaged]" in err) == (1, True)


@pytest.mark.parametrize(
    "edit",
    [
        into(**{"\ud800": 1}),
        into("tensors", **{"\ud800": "x"}),
        into("tensors", **{f"{L1}_scale": "\ud800"}),
        into("files", **{"\ud800": {"size": 1, "sha256": "\ud800"}}),
        into("contract", name="\ud800"),
        into("model", family="\ud800"),
        into("layers", 0, name="\ud800"),
    ],
)
def test_half_characters_in_a_manifest_are_printed_as_escapes(
    edit: Callable[[Manifest], None], out: Path, verify: Run, run: Run
) -> None:
    manifest = load(out)
    edit(manifest)
    seal(out, manifest, digests=False)
    code, text, _ = verify("--level", "storage")
    assert code == 1
    assert "\\ud800" in text
    assert run("verify", out)[0] in (0, 1)


def without(out: Path, name: str, key: str, value: Any) -> None:
    content = json.loads((out / name).read_text())
    content.pop(key)
    (out / name).write_bytes(encode_json(content if value is None else {**content, key: value}))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda out: seal(out, {**load(out), "config_edits": [{**load(out)["config_edits"][0], "section": "nope"}]}), 1),
        (lambda out: without(out, "config.json", "text_config", None), 1),
        (lambda out: without(out, "config.json", "text_config", []), 1),
        (lambda out: without(out, "model.safetensors.index.json", "metadata", None), 1),
        (lambda out: without(out, "model.safetensors.index.json", "metadata", []), 3),
    ],
    ids=["section unknown", "config without section", "section a list", "index without metadata", "metadata a list"],
)
def test_a_crafted_output_is_not_restored(change: Callable[[Path], None], code: int, out: Path, tmp_path: Path, run: Run) -> None:
    change(out)
    seal(out)
    status, _, err = run("restore", out, tmp_path / "original")
    assert status == code
    assert "error[original-unknown]: " in err or code == 3
    assert not (tmp_path / "original").exists()


@pytest.mark.parametrize("target", ["megamoe-512", "megamoe-128"])
def test_half_characters_in_a_config_are_kept(target: str, source: Make, tmp_path: Path, run: Run) -> None:
    root, out, original = source("v4.1-flash", layers=1, experts=1), tmp_path / "out", tmp_path / "original"
    path = root / "config.json"
    path.write_text(path.read_text().replace("{\n", '{\n "n": "\\ud800",\n', 1))
    assert run(root, out, "--target", target)[0] == 0
    assert run("verify", out, "--source", root)[0] == 0
    assert run("restore", out, original)[0] == 0
    assert (original / "config.json").read_bytes() == path.read_bytes()


# Sizes that would not fit into memory.


@pytest.mark.parametrize("name", ["fse/manifest.json", "config.json", INDEX, f"fse/{INDEX}"])
def test_json_of_absurd_size_is_not_read(name: str, out: Path, verify: Run) -> None:
    os.truncate(out / name, 40 << 30)
    code, _, err = verify()
    assert (code, "error[json-too-large]" in err) == (3, True)


def test_a_tensor_of_another_shape_is_not_read(root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, payload = read(out / SIDECAR)
    last = "mtp.0.ffn.experts.shared_l2_weight_scale"
    start = header[last]["data_offsets"][0]
    header[last] |= {"shape": [1 << 31], "data_offsets": [start, start + (8 << 30)]}
    write(out / SIDECAR, header, payload[:start])
    os.truncate(out / SIDECAR, (out / SIDECAR).stat().st_size + (8 << 30))
    asked: list[int] = []
    right = InputFiles.read

    def watched(self: InputFiles, name: str, offset: int, into: memoryview) -> memoryview:
        asked.append(len(into))
        return right(self, name, offset, into)

    monkeypatch.setattr(InputFiles, "read", watched)
    folder = LocalFolder(out)
    demanded = demand(open_source(LocalFolder(root)), read_claims(folder))
    assert isinstance(demanded, Demand)
    numerics = check_layers(demanded, folder)
    assert [layer.passed for layer in numerics.layers] == [True, True, False]
    assert "shared_l2_weight_scale is I32 [2147483648], expected I32 [4, 512]" in numerics.layers[2].reason
    assert max(asked) < 1 << 20
