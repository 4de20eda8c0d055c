"""The SGLang plugin refuses whatever still reads the weights that it frees: at start-up by mode, while serving by request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fse_convert.errors import NotServable
from fse_convert.serving.sglang import guards, hooks, modes, modules
from tests.serving.sglang_standins import Experts, codes, loaded, never, refused, served

READERS = {
    "weight_cache_mode": ("daemon", "--weight-cache-mode off"),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": (True, "start-seed-via-transfer-engine"),
    "modelexpress_config": ("{}", "--modelexpress-config"),
    "checkpoint_engine_wait_weights_before_ready": (True, "--checkpoint-engine-wait-weights-before-ready"),
    "custom_weight_loader": (["a.b"], "--custom-weight-loader"),
    "rl_quant_profile": ("p", "--rl-quant-profile"),
    "enable_memory_saver": (True, "--enable-weights-cpu-backup"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend"),
    "enable_lora": (True, "--enable-lora"),
    "lora_paths": (["a"], "--lora-paths"),
    "startup_weight_load_mode": ("overlap", "--startup-weight-load-mode serial"),
    "model_path": ("instance://1.2.3.4:5", "instance connector"),
    "disaggregation_mode": ("decode", modules.CAP),
    "enable_dynamic_chunking": (True, modules.CAP),
    "max_running_requests": (8193, "--max-running-requests lower"),
}


def test_every_mode_is_tried():
    assert READERS.keys() == {mode.leaf for mode in modes.MODES}


@pytest.mark.parametrize("leaf", READERS)
def test_modes_that_read_the_originals_are_refused_by_name(server, converted, leaf):
    value, named = READERS[leaf]
    served(converted())
    server.leaves |= {leaf: value, "pp_size": 2}
    mlp, experts = loaded(converted()), Experts(2, 512, 384)
    error = refused(mlp)
    assert codes(error) == ["needs-originals"]
    assert named in str(error.value)
    assert f"{modules.SWITCH}=off" in str(error.value)
    with pytest.raises(NotServable):
        hooks.around_routed(lambda _e: None, experts)
    assert experts.w13_weight_scale_inv.numel()


@pytest.mark.parametrize(
    "leaves",
    [
        {"enable_memory_saver": True, "enable_weights_cpu_backup": True},
        {"enable_dynamic_chunking": True, "pp_size": 1},
        {"disaggregation_mode": "prefill"},
        {"model_path": "s3://bucket/model"},
        {"weight_cache_mode": None, "startup_weight_load_mode": None},
    ],
)
def test_modes_that_do_not_read_them_are_not_refused(leaves):
    modes.refuse("DefaultModelLoader", leaves.get)


@pytest.mark.parametrize(
    ("leaves", "cap", "above"),
    [
        ({}, 8192, False),  # not given: SGLang sizes it from the memory that is left, after loading
        ({"max_running_requests": 8192}, 8192, False),
        ({"max_running_requests": 8193}, 8192, True),
        ({"max_running_requests": 8193}, 8193, False),
        ({"max_running_requests": 8193, "attn_dp_size": 2}, 8192, False),
        ({"max_running_requests": 8193, "attn_dp_size": 2}, 4095, True),
        ({"max_running_requests": 2048, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}, 8192, False),
        ({"max_running_requests": 2049, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}, 8192, True),
        ({"max_running_requests": 2049, "speculative_num_draft_tokens": 4}, 8192, False),
        ({"max_running_requests": 8193, "disaggregation_mode": "prefill"}, 8192, False),
    ],
)
def test_decode_batches_above_the_cap_are_refused_where_the_configuration_allows_them(server, monkeypatch, leaves, cap, above):
    monkeypatch.setenv(modules.CAP, str(cap))
    if above:
        with pytest.raises(NotServable, match=modules.CAP):
            modes.refuse("DefaultModelLoader", leaves.get)
    else:
        modes.refuse("DefaultModelLoader", leaves.get)


@pytest.mark.parametrize(
    "loader", ["PreshardedModelLoader", "QuantizedRLModelLoader", "IpcModelLoader", "RemoteInstanceModelLoader"]
)
def test_loaders_that_read_the_originals_are_refused(server, converted, loader):
    served(converted(), loader=loader)
    assert loader in str(refused(loaded(converted())).value)


def test_an_architecture_with_a_fallback_keeps_everything(server, converted, caplog):
    hooks.state.architectures = ("DeepseekV3ForCausalLM",)
    served(converted())
    mlp, experts, pair = loaded(converted()), Experts(2, 512, 384), (torch.zeros(1), torch.zeros(1))
    with caplog.at_level("INFO"):
        assert hooks.around_shared(lambda _mlp: (pair, pair), mlp) == (pair, pair)
        hooks.around_routed(lambda _e: None, experts)
    assert mlp.gate_up_proj.weight.numel()
    assert experts.w13_weight_scale_inv.numel()
    assert caplog.text.count("nothing is freed") == 1


@pytest.mark.parametrize("kind", ["lost", "deaf"])
def test_a_guard_that_sglang_does_not_take_stops_everything(server, converted, kind):
    getattr(server.registry, kind).add(guards.CHECKER)
    served(converted())
    error = refused(loaded(converted()))
    assert codes(error) == ["release-unknown"]
    assert guards.CHECKER in str(error.value)
    assert guards.UPDATER not in str(error.value)
    assert not hooks.state.guarded


def test_a_method_that_moved_stops_everything(server, converted):
    del server.updater.begin_weight_update
    served(converted())
    error = refused(loaded(converted()))
    assert codes(error) == ["release-unknown"]
    assert guards.UPDATER in str(error.value)


@pytest.mark.parametrize("passes_on", [True, False])
def test_guards_are_there_where_another_plugin_was_first(server, converted, passes_on):
    """SGLang applies hooks to a target once; that it has been at it says nothing of ours, nor does the other hooks."""
    seen = []

    def others(original, *args, **kwargs):
        seen.append(args)
        return original(*args, **kwargs) if passes_on else "another plugin's"

    for target in (guards.CHECKER, guards.UPDATER):
        server.registry.register(target, others, "around")
    server.registry.apply_hooks()
    served(converted())
    mlp = loaded(converted())
    hooks.around_shared(never, mlp)
    assert not seen, "the proof that a guard is there calls nobody else"
    checker = server.checker()
    checker._get_model = lambda: mlp
    with pytest.raises(RuntimeError, match="weight checks"):
        checker.handle("checksum")
    assert not seen
    checker._get_model = lambda: nn.Linear(1, 1)
    assert checker.handle("checksum") == ("read" if passes_on else "another plugin's")
    assert seen == [(checker, "checksum")]


def test_guards_cover_the_exports_of_a_release_without_marks(server, converted):
    served(converted())
    hooks.around_shared(never, loaded(converted()))
    assert set(server.registry.applied) == {guards.UPDATER, guards.CHECKER}
    hooks.state.guarded = False
    del server.exporter._weight_export_unsupported_reason
    guards.install()
    assert {name.rpartition(".")[2] for name in server.registry.applied} >= {*guards.SAVES, *guards.SENDS, "get_weights_by_name"}
    mlp = loaded(converted())
    modules.free_shared(mlp, ())
    exporter = server.exporter()
    exporter.get_model = lambda: mlp
    with pytest.raises(RuntimeError, match="weight exports"):
        exporter.save_sharded_model("elsewhere")
    assert exporter.get_weights_by_name("name") is None


def test_freed_modules_refuse_with_what_to_change(server, converted, monkeypatch):
    monkeypatch.setenv(modules.CAP, "4096")
    served(converted())
    mlp, experts = loaded(converted()), Experts(2, 512, 384)
    hooks.around_shared(never, mlp)
    hooks.around_routed(lambda _e: None, experts)
    for call in (mlp, experts, experts.run_moe_core):
        with pytest.raises(RuntimeError, match=rf"{modules.CAP} \(4096\).*--chunked-prefill-size"):
            call(torch.zeros(1))
    model = nn.ModuleList([mlp, experts])
    assert modules.sealed_modules(model) == ["model.layers.1.mlp.shared_experts", "experts of layer 1"]
    original = SimpleNamespace(get_model=lambda: model, _get_model=lambda: model)
    with pytest.raises(RuntimeError, match="weight checks"):
        guards.refuse_check(never, original, "checksum")
    with pytest.raises(RuntimeError, match="weight exports"):
        guards.refuse_save(never, original, "path")
    assert guards.refuse_send(never, original)[0] is False
    assert guards.refuse_get(never, original, "name") is None
    for module in (mlp, experts):
        assert "online weight updates" in module._derived_weight_cache_error
        assert "weight exports" in module._weight_export_error


def test_a_model_that_lost_nothing_is_checked_and_saved_as_ever():
    original = SimpleNamespace(get_model=lambda: nn.Linear(1, 1), _get_model=lambda: nn.Linear(1, 1))
    for guard in (guards.refuse_check, guards.refuse_save, guards.refuse_send, guards.refuse_get):
        assert guard(lambda _self, argument: argument, original, "argument") == "argument"
