"""Registration of the SGLang plugin, whatever the release lacks and whoever was first, and its line in the log."""

from __future__ import annotations

import pkgutil
import sys

import pytest
from torch import nn

from fse_convert.serving import sglang
from fse_convert.serving.sglang import hooks, modules
from tests.serving.sglang_standins import served

GIB = 2**30


def test_register_leaves_out_what_a_release_lacks(server, monkeypatch, caplog):
    sglang.register()
    assert server.registry.hooks.keys() >= {hooks.SHARED, hooks.ROUTED, hooks.AFTER_LOAD}
    server.registry._hooks.clear()
    del sys.modules["sglang.srt.layers.moe.mega_moe"].build_mega_moe_shared_weights
    with caplog.at_level("INFO"):
        sglang.register()
    assert hooks.SHARED not in server.registry.hooks
    assert hooks.ROUTED in server.registry.hooks
    assert hooks.SHARED in caplog.text


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError, OSError, KeyError])
def test_a_module_that_fails_at_import_in_any_way_registers_nothing(server, monkeypatch, caplog, error):
    """Not half of the hooks: without those that say what is loaded, nothing could be freed safely."""
    resolve = pkgutil.resolve_name

    def failing(name):
        if name.startswith(hooks.AFTER_LOAD.rpartition(".")[0]):
            raise error(name)
        return resolve(name)

    monkeypatch.setattr(pkgutil, "resolve_name", failing)
    with caplog.at_level("INFO"):
        sglang.register()
    assert server.registry.hooks == {}
    assert "left as it is" in caplog.text
    assert hooks.AFTER_LOAD in caplog.text


def test_hooks_are_there_where_another_plugin_applied_its_own_first(server):
    build = sys.modules["sglang.srt.layers.moe.mega_moe"]
    build.build_mega_moe_shared_weights = lambda _mlp: "SGLang's"
    server.registry.register(hooks.SHARED, lambda original, mlp: f"{original(mlp)}, hooked", "around")
    server.registry.apply_hooks()
    hooks.state.architectures = ("DeepseekV3ForCausalLM",)  # nothing is freed, the builder is called
    sglang.register()
    server.registry.apply_hooks()
    assert build.build_mega_moe_shared_weights(None) == "SGLang's, hooked"
    assert hooks.state.fallback_logged, "our hook was called"


@pytest.mark.parametrize("value", ["off", "0", "False", " no "])
def test_the_switch_leaves_sglang_alone(monkeypatch, value):
    monkeypatch.setenv(modules.SWITCH, value)
    sglang.register()  # without any sglang to import


def test_one_line_says_what_is_fused(server, converted, caplog):
    model = nn.Module()
    model.layers = nn.ModuleList()
    for fused in (True, True, False):
        moe = nn.Module()
        moe.mega_shared_l1_weights = () if fused else None
        moe.experts, moe.shared_experts = nn.Module(), nn.Module()
        moe.experts._mega_moe_weights_built = True
        model.layers.append(moe)
    served(converted())
    hooks.state.load.freed, hooks.state.load.from_sidecar = 3 * GIB // 2, ["a"]
    with caplog.at_level("INFO"):
        hooks.after_load(None, model, "cuda")
        del model.layers[2]
        hooks.after_load(None, model, "cuda")
        for moe in model.layers:
            moe.shared_experts = None  # slot fusion
        hooks.after_load(None, model, "cuda")
        hooks.after_load(None, nn.Linear(1, 1), "cuda")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "2 of 3 MoE layers, 1 of them from fse/; 1.50 GiB freed; the others run unfused" in caplog.text
    assert "2 of 2 MoE layers" in caplog.text
