"""Load checkpoints into SGLang's own model classes and compare every expert: JSON cases on stdin, JSON answers on stdout.

A case: ``folder``, ``draft`` ("", "nextn" or "dspark"), ``slots`` (ask for fused shared experts), ``source``, whose values are
expected, and ``rounded``: shared experts then have the values that SGLang's own encoder for AMD makes of the source. An answer:
``fused``, the layers whose shared experts are in a slot; how many matrices are ``equal``, and which are ``unequal``, by their names
in a checkpoint; ``hooked``, the same after SGLang's post-load hooks (not for Quark, whose hooks are AITER's kernels); or
``refused``, why SGLang did not load it.

Expert parameters are filled with NaN before the loading, so that what is never loaded equals nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.peers import values
from tests.peers.drivers import sglang_host as host

DRAFTS = {
    "": {},
    "nextn": {"is_draft_model": True},
    "dspark": {"is_draft_model": True, "speculative_algorithm": "DSPARK"},
}
LAYER = re.compile(r"(model\.layers|model\.decoder|stages)(?:\.(\d+))?\.mlp")


class Matrices:
    """The values of a checkpoint's matrices by name; kept, as cases share checkpoints."""

    def __init__(self, folder: str) -> None:
        tensors = [load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))]
        self.tensors = {name: tensor for shard in tensors for name, tensor in shard.items()}
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self.block = tuple(config["quantization_config"].get("weight_block_size", (128, 128)))  # Quark's config has it by module

    @cache  # noqa: B019 (for the life of the process)
    def __call__(self, name: str, *, rounded: bool) -> torch.Tensor:
        from sglang.srt.layers.quantization import fp8_utils

        if not rounded:
            return values.stored(self.tensors, name, self.block)
        weight, scale = self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"]
        packed, scale = fp8_utils._quantize_block_fp8_weight_to_mxfp4_rne(weight, scale, list(self.block), 32)
        return values.mxfp4(packed.view(torch.uint8), scale)


checkpoint = cache(Matrices)


def moe_layers(model) -> dict:
    """The MoE layers by their names in a checkpoint; a layer is also a child of the one before."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if match := LAYER.fullmatch(name):
            found[f"{'layers' if match[1] == 'model.layers' else 'mtp'}.{match[2] or 0}.ffn"] = module
    return found


def matrices(module, block, *weights: str) -> list[tuple[torch.Tensor, ...]]:
    """The values of a module's weights, one matrix or one per expert; it has no other parameters than these and their scales."""
    held = {name: parameter.data for name, parameter in module.named_parameters()}
    found = []
    for name in weights:
        weight, scale = held.pop(name), next(held.pop(s) for s in (f"{name}_scale_inv", f"{name}_scale") if s in held)
        packed = scale.dtype == torch.int32  # by the hooks: a row's E8M0 bytes, one for 128 columns, four in a word
        if packed:
            scale = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, : weight.shape[1] // 128]
        pairs = zip(weight, scale, strict=True) if weight.ndim == 3 else [(weight, scale)]
        found.append([values.matrix(*pair, (1, 128) if packed else block) for pair in pairs])
    assert not held, held.keys()
    return list(zip(*found, strict=True))


def loaded(moe, block) -> dict[str, torch.Tensor]:
    """The values of every matrix of an MoE layer, by its name there."""
    mlps = matrices(moe.experts, block, "w13_weight", "w2_weight")
    assert len(mlps) == moe.gate.weight.shape[0] + moe.num_fused_shared_experts
    if not moe.num_fused_shared_experts:
        mlps += matrices(moe.shared_experts, block, "gate_up_proj.weight", "down_proj.weight")
    found = {}
    for name, (gate_up, down) in zip([*(f"experts.{e}" for e in range(len(mlps) - 1)), "shared_experts"], mlps, strict=True):
        found |= {f"{name}.w1": gate_up.chunk(2)[0], f"{name}.w3": gate_up.chunk(2)[1], f"{name}.w2": down}
    return found


def compare(model, source: Matrices, *, rounded: bool) -> dict:
    """Compare every matrix of every MoE layer."""
    equal, unequal = 0, []
    for layer, moe in moe_layers(model).items():
        for name, found in loaded(moe, source.block).items():
            matrix = f"{layer}.{name}"
            if torch.equal(found, source(matrix, rounded=rounded and ".shared_experts." in matrix)):
                equal += 1
            else:
                unequal.append(matrix)
    return {"equal": equal, "unequal": sorted(unequal)}


def forget(model) -> None:
    """Set every bit of the experts' parameters: NaN in F32, E4M3 and E8M0."""
    for moe in moe_layers(model).values():
        for name, parameter in moe.named_parameters():
            if "experts." in name:
                parameter.data.view(torch.uint8).fill_(255)


def judge(case: dict) -> dict:
    """Load one checkpoint and compare it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.eplb import expert_location
    from sglang.srt.layers.quantization.quark import quark
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
    from sglang.srt.runtime_context import get_context

    quark.get_device_capability = lambda: (9, 5)  # gfx950's
    get_context().override("test", enforce_shared_experts_fusion=case["slots"])
    config = host.model_config(Path(case["folder"]), **DRAFTS[case["draft"]])
    if not config.is_draft_model:
        location = expert_location.compute_initial_expert_location_metadata(config, 0)
        expert_location.set_global_expert_location_metadata(location, allow_overwrite=True)
    compared = partial(compare, source=checkpoint(case["source"]), rounded=case["rounded"])
    answer = {"hooked": None}

    def load(model, weights, device):
        forget(model)
        DefaultModelLoader.load_weights_only(model, weights, device)
        layers = moe_layers(model).values()
        answer.update(
            model=type(model).__name__,
            method=type(next(iter(layers)).experts.quant_method).__name__,
            fused=sum(moe.num_fused_shared_experts for moe in layers),
            **compared(model),
        )
        if config.quantization != "quark":
            DefaultModelLoader.postprocess_weights(model, device)
            answer["hooked"] = compared(model)

    loader = get_model_loader(load_config=LoadConfig(load_format="auto"), model_config=config)
    loader.load_weights_and_postprocess = load
    loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    return answer


def tried(case: dict) -> dict:
    try:
        return judge(case)
    except Exception as error:  # noqa: BLE001
        return {"refused": f"{type(error).__name__}: {error}"}


def main() -> int:
    cases = json.load(sys.stdin)
    sys.stdout = sys.stderr  # whatever the peer prints
    host.start(moe_a2a_backend="none")
    import sglang

    answer = {"version": sglang.__version__, "answers": {name: tried(case) for name, case in cases.items()}}
    os.write(1, ("\n@@@" + json.dumps(answer) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
