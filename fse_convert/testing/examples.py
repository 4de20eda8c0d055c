"""A small model of any family, as headers in memory, under the names and keys that its row has."""

from __future__ import annotations

from typing import Any

from fse_convert.model.families.family import Family, Stack
from fse_convert.model.moe import Role
from fse_convert.testing.memory import Tensors, expert

HIDDEN, WIDTH, EXPERTS, LAYERS = 512, 384, 2, 2


def example_of(family: Family) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and tensors of two layers: two routed experts, 384 wide, and a shared one where the family has any."""
    config: dict[str, Any] = {"model_type": family.model_types[0], "hidden_size": HIDDEN, family.depth_keys[0]: LAYERS}
    config |= {w.key: WIDTH for w in family.widths} | dict.fromkeys(family.n_routed_keys[:1], EXPERTS)
    config |= {key: 1 for key in family.n_shared_keys[:1] if family.shared}
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (8, HIDDEN))}
    for layer in range(LAYERS):
        tensors |= _layer(family, family.example.replace(".N", f".{layer}", 1))
    return config, tensors


def _layer(family: Family, block: str) -> Tensors:
    names = {role: name for name, role in family.routed_names.items()}
    routed = (names.get(Role.GATE, ""), names[Role.UP], names[Role.DOWN])
    tensors: Tensors = {}
    for stack in family.stacked:
        tensors[f"{block}.{stack.name}{_suffix(stack)}"] = ("BF16", (EXPERTS, *_stored(stack)))
        if stack.biased:
            tensors[f"{block}.{stack.name}_bias"] = ("BF16", (EXPERTS, _stored(stack)[stack.transposed]))
    for number in range(0 if family.stacked else EXPERTS):
        tensors |= expert(f"{block}.experts.{number}", "bf16", WIDTH, HIDDEN, routed)
    if family.shared:
        names = {role: name for name, role in family.shared_names.items()}
        shared = f"{block.rpartition('.')[0] if family.beside else block}.{family.shared}"
        for stack in family.fused if Role.UP not in names else ():
            tensors[f"{shared}.{stack.name}.weight"] = ("BF16", _stored(stack))
        of_shared = (names.get(Role.GATE, ""), names.get(Role.UP, ""), names[Role.DOWN])
        tensors |= expert(shared, "bf16", WIDTH, HIDDEN, of_shared)
        if family.gated:
            tensors[f"{shared}_gate.weight"] = ("BF16", (1, HIDDEN))
    return tensors


def _suffix(stack: Stack) -> str:
    """Return what names of modules have and those of parameters lack."""
    return "" if stack.name.startswith("experts.") and stack.name.endswith(("_proj", "_weight")) else ".weight"


def _stored(stack: Stack) -> tuple[int, int]:
    """Return rows and columns of a stack's matrix, as it is stored."""
    n, k = (HIDDEN, WIDTH) if stack.roles == (Role.DOWN,) else (len(stack.roles) * WIDTH, HIDDEN)
    return (k, n) if stack.transposed else (n, k)
