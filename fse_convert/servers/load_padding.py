"""What a server pads by itself while loading: the routed experts of vLLM 0.30, and what that asks of a shared expert.

Slices of tensor parallelism that servers pad are in `fse_convert.servers.tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fse_convert.layout.sizes import round_up
from fse_convert.servers.targets import CONTRACTS, Contract, Target

ROUTED_PAD: Mapping[str, int] = {"vllm-0.30": 512}
"""By target, the multiple to which it pads routed experts alone (models/deepseek_v4/nvidia/model.py:412-441, 516-534)."""


def padded_routed(width: int, target: Target) -> int:
    """Return the width of a routed expert after the padding that the server itself does."""
    return round_up(width, ROUTED_PAD.get(target.name, 1))


def needed_contract(target: Target) -> Contract:
    """Return the contract that a converted checkpoint must meet: a server that pads routed experts needs that shared width too."""
    return next(c for c in (target.contract, *CONTRACTS.values()) if c.width_multiple % ROUTED_PAD.get(target.name, 1) == 0)
