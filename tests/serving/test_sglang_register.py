"""Registration of the SGLang plugin, whatever the release lacks and whoever was first, and its line in the log."""

from __future__ import annotations

import pkgutil
import sys

import pytest
from torch import nn

from fse_convert.servers.targets import TARGETS
from fse_convert.serving import sglang as plugin
from fse_convert.serving.sglang import modules
from tests.serving.sglang_standins import served

GIB = 2**30
NEWEST = [t.name for t in TARGETS if t.engine == "SGLang"][-1]


def test_register_leaves_out_what_a_release_lacks(server, monkeypatch, caplog):
    plugin.register()
    assert server.registry.hooks.keys() >= {plugin.SHARED, plugin.ROUTED, plugin.AFTER_LOAD}
    server.registry._hooks.clear()
    del sys.modules["sglang.srt.layers.moe.mega_moe"].build_mega_moe_shared_weights
    with caplog.at_level("INFO"):
        plugin.register()
    assert plugin.SHARED not in server.registry.hooks
    assert plugin.ROUTED in server.registry.hooks
    assert plugin.SHARED in caplog.text


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError, OSError, KeyError])
def test_a_module_that_fails_at_import_in_any_way_registers_nothing(server, monkeypatch, caplog, error):
    """Not half of the hooks: without those that say what is loaded, nothing could be freed safely."""
    resolve = pkgutil.resolve_name

    def failing(name):
        if name.startswith(plugin.AFTER_LOAD.rpartition(".")[0]):
            raise error(name)
        return resolve(name)

    monkeypatch.setattr(pkgutil, "resolve_name", failing)
    with caplog.at_level("INFO"):
        plugin.register()
    assert server.registry.hooks == {}
    assert "left as it is" in caplog.text
    assert plugin.AFTER_LOAD in caplog.text


def test_hooks_are_there_where_another_plugin_applied_its_own_first(server):
    build = sys.modules["sglang.srt.layers.moe.mega_moe"]
    build.build_mega_moe_shared_weights = lambda _mlp: "SGLang's"
    server.registry.register(plugin.SHARED, lambda original, mlp: f"{original(mlp)}, hooked", "around")
    server.registry.apply_hooks()
    plugin.state.architectures = ("DeepseekV3ForCausalLM",)  # nothing is freed, the builder is called
    plugin.register()
    server.registry.apply_hooks()
    assert build.build_mega_moe_shared_weights(None) == "SGLang's, hooked"
    assert any("nothing is freed" in text for text in plugin._said), "our hook was asked"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.5.22", "sglang-0.5.22"),
        ("0.5.22rc1", "sglang-0.5.22"),
        ("0.5.22.post1", "sglang-0.5.22"),
        ("0.5.22.dev3+g1234567", "sglang-0.5.22"),
        ("0.5.21rc0", "sglang-0.5.21"),
        ("0.99.0rc1", NEWEST),
        ("main", NEWEST),
    ],
)
def test_targets_of_releases_candidates_and_builds(server, monkeypatch, version, name):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: version)
    assert plugin.server_target().name == name


@pytest.mark.parametrize("value", ["off", "0", "False", " no "])
def test_the_switch_leaves_sglang_alone(monkeypatch, value):
    monkeypatch.setenv(modules.SWITCH, value)
    plugin.register()  # without any sglang to import


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
    plugin.state.load.freed, plugin.state.load.from_sidecar = 3 * GIB // 2, ["a"]
    with caplog.at_level("INFO"):
        plugin.after_load(None, model, "cuda")
        del model.layers[2]
        plugin.after_load(None, model, "cuda")
        for moe in model.layers:
            moe.shared_experts = None  # slot fusion
        plugin.after_load(None, model, "cuda")
        plugin.after_load(None, nn.Linear(1, 1), "cuda")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "2 of 3 MoE layers, 1 of them from fse/; 1.50 GiB freed; the others run unfused" in caplog.text
    assert "2 of 2 MoE layers" in caplog.text
