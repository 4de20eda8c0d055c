"""Tells from group scales alone, a few percent of the bytes, whether MXFP4 experts can be FP8 exactly: before any work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from fse_convert.conversion.recoding import recoded_bands
from fse_convert.conversion.source_rows import open_reader
from fse_convert.errors import Problem
from fse_convert.layout.mxfp4_to_fp8 import certainly_fits
from fse_convert.layout.nan_and_one import NaN
from fse_convert.layout.sizes import GROUP
from fse_convert.plan.plan import Plan
from fse_convert.plan.tensors import Recoded, Rule
from fse_convert.servers.routed_fp8 import LOW


def fit_note(plan: Plan) -> Problem | None:
    """Say how many weights their scales prove to fit; of the others the elements decide. None where nothing becomes FP8.

    Raises InvalidCheckpoint for a scale that the other format cannot hold, OSError, EOFError.
    """
    weights = list(_scales_by(Rule.FP8, plan))
    unproved: list[Recoded] = []
    low: list[Recoded] = []
    with open_reader(plan.source.folder, plan.source.checkpoint.shards) as reader:
        for change in _scales_by(Rule.F32, plan):
            deque(recoded_bands(change, reader), maxlen=0)  # raises for what F32 cannot hold
        for change in weights:
            sf_ng = reader.tensor(change.sources[1], 0, change.shape[0], NaN.E8M0)
            if not certainly_fits(sf_ng, change.block or (1, GROUP)):
                unproved.append(change)
            if (sf_ng < LOW).any():
                low.append(change)
    return _note(weights, unproved, low) if weights else None


def _note(weights: Sequence[Recoded], unproved: Sequence[Recoded], low: Sequence[Recoded]) -> Problem:
    if low:
        message = f"{len(low):,} weights have group scales below 2**-30: vLLM's requantisation for DeepGEMM changes their values"
        return Problem("fp8-low", message, low[0].sources[0].name, "serve with VLLM_USE_DEEP_GEMM_E8M0=0")
    if not unproved:
        return Problem("fp8-fits", f"the scales of all {len(weights):,} weights show that they are exact in FP8")
    of = f"{len(unproved):,} of {len(weights):,} weights"
    message = f"the scales of {of} leave open whether they are exact in FP8; their elements decide"
    return Problem("fp8-open", message, unproved[0].sources[0].name, "the conversion refuses what is not, and names the place")


def _scales_by(rule: Rule, plan: Plan) -> Iterator[Recoded]:
    """Yield the scales that are coded again by a rule; by `Rule.FP8` every weight has some."""
    changes = (t.change for shard in plan.shards for t in shard.tensors)
    return (c for c in changes if isinstance(c, Recoded) and c.rule is rule and c.is_scale)
