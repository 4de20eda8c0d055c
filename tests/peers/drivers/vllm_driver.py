"""Load converted checkpoints through vLLM and say what came of it: JSON cases on stdin, JSON answers on stdout.

A case: ``checkpoint``, ``model`` (see `vllm_cpu.MODELS`), ``load_format``, ``arguments`` of the engine, ``environment``,
``sabotage``. Counted are tensors read out of safetensors files, by kind, and bytes that torch allocates: live after
construction and after loading, and at the peak between the two.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
import time
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STARTED = time.perf_counter()
PARTS = ("shared_l1_weight", "shared_l1_weight_scale", "shared_l2_weight", "shared_l2_weight_scale")
SLOTS = ("_transformed_shared_l1_weights", "_transformed_shared_l2_weights")


class Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that a torch operation allocates, until it is freed; mapped files are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.built = 0
        self._known: dict[int, int] = {}

    def start_loading(self) -> None:
        """Forget what construction took: from here on the peak is that of loading."""
        gc.collect()
        self.built = self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage(), given)
        return out

    def _see(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._known or not size:
            return
        self._known[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key)


class Reads:
    """Stands in for ``safe_open`` and counts what is read through it, by folder and kind."""

    def __init__(self) -> None:
        self.tensors: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._open = safetensors.safe_open

    def __call__(self, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return _Shard(self._open(filename, *args, **kwargs), Path(filename).parent.name == "fse", self)

    def clear(self) -> None:
        self.tensors.clear()
        self.bytes.clear()


class _Shard:
    def __init__(self, shard: Any, sidecar: bool, reads: Reads) -> None:
        self._shard, self._sidecar, self._reads = shard, sidecar, reads

    def __enter__(self) -> _Shard:
        self._shard.__enter__()
        return self

    def __exit__(self, *exception: object) -> Any:
        return self._shard.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._shard.get_tensor(name)
        kind = "sidecar" if self._sidecar else "shared" if ".shared_experts." in name else "rest"
        self._reads.tensors[kind] += 1
        self._reads.bytes[kind] += tensor.nbytes
        return tensor


READS = Reads()
safetensors.safe_open = safetensors.torch.safe_open = READS  # before vLLM imports it by name

from fse_convert.serving.vllm import register  # noqa: E402
from tests.peers.drivers import vllm_cpu  # noqa: E402


class Log(logging.Handler):
    """Keeps what vLLM and the plugin say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def digest(tensor: torch.Tensor) -> dict[str, Any]:
    """Bytes of a tensor in logical order, as SHA-256; dtype, shape and strides beside."""
    rows = tensor.detach().contiguous().clone().view(torch.uint8).numpy()
    return {
        "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def kernel_tensors(experts: Any) -> dict[str, torch.Tensor]:
    """What the kernel would be called with for the shared experts of a layer; empty when they are not fused."""
    if not experts.has_fused_shared_experts:
        return {}
    if hasattr(experts, SLOTS[0]):
        return dict(zip(PARTS, (*getattr(experts, SLOTS[0]), *getattr(experts, SLOTS[1])), strict=True))
    return {part: getattr(experts, part).data for part in PARTS}


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """Layers by module name: the kernel's tensors, the width, and what else is held of the shared experts."""
    layers = {}
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if experts is None or not hasattr(experts, "has_fused_shared_experts"):
            continue
        tensors = kernel_tensors(experts)
        mlp = module.shared_experts
        held = [*tensors.values(), *(p.data for p in (mlp.parameters() if mlp is not None else ()))]
        layers[name] = {
            "kernel": {part: digest(t) for part, t in tensors.items()},
            "width": experts.intermediate_size,
            "mlp": mlp is not None,
            "shared_bytes": sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()),
        }
    return layers


def loaded_names(case: dict[str, Any]) -> Any:
    """Have the model's own `load_weights` tell which parameters it loaded."""
    module, name = vllm_cpu.MODELS[case["model"]]
    model_class = getattr(vllm_cpu.importlib.import_module(f"vllm.models.{module}"), name)
    original, names = model_class.load_weights, set()

    def load_weights(self: Any, weights: Any) -> Any:
        names.update({n for n, _ in self.named_parameters()} - (loaded := original(self, weights)))
        names.add(f"={len(loaded)}")
        return loaded

    return mock.patch.object(model_class, "load_weights", load_weights), names


def sabotage(wanted: bool) -> Any:
    """A plugin that logs its failure and serves what vLLM would have served without it."""
    if not wanted:
        return mock.patch.dict({})
    from fse_convert.serving.vllm import loader as vllm_loader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        vllm_loader.logger.error("fse: could not take the shared experts over: loading as usual")
        vllm_loader.DefaultModelLoader.load_weights(self, model, model_config)

    return mock.patch.object(vllm_loader.FseModelLoader, "load_weights", load_weights)


def reload(config: Any, model: torch.nn.Module) -> str:
    """What vLLM's reload of weights would be given by a fresh loader: how many tensors and of which kinds, or the refusal."""
    loader = vllm_cpu.get_model_loader(config.load_config)
    READS.clear()
    try:
        given = sum(1 for _ in loader.get_all_weights(config.model_config, model))
    except Exception as e:  # noqa: BLE001
        return str(e)
    return f"{given} tensors: {' '.join(sorted(READS.tensors))}"


def run(case: dict[str, Any], log: Log) -> dict[str, Any]:
    """Load one checkpoint; an error is an answer."""
    log.lines.clear()
    READS.clear()
    for once in ("_print_info_once", "_print_warning_once"):
        getattr(vllm_cpu.vllm.logger, once).cache_clear()
    started, ledger = time.perf_counter(), Ledger()
    with mock.patch.dict(os.environ, case["environment"]):
        try:
            config = vllm_cpu.engine_config(case["checkpoint"], case["load_format"], case["arguments"])
            logging.getLogger("vllm").addHandler(log)  # 0.33 configures its logger with every config
            patch, names = loaded_names(case)
            with patch, sabotage(case["sabotage"]), ledger:
                model = vllm_cpu.load(config, case["model"], ledger.start_loading)
        except Exception as e:  # noqa: BLE001
            trace = traceback.format_exception(e)[-6:]
            return {"error": type(e).__name__, "text": str(e), "trace": trace, "log": list(log.lines), "reads": dict(READS.tensors)}
    gc.collect()
    answer = {
        "error": None,
        "built": ledger.built,
        "held": ledger.live,
        "peak": ledger.peak,
        "reads": dict(READS.tensors),
        "read_bytes": dict(READS.bytes),
        "parameters": sum(1 for _ in model.parameters()),
        "not_loaded": sorted(n for n in names if not n.startswith("=")),
        "layers": describe(model),
        "log": list(log.lines),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if case["load_format"] == "fse":
        answer["reload"] = reload(config, model)
    del model, config
    gc.collect()
    return answer


def main() -> None:
    """Answer every case."""
    request = json.load(sys.stdin)
    log = Log()
    logging.getLogger("vllm").addHandler(log)
    vllm_cpu.start()
    ready = time.perf_counter() - STARTED
    for case in {case["model"]: case for case in reversed(request["cases"])}.values():
        run(case, log)  # what models share (rotary tables) is allocated by the first of a kind
    answers = [run(case, log) for case in request["cases"]]
    log.lines.clear()
    register()
    register()
    result = {"version": vllm_cpu.vllm.__version__, "ready": round(ready, 2), "answers": answers, "registered_again": log.lines}
    print("@@@" + json.dumps(result))


if __name__ == "__main__":
    main()
