"""`fse-convert doctor` and `--version`: what is here is found without importing a server, and what is not is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import fse_convert
from fse_convert import doctor

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def findings(run: Run, tmp_path: Path) -> Callable[[], dict[str, dict[str, Any]]]:
    def ask() -> dict[str, dict[str, Any]]:
        code, out, err = run("doctor", tmp_path / "not" / "there", "--json")
        assert (code, err) == (0, "")
        return {f["name"]: f for f in json.loads(out)["findings"]}

    return ask


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages that seem to be installed, to be filled in."""
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package in versions:
            return versions[package]
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", version)
    return versions


def pose_as(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_everything_has_a_row_here_or_not(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for name in (*doctor.DISTRIBUTIONS, "Python", "GPU", "vLLM plugin", "SGLang plugin", "disk"):
        assert f"\n {name} " in out
    assert fse_convert.__version__ in out


@pytest.mark.parametrize(
    ("package", "version", "name", "target"),
    [
        ("vllm", "0.33.1+cu130", "vLLM", "vllm-0.33"),
        ("vllm", "0.30.0", "vLLM", "vllm-0.30"),
        ("sglang", "0.5.23.post1", "SGLang", "sglang-0.5.23"),
        ("sglang", "0.5.22rc1", "SGLang", "sglang-0.5.22"),
    ],
)
def test_an_installed_server_has_its_target(
    package: str, version: str, name: str, target: str, findings: Any, installed: dict[str, str]
) -> None:
    installed[package] = version
    server = findings()[name]
    assert (server["found"], server["target"]) == (version, target)
    assert server["meaning"].startswith(f"--target {target}; it is started with SM100, --moe-")


def test_a_server_of_an_unknown_release_is_said_to_be_so(findings: Any, installed: dict[str, str]) -> None:
    installed["vllm"] = "9.1.0"
    server = findings()["vLLM"]
    assert (server["found"], server["target"]) == ("9.1.0", "")
    assert "newer than the newest release known here" in server["meaning"]
    assert findings()["SGLang"] == {"name": "SGLang", "found": None, "meaning": "", "target": ""}


def test_on_rocm_a_server_fuses_by_other_rules(findings: Any, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.update({"vllm": "0.33.0", "sglang": "0.5.23", "amd-aiter": "0.1.5"})
    pose_as(monkeypatch, "AMD Instinct MI355X", (9, 5))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = type("Properties", (), {"gcnArchName": "gfx950:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    found = findings()
    assert [found[n]["target"] for n in ("vLLM", "SGLang")] == ["vllm-0.33-aiter", "sglang-0.5.23-slots"]
    assert found["AITER"]["found"] == "0.1.5"
    assert found["GPU"]["found"] == "AMD Instinct MI355X, gfx950"
    assert "not by MegaMoE" in found["GPU"]["meaning"]


@pytest.mark.parametrize(
    ("name", "capability", "found", "meaning"),
    [
        ("NVIDIA B200", (10, 0), "NVIDIA B200, SM100", "MegaMoE and verify --level kernel run on it"),
        ("NVIDIA H200", (9, 0), "NVIDIA H200, SM90", "neither MegaMoE nor verify --level kernel runs on it: they need SM100"),
    ],
)
def test_a_gpu_is_named_with_its_architecture(
    name: str, capability: tuple[int, int], found: str, meaning: str, findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pose_as(monkeypatch, name, capability)
    gpu = findings()["GPU"]
    assert (gpu["found"], gpu["meaning"]) == (found, meaning)


def test_without_a_gpu_it_says_what_needs_none(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = findings()["GPU"]
    assert gpu["found"] is None
    assert "converting and proving need none" in gpu["meaning"]


def test_plugins_are_found_and_an_allow_list_that_leaves_one_out_is_named(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [findings()[n]["found"] for n in ("vLLM plugin", "SGLang plugin")] == ["yes", "yes"]
    monkeypatch.setenv("VLLM_PLUGINS", "lora,another")
    monkeypatch.setenv("SGLANG_PLUGINS", "another,fse-convert")
    found = findings()
    assert (found["vLLM plugin"]["found"], found["SGLang plugin"]["found"]) == (None, "yes")
    assert "VLLM_PLUGINS leaves it out" in found["vLLM plugin"]["meaning"]


def test_a_source_that_is_not_installed_has_no_plugins(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_kwargs: ())
    assert "install the package" in findings()["SGLang plugin"]["meaning"]


@pytest.mark.parametrize(("shares", "meaning"), [(True, "share their blocks"), (False, "no reflink")])
def test_the_disk_says_what_becomes_of_unchanged_shards(
    shares: bool, meaning: str, findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "shares_blocks", lambda _folder: shares)
    disk = findings()["disk"]
    assert " free in /" in disk["found"]
    assert meaning in disk["meaning"]


def test_a_place_that_cannot_be_written_is_said_to_be_so(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(doctor, "shares_blocks", refuse)
    disk = findings()["disk"]
    assert disk["found"] is None
    assert disk["meaning"].endswith("Permission denied; check the permissions of this path")


def test_no_server_is_imported(tmp_path: Path) -> None:
    """A module of that name, first in the path, would end the process."""
    for name in ("vllm", "sglang", "aiter", "deep_gemm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fse_convert.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_in_one_line_and_in_full(run: Run, installed: dict[str, str]) -> None:
    assert run("--version") == (0, f"fse-convert {fse_convert.__version__}\n", "")
    installed["vllm"] = "0.33.0"
    code, out, _ = run("--version", "-v")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"fse-convert {fse_convert.__version__}"
    assert {"vLLM 0.33.0", "SGLang is not installed"} <= set(lines)


def test_verbose_alone_is_the_default_commands(run: Run, made: Callable[..., Path], tmp_path: Path) -> None:
    code, out, err = run("-v", made(), tmp_path / "out", "--dry-run")
    assert code == 0, err
    assert out.startswith("plan: ")


def test_what_to_install_is_named_by_packages_that_an_index_has(findings: Any, installed: dict[str, str]) -> None:
    """This one is in no index: its extras would not be found by anyone who has not installed it."""
    said = {name: f["meaning"] for name, f in findings().items() if "pip install" in f["meaning"] and "plugin" not in name}
    assert {"torch", "huggingface_hub", "DeepGEMM"} <= said.keys()
    assert not any("fse-convert" in meaning.partition("pip install")[2] for meaning in said.values())
