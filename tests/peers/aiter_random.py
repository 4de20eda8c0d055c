"""Configs for `test_aiter_vllm.py` with random exclusion lists and random schemes by module."""

from __future__ import annotations

import random
from typing import Any

from tests.peers.aiter_cases import (
    FAMILIES,
    FP8,
    FP8_BLOCK,
    MODELOPT,
    MXFP4,
    MXFP8,
    QUARK,
    case,
    checkpoint_block,
    shard_names,
    without,
)


class Patterns:
    """Random entries of exclusion lists: names of real modules, cut, joined and decorated; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def name(self, family: str) -> str:
        pick, facts = self.random.choice, FAMILIES[family]
        index = pick([3, 3, 3, 1, 13, 30])
        block = pick([checkpoint_block(family, index), facts.block.format(index=index), f"mtp.{pick([0, 1])}.ffn"])
        gate, up = shard_names(family)
        module = pick(
            [facts.shared, facts.shared, "experts", "experts.0", f"{facts.shared}_gate", "gate", "shared_experts", "shared_expert"]
        )
        parts = [block, module, pick([gate, up, "down_proj", "w2", "gate_up_proj", "weight", ""])]
        return ".".join(part for part in parts if part)

    def entry(self, family: str) -> str:
        name, turn = self.name(family), self.random.random()
        if turn < 0.35:
            return name
        if turn < 0.5:
            return name[self.random.randrange(len(name)) :] or name
        if turn < 0.6:
            return name[: self.random.randrange(1, len(name) + 1)]
        if turn < 0.8:
            at = self.random.randrange(len(name) + 1)
            return (
                name[:at]
                + self.random.choice(["*", "?", "*.", ".*", "[a-z]", "[!x]"])
                + name[min(len(name), at + self.random.randrange(9)) :]
            )
        regex = name.replace(".", self.random.choice([".", r"\."]))
        cut = self.random.choice([".*", r"\d+", "(gate|up|down)_proj", "w[13]", "$", "^", "(?:x|)", "(?i:E)", ""])
        at = self.random.choice([0, len(regex), self.random.randrange(len(regex) + 1)])
        return f"re:{regex[:at]}{cut}{regex[at:]}"

    def entries(self, family: str) -> list[str]:
        """One to four entries, at times all projections of one expert."""
        made = [self.entry(family) for _ in range(self.random.randrange(1, 4))]
        if self.random.random() < 0.4:
            facts = FAMILIES[family]
            block = self.random.choice([checkpoint_block(family, 3), facts.block.format(index=3)])
            made += [f"{block}.{facts.shared}.{part}" for part in (*shard_names(family), self.random.choice(["down_proj", "w2"]))]
        self.random.shuffle(made)
        return made


def random_cases(count: int, seed: int) -> list[dict[str, Any]]:
    patterns = Patterns(seed)
    pick = patterns.random.choice
    cases = []
    for number in range(count):
        name, method = pick(list(FAMILIES)), pick(["fp8", "quark", "layers", "modelopt", "inner", "inner-layers"])
        entries = patterns.entries(name)
        configs = {entry: pick([MXFP4, FP8_BLOCK, MXFP8]) for entry in entries}
        if method.startswith("inner"):
            name = pick(["DeepSeek-V4", "DeepSeek-V4.1"])
        inner = {**FP8, **without(QUARK, "quant_method")}
        scheme = {
            "fp8": {**FP8, "ignored_layers": entries},
            "quark": {**QUARK, "exclude": entries},
            "layers": {**QUARK, "layer_quant_config": configs},
            "modelopt": {**MODELOPT, "ignore": entries},
            "inner": {**inner, "exclude": entries},
            "inner-layers": {**inner, "layer_quant_config": configs},
        }[method]
        mtp = pick([None, None, 0]) if name.startswith("DeepSeek-V4") else None
        cases.append(case(name, scheme, f"random/{number}/{method}", mtp=mtp))
    return cases
