from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fse_convert.serving.sglang import guards, hooks, modules
from tests.serving.sglang_standins import Registry, method


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the parts of SGLang that the plugin asks, with a configuration that refuses nothing."""
    leaves: dict[str, Any] = {
        "weight_cache_mode": "off",
        "startup_weight_load_mode": "serial",
        "disaggregation_mode": "null",
        "pp_size": 1,
    }
    cap = SimpleNamespace(get=lambda: int(os.environ.get(modules.CAP, "8192")))
    registry = Registry()
    methods = dict.fromkeys((*guards.SAVES, *guards.SENDS, "get_weights_by_name"), method)
    exporter = type("WeightExporter", (), {"_weight_export_unsupported_reason": None, **methods})
    updater = type("SchedulerWeightUpdaterManager", (), {"begin_weight_update": method})
    checker = type("WeightChecker", (), {"handle": method})
    given = {
        "arg_groups.mega_moe_hook": {"MEGA_MOE_NO_FALLBACK_ARCHS": frozenset({"DeepseekV4ForCausalLM"})},
        "environ": {"envs": SimpleNamespace(**{modules.CAP: cap})},
        "runtime_context": {"get_context": lambda: SimpleNamespace(config_leaf=leaves.get)},
        "plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
            "HookSource": lambda *names: names,
        },
        "managers.scheduler_components.weight_updater": {"SchedulerWeightUpdaterManager": updater},
        "utils.weight_checker": {"WeightChecker": checker},
        "model_executor.model_runner_components.weight_exporter": {"WeightExporter": exporter},
        "model_executor.model_runner_components.load_model_utils": {"maybe_precompile_model_kernels_after_loading": None},
        "layers.moe.mega_moe": {"build_mega_moe_experts_weights": None, "build_mega_moe_shared_weights": None},
        "model_loader.loader": {"get_model_loader": None, "DefaultModelLoader": SimpleNamespace(_prepare_weights=None)},
    }
    for name, values in given.items():
        parts = ["sglang", "srt", *name.split(".")]
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules or depth == len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            sys.modules[path].__path__ = []
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path])
        vars(sys.modules[".".join(parts)]).update(values)
    monkeypatch.setattr(hooks, "state", hooks.State())
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.5.23")
    for variable in (modules.SWITCH, modules.CAP):
        monkeypatch.delenv(variable, raising=False)
    return SimpleNamespace(leaves=leaves, registry=registry, exporter=exporter, updater=updater, checker=checker)


@pytest.fixture(scope="session")
def converted(converted: Callable[..., Path]) -> Callable[..., Path]:
    """Convert for the release that the stand-ins stand for, unless a test names a target."""
    return lambda target="sglang-0.5.23", *options, **knobs: converted(target, *options, **knobs)
