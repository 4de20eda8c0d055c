"""Ask vLLM's own code whether it would fuse shared experts: JSON cases on stdin, JSON answers on stdout.

Runs in the environment that `tests/peers/make_env.py` builds, on a CPU, with the platform made to look like ROCm while a case runs.
Real code: `_verify_quantization`, `get_quant_config`, the config classes, `configure_quant_config`, `align_mtp_quant_config`,
`is_shared_expert_quant_fse_compatible`, `resolve_layer_fused_shared_expert`, `is_model_fused_shared_expert_compatible`. Faked: the
model config around them, and the model classes, which do not import here: their two mappings are evaluated out of the source.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import regex
import vllm
import vllm.config as vllm_config_module
import vllm.model_executor.layers.quantization as quantization_package
import vllm.models.deepseek_v4.quant_config
from torch import nn
from vllm.config.model import ModelConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.fused_moe import utils as moe_utils
from vllm.model_executor.layers.quantization.utils import config_utils
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.model_loader.weight_utils import get_quant_config
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.transformers_utils import model_arch_config_convertor as convertor

# Before anything looks like ROCm: what the code under test imports late, on the platform where it does import.
with contextlib.suppress(ImportError):
    import vllm.models.deepseek_v41.quant_config
quantization_package.get_quantization_config("fp8")

ROOT = Path(vllm.__file__).parent
CLASS_ATTRIBUTES = ("packed_modules_mapping", "hf_to_vllm_mapper")


class Source:
    """One module of vLLM as syntax: evaluates class attributes without importing it, following imports of other model classes."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.path = path
        self.names: dict[str, object] = {"re": regex, "WeightsMapper": WeightsMapper, "dict": dict}

    @staticmethod
    @functools.cache
    def of(path: Path) -> Source:
        return Source(path)

    def attribute(self, class_name: str, name: str) -> object:
        """Return a class attribute, from the class or the bases that can be found; None where there is none."""
        node = next((n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == class_name), None)
        if node is None:
            where = self._imported(class_name)
            return where.attribute(class_name, name) if where else None
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return self.evaluate(statement.value)
        for base in node.bases:
            if isinstance(base, ast.Name) and (value := self.attribute(base.id, name)) is not None:
                return value
        return None

    def _imported(self, name: str) -> Source | None:
        for statement in ast.walk(self.tree):
            if isinstance(statement, ast.ImportFrom) and any((a.asname or a.name) == name for a in statement.names):
                path = self._module_path(statement)
                return Source.of(path) if path else None
        return None

    def _module_path(self, statement: ast.ImportFrom) -> Path | None:
        if statement.level:
            base = self.path.parents[statement.level - 1]
            parts = (statement.module or "").split(".") if statement.module else []
        elif statement.module and statement.module.startswith("vllm."):
            base, parts = ROOT, statement.module.split(".")[1:]
        else:
            return None
        path = base.joinpath(*parts)
        found = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        return found if found.is_file() else None

    def evaluate(self, node: ast.expr) -> object:
        """Evaluate an expression: literals, mappers, module-level names and functions, attributes of other classes."""
        for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            if name not in self.names:
                self.names[name] = self._resolve(name)
        return eval(compile(ast.Expression(node), str(self.path), "eval"), self.names)

    def _resolve(self, name: str) -> object:
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                exec(compile(ast.Module([statement], []), str(self.path), "exec"), self.names)
                return self.names[name]
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return self.evaluate(statement.value)
        other = self._imported(name)
        if other is not None and not any(isinstance(n, ast.ClassDef) and n.name == name for n in other.tree.body):
            with contextlib.suppress(LookupError):
                return other._resolve(name)
        if other is not None or any(isinstance(n, ast.ClassDef) and n.name == name for n in self.tree.body):
            return _ClassStand(self, name)
        raise LookupError(name)


class _ClassStand:
    """Stands for a class in an evaluated expression: its attributes are evaluated in turn."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name

    def __getattr__(self, name: str) -> object:
        return self._source.attribute(self._name, name)


@functools.cache
def model_class(spec: str) -> type:
    """Make a class with the two mappings of a model class, given as `path/in/vllm.py:ClassName`."""
    path, _, name = spec.partition(":")
    source = Source.of(ROOT / path)
    found = {key: source.attribute(name, key) for key in CLASS_ATTRIBUTES}
    return type(name, (), {key: value for key, value in found.items() if value is not None})


@functools.cache
def rocm_methods() -> list[str]:
    """Return the quantisation methods that the ROCm platform supports, out of its source."""
    tree = ast.parse((ROOT / "platforms" / "rocm.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "supported_quantization":
            return ast.literal_eval(node.value)
    raise LookupError("supported_quantization")


@contextlib.contextmanager
def as_rocm():
    """Let the current platform look like ROCm to the code that picks a quantisation class."""
    kind = type(current_platform)
    changed = {
        "is_rocm": lambda self: True,
        "is_cpu": lambda self: False,
        "supported_quantization": rocm_methods(),
        "device_name": "rocm",
    }
    before = {name: kind.__dict__.get(name) for name in changed}
    for name, value in changed.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(kind, name)
            else:
                setattr(kind, name, value)


def hf_config(config: dict, quant_config: dict | None) -> object:
    """Make the config object that the model code reads; V4.1's is the real class, which flattens it."""
    if config.get("model_type") == "deepseek_v41":
        from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

        made = DeepseekV41Config(**copy.deepcopy(config))
    else:
        made = SimpleNamespace(**copy.deepcopy(config))
        if isinstance(config.get("text_config"), dict):
            made.text_config = SimpleNamespace(**copy.deepcopy(config["text_config"]))
    if config.get("quantization_config") is None and quant_config is not None:
        made.quantization_config = copy.deepcopy(quant_config)
    return made


def build(case: dict, hf: object) -> object:
    """Return the quantisation object that the server would build, None for none."""
    reader = object.__new__(convertor.ModelArchConfigConvertorBase)
    reader.hf_config = hf
    arch = SimpleNamespace(quantization_config=reader.get_quantization_config(), total_num_attention_heads=8, total_num_kv_heads=8)
    online = QuantizationConfigArgs(**case["online"]) if case.get("online") else None
    model = SimpleNamespace(
        quantization=None,
        quantization_config=online,
        model_arch_config=arch,
        hf_config=hf,
        allow_deprecated_quantization=False,
        hf_overrides={},
        model=case.get("folder", "/nonexistent"),
        revision=None,
    )
    ModelConfig._verify_quantization(model)
    if model.quantization is None:
        return None
    quant = get_quant_config(model, SimpleNamespace(download_dir=None))
    configure_quant_config(quant, model_class(case["model_class"]))
    if case.get("mtp"):
        from vllm.models.deepseek_v4 import quant_config as module

        if hasattr(module, "align_mtp_quant_config"):
            numbers = SimpleNamespace(num_hidden_layers=hf.num_hidden_layers, num_nextn_predict_layers=case["mtp"])
            module.align_mtp_quant_config(quant, numbers)
    return quant


def ask(case: dict) -> dict:
    """Answer one case."""
    answer: dict[str, object] = {"id": case["id"], "stage": "config"}
    hf = hf_config(case["config"], case.get("quant_config"))
    moe_utils.rocm_aiter_ops.is_fusion_moe_shared_experts_enabled = lambda: True
    moe_utils.logger.warning = lambda *_: None
    if hasattr(config_utils, "logger"):
        config_utils.logger.warning_once = lambda *_: None
    fake = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf))
    try:
        with as_rocm(), vllm_config_module.set_current_vllm_config(fake, check_compile=False):
            quant = build(case, hf)
            answer["class"] = type(quant).__name__ if quant is not None else ""
            answer["module"] = type(quant).__module__
            answer["stage"] = "check"
            if case.get("modules"):
                schemes = {name: quant.get_layer_quant_config_from_name(name) for name in case["modules"]}
                general = quant.quant_config["global_quant_config"]
                answer["schemes"] = {name: (scheme or general)["weight"]["dtype"] for name, scheme in schemes.items()}
            check, block, shared = config_utils.is_shared_expert_quant_fse_compatible, case["block"], case["shared"]
            takes_backend = "moe_backend" in inspect.signature(check).parameters
            backend = {"moe_backend": case["moe_backend"]} if case.get("moe_backend") and takes_backend else {}
            fused, reason = check(copy.deepcopy(quant), f"{block}.experts", f"{block}.{shared}", **backend)
            answer.update(fused=fused, reason=reason)
            answer["resolved"] = moe_utils.resolve_layer_fused_shared_expert(quant, block, shared, **backend)
    except Exception as error:  # noqa: BLE001  whatever vLLM raises is its answer
        answer.update(error=type(error).__name__, text=str(error))
    return answer


def judge_mixed(states: list[bool | None]) -> dict:
    """Judge layers together; None stands for a layer that another pipeline rank holds."""

    class Block(nn.Module):
        def __init__(self, enabled: bool) -> None:
            super().__init__()
            self.is_fused_shared_expert_enabled = enabled

    class Layer(nn.Module):
        def __init__(self, enabled: bool) -> None:
            super().__init__()
            self.mlp = Block(enabled)

    layers = nn.ModuleList(moe_utils.PPMissingLayer() if state is None else Layer(state) for state in states)
    try:
        return {"fused": moe_utils.is_model_fused_shared_expert_compatible(layers, Block, "mlp")}
    except NotImplementedError as error:
        return {"error": type(error).__name__, "text": str(error)}


def main() -> int:
    request = json.load(sys.stdin)
    out = {
        "version": vllm.__version__,
        "answers": [ask(case) for case in request["cases"]],
        "mixed": [judge_mixed(states) for states in request.get("mixed", [])],
    }
    sys.stdout.write("\n@@@" + json.dumps(out) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
