"""The proof on the command line: what ``verify`` says and exits with, and what ``convert`` does with it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open

from fse_convert.layout import megamoe
from fse_convert.testing.patch import flip
from fse_convert.verification import gpu_kernel, layers, storage
from fse_convert.verification.findings import BOUND
from fse_convert.verification.gpu_kernel import KernelProbe, KernelResult

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]


@pytest.fixture
def root(made: Make) -> Path:
    return made("v4.1-flash", layers=1, experts=1)


@pytest.fixture
def out(output: Make) -> Path:
    return output(layers=1, experts=1)


def manifest(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / "fse/manifest.json").read_text())
    return value


def test_passes_and_says_what_was_covered(root: Path, out: Path, run: Run) -> None:
    code, text, err = run("verify", out, "--source", root)
    assert code == 0
    assert "storage: passed" in text
    assert "against the source, byte for byte" in text
    assert " files beside the manifest" in text
    assert "numerics: passed: 2 of 2 layers bit-equal to the source" in text
    assert "16 tokens, seed 0" in text
    assert "kernel" not in text.replace("in kernel layout", "")
    assert "read back" in err


def test_json_is_one_object(root: Path, out: Path, run: Run) -> None:
    code, text, _ = run("verify", out, "--source", root, "--json")
    report = json.loads(text)
    assert code == report["exit_code"] == 0
    assert report["ok"] is True
    assert report["storage"]["status"] == report["numerics"]["status"] == "passed"
    assert report["storage"]["digests"] is True
    assert sum(report["storage"]["tensors"].values()) == report["storage"]["of_tensors"]
    assert [layer["bit_equal"] for layer in report["numerics"]["layers"]] == [True, True]
    assert report["kernel"] is None


def test_a_mismatch_exits_1_and_names_it(root: Path, out: Path, run: Run) -> None:
    flip(out / "fse/shared-00001-of-00001.safetensors", -1)
    code, text, _ = run("verify", out, "--source", root)
    assert code == 1
    assert "storage: FAILED: 3 mismatches among " in text
    assert "byte for byte" not in text
    assert "mismatch[padding]: mtp.0.ffn.experts.shared_l2_weight_scale (fse/shared-00001-of-00001.safetensors, byte " in text
    assert "expected 0x7F, found 0x7E" in text
    assert "numerics: FAILED: 1 of 2 layers" in text
    code, text, _ = run("verify", out, "--source", root, "--json", "--level", "storage")
    report = json.loads(text)
    assert code == report["exit_code"] == 1
    assert report["ok"] is False
    assert report["numerics"] is None
    first = report["storage"]["mismatches"][0]
    assert (first["expected"], first["found"], first["bytes"]) == ("0x7F", "0x7E", 1)


def test_without_a_source_says_that_it_was_not_compared(out: Path, run: Run) -> None:
    code, text, _ = run("verify", out)
    assert code == 0
    assert "against the manifest's digests" in text
    assert "the source was not compared" in text
    assert "numerics" not in text
    flip(next(out.glob("model-00001*")), -1)
    code, text, _ = run("verify", out)
    assert code == 1
    assert "mismatch[tensor-digest]" in text
    assert "mismatch[file-digest]: model-00001" in text


def test_arguments_that_do_not_fit(root: Path, out: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run("verify", out, "--level", "numerics")
    assert (code, "error[source-needed]" in err) == (2, True)
    code, _, err = run("verify", root, "--source", root)
    assert (code, "error[not-an-output]" in err) == (3, True)
    assert run("verify", tmp_path / "nowhere", "--source", root)[0] == 3
    code, _, err = run("verify", out, "--source", out)
    assert (code, "error[already-converted]" in err) == (3, True)


def test_a_device_that_is_not_there_is_told_before_anything_is_read(
    root: Path, out: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flip(out / "fse/shared-00001-of-00001.safetensors", -1)
    code, text, err = run("verify", out, "--source", root, "--device", "cuda")
    assert (code, "error[no-cuda]" in err, text) == (4, True, "")


def test_a_damaged_manifest_is_a_mismatch(root: Path, out: Path, run: Run) -> None:
    path = out / "fse/manifest.json"
    path.write_text(path.read_text().replace('"tp": 1', '"tp": 2'))
    code, text, _ = run("verify", out, "--source", root)
    assert code == 1
    assert "mismatch[manifest-damaged]" in text
    assert "nothing was compared" in text
    assert run("verify", out)[0] == 1
    path.write_text("{")
    assert run("verify", out, "--source", root)[0] == 1


def test_a_sample_says_so(root: Path, out: Path, run: Run) -> None:
    code, text, _ = run("verify", out, "--source", root, "--sample", "3")
    assert code == 0
    assert "a sample of 3: 3 of " in text
    assert run("verify", out, "--sample", "3")[0] == 0


def test_another_source_is_told(out: Path, made: Make, run: Run) -> None:
    code, text, _ = run("verify", out, "--source", made("v4-flash"))
    assert code == 1
    assert "this is not the checkpoint that the output was made from" in text


def stand_in(monkeypatch: pytest.MonkeyPatch, status: str, verdict: str) -> None:
    found = KernelProbe(status, "needs an SM100 GPU", "2.8.2", "NVIDIA B200")  # type: ignore[arg-type]
    result = KernelResult(verdict, f"the kernel {verdict}", {"relative_l2": 1e-4})  # type: ignore[arg-type]
    for module in (layers, gpu_kernel):
        monkeypatch.setattr(module, "probe", lambda: found)
    monkeypatch.setattr(layers, "check_kernel", lambda *_args, **_kwargs: result)


def test_a_kernel_that_cannot_run_is_never_passed(
    root: Path, out: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "unavailable", "passed")
    code, text, _ = run("verify", out, "--source", root, "--level", "kernel")
    assert code == 4
    assert "kernel: not run: needs an SM100 GPU" in text
    code, text, _ = run("verify", out, "--source", root, "--level", "kernel", "--json")
    report = json.loads(text)
    assert (report["ok"], report["exit_code"], report["kernel"]["status"]) == (False, 4, "not-run")
    code, text, _ = run(root, tmp_path / "more", "--verify", "kernel")
    assert code == 0
    assert "kernel: not run" in text
    needs = {"status": "not-run", "reason": "needs SM100 and a DeepGEMM with fused shared experts"}
    assert manifest(tmp_path / "more")["proof"]["kernel"] == needs
    stand_in(monkeypatch, "ready", "not-run")
    assert run(root, tmp_path / "raised", "--verify", "kernel")[0] == 0
    assert manifest(tmp_path / "raised")["proof"]["kernel"] == {"status": "not-run", "reason": "DeepGEMM raised an error"}
    assert run("verify", tmp_path / "raised", "--source", root)[0] == 0


def test_a_kernel_that_ran_is_recorded(root: Path, out: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "ready", "passed")
    code, text, _ = run("verify", out, "--source", root, "--level", "kernel")
    assert code == 0
    assert "kernel: passed: 2 of 2 layers, relative L2 at most 0.0001, on NVIDIA B200" in text
    code, text, _ = run("verify", out, "--source", root, "--level", "kernel", "--sample", "1")
    assert code == 0
    assert "kernel: passed: a sample of 1: 1 of 2 layers, " in text
    assert run(root, tmp_path / "more", "--verify", "kernel")[0] == 0
    assert manifest(tmp_path / "more")["proof"]["kernel"] == {
        "status": "passed",
        "layers": 2,
        "relative_l2": 1e-4,
        "device": "NVIDIA B200",
        "deep_gemm": "2.8.2",
    }
    assert run("verify", tmp_path / "more", "--source", root)[0] == 0
    stand_in(monkeypatch, "ready", "failed")
    code, _, err = run(root, tmp_path / "third", "--verify", "kernel")
    assert (code, "error[kernel-mismatch]" in err) == (1, True)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("wrong", ["interleave", "l1_scale", "l2_scale"])
def test_a_wrong_writer_publishes_nothing(
    wrong: str, root: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(megamoe, wrong)
    swapped = (lambda a, b: right(b, a)) if wrong != "l2_scale" else (lambda rows: right(rows[::-1]))
    monkeypatch.setattr(megamoe, wrong, swapped)
    code, text, err = run(root, tmp_path / "out", "--json")
    report = json.loads(text)
    assert code == report["exit_code"] == 1
    assert "error[storage-mismatch]: layers.0.ffn.experts.shared_l" in err
    assert "error[proof-failed]" in err
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_wrong_publish_nothing(root: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fse_convert.verification.numerics.E8M0_ONE", 0x7E)
    code, _, err = run(root, tmp_path / "out")
    assert (code, "error[numerics-mismatch]" in err) == (1, True)
    assert list(tmp_path.iterdir()) == []
    assert run(root, tmp_path / "out", "--verify", "storage")[0] == 0


def test_manifest_holds_proof_and_digests(root: Path, out: Path) -> None:
    m = manifest(out)
    files = {str(p.relative_to(out)): p for p in out.rglob("*") if p.is_file()} | {}
    assert set(m["files"]) == set(files) - {"fse/manifest.json"}
    for name, entry in m["files"].items():
        raw = files[name].read_bytes()
        assert entry == {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    tensors = {}
    for path in out.rglob("*.safetensors"):
        with safe_open(path, "pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                tensor = f.get_tensor(name)
                raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
                if raw:  # the tripwire in fse/ has no bytes, and the name of one that has
                    tensors[name] = xxhash.xxh3_128_hexdigest(raw)
    assert m["tensors"] == tensors
    assert m["proof"]["storage"]["status"] == m["proof"]["numerics"]["status"] == "passed"
    assert m["proof"]["numerics"] == {
        "status": "passed",
        "layers": 2,
        "tokens": 16,
        "seed": 0,
        "swiglu_limit": 10.0,
        "criterion": BOUND,
    }
    assert m["proof"]["kernel"] == {"status": "not-run", "reason": "not asked for"}
    assert set(m["source"]) == {"files", "shards", "originals"}
    assert next(reversed(m)) == "manifest_sha256"
    text = (out / "fse/manifest.json").read_text()
    assert str(root) not in text
    assert str(out.parent) not in text


def test_same_bytes_whatever_the_folder_and_the_workers(
    root: Path, out: Path, tmp_path: Path, run: Run, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WORKERS", 5)
    monkeypatch.setattr(layers, "WORKERS", 3)
    elsewhere = tmp_path / "elsewhere/deep/out"
    elsewhere.parent.mkdir(parents=True)
    assert run(root, elsewhere, "--link", "hard")[0] == 0
    assert digest(elsewhere) == digest(out)


def test_no_proof_leaves_no_digests(root: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    code, text, _ = run(root, out, "--verify", "none")
    assert code == 0
    assert "storage:" not in text
    m = manifest(out)
    assert m["files"] is None
    assert m["tensors"] is None
    assert {level["status"] for level in m["proof"].values()} == {"not-run"}
    code, text, _ = run("verify", out)
    assert code == 1
    assert "storage: not proved: no digests; headers and indexes agree; 8 of " in text
    assert "passed" not in text
    report = json.loads(run("verify", out, "--json")[1])
    assert (report["ok"], report["exit_code"], report["storage"]["status"]) == (False, 1, "not-proved")
    code, text, _ = run("verify", out, "--source", root)
    assert code == 0
    assert "the manifest holds no digests to compare" in text


def test_convert_reports_the_proof(root: Path, tmp_path: Path, run: Run) -> None:
    code, text, _ = run(root, tmp_path / "a")
    assert code == 0
    assert "storage: passed" in text
    assert "no digests" not in text
    report = json.loads(run(root, tmp_path / "b", "--json")[1])
    assert report["proof"]["storage"]["status"] == "passed"
    assert report["proof"]["level"] == "numerics"
    assert json.loads(run(root, tmp_path / "c", "--json", "--verify", "none")[1])["proof"] is None


def test_layers_without_kernel_layout_have_no_numerics(made: Make, tmp_path: Path, run: Run) -> None:
    root = made("bf16", layers=1, experts=1)
    code, text, _ = run(root, tmp_path / "out", "--allow-unfused")
    assert code == 0
    assert "numerics: not run: no layer has the kernel layout" in text
    assert manifest(tmp_path / "out")["proof"]["numerics"]["status"] == "not-run"
    verify = ("verify", tmp_path / "out", "--source", root)
    code, text, _ = run(*verify)
    assert code == 0
    assert "kernel layout: 0 of 2 MoE layers; 2 do not fit: " in text
    report = json.loads(run(*verify, "--json")[1])
    assert (report["ok"], report["level"], report["numerics"]["status"]) == (True, "storage", "not-run")
    for level in ("numerics", "kernel"):
        code, text, _ = run(*verify, "--level", level)
        assert code == 1
        assert f"{level}: not run: no layer has the kernel layout" in text
        report = json.loads(run(*verify, "--level", level, "--json")[1])
        assert (report["ok"], report["exit_code"], report[level]["status"]) == (False, 1, "not-run")
    code, text, _ = run(root, tmp_path / "kernel", "--allow-unfused", "--verify", "kernel")
    assert code == 0
    assert "kernel: not run: no layer has the kernel layout" in text
    recorded = {"status": "not-run", "reason": "no layer has the kernel layout"}
    assert manifest(tmp_path / "kernel")["proof"]["kernel"] == recorded


def test_help_needs_no_torch() -> None:
    for command in ("--help", "verify --help", "restore --help"):
        code = f"import sys; from fse_convert.cli.process import _run; _run({command.split()!r}); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
