"""Load a checkpoint by vLLM's own classes and loaders, and compare every expert with the source, in float64.

    vllm_load.py CHECKPOINT [--source SRC] [--shared-source SRC] [--gpu sm100|sm90|gfx950] [--fse] [--draft mtp|dspark]

Answers in JSON. Without arguments: a list of arguments per line of stdin, all for one GPU, each answered by a process of its own.
The release is that of the first vLLM on the path. Compared are the parameters as loaded, before a kernel's own layout is made
of them: routed experts, slots behind them, shared experts beside them, and the block FP8 matrices of attention ("dense").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.peers import values
from tests.peers.drivers import vllm_gpu

EXPERT = re.compile(r"(?P<block>.*)\.experts\.0\.(w1|gate_proj)\.weight")
PROJECTIONS = {"w1": ("w1", "w3", "w2"), "gate_proj": ("gate_proj", "up_proj", "down_proj")}
PARTS = {"fused_wqa_wkv": ("wq_a", "wkv")}
SPECULATION = {"mtp": 1, "dspark": 5}


class Source:
    """A checkpoint's matrices by name, and its blocks of experts: those of the model, and those of its drafter."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                self.tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        config = json.loads((folder / "config.json").read_text())
        self.block = tuple((config.get("quantization_config") or {}).get("weight_block_size") or (128, 128))
        found = {match["block"]: match[2] for name in self.tensors if (match := EXPERT.fullmatch(name))}
        self.names = {block: PROJECTIONS[gate] for block, gate in sorted(found.items())}
        layers = config.get("text_config", config)["num_hidden_layers"]
        self.main = [b for b in self.names if not b.startswith("mtp.") and int(re.findall(r"\d+", b)[0]) < layers]
        self.draft = [b for b in self.names if b not in self.main]

    def __getitem__(self, name: str) -> Tensor:
        return values.stored(self.tensors, name, self.block)


class Comparison:
    """What was equal, how much of which kind, and the names of what was not."""

    def __init__(self, source: Source, shared: Source) -> None:
        self.source, self.shared = source, shared
        self.equal = {"routed": 0, "slot": 0, "shared": 0, "dense": 0}
        self.unequal: dict[str, list[str]] = {kind: [] for kind in self.equal}

    def note(self, kind: str, name: str, loaded: Tensor, expected: Tensor) -> None:
        """Compare; a parameter may be padded by the server behind the matrix."""
        if torch.equal(loaded[: expected.shape[0], : expected.shape[1]], expected):
            self.equal[kind] += 1
        else:
            self.unequal[kind].append(name)

    def experts(self, held: nn.Module, block: str) -> int:
        """Compare routed experts and the slots behind them; returns the number of slots."""
        gate, up, down = self.source.names[block]
        routed = sum(name.startswith(f"{block}.experts.") and name.endswith(f".{gate}.weight") for name in self.source.tensors)
        w13, w2 = (_decoded(held, name, self.source.block) for name in ("w13", "w2"))
        width = self.source[f"{block}.experts.0.{gate}"].shape[0]
        for expert in range(len(w13)):
            slot = expert - routed
            kind = "routed" if slot < 0 else "slot"
            origin, prefix = (self.source, f"experts.{expert}") if slot < 0 else (self.shared, "shared_experts")
            part = slice(None) if slot < 0 else slice(slot * width, (slot + 1) * width)
            halves = w13[expert].chunk(2)
            for name, half in ((gate, halves[0]), (up, halves[1])):
                self.note(kind, f"{block}.{prefix}.{name}", half, origin[f"{block}.{prefix}.{name}"][part])
            self.note(kind, f"{block}.{prefix}.{down}", w2[expert], origin[f"{block}.{prefix}.{down}"][:, part])
        return len(w13) - routed

    def linear(self, kind: str, module: nn.Module, names: list[str], origin: Source) -> None:
        """Compare a linear layer with the matrices that are its rows."""
        weight, scale = module.weight.data, _scale(module, "weight")
        # V4.1's MXFP8 layers spread a block's scale over its rows as they load it.
        block = (1, 32) if scale is not None and len(scale) == len(weight) else origin.block
        loaded = values.matrix(weight, scale, block)
        for name in names:
            expected = origin[name]
            self.note(kind, name, loaded[: len(expected)], expected)
            loaded = loaded[len(expected) :]


def _scale(module: nn.Module, weight: str) -> Tensor | None:
    """The scales of a parameter, under whichever name the class registers them."""
    found = [getattr(module, name, None) for name in (f"{weight}_scale", f"{weight}_scale_inv")]
    return next((parameter.data for parameter in found if parameter is not None), None)


def _decoded(held: nn.Module, name: str, block: tuple[int, int]) -> list[Tensor]:
    weight, scale = getattr(held, f"{name}_weight").data, _scale(held, f"{name}_weight")
    return [values.matrix(weight[e], None if scale is None else scale[e], block) for e in range(len(weight))]


def compare(model: nn.Module, source: Source, shared: Source, blocks: list[str]) -> dict[str, Any]:
    """Compare all layers of experts, which the model has in the order of the checkpoint's blocks."""
    found = [(name, module) for name, module in model.named_modules() if _experts(module) is not None]
    assert len(found) == len(blocks), f"{[name for name, _ in found]} are not {blocks}"
    result, slots = Comparison(source, shared), []
    for (name, module), block in zip(found, blocks, strict=True):
        slots.append(result.experts(_experts(module), block))
        if module.shared_experts is not None:
            gate, up, down = (f"{block}.shared_experts.{p}" for p in source.names[block])
            result.linear("shared", module.shared_experts.gate_up_proj, [gate, up], shared)
            result.linear("shared", module.shared_experts.down_proj, [down], shared)
        _compare_dense(result, model.get_submodule(name.rpartition(".")[0]), block.rpartition(".")[0])
    return {
        "fused": all(slots),
        "slots": slots,
        "equal": result.equal,
        "unequal": {kind: names for kind, names in result.unequal.items() if names},
    }


def _experts(module: nn.Module) -> Any:
    """The module that holds a layer's routed experts, where ``module`` is the layer's block of experts."""
    if not hasattr(module, "experts") or not hasattr(module, "shared_experts"):
        return None
    return next((m for m in module.experts.modules() if hasattr(m, "w13_weight")), None)


def _compare_dense(result: Comparison, layer: nn.Module, prefix: str) -> None:
    for name, module in layer.named_modules():
        if name.startswith("attn.") and getattr(getattr(module, "weight", None), "dtype", None) == torch.float8_e4m3fn:
            stem, _, last = name.rpartition(".")
            result.linear("dense", module, [f"{prefix}.{stem}.{part}" for part in PARTS.get(last, (last,))], result.source)


def load(arguments: argparse.Namespace) -> nn.Module:
    """Return the model, or its drafter, as loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.utils import get_draft_quant_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = engine_config(arguments)
    with contextlib.ExitStack() as stack:
        rendezvous = stack.enter_context(tempfile.TemporaryDirectory())
        for context in (set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), vllm_gpu.OnCpu()):
            stack.enter_context(context)
        stack.enter_context(vllm_gpu.no_tokenizer(config))
        init_distributed_environment(1, 0, f"file://{rendezvous}/one", 0, "gloo")
        initialize_model_parallel(1, 1)
        model, model_config = initialize_model(vllm_config=config), config.model_config
        if arguments.draft:  # after the model itself, whose construction renames what the quantisation config says
            model_config = config.speculative_config.draft_model_config
            if arguments.draft == "dspark":
                config.quant_config = get_draft_quant_config(config)
            model = initialize_model(vllm_config=config, model_config=model_config)
        model.load_weights(get_model_loader(config.load_config).get_all_weights(model_config, model))
    return model


def engine_config(arguments: argparse.Namespace) -> Any:
    """The engine's config as ``vllm serve`` would make it."""
    from vllm import __version__
    from vllm.engine.arg_utils import EngineArgs

    speculation = {"method": arguments.draft, "num_speculative_tokens": SPECULATION.get(arguments.draft)}
    config = EngineArgs(
        model=arguments.checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=1,
        dtype="bfloat16",
        kv_cache_dtype="fp8" if __version__ == "0.29.0" else "auto",  # it builds V4's attention with no other
        speculative_config=speculation if arguments.draft else None,
    ).create_engine_config()
    if getattr(config.model_config.hf_text_config, "engram_layer_ids", None):
        from vllm.config.engram import EngramConfig

        config.engram_config = EngramConfig(cpu_offload=False)  # the default pins memory, which needs a GPU
    return config


def answer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load and compare; what vLLM raises is an answer."""
    source = Source(Path(arguments.source or arguments.checkpoint))
    shared = Source(Path(arguments.shared_source)) if arguments.shared_source else source
    try:
        model = load(arguments)
    except Exception as error:  # noqa: BLE001
        return {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exception(error)[-3:]}
    result = compare(model, source, shared, source.draft if arguments.draft else source.main)
    return {"refused": None, "class": type(model).__name__, **result}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read one list of arguments."""
    parser = argparse.ArgumentParser(description="Load a checkpoint in vLLM and compare every expert with the source.")
    parser.add_argument("checkpoint")
    parser.add_argument("--source", help="with whose values to compare; the checkpoint itself by default")
    parser.add_argument("--shared-source", help="with whose values to compare the shared experts, if others")
    parser.add_argument("--gpu", choices=sorted(vllm_gpu.GPUS), default="sm100")
    parser.add_argument("--fse", action="store_true", help="VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS")
    parser.add_argument("--draft", choices=sorted(SPECULATION), default="")
    return parser.parse_args(argv)


def isolated(arguments: argparse.Namespace) -> dict[str, Any]:
    """`answer` in a forked process, as a process has one environment and one distributed state."""
    from vllm._aiter_ops import rocm_aiter_ops

    read, write = os.pipe()
    if not (child := os.fork()):
        os.environ["VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"] = str(int(arguments.fse))
        if arguments.draft == "dspark":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # it has no other
        rocm_aiter_ops.refresh_env_variables()
        try:
            result = answer(arguments)
        except BaseException as error:  # noqa: BLE001
            result = {"failed": traceback.format_exception(error)[-3:]}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def main() -> None:
    """Answer one case, or all of stdin; they share the GPU."""
    cases = [parse(sys.argv[1:])] if sys.argv[1:] else [parse(json.loads(line)) for line in sys.stdin]
    vllm = vllm_gpu.start(cases[0].gpu)
    warm_up()
    answers = [{"version": vllm.__version__, **isolated(case)} for case in cases]
    print("@@@" + json.dumps(answers))


def warm_up() -> None:
    """Import what every case would import."""
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader
    import vllm.models.deepseek_v4

    with contextlib.suppress(ImportError):  # 0.29
        import vllm.models.deepseek_v41  # noqa: F401


if __name__ == "__main__":
    main()
