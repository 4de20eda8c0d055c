"""Our reading of Quark configs for SGLang against SGLang's own: what it may fuse, and which modules it builds as FP4."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fse_convert.model.quantization import read_quantization
from fse_convert.servers.sglang_quark import SglangQuark
from tests.peers.aiter_cases import FP8_BLOCK, MXFP4, QUARK
from tests.peers.sglang_run import run_driver

pytestmark = pytest.mark.peers

MODULES = {
    False: {
        "layers.0.attn.wq_a": "model.layers.0.self_attn.wq_a",
        "layers.0.attn.indexer.wq_b": "model.layers.0.self_attn.indexer.wq_b",
    },
    True: {
        "mtp.0.attn.wo_b": "model.decoder.self_attn.wo_b",
        "mtp.0.e_proj": "model.e_proj",
        "mtp.0.ffn.shared_experts.w2": "model.decoder.mlp.shared_experts.down_proj",
    },
}
SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": dict.fromkeys([name for names in MODULES.values() for name in names], FP8_BLOCK),
    "globs": {"*attn*": FP8_BLOCK, "*e_proj": FP8_BLOCK},
    "regular expressions": {r"re:layers\..*attn.*": FP8_BLOCK},
    "shared of the first layer": {f"layers.0.ffn.shared_experts.w{n}": FP8_BLOCK for n in (1, 2, 3)},
    "shared of another layer": {f"layers.1.ffn.shared_experts.w{n}": FP8_BLOCK for n in (1, 2, 3)},
    "shared of the drafter": {f"mtp.0.ffn.shared_experts.w{n}": FP8_BLOCK for n in (1, 2, 3)},
    "shared, by a glob": {"*shared_experts*": FP8_BLOCK},
    "shared as the others": {"*shared_experts*": MXFP4},
    "experts one by one": {f"mtp.0.ffn.experts.{e}.w{n}": MXFP4 for e in (0, 1) for n in (1, 2, 3)},
}
EXCLUDES = {
    "nothing": [],
    "the head": ["head"],
    "shared of a layer": ["layers.1.ffn.shared_experts.w1"],
    "shared of the drafter": ["mtp.0.ffn.shared_experts.w1"],
    "shared of the drafter as a later layer": ["model.layers.3.mlp.shared_experts.gate_proj"],
    "the shared expert's gate": ["layers.0.ffn.shared_expert_gate"],
    "a regular expression": ["re:.*shared_experts.*"],
}


def cases() -> dict[str, dict[str, Any]]:
    made = {}
    for (name, layers), (out, exclude), draft in product(SCHEMES.items(), EXCLUDES.items(), (False, True)):
        scheme = {**QUARK, "layer_quant_config": layers, "exclude": exclude}
        config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "quantization_config": scheme}
        made[f"{name} / without {out} / {draft}"] = {"draft": draft, "config": config, "modules": list(MODULES[draft].values())}
    return made


def test_sglang_reads_quark_as_we_say(work: Path) -> None:
    asked = cases()
    found = run_driver("sglang_quark_driver", folder=work, given=json.dumps(list(asked.values())))
    assert found["version"] == "0.5.23"
    differ = {}
    for (name, case), theirs in zip(asked.items(), found["answers"], strict=True):
        read = SglangQuark.of(read_quantization(case["config"]), case["config"], "0.5.23", draft=case["draft"])
        names = MODULES[case["draft"]]
        ours = {"fuses": read.may_fuse(), "fp4": [names[m] for m in read.misread(tuple(names))]}
        if ours != theirs:
            differ[name] = ours, theirs
    assert differ == {}
    assert len({answer["fuses"] for answer in found["answers"]}) == 2
