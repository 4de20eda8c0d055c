"""The quantisation that a checkpoint's configs describe, as one value, with every contradiction between them.

This is the one reading of them, and nothing here decides anything: storage formats come from the headers
(`fse_convert.model.formats`), and what a server reads differently stands beside that server's rules (`fse_convert.servers`).
Malformed values never raise; they become conflicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fse_convert.errors import Problem

IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert", "exclude", "ignore", "exclude_modules")
"""Keys for modules that stay unquantised: DeepSeek and MiniMax, transformers, Quark, ModelOpt, ModelOpt's own file."""

READ_BY = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "deepseek_v4_fp8": ("ignored_layers", "modules_to_not_convert"),
    "quark": ("exclude",),
    "mxfp8": ("ignored_layers",),
    "compressed-tensors": ("ignore",),
}
"""Those of them that servers read for a method, the first with entries (vLLM 0.33 fp8.py, quark.py, modelopt.py)."""

MODELOPT_METHODS = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt"} | {
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}
"""Methods by ``quant_algo`` of NVIDIA ModelOpt, for files that name no ``quant_method``."""


NOT_AN_OBJECT = "quantization-not-an-object"
FP8_METHODS = ("fp8", "deepseek_v4_fp8")
"""Methods whose ``weight_block_size`` servers read (vLLM 0.33 fp8.py, models/deepseek_v4/quant_config.py)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation that the configs describe.

    ``source`` names where it stands: ``config.json``, ``config.json:text_config``, ``config.json:compression_config``,
    ``hf_quant_config.json``, or empty for an unquantised model. ``method`` is ``quant_method`` in lower case, None when
    it is missing. ``block`` is ``weight_block_size``. ``ignore`` is the list that servers read, found under ``ignore_key``;
    ``raw`` the dictionary itself. ``conflicts``: what is malformed, and where configs contradict each other.
    """

    source: str = ""
    method: str | None = None
    quant_algo: str | None = None
    moe_quant_algo: str | None = None
    block: tuple[int, int] | None = None
    ignore: tuple[str, ...] = ()
    ignore_key: str | None = None
    expert_dtype: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    conflicts: tuple[Problem, ...] = ()

    @property
    def malformed(self) -> bool:
        """True where config.json's ``quantization_config`` is something else than an object."""
        return any(problem.code == NOT_AN_OBJECT and problem.where == "config.json" for problem in self.conflicts)

    @property
    def quantized(self) -> bool:
        """True where any config describes a quantisation."""
        return bool(self.source)

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """The FP8 block that servers believe the weights to have; None where they read none."""
        return self.block if self.method in FP8_METHODS else None


def read_quantization(config: Mapping[str, Any], quant_config: Mapping[str, Any] | None = None) -> Quantization:
    """Read the quantisation that config.json describes, else the one of ``hf_quant_config.json`` (``quant_config``).

    Precedence as vLLM 0.33 has it: config.json's ``quantization_config``, then ``hf_quant_config.json``
    (transformers_utils/config.py), then ``compression_config``, then ``text_config`` (model_arch_config_convertor.py).
    """
    places = list(_places(config, quant_config))
    dtypes = list(_expert_dtypes(config, places))
    dtype = dtypes[0][1] if dtypes else None
    conflicts = [*_not_objects(config, quant_config), *_contradicting(places), *_dtype_conflicts(dtypes)]
    if not places:
        return Quantization(expert_dtype=dtype, conflicts=tuple(conflicts))
    source, raw = places[0]
    inner = _inner(raw)
    method = _method(raw, inner)
    ignore, ignore_key, ignore_conflicts = _ignore(raw, inner, method)
    block = _block(raw)
    conflicts += [*_method_conflicts(method, raw), *ignore_conflicts, *_block_conflicts(raw, block), *_quark_conflicts(raw, method)]
    return Quantization(
        source=source,
        method=method,
        quant_algo=_upper(inner.get("quant_algo")),
        moe_quant_algo=_upper(raw.get("moe_quant_algo")),
        block=block,
        ignore=ignore,
        ignore_key=ignore_key,
        expert_dtype=dtype,
        raw=raw,
        conflicts=tuple(conflicts),
    )


def _places(config: Mapping[str, Any], quant_config: Mapping[str, Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = config.get("text_config")
    candidates = (
        ("config.json", config.get("quantization_config")),
        ("hf_quant_config.json", quant_config),
        ("config.json:compression_config", config.get("compression_config")),
        ("config.json:text_config", text.get("quantization_config") if isinstance(text, Mapping) else None),
    )
    for source, value in candidates:
        if isinstance(value, Mapping):
            yield source, value


def _not_objects(config: Mapping[str, Any], quant_config: object) -> Iterator[Problem]:
    for where, value in (("config.json", config.get("quantization_config")), ("hf_quant_config.json", quant_config)):
        if value is not None and not isinstance(value, Mapping):
            yield Problem(NOT_AN_OBJECT, f"expected an object, found {type(value).__name__}", where=where)


def _inner(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that holds ModelOpt's keys: ``quantization`` in its own file, else the dictionary itself."""
    inner = raw.get("quantization")
    return inner if isinstance(inner, Mapping) else raw


def _method(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> str | None:
    method = raw.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower().replace("compressed_tensors", "compressed-tensors")
    producer = raw.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return MODELOPT_METHODS.get(str(inner.get("quant_algo", "")).upper())
    return None


def _ignore(
    raw: Mapping[str, Any], inner: Mapping[str, Any], method: str | None
) -> tuple[tuple[str, ...], str | None, tuple[Problem, ...]]:
    written = {key: value for key in IGNORE_KEYS for place in (inner, raw) if (value := place.get(key)) is not None}
    keys = READ_BY.get(method or "", ("ignore", "exclude_modules") if (method or "").startswith("modelopt") else IGNORE_KEYS)
    problems = [
        Problem("ignore-not-a-list", f"{key} must be a list of module names, found {type(value).__name__}", where=key)
        for key, value in written.items()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value)
    ]
    lists = {key: _names(value) for key, value in written.items()}
    key = next((k for k in keys if lists.get(k)), next((k for k in keys if k in lists), None))
    chosen = lists.get(key, ()) if key else ()
    for other, names in lists.items():
        if other != key and names and set(names) != set(chosen):
            message, hint = (
                f"{other} lists {len(names)} modules that servers do not read",
                f"{method} is read with {' or '.join(keys)}",
            )
            problems.append(Problem("ignore-key-unread", message, other, hint))
    return chosen, key, tuple(problems)


def _names(value: object) -> tuple[str, ...]:
    return tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()


def _block(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    value = raw.get("weight_block_size")
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return value[0], value[1]
    return None


def _block_conflicts(raw: Mapping[str, Any], block: tuple[int, int] | None) -> Iterator[Problem]:
    value = raw.get("weight_block_size")
    if value is not None and block is None:
        yield Problem("block-size-invalid", f"expected two positive integers, found {value!r}", where="weight_block_size")


def _expert_dtypes(config: Mapping[str, Any], places: list[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Yield every ``expert_dtype`` with its place: DeepSeek-V4 writes it at the top level, V4.1 inside ``quantization_config``."""
    named = [("quantization_config" if source == "config.json" else source, place) for source, place in places]
    for source, place in (("config.json", config), ("config.json:text_config", config.get("text_config")), *named):
        value = place.get("expert_dtype") if isinstance(place, Mapping) else None
        if isinstance(value, str):
            yield source, value


def _dtype_conflicts(dtypes: list[tuple[str, str]]) -> Iterator[Problem]:
    for source, value in dtypes[1:]:
        if value != dtypes[0][1]:
            yield Problem("expert-dtype-conflict", f"expert_dtype is {value!r} here and {dtypes[0][1]!r} elsewhere", where=source)


def _contradicting(places: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Compare the other places that describe a quantisation with the one that is read."""
    if not places:
        return
    read_from, first = places[0]
    for source, other in places[1:]:
        for key in ("quant_algo", "weight_block_size"):
            mine, theirs = _inner(first).get(key), _inner(other).get(key)
            if theirs is not None and _folded(mine) != _folded(theirs):
                yield Problem("quantization-conflict", f"{key} is {theirs!r} here and {mine!r} in {read_from}", where=source)
        mine, theirs = _all_ignored(first), _all_ignored(other)
        if mine != theirs:
            message = f"excludes {len(theirs - mine)} modules that {read_from} does not, and lacks {len(mine - theirs)}"
            yield Problem("quantization-conflict", message, where=source, hint=f"servers read {read_from}")


def _folded(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _all_ignored(raw: Mapping[str, Any]) -> set[str]:
    return {name for key in IGNORE_KEYS for name in _names(_inner(raw).get(key))}


def _method_conflicts(method: str | None, raw: Mapping[str, Any]) -> Iterator[Problem]:
    if method is None:
        message, hint = "a quantisation is described without a quant_method", "vLLM loads such a model as unquantised"
        yield Problem("quant-method-missing", message, "quantization_config", hint)
    elif method in MODELOPT_METHODS.values() and "quant_method" not in raw and _upper(_inner(raw).get("quant_algo")) == "MXFP8":
        hint = "vLLM 0.33 knows MXFP8 from config.json only: there it raises Unknown ModelOpt quant algo: MXFP8"
        yield Problem("modelopt-file-unread", "MXFP8 is described by hf_quant_config.json alone", "hf_quant_config.json", hint)


def _quark_conflicts(raw: Mapping[str, Any], method: str | None) -> Iterator[Problem]:
    if method != "quark":
        return
    for key in ("exclude", "global_quant_config", "export"):
        if raw.get(key) is None:
            yield Problem("quark-incomplete", f"a Quark export without {key}", where="quantization_config", hint="vLLM needs it")


def _upper(value: object) -> str | None:
    return value.upper() if isinstance(value, str) else None
