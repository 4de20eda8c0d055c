"""Routed experts from MXFP4 to FP8 blocks with F32 scales, every value exact: for servers and GPUs that have no FP4."""

from __future__ import annotations

from fse_convert.errors import Problem
from fse_convert.layout.sizes import GROUP, ceil_div
from fse_convert.model.formats import StorageKind
from fse_convert.model.quantization import FP8_METHODS
from fse_convert.plan.changes.change import FormatChange, Result
from fse_convert.plan.changes.config_places import EXPERT_DTYPE, expert_dtype_edits
from fse_convert.plan.changes.modules import Matrix, Tensors, f32_scales, matrices, stored_alike
from fse_convert.plan.tensors import Recoded, Rule, TensorSpec
from fse_convert.servers.subject import Subject

NAME = "routed-fp8"


def routed_fp8(subject: Subject) -> Result:
    """Return the change of DeepSeek-V4 and V4.1, MTP layers included, or why it does not fit the checkpoint.

    ``expert_dtype`` is one value for all layers, so all routed experts change. Scales of the shared experts become F32 as well:
    vLLM on AMD copies E8M0 ones as plain numbers into its slots (0.30 models/deepseek_v4/amd/model.py:1240, 0.33 :1403). Whether
    every value of a block can be exact, the writer finds from the elements.
    """
    block, layers, model_type = subject.quantization.block, subject.description.layers, subject.description.model_type
    if model_type not in EXPERT_DTYPE:
        return _unfit(f"only DeepSeek-V4 and V4.1 are known to be served with FP8 experts of this form, not {model_type or 'this'}")
    if not stored_alike(layers, StorageKind.MXFP4):
        stored = dict.fromkeys(d.routed.label if d.routed else "not understood" for d in layers)
        return _unfit(f"routed experts must be MXFP4 in every layer, here they are: {', '.join(stored) or 'none'}")
    if subject.quantization.method not in FP8_METHODS or block is None:
        return _unfit("config.json must describe DeepSeek's FP8, with the weight_block_size that the experts get")
    if block[1] % GROUP or any(side & (side - 1) for side in block):  # `restore` tells such a block from the shapes
        return _unfit(f"weight_block_size is {list(block)}; its sides must be powers of two, of at least {GROUP} columns")
    tensors: Tensors = {}
    originals: set[str] = set()
    for layer in layers:
        for projection, f in matrices(layer.routed) if layer.routed else ():
            tensors |= _fp8((projection, f), block)
            originals.add(projection.parts[f.scale or ""].name)
        tensors |= f32_scales(matrices(layer.shared)) if layer.shared else {}
    return FormatChange(
        name=NAME,
        does=f"codes the MXFP4 routed experts as FP8 {block[0]}x{block[1]} with F32 scales, every value exact",
        tensors=tensors,
        config=expert_dtype_edits(subject.config, model_type, "fp8"),
        originals=frozenset(originals),
    )


def _fp8(matrix: Matrix, block: tuple[int, int]) -> Tensors:
    """Return a matrix ``[n, k]`` as F8_E4M3 with F32 scales ``[n / block, k / block]``, the last ones of partial blocks."""
    projection, f = matrix
    weight, scale = projection.parts[f.weight], projection.parts[f.scale or ""]
    grid = (ceil_div(f.shape[0], block[0]), ceil_div(f.shape[1], block[1]))
    codes = Recoded(rule=Rule.FP8, weight=weight, scale=scale, shape=f.shape, block=block, is_scale=False)
    scales = Recoded(rule=Rule.FP8, weight=weight, scale=scale, shape=f.shape, block=block, is_scale=True)
    return {
        weight.name: (TensorSpec(weight.name, "F8_E4M3", f.shape, codes),),
        scale.name: (TensorSpec(scale.name, "F32", grid, scales),),
    }


def _unfit(message: str) -> Problem:
    return Problem("routed-fp8-unfit", message)
