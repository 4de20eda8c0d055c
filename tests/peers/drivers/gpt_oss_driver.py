"""Cut gpt-oss's stacked MXFP4 experts for every rank by vLLM's own loader of that model, on a CPU.

    python gpt_oss_driver.py IN.safetensors OUT.safetensors

IN: ``TP/NAME``, NAME as vLLM calls the parameter (``w13_weight``, ``w2_weight_scale``, ``w13_bias`` ...). OUT: what rank RANK of TP
is given, ``TP/NAME/RANK``; the version is printed. No model is built: a stand-in has the parameters, which keep what they get.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.model_executor.models import gpt_oss


def cut(tensors, tp, rank):
    """Return what the loader hands to the parameters of a rank."""
    given = {}
    scales = tensors["w13_weight_scale"]
    parameters = {
        f"experts.{name}": torch.nn.Parameter(torch.empty(0, dtype=t.dtype), requires_grad=False) for name, t in tensors.items()
    }
    for name, parameter in parameters.items():
        parameter.weight_loader = lambda _, part, name=name, **_more: given.update({name.partition(".")[2]: part})
    model = SimpleNamespace(
        named_parameters=parameters.items,
        parallel_config=SimpleNamespace(enable_expert_parallel=False),
        config=SimpleNamespace(num_local_experts=scales.shape[0], intermediate_size=scales.shape[1] // 2),
        _try_load_streamed_expert=lambda *_: False,
    )
    parallel = SimpleNamespace(flatten_tp_across_dp_and_pcp=lambda **_: (tp, rank))
    with (
        mock.patch.multiple(
            gpt_oss,
            FusedMoEParallelConfig=parallel,
            get_tensor_model_parallel_world_size=lambda: tp,
            get_dp_group=mock.Mock(),
            get_pcp_group=mock.Mock(),
            remap_moe_expert_weights=lambda weights, _: weights,
            is_pp_missing_parameter=lambda *_: False,
        ),
    ):
        weights = [(f"experts.{name}", tensor.clone()) for name, tensor in tensors.items()]
        gpt_oss.GptOssModel._load_weights_mxfp4(model, 0, 0, weights, [])
    return given


def main() -> int:
    source, out = sys.argv[1:]
    stored, made = load_file(source), {}
    for tp in sorted({int(name.partition("/")[0]) for name in stored}):
        tensors = {name.partition("/")[2]: t for name, t in stored.items() if name.startswith(f"{tp}/")}
        for rank in range(tp):
            made |= {f"{tp}/{name}/{rank}": t.contiguous().clone() for name, t in cut(tensors, tp, rank).items()}
    save_file(made, out)
    os.write(1, ("\n@@@" + json.dumps({"version": vllm.__version__}) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
