"""Ask SGLang's own Quark config what it makes of DeepSeek-V4 exports: JSON cases on stdin, JSON answers on stdout.

Runs in SGLang's environment on a CPU. Real code: `QuarkConfig.from_config`, `apply_weight_name_mapper`, `can_fuse_shared_expert`,
`_find_matched_config`, and the name mappers of the model and of its NextN drafter. No model is built.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from tests.peers.drivers import sglang_host  # noqa: F401  (stands in for compiled operators, before SGLang is imported)


def ask(case: dict) -> dict:
    """Answer one case: may shared experts be fused, and which modules have FP4 weights."""
    from sglang.srt.layers.quantization.quark import quark
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    quark.get_exec = lambda: SimpleNamespace(moe=SimpleNamespace(enforce_shared_experts_fusion=False))
    hf = SimpleNamespace(**case["config"])
    packed = {"packed_modules_mapping": getattr(DeepseekV4ForCausalLM, "packed_modules_mapping", {})}
    quant = quark.QuarkConfig.from_config({**case["config"]["quantization_config"], **packed})
    quant.num_hidden_layers, quant.num_nextn_predict_layers = hf.num_hidden_layers, hf.num_nextn_predict_layers
    model = DeepseekV4ForCausalLMNextN if case["draft"] else DeepseekV4ForCausalLM
    quant.apply_weight_name_mapper(model.get_hf_to_sglang_mapper(hf))
    stub = torch.nn.Module()
    fp4 = [name for name in case["modules"] if quant._find_matched_config(name, stub)["weight"]["dtype"] == "fp4"]
    return {"fuses": quant.can_fuse_shared_expert(), "fp4": fp4}


def main() -> int:
    import sglang

    out = {"version": sglang.__version__, "answers": [ask(case) for case in json.load(sys.stdin)]}
    sys.stdout.write("\n@@@" + json.dumps(out) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
