"""Loads a converted checkpoint into SGLang's own model, without the plugin and with it, and prints what became of it as JSON.

    python sglang_driver.py OUT --draft nextn|dspark [--source CHECKPOINT]
    python sglang_driver.py OUT [OUT ...] --load-only [--override JSON]

One process for everything, since SGLang takes 15 seconds to import. Facts are gathered here and judged in `test_sglang_plugin.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.peers.drivers import sglang_host as host

DRAFTS = {"nextn": {"is_draft_model": True}, "dspark": {"is_draft_model": True, "speculative_algorithm": "DSPARK"}}
TARGETS = {
    "sglang.srt.layers.moe.mega_moe.build_mega_moe_shared_weights",
    "sglang.srt.layers.moe.mega_moe.build_mega_moe_experts_weights",
    "sglang.srt.model_loader.loader.get_model_loader",
    "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights",
    "sglang.srt.model_executor.model_runner_components.load_model_utils.maybe_precompile_model_kernels_after_loading",
}
REFUSED = {
    "weight_cache_mode": "client",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": True,
    "modelexpress_config": "{}",
    "checkpoint_engine_wait_weights_before_ready": True,
    "custom_weight_loader": ["a.loader"],
    "rl_quant_profile": "profile",
    "enable_memory_saver": True,
    "elastic_ep_backend": "mooncake",
    "enable_lora": True,
    "lora_paths": ["adapter"],
    "startup_weight_load_mode": "overlap",
    "model_path": "instance://10.0.0.1:30000",
    "disaggregation_mode": "decode",
    "enable_dynamic_chunking": True,
    "max_running_requests": 1_000_000,
}


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def tried(function, *args, **kwargs):
    """Call and return an answer of plain values, the exception's class and text, or the class of any other result."""
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error)]
    plain = isinstance(result, tuple) and all(isinstance(value, (bool, str)) for value in result)
    return list(result) if plain else ["returned", type(result).__name__]


# Tensors ---------------------------------------------------------------------------------------------------------------------


def compare(stock, plugin):
    """Compare the kernel's shared tensors of two loaded models, layer by layer."""
    before, after = host.shared_tensors(stock.model), host.shared_tensors(plugin.model)
    assert before.keys() == after.keys()
    return {name: [one(a, b) for a, b in zip(before[name], after[name], strict=True)] for name in before}


def one(a, b):
    return {
        "same_kind": (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device),
        "same_bytes": torch.equal(raw(a), raw(b)),
        "own": a.data_ptr() != b.data_ptr(),
        "shape": list(b.shape),
        "stride": list(b.stride()),
        "dtype": str(b.dtype),
    }


def dequantised(tensors):
    """Values of gate, up and down as the kernel sees them, by `fse_convert`'s inverse maps."""
    from fse_convert.layout import megamoe, ue8m0

    l1, l1_scale, l2, l2_scale = tensors
    weights = (*megamoe.deinterleave(l1.view(torch.uint8)), l2.view(torch.uint8))
    scales = (*megamoe.l1_scale_inverse(l1_scale.t()), megamoe.l2_scale_inverse(l2_scale.t()))
    return [
        w.view(torch.float8_e4m3fn).float() * ue8m0.to_fp32(s).repeat_interleave(32, 1)
        for w, s in zip(weights, scales, strict=True)
    ]


def same_values(stock, plugin):
    before, after = host.shared_tensors(stock.model), host.shared_tensors(plugin.model)
    pairs = [(a, b) for name in before for a, b in zip(dequantised(before[name]), dequantised(after[name]), strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def requantised_checkpoint(stock, plugin):
    """Put the checkpoint's weights through SGLang's own `requant_weight_ue8m0` and builder: that is what unmodified SGLang has."""
    from sglang.srt.layers.moe import mega_moe
    from sglang.srt.layers.quantization import fp8_utils

    build = mega_moe.build_mega_moe_shared_weights.__wrapped__
    results = {}
    for name, tensors in host.shared_tensors(plugin.model).items():
        gate, up, down = (raw_block(t) for t in halves(tensors))
        linears = []
        for weight, scale in ((torch.cat((gate[0], up[0])), torch.cat((gate[1], up[1]))), down):
            new = fp8_utils.requant_weight_ue8m0(weight.view(torch.float8_e4m3fn), scale, [128, 128])
            linears.append(SimpleNamespace(weight=new[0], weight_scale_inv=new[1]))
        l1, l2 = build(SimpleNamespace(gate_up_proj=linears[0], down_proj=linears[1]))
        expected = host.shared_tensors(stock.model)[name]
        results[name] = all(torch.equal(raw(a), raw(b)) for a, b in zip((*l1, *l2), expected, strict=True))
    return results


def halves(tensors):
    from fse_convert.layout import megamoe

    l1, l1_scale, l2, l2_scale = tensors
    gates = zip(megamoe.deinterleave(l1.view(torch.uint8)), megamoe.l1_scale_inverse(l1_scale.t()), strict=True)
    return [*gates, (l2.view(torch.uint8), megamoe.l2_scale_inverse(l2_scale.t()))]


def raw_block(pair):
    from fse_convert.layout import ue8m0

    weight, scale = pair
    return weight, ue8m0.to_fp32(scale[::128, ::4].contiguous())


# Forward and EPLB ------------------------------------------------------------------------------------------------------------


def forward(moe, *, cap=None):
    """Run the real forward of an MoE layer on two tokens, at or above the cap on tokens."""
    from sglang.srt.environ import envs

    tokens = torch.randn(2, moe.config.hidden_size, dtype=torch.bfloat16)
    ids = torch.zeros(2, dtype=torch.int64)
    with envs.SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK.override(8 if cap is None else cap):
        return moe(tokens, None, input_ids=ids, input_ids_global=ids)


def kernel_call(loaded):
    """Forward every layer that needs no hash routing table, and see which tensors the fused kernel is given."""
    results = []
    for moe in host.moe_layers(loaded.model).values():
        host.calls.clear()
        forward(moe)
        (call,) = host.calls
        given = (*call.shared_l1_weights, *call.shared_l2_weights, *call.l1, *call.l2)
        wanted = (
            *moe.mega_shared_l1_weights,
            *moe.mega_shared_l2_weights,
            *moe.experts.mega_l1_weights,
            *moe.experts.mega_l2_weights,
        )
        results.append({"same_tensors": all(a is b for a, b in zip(given, wanted, strict=True)), "num_shared": call.num_shared})
    return results


def eplb(loaded):
    """What EPLB moves, by SGLang's own `get_moe_weights`: names, and whether each is what the kernel reads."""
    results = []
    for moe in host.moe_layers(loaded.model).values():
        names = {p.data_ptr(): n for n, p in moe.experts.named_parameters() if p.numel()}
        results.append(sorted(names[t.data_ptr()] for t in moe.get_moe_weights()))
    return results


def freed(loaded):
    """Names of the parameters of the MoE layers that are empty."""
    return sorted({n.rpartition("mlp.")[2] for n, p in loaded.model.named_parameters() if ".mlp." in n and not p.numel()})


# What reads the originals ----------------------------------------------------------------------------------------------------


def refusals(stock):
    """Ask for each mode in turn, by SGLang's own configuration, and build again."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.moe import mega_moe
    from sglang.srt.model_executor.model_runner_components import load_model_utils
    from sglang.srt.runtime_context import get_context

    shared_experts = next(iter(host.moe_layers(stock.model).values())).shared_experts
    load_model_utils.get_model_loader(load_config=LoadConfig(load_format="auto"), model_config=stock.config)
    found = {}
    for leaf, value in REFUSED.items():
        before = get_context().config_leaf(leaf)
        more = {"pp_size": 2} if leaf == "enable_dynamic_chunking" else {}
        old = {name: get_context().config_leaf(name) for name in more}
        get_context().override("test", **{leaf: value}, **more)
        found[leaf] = tried(mega_moe.build_mega_moe_shared_weights, shared_experts)
        get_context().override("test", **{leaf: before}, **old)
    for name in ("presharded", "layered", "flash_rl", "sharded_state", "remote_instance", "remote"):
        load_model_utils.get_model_loader(load_config=LoadConfig(load_format=name), model_config=stock.config)
        found[f"load_format {name}"] = tried(mega_moe.build_mega_moe_shared_weights, shared_experts)
    return found


def requests(loaded):
    """Send what a running server gets as requests to SGLang's own handlers."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    def get():
        return loaded.model

    updater = WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=loaded.config, custom_weight_loaders={}, get_model=get,
        update_model_fields=None, recapture_cuda_graph=None, get_model_runner=None,
    )  # fmt: skip
    exporter = WeightExporter(tp_rank=0, tp_size=1, gpu_id=0, get_model_path=None, get_model=get)
    runner = SimpleNamespace(model=loaded.model, weight_updater=updater)
    manager = SimpleNamespace(_session=None, _select_runners=lambda _selector: [("target", runner)])
    begun = SchedulerWeightUpdaterManager.begin_weight_update(manager, SimpleNamespace(selector="all"))
    return {
        "update_weights_from_disk": tried(updater.update_weights_from_disk, "elsewhere", "auto"),
        "update_weights_from_distributed": tried(updater.load_weights_from_distributed, []),
        "update_weights_from_tensor": tried(updater.update_weights_from_tensor, []),
        "update_weights_from_ipc": tried(updater.update_weights_from_ipc, None),
        "begin_weight_update": [begun.success, begun.message],
        "save_sharded_model": tried(exporter.save_sharded_model, "elsewhere"),
        "save_remote_model": tried(exporter.save_remote_model, "elsewhere"),
        "get_weights_by_name": tried(exporter.get_weights_by_name, "model.norm.weight"),
        "send_weights": tried(exporter.send_weights_to_remote_instance, "localhost", "1", "group"),
        "init_send_group": tried(exporter.init_weights_send_group_for_remote_instance, "localhost", "1", 0, 2, "group"),
        "check_weights": tried(WeightChecker(get_model=get).handle, "checksum", role="target"),
    }


# The files -------------------------------------------------------------------------------------------------------------------


def files(out, loader):
    """What SGLang's own loader reads of OUT, and what it makes of OUT/fse."""
    folder, names, _ = loader._prepare_weights(str(out), None, True)
    source = type(loader).Source(str(out), revision=None, model_config=None)
    tensors = [name for name, _ in loader._get_weights_iterator(source)]
    return {
        "folder_is_out": Path(folder) == out,
        "files": sorted(str(Path(n).relative_to(out)) for n in names),
        "kernel_names": [n for n in tensors if "shared_l1" in n or "shared_l2" in n],
        "tensors": len(tensors),
        "pointed_at_fse": tried(lambda: str(host.model_config(out / "fse"))),
    }


def load_only(folders, override):
    """Load each folder as it is, then with the plugin, and tell what each became."""
    more = {"model_override_args": override} if override else {}
    before = [tried_loading(folder, more) for folder in folders]
    missing = load_plugins()
    log = host.LogLines("fse_convert")
    after = [tried_loading(folder, more) for folder in folders]
    return {"not_patched": missing, "stock": before, "plugin": after, "log": log.lines}


def tried_loading(folder, more):
    try:
        loaded = host.load(folder, **more)
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}
    fused = [getattr(moe, "mega_shared_l1_weights", None) is not None for moe in host.moe_layers(loaded.model).values()]
    return {"fused": fused, "freed": freed(loaded), "bytes": loaded.sizes}


def another_plugin(original, *args, **kwargs):
    return original(*args, **kwargs)


def load_plugins():
    """Let SGLang find and load its plugins; return the targets that it did not patch, which it only logs.

    Another plugin has been at what ours must guard, and has applied its hooks: SGLang will pass over these targets from then on.
    """
    from sglang.srt import plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from fse_convert.serving.sglang import guards

    for target in (guards.CHECKER, guards.UPDATER):
        HookRegistry.register(target, another_plugin, HookType.AROUND)
    HookRegistry.apply_hooks()
    plugins.load_plugins()
    return sorted(TARGETS - HookRegistry._patched)


def full(out, draft_name, source):
    """Everything about one converted checkpoint."""
    stock, stock_draft = host.load(out), host.load(out, **DRAFTS[draft_name])
    answer = {"not_patched": load_plugins(), "block": stock.model.quant_config.weight_block_size}
    answer["refusals"] = refusals(stock)
    log = host.LogLines("fse_convert")
    plugin, draft = host.load(out), host.load(out, **DRAFTS[draft_name])
    first = next(iter(host.moe_layers(plugin.model).values()))
    answer |= {
        "log": list(log.lines),
        "models": [type(m.model).__name__ for m in (plugin, draft)],
        "prefixes": [
            m.shared_experts.gate_up_proj.prefix for loaded in (plugin, draft) for m in host.moe_layers(loaded.model).values()
        ],
        "tensors": compare(stock, plugin) | {f"draft {k}": v for k, v in compare(stock_draft, draft).items()},
        "value_error": max(same_values(stock, plugin), same_values(stock_draft, draft)),
        "bytes": {
            "stock": stock.sizes,
            "plugin": plugin.sizes,
            "stock draft": stock_draft.sizes,
            "plugin draft": draft.sizes,
        },
        "freed": freed(plugin),
        "calls": kernel_call(plugin) + kernel_call(draft),
        "eplb": {"stock": eplb(stock), "plugin": eplb(plugin)},
        "over_cap": tried(forward, first, cap=1),
        "requests": requests(plugin),
        "files": files(out, plugin.loader),
    }
    if answer["block"] == [128, 128]:
        answer["requantised"] = requantised_checkpoint(stock, plugin)
    if source:
        plain = host.load(source)
        answer["no_sidecar"] = {"tensors": compare(stock, plain), "freed": freed(plain), "bytes": plain.sizes, "log": log.lines[-1]}
    return answer


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=lambda text: Path(text).absolute(), nargs="+")
    parser.add_argument("--draft", choices=sorted(DRAFTS))
    parser.add_argument("--source", type=Path)
    parser.add_argument("--load-only", action="store_true")
    parser.add_argument("--override", help="as --json-model-override-args")
    arguments = parser.parse_args()
    sys.stdout = sys.stderr  # whatever the peer prints
    host.start()
    if arguments.load_only:
        answer = load_only(arguments.out, arguments.override)
    else:
        answer = full(arguments.out[0], arguments.draft, arguments.source)
    os.write(1, ("\n@@@" + json.dumps(answer) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
