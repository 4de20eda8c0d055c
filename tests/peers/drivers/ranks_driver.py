"""Cut the matrices of an expert for every rank by a server's own loaders, on a CPU.

    python ranks_driver.py (vLLM|SGLang) IN.safetensors OUT.safetensors

IN: ``CASE/TP/PROJECTION/PART``: matrices as bytes or floats, PROJECTION w1 (gate), w3 (up) or w2 (down). OUT: what rank RANK of TP
holds, ``LOADER/CASE/TP/PROJECTION/PART/RANK``, with LOADER ``routed`` or ``shared``, without what a loader refuses; the version is
printed. No layer is built: parameters are as large as both servers make them, and a stand-in tells the loaders which rank they are
on.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from types import SimpleNamespace

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
from safetensors.torch import load_file, save_file


def by_vllm():
    from unittest import mock

    from vllm.model_executor import parameter
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def routed(held, stored, projection, dim, rank, tp):
        layer = RoutedExperts.__new__(RoutedExperts)
        parallel = SimpleNamespace(tp_size=tp)
        layer.__dict__["moe_config"] = SimpleNamespace(
            tp_shard_with_padding=False, is_act_and_mul=True, moe_parallel_config=parallel
        )
        layer._load_model_weight_or_group_weight_scale(dim, held, projection, stored, rank)

    def shared(held, stored, projection, dim, rank, tp):
        with (
            mock.patch.object(parameter, "get_tensor_model_parallel_rank", return_value=rank),
            mock.patch.object(parameter, "get_tensor_model_parallel_world_size", return_value=tp),
        ):
            loaded = parameter.ModelWeightParameter(data=held, input_dim=1, output_dim=0, weight_loader=lambda *_: None)
        if projection == "w2":
            loaded.load_row_parallel_weight(stored)
        else:
            loaded.load_merged_column_weight(stored, **half(held, projection))

    return {"routed": routed, "shared": shared}


def by_sglang():
    importlib.import_module("tests.peers.drivers.sglang_host")  # stands in for compiled operators, before SGLang is imported

    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.parameter import ModelWeightParameter

    def routed(held, stored, projection, dim, rank, tp):
        layer = SimpleNamespace(
            moe_runner_config=SimpleNamespace(is_gated=True), quant_method=None, quant_config=None, use_padded_loading=False,
            use_presharded_weights=False, use_triton_kernels=False, moe_tp_rank=rank, moe_tp_size=tp,
        )  # fmt: skip
        load = FusedMoE._load_w2 if projection == "w2" else FusedMoE._load_w13
        load(layer, held, dim, projection, stored)

    def shared(held, stored, projection, dim, rank, tp):
        loaded = ModelWeightParameter(data=held, input_dim=1, output_dim=0, weight_loader=lambda *_: None)
        if projection == "w2":
            loaded.load_row_parallel_weight(stored, tp_rank=rank)
        else:
            loaded.load_merged_column_weight(stored, tp_rank=rank, **half(held, projection))

    return {"routed": routed, "shared": shared}


def half(held, projection) -> dict[str, int]:
    """Where gate or up stands in the parameter that holds both."""
    size = held.shape[0] // 2
    return {"shard_offset": 0 if projection == "w1" else size, "shard_size": size}


def rank_size(tensor, weight, dim, tp) -> int:
    """Elements of a rank's part along the width: as many as its channels need, a part of a block counting as one."""
    block = -(-weight.shape[dim] // tensor.shape[dim])
    return -(-(weight.shape[dim] // tp) // block)


def cut(load, tensor, weight, projection, tp):
    """Yield what every rank holds of a matrix's tensor; gate and up in their half of one parameter."""
    dim, halves = (1, 1) if projection == "w2" else (0, 2)
    shape = list(tensor.shape)
    shape[dim] = halves * rank_size(tensor, weight, dim, tp)
    for rank in range(tp):
        held = torch.zeros(shape, dtype=tensor.dtype)
        load(held, tensor, projection, dim, rank, tp)
        yield held.chunk(2)[projection == "w3"] if halves == 2 else held


def main() -> int:
    engine, source, out = sys.argv[1:]
    loaders = {"vLLM": by_vllm, "SGLang": by_sglang}[engine]()
    tensors, made = load_file(source), {}
    for loader, load in loaders.items():
        for name, tensor in tensors.items():
            matrix = name.rpartition("/")[0]
            _, tp, projection = matrix.split("/")
            with suppress(RuntimeError):  # such as a slice that ends behind the matrix
                for rank, held in enumerate(cut(load, tensor, tensors[f"{matrix}/weight"], projection, int(tp))):
                    made[f"{loader}/{name}/{rank}"] = held.contiguous()
    save_file(made, out)
    module = sys.modules["vllm" if engine == "vLLM" else "sglang"]
    os.write(1, ("\n@@@" + json.dumps({"version": module.__version__}) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
