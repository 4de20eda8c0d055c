"""Where config.json's quantisation and the stored tensors contradict each other. Headers are right; servers believe the config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from fse_convert.errors import Problem
from fse_convert.model.describe import METHOD_CONFLICT, Description, ExpertGroup
from fse_convert.model.formats import Kind
from fse_convert.model.quantization import Quantization

OTHER_CODES = ("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "aqlm", "hqq", "eetq", "gguf")
"""Methods that store weights as codes of their own: none of them reads FP8 blocks, MXFP4 or NVFP4."""
WHOLE_MODEL = ("fp8", "deepseek_v4_fp8", "quark", "mxfp8", "modelopt", "modelopt_fp4", "modelopt_mxfp8")
"""Methods that quantise every linear layer but those they list; others (compressed-tensors) list what they quantise."""


def header_conflicts(quantization: Quantization, description: Description) -> tuple[Problem, ...]:
    """Compare what the configs say about experts with how they are stored."""
    return tuple(_conflicts(quantization, description))


def _conflicts(quantization: Quantization, description: Description) -> Iterator[Problem]:
    routed = [(f"{d.layer.name}.experts", d.routed) for d in description.layers if d.routed]
    shared = [(d.layer.shared.name, d.shared) for d in description.layers if d.shared and d.layer.shared]
    stored = sorted({group.label for _, group in routed + shared if not _plain(group)})
    if not quantization.quantized:
        if stored:
            message = f"no quantization_config, but experts are stored as {', '.join(stored)}"
            yield Problem("quantization-missing", message, "config.json", "servers would load the model as unquantised")
        return
    if quantization.method in OTHER_CODES and stored:
        message = f"says {quantization.method}, but experts are stored as {', '.join(stored)}"
        yield Problem(METHOD_CONFLICT, f"{quantization.source} {message}", "config.json", "servers would not load them")
    if quantization.method not in WHOLE_MODEL:
        return
    for what, groups in (("routed experts", routed), ("shared experts", shared)):
        stale = [name for name, group in groups if _plain(group) and not covered(quantization.ignore, name)]
        if stale:
            label = next(group.label for name, group in groups if name == stale[0])
            message = f"says {quantization.method}, but {what} are stored as {label} in {len(stale)} layers and are not excluded"
            yield Problem("quantization-stale", f"{quantization.source} {message}", stale[0], "servers would ask for scales")
        if quantization.method in ("fp8", "deepseek_v4_fp8") and quantization.moe_quant_algo is None:
            kept = [name for name, group in groups if not _plain(group) and covered(quantization.ignore, name)]
            if kept:
                message = f"{quantization.ignore_key} excludes {what} of {len(kept)} layers, which are stored quantised"
                yield Problem("quantization-excluded", message, kept[0], "servers would load them as unquantised")


def _plain(group: ExpertGroup) -> bool:
    return all(f.kind is Kind.PLAIN for f in group.formats.values())


def covered(entries: Sequence[str], name: str) -> bool:
    """Whether some entry of an exclusion list may mean a module: by name, prefix, shell pattern or ``re:`` expression.

    Wider than any one server's matching, so that nothing is called stale which some server would exclude.
    """
    names = (name, f"model.{name}", f"{name}.gate_proj", f"{name}.w1", f"{name}.0.w1")
    return any(_means(entry, names) for entry in entries)


def _means(entry: str, names: Iterable[str]) -> bool:
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry[3:])
        except re.error:
            return False
        return any(pattern.search(n) for n in names)
    bare = entry.strip("*").strip(".")
    return any(fnmatchcase(n, entry) or f".{bare}." in f".{n}." for n in names) if bare else bool(entry)
