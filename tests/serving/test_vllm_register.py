"""Registration in a vLLM that has moved what the loader needs: a warning, and a server that starts all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fse_convert.serving import vllm as plugin

LOADER = "vllm.model_executor.model_loader"


class DefaultModelLoader:
    def __init__(self, load_config: Any) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the modules that registration imports; returns vLLM's table of loaders."""
    known: dict[str, Any] = {}
    given: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.99.0"},
        "vllm.logger": {"init_logger": lambda _name: None},
        "vllm.model_executor": {},
        LOADER: {
            "_LOAD_FORMAT_TO_MODEL_LOADER": known,
            "register_model_loader": lambda name: lambda loader: known.__setitem__(name, loader),
        },
        f"{LOADER}.weight_utils": {},
        f"{LOADER}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
    }
    for name, values in given.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    monkeypatch.delitem(sys.modules, "fse_convert.serving.vllm.loader", raising=False)
    return known


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """The loader's module was imported with stand-ins: nobody else may see it."""
    yield
    sys.modules.pop("fse_convert.serving.vllm.loader", None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level("INFO"):
        plugin.register()
    assert {r.levelname for r in caplog.records} <= {"WARNING"}
    return [r.getMessage() for r in caplog.records]


def test_the_load_format_is_there_however_often(vllm: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog) == warnings(caplog) == []
    assert [(name, loader.__name__) for name, loader in vllm.items()] == [("fse", "FseModelLoader")]
    assert issubclass(vllm["fse"], DefaultModelLoader)


def _no_loader(_name: str) -> Any:
    raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")


@pytest.mark.parametrize(
    "move",
    [
        lambda modules: modules.pop(LOADER),
        lambda modules: modules.pop(f"{LOADER}.default_loader"),
        lambda modules: delattr(modules[LOADER], "register_model_loader"),
        lambda modules: delattr(modules[f"{LOADER}.default_loader"], "DefaultModelLoader"),
        lambda modules: delattr(modules["vllm.logger"], "init_logger"),
        lambda modules: vars(modules[LOADER]).update(register_model_loader=lambda: None),
        lambda modules: vars(modules[LOADER]).update(register_model_loader=_no_loader),
    ],
    ids=["package", "module", "function", "class", "logger", "arguments", "no loader"],
)
def test_a_moved_api_costs_the_load_format_and_not_the_server(
    vllm: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, move: Callable[[Any], object]
) -> None:
    for name in [n for n in sys.modules if n.startswith("vllm")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # put back what is taken away
    move(sys.modules)
    if LOADER not in sys.modules:
        delattr(sys.modules["vllm.model_executor"], "model_loader")
    (line,) = warnings(caplog)
    assert "this vLLM is not known to fse-convert; --load-format fse is not available" in line
    assert vllm == {}


def test_outside_of_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "fse_convert.serving.vllm.loader", raising=False)
    (line,) = warnings(caplog)
    assert "ModuleNotFoundError" in line or "ImportError" in line
