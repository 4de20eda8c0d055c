"""Encode matrices by published encoders, on a CPU.

    python encoders_driver.py IN.safetensors OUT.safetensors VLLM

IN: ``CASE/values`` in BF16 or F32, or ``CASE/weight`` and ``CASE/scale``: E4M3 with block scales, or packed E2M1 (I8) with E8M0.
OUT: ``ENCODER/CASE/weight`` and ``ENCODER/CASE/scale``, as bytes; versions are printed. VLLM is the folder of vLLM's package: one
file of it runs in SGLang's environment, where Triton is, which interprets its kernel. torchao is on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import distributions, version
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from safetensors.torch import load_file, save_file

from tests.peers import published
from tests.peers.drivers import sglang_host  # noqa: F401  (stands in for compiled operators, before SGLang is imported)

GROUP = 32
Encoded = tuple[torch.Tensor, torch.Tensor]


def torchao(values, mode) -> Encoded:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, weight = to_mx(values, torch.float4_e2m1fn_x2, GROUP, ScaleCalculationMode[mode])
    return weight, scale


def vllm_file(package: Path):
    """vLLM's file with the encoder; its custom operators, which are Quark's, are left out."""
    import triton
    import triton.language as tl

    given = {
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **op: setattr(torch.ops.vllm, op["op_name"], None)},
    }
    return published._run(package / "model_executor/layers/quantization/utils/mxfp4_utils.py", given)


def mxfp4(weight, scale, block, vllm) -> dict[str, Encoded]:
    """Encode a matrix with its block scales; what an encoder cannot be given is left out."""
    from sglang.srt.layers.quantization import fp8_utils

    values = fp8_utils.block_quant_dequant(weight, scale.float(), block, torch.float32)
    encoded = {
        "torchao EVEN": torchao(values, "EVEN"),
        "torchao FLOOR": torchao(values, "FLOOR"),
        "SGLang HIP": fp8_utils._quantize_block_fp8_weight_to_mxfp4_rne(weight, scale, block, GROUP),
        "SGLang CUDA": fp8_utils.quantize_block_fp8_weight_to_mxfp4(weight, scale, block, GROUP),
    }
    if torch.equal(values.bfloat16().float(), values):
        encoded["vLLM"] = vllm.downcast_to_mxfp(values.bfloat16(), -1)[:2]
    return encoded


def encode(tensors, vllm) -> dict[str, Encoded]:
    from sglang.srt.layers.quantization import fp8

    if "values" in tensors:
        return mxfp4(tensors["values"], torch.ones(1, 1), list(tensors["values"].shape), vllm)
    weight, scale = tensors["weight"], tensors["scale"]
    if weight.dtype == torch.int8:
        return {"SGLang cast": fp8.cast_e2m1fn_to_e4m3fn(weight, scale)}
    return mxfp4(weight, scale, [n // blocks for n, blocks in zip(weight.shape, scale.shape, strict=True)], vllm)


def main() -> int:
    source, out, package = (Path(argument) for argument in sys.argv[1:])
    vllm = vllm_file(package)
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(source).items():
        case, _, part = name.rpartition("/")
        cases.setdefault(case, {})[part] = tensor
    encoded = {}
    for case, tensors in cases.items():
        for encoder, pair in encode(tensors, vllm).items():
            for part, tensor in zip(("weight", "scale"), pair, strict=True):
                encoded[f"{encoder}/{case}/{part}"] = tensor.contiguous().view(torch.uint8)
    save_file(encoded, out)
    versions = {"sglang": version("sglang"), "torchao": version("torchao")}
    versions["vllm"] = next(iter(distributions(name="vllm", path=[str(package.parent)]))).version
    os.write(1, ("\n@@@" + json.dumps(versions) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
