"""Tells from group scales alone, a few percent of the bytes, whether MXFP4 experts can be FP8 exactly: before any work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fse_convert.conversion.recoding import recoded_bands
from fse_convert.conversion.source_rows import open_reader
from fse_convert.errors import Problem
from fse_convert.layout.mxfp4_to_fp8 import certainly_fits
from fse_convert.model.formats import NaN
from fse_convert.plan.plan import Plan
from fse_convert.plan.tensors import Recoded, Rule

LOW = 97
"""E8M0 byte of 2**-30: vLLM 0.33 clamps amax at 1e-4 (utils/deep_gemm.py:1027), which smaller values do not reach."""


def fit_note(plan: Plan) -> Problem | None:
    """Say how many weights their scales prove to fit; of the others the elements decide. None where nothing becomes FP8.

    Raises InvalidCheckpoint for a scale that the other format cannot hold, OSError, EOFError.
    """
    changes = list(_recoded(plan, Rule.FP8))
    with open_reader(plan.source.folder, plan.source.checkpoint.shards) as reader:
        for change in _recoded(plan, Rule.F32):
            deque(recoded_bands(change, reader), maxlen=0)
        unsure, low = [], []
        for c in changes:
            scales = reader.tensor(c.sources[1], 0, c.shape[0], NaN.E8M0)
            unsure += [c] * (not certainly_fits(scales, c.block or (1, 32)))
            low += [c] * bool((scales < LOW).any())
    if not changes:
        return None
    if low:
        message = f"{len(low):,} weights have group scales below 2**-30: vLLM's requantisation for DeepGEMM changes their values"
        return Problem("fp8-low", message, low[0].sources[0].name, "serve with VLLM_USE_DEEP_GEMM_E8M0=0")
    if not unsure:
        return Problem("fp8-fits", f"the scales of all {len(changes):,} weights show that they are exact in FP8")
    message = (
        f"the scales of {len(unsure):,} of {len(changes):,} weights leave open whether they are exact in FP8; their elements decide"
    )
    return Problem("fp8-open", message, unsure[0].sources[0].name, "the conversion refuses what is not, and names the place")


def _recoded(plan: Plan, rule: Rule) -> Iterator[Recoded]:
    """Yield the scales that are coded again by a rule."""
    changes = (t.change for shard in plan.shards for t in shard.tensors)
    return (c for c in changes if isinstance(c, Recoded) and c.rule is rule and c.is_scale)
