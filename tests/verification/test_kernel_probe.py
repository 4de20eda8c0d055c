"""Which devices and which DeepGEMM level 3 can run on, with a stand-in for what this machine lacks."""

from __future__ import annotations

import importlib
import inspect
import types
import warnings
from typing import Any

import pytest
import torch

from fse_convert.verification import gpu_kernel as level3
from fse_convert.verification.gpu_kernel import probe
from tests.verification.fake_deep_gemm import SM90, SM100, FakeDeepGemm, check


@pytest.mark.parametrize("facts", [SM100, ("NVIDIA B300", (10, 3))])
def test_import_failures_are_reasons(monkeypatch, device, facts):
    device(facts)
    raised = {
        "deep_gemm": OSError("libnvrtc.so.13: cannot open shared object file"),
        "vllm.third_party.deep_gemm": ImportError("_C.abi3.so: undefined symbol: x\nsecond line"),
    }

    def fail(name: str) -> Any:
        print("noise that must not reach standard output")
        raise raised[name]

    monkeypatch.setattr(importlib, "import_module", fail)
    found = probe()
    assert found.status == "unavailable"
    for part in ("libnvrtc.so.13", "undefined symbol", f"torch {torch.__version__}", "CUDA", "OSError", "ImportError"):
        assert part in found.reason
    assert "second line" not in found.reason
    assert (found.device_name, found.version) == (facts[0], None)


def test_importing_prints_nothing(monkeypatch, device, capsys):
    device(SM100)

    def load(name: str) -> Any:
        print("Failed to load mega kernels")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return FakeDeepGemm()

    monkeypatch.setattr(importlib, "import_module", load)
    assert probe().status == "ready"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [RuntimeError("ABI"), AssertionError(), AttributeError("torch has no x")])
def test_any_other_import_error_is_a_reason_too(monkeypatch, device, error):
    device(SM100)

    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert type(error).__name__ in probe().reason


def test_the_vendored_module_is_found_second(monkeypatch, device):
    device(SM100)
    fake = FakeDeepGemm()

    def load(name: str) -> Any:
        if name == "deep_gemm":
            raise ModuleNotFoundError("No module named 'deep_gemm'")
        assert name == "vllm.third_party.deep_gemm"
        return fake

    monkeypatch.setattr(importlib, "import_module", load)
    found = probe()
    assert (found.status, found.version) == ("ready", "0.2.5")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (SM90, "NVIDIA H200 is SM90"),
        (("NVIDIA L40S", (8, 9)), "NVIDIA L40S is SM89"),
        (("NVIDIA RTX PRO 6000", (12, 0)), "is SM120"),
        (None, "no CUDA device"),
    ],
)
def test_other_devices_are_named_and_nothing_is_imported(monkeypatch, device, facts, expected):
    device(facts)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    found = probe()
    assert found.status == "unavailable"
    assert "needs an SM100 GPU" in found.reason
    assert expected in found.reason


def test_a_driver_that_warns_is_quoted(monkeypatch):
    def broken() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert "driver on your system is too old" in probe().reason


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: system not yet initialized"), AssertionError("no CUDA")])
def test_a_device_that_raises_is_quoted(monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def raises(device: Any = None) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_name", raises)
    found = probe()
    assert found.status == "unavailable"
    assert f"CUDA is broken: {type(error).__name__}: {error}" in found.reason


def test_here_and_now_the_probe_answers():
    found = probe()
    assert found.status in ("ready", "unavailable")
    if not torch.cuda.is_available():
        assert "torch sees no CUDA device" in found.reason


def without(name: str, parameter: str | None = None) -> Any:
    fake = FakeDeepGemm()
    if parameter is None:
        setattr(fake, name, None)
    else:
        setattr(fake, name, lambda *args: None)
    return fake


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("get_symm_buffer_for_mega_moe", "num_shared_experts"),
        ("fp8_fp4_mega_moe", "shared_l1_weights"),
        ("get_block_m_for_mega_moe", None),
        ("transform_weights_for_mega_moe", None),
    ],
)
def test_a_deep_gemm_without_shared_experts_is_unavailable(device, deep_gemm, make_source, make_kernel, name, parameter):
    device(SM100)
    deep_gemm(without(name, parameter))
    found = probe()
    assert found.status == "unavailable"
    assert name in found.reason
    assert FakeDeepGemm.__file__ in found.reason
    source = make_source(256, 128)
    result = check(make_kernel(source, 128), source)
    assert (result.status, result.reason, result.figures) == ("not-run", found.reason, {})


def test_a_function_without_a_signature_counts_as_missing(device, deep_gemm):
    device(SM100)
    fake = FakeDeepGemm()
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(type)
    fake.fp8_fp4_mega_moe = type  # type: ignore[method-assign,assignment]
    deep_gemm(fake)
    assert "fp8_fp4_mega_moe(shared_l1_weights)" in probe().reason


def test_an_empty_module_lacks_everything(device, deep_gemm):
    device(SM100)
    deep_gemm(types.ModuleType("deep_gemm"))
    found = probe()
    assert (found.status, found.version) == ("unavailable", None)
    assert all(name in found.reason for name, _ in level3.FEATURES)
