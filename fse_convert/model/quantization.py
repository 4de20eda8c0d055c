"""The quantisation that a checkpoint's configs describe, as one value, with every contradiction between them.

This is the one reading of them, and nothing here decides anything: storage formats come from the headers
(`fse_convert.model.formats`), and what a server reads differently stands beside that server's rules (`fse_convert.servers`).
Malformed values never raise; they become conflicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fse_convert.errors import Problem, counted
from fse_convert.model.families.family import place
from fse_convert.model.values import DYNAMIC, QUANTIZATION

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

MODELOPT = {
    "FP8": ("modelopt", "FP8"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("modelopt", "FP8"),
    "FP8_PB_WO": ("modelopt", "FP8"),
    "NVFP4": ("modelopt_fp4", "NVFP4"),
    "W4A16_NVFP4": ("modelopt_fp4", "NVFP4"),
    "MXFP8": ("modelopt_mxfp8", "MXFP8"),
    "MIXED_PRECISION": ("modelopt_mixed", ""),
}
"""By ``quant_algo`` of NVIDIA ModelOpt: the method of files that name no ``quant_method``, and what weights are stored as."""
WEIGHTS = {"fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4", "gpt_oss_mxfp4": "MXFP4"}
"""What weights are stored as, by methods that store them in one way."""
SAME = {"compressed_tensors": "compressed-tensors", "deepseek_v4_fp8": "fp8"} | {m: "modelopt" for m, _ in MODELOPT.values()}
"""Other spellings of a method: what servers make of them differs, what is stored does not."""
BLOCK, SCHEME_BLOCKS = "weight_block_size", ("block_structure", "block_size")
"""Keys of an FP8 block: DeepSeek's, and in a scheme compressed-tensors' and Quark's."""
TARGET_KEYS = ("modules_in_block_to_quantize", "block_name_to_quantize", "to_quant_block_names")
"""Keys for the only modules that GPTQ and AutoRound quantise."""
SCHEME = "activation_scheme"

INNER = {"config.json": "quantization_config", "config.json:text_config": "text_config.quantization_config"}
"""Names of quantisations whose keys may also stand beside them."""
_Place = tuple[str, Mapping[str, Any]]

NOT_AN_OBJECT = "quantization-not-an-object"
FP8_METHODS = ("fp8", "deepseek_v4_fp8")
"""Methods whose ``weight_block_size`` servers read (vLLM 0.33 fp8.py, models/deepseek_v4/quant_config.py)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation that the configs describe.

    ``source`` names where it stands: ``config.json``, ``config.json:text_config``, ``config.json:compression_config``,
    ``hf_quant_config.json``, or empty for an unquantised model. ``method`` is ``quant_method`` in lower case, None when
    it is missing. ``block_hint``: the FP8 block that is stated anywhere, under ``block_key``; ``block``: the same where servers
    read one for the method. ``weights``: what it stores weights as, FP8, MXFP8, MXFP4, NVFP4, INT4 ...; empty where it does not
    say. ``ignore`` is the list that servers read, found under ``ignore_key``; ``raw`` the dictionary itself.
    ``conflicts``: what is malformed, and where configs contradict each other.
    """

    source: str = ""
    method: str | None = None
    quant_algo: str | None = None
    moe_quant_algo: str | None = None
    block: tuple[int, int] | None = None
    block_hint: tuple[int, int] | None = None
    block_key: str = ""
    weights: frozenset[str] = frozenset()
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
    def left_out(self) -> tuple[str, ...]:
        """Entries of modules that stay unquantised: `ignore`, GPTQ's negative ``dynamic``, and AutoRound's ``extra_config``.

        vLLM 0.33 layers/quantization/utils/gptq_utils.py:91-95, inc/config_parser.py:109-200: both match regular expressions.
        """
        taken = [key[2:] for key in place(self.raw, "dynamic") if key.startswith("-:")]
        extra = place(self.raw, "extra_config")
        taken += [key for key in extra if type(bits := place(extra, key).get("bits")) is int and bits >= 16]
        return (*self.ignore, *(f"re:{key}" for key in taken))

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Entries of the only modules that are quantised; None where all linear layers are.

        vLLM 0.33 layers/quantization/compressed_tensors/utils.py:73-111, utils/gptq_utils.py:120-140, inc/config_parser.py:172.
        """
        if self.method == "compressed-tensors":
            groups = place(self.raw, "config_groups")
            found = [t for key in groups if place(groups, key).get("weights") for t in _names(place(groups, key).get("targets"))]
            return None if "Linear" in found else tuple(found)
        listed = next((v for key in TARGET_KEYS if (v := self.raw.get(key))), None)
        if isinstance(listed, list):
            return tuple(name for each in listed for name in (_names(each) or _names([each])))
        return tuple(listed.split(",")) if isinstance(listed, str) else None


def read_quantization(config: Mapping[str, Any], quant_config: Mapping[str, Any] | None = None) -> Quantization:
    """Read the quantisation that config.json describes, else the one of ``hf_quant_config.json`` (``quant_config``).

    Precedence as vLLM 0.33 has it: config.json's ``quantization_config``, then ``hf_quant_config.json``
    (transformers_utils/config.py), then ``compression_config``, then ``text_config`` (model_arch_config_convertor.py).
    """
    text = place(config, "text_config")
    candidates = {
        "config.json": config.get("quantization_config"),
        "hf_quant_config.json": quant_config,
        "config.json:compression_config": config.get("compression_config"),
        "config.json:text_config": text.get("quantization_config"),
    }
    sections = [_Section(source, value) for source, value in candidates.items() if isinstance(value, Mapping)]
    top, inner = (
        [("config.json", config), ("config.json:text_config", text)],
        [(INNER.get(s.source, s.source), s.flat) for s in sections],
    )
    # DeepSeek-V4 writes expert_dtype at the top level, V4.1 inside quantization_config
    dtypes = [(where, str(found["expert_dtype"])) for where, found in (*top, *inner) if found.get("expert_dtype") is not None]
    blocks = list(_blocks([*inner, *top]))
    found = (
        _not_objects(candidates),
        _misstated(inner),
        _contradicting(sections),
        _dtype_conflicts(dtypes),
        _block_conflicts(blocks),
    )
    conflicts = [problem for each in found for problem in each]
    block = next((b for b in blocks if b.sides), NO_BLOCK)
    dtype = dtypes[0][1] if dtypes else None
    anywhere = Quantization(expert_dtype=dtype, block_hint=block.sides, block_key=block.key, conflicts=tuple(conflicts))
    if not sections:
        return anywhere
    read = sections[0]
    one_block = read.method in FP8_METHODS or (read.method == "compressed-tensors" and len(list(_schemes(read.flat))) == 1)
    ignore, ignore_key, ignore_conflicts = _ignore(read.flat, read.method)
    return replace(
        anywhere,
        source=read.source,
        method=read.method,
        quant_algo=_upper(read.flat.get("quant_algo")),
        moe_quant_algo=_upper(read.flat.get("moe_quant_algo")),
        block=block.sides if one_block else None,
        weights=frozenset(read.weights),
        ignore=ignore,
        ignore_key=ignore_key,
        raw=read.raw,
        conflicts=(*conflicts, *_method_conflicts(read), *ignore_conflicts, *_quark_conflicts(read)),
    )


def _misstated(places: list[_Place]) -> Iterator[Problem]:
    """Find values of a type that no server takes."""
    for where, found in places:
        for key, values in QUANTIZATION.items():
            if found.get(key) is not None and not values.fit(found[key]):
                yield values.refusal(key, found[key], where)


def _not_objects(candidates: Mapping[str, object]) -> Iterator[Problem]:
    for where, value in candidates.items():
        if value is not None and not isinstance(value, Mapping):
            yield Problem(NOT_AN_OBJECT, f"expected an object, found {type(value).__name__}", where=where)


class _Section:
    """One place that describes a quantisation, and what it says, however it spells it."""

    def __init__(self, source: str, raw: Mapping[str, Any]) -> None:
        self.source, self.raw = source, raw
        inner = raw.get("quantization")  # ModelOpt's own file
        self.flat: Mapping[str, Any] = {**raw, **inner} if isinstance(inner, Mapping) else raw
        self.method = _method(raw, self.flat)
        self.ignored = {name for key in IGNORE_KEYS for name in _names(self.flat.get(key))}

    @property
    def named(self) -> dict[str, str]:
        """What the section calls its scheme, spelled alike."""
        method, algo = self.flat.get("quant_method"), self.flat.get("quant_algo")
        found = {"quant_method": SAME.get(str(method).lower(), str(method).lower()), "quant_algo": str(algo).upper()}
        return {key: value for key, value in found.items() if isinstance(self.flat.get(key), str)}

    @property
    def weights(self) -> set[str]:
        """What the section stores weights as: FP8, MXFP8, NVFP4, MXFP4, INT4 ...; empty where it does not say."""
        algos = (_upper(self.flat.get(key)) for key in ("quant_algo", "moe_quant_algo"))
        found = {MODELOPT[a][1] for a in algos if a in MODELOPT} | {_weights(scheme) for scheme in _schemes(self.flat)}
        bits = f"INT{self.flat['bits']}" if type(self.flat.get("bits")) is int else ""
        return (found | {bits, WEIGHTS.get(self.named.get("quant_method", ""), "")}) - {""}


def _schemes(flat: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of weights in compressed-tensors' groups, and in Quark's global and per-layer schemes."""
    places = [(flat.get("config_groups"), "weights"), (flat.get("layer_quant_config"), "weight")]
    places.append(({"": flat.get("global_quant_config")}, "weight"))
    for groups, key in places:
        for group in groups.values() if isinstance(groups, Mapping) else ():
            scheme = group.get(key) if isinstance(group, Mapping) else None
            if isinstance(scheme, Mapping):
                yield scheme


def _weights(scheme: Mapping[str, Any]) -> str:
    """Name the elements of a scheme: ``type`` and ``num_bits`` (compressed-tensors), or ``dtype`` (Quark)."""
    element = re.match(r"(int|fp|float)(\d+)", str(scheme.get("dtype") or f"{scheme.get('type')}{scheme.get('num_bits')}"))
    if element is None:
        return ""
    group = scheme.get("group_size")
    scaled = {32: "MX", 16: "NV"}.get(group, "") if isinstance(group, int) else ""
    return f"INT{element[2]}" if element[1] == "int" else f"{scaled}FP{element[2]}"


def _dtype_conflicts(dtypes: list[tuple[str, str]]) -> Iterator[Problem]:
    for source, value in dtypes[1:]:
        if value != dtypes[0][1]:
            yield Problem("expert-dtype-conflict", f"expert_dtype is {value!r} here and {dtypes[0][1]!r} elsewhere", where=source)


class _Block(NamedTuple):
    """An FP8 block as written, with its place; ``sides`` where it is a pair of positive integers."""

    source: str
    key: str
    value: object
    sides: tuple[int, int] | None


NO_BLOCK = _Block("", "", None, None)


def _blocks(places: list[_Place]) -> Iterator[_Block]:
    """Yield every block that is stated, those of one place in an order that does not depend on its keys'."""
    for source, found in places:
        scopes = [(found, (BLOCK,)), *((scheme, SCHEME_BLOCKS) for scheme in _schemes(found))]
        written = [(key, scope[key]) for scope, keys in scopes for key in keys if scope.get(key) is not None]
        blocks = (_Block(source, key, value, _sides(value, words=key != BLOCK)) for key, value in written)
        yield from sorted(blocks, key=lambda b: (b.sides or (0, 0), repr(b.value)))


def _sides(value: object, *, words: bool) -> tuple[int, int] | None:
    """Read a block: two positive integers, or both in a word as compressed-tensors may write it, ``128x128``."""
    if words and isinstance(value, str) and (both := re.fullmatch(r"(\d+)x(\d+)", value)):
        value = [int(side) for side in both.groups()]
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return value[0], value[1]
    return None


def _block_conflicts(blocks: list[_Block]) -> Iterator[Problem]:
    """Find blocks that are none, and places that state another block than the first place does."""
    for b in blocks:
        if b.sides is None:
            yield Problem("block-size-invalid", f"expected two positive integers, found {b.value!r}", where=b.key)
    first = [b for b in blocks if b.source == blocks[0].source]
    for b in blocks:
        if b.sides and any(f.sides for f in first) and b.source != first[0].source and b.sides not in [f.sides for f in first]:
            message = f"{b.key} is {b.value!r} here and {first[0].value!r} in {first[0].source}"
            yield Problem("quantization-conflict", message, where=b.source)


def _contradicting(sections: list[_Section]) -> Iterator[Problem]:
    """Compare the other places that describe a quantisation with the one that is read: its name, its elements, its exclusions."""
    for other in sections[1:]:
        read = sections[0]
        hint = f"servers read {read.source}; keep the one that says how the experts are stored, and remove the other"
        both = [key for key in read.named if key in other.named and read.named[key] != other.named[key]]
        mine, theirs = read.weights, other.weights
        if both:
            message = f"{both[0]} is {other.flat[both[0]]!r} here and {read.flat[both[0]]!r} in {read.source}"
            yield Problem("quantization-conflict", message, where=other.source, hint=hint)
        elif mine and theirs and not (mine <= theirs or theirs <= mine):
            message = f"weights are {', '.join(sorted(theirs))} here and {', '.join(sorted(mine))} in {read.source}"
            yield Problem("quantization-conflict", message, where=other.source, hint=hint)
        if read.ignored != other.ignored:
            more, fewer = len(other.ignored - read.ignored), len(read.ignored - other.ignored)
            message = f"excludes {counted(more, 'module')} that {read.source} does not, and lacks {fewer}"
            yield Problem("quantization-conflict", message, where=other.source, hint=f"servers read {read.source}")


def _method(raw: Mapping[str, Any], flat: Mapping[str, Any]) -> str | None:
    method = raw.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower().replace("compressed_tensors", "compressed-tensors")
    producer = raw.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return MODELOPT.get(_upper(flat.get("quant_algo")) or "", (None, ""))[0]
    return None


def _ignore(flat: Mapping[str, Any], method: str | None) -> tuple[tuple[str, ...], str | None, tuple[Problem, ...]]:
    written = {key: value for key in IGNORE_KEYS if (value := flat.get(key)) is not None}
    keys = READ_BY.get(method or "", ("ignore", "exclude_modules") if (method or "").startswith("modelopt") else IGNORE_KEYS)
    problems = [
        Problem("ignore-not-a-list", f"{key} must be a list of module names, found {type(value).__name__}", where=key)
        for key, value in written.items()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value)
    ]
    lists = {key: _names(value) for key, value in written.items()}
    key = next((k for k in keys if lists.get(k)), next((k for k in keys if k in lists), None))
    chosen = lists[key] if key else ()
    for other, names in lists.items():
        nvfp4 = other == "ignore" and _upper(flat.get("moe_quant_algo")) == "NVFP4"  # vLLM 0.32 deepseek_v41/quant_config.py:198
        if other != key and names and set(names) != set(chosen) and not nvfp4:
            message = f"lists {counted(len(names), 'module')}, but servers do not read this key"
            problems.append(
                Problem("ignore-key-unread", message, other, f"for {method or 'this checkpoint'} they read {' or '.join(keys)}")
            )
    return chosen, key, tuple(problems)


def _names(value: object) -> tuple[str, ...]:
    return tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()


def _method_conflicts(read: _Section) -> Iterator[Problem]:
    if read.method is None:
        message, hint = "a quantisation is described without a quant_method", "vLLM loads such a model as unquantised"
        yield Problem("quant-method-missing", message, "quantization_config", hint)
    elif read.method == "modelopt_mxfp8" and "quant_method" not in read.raw:
        hint = "vLLM 0.33 knows MXFP8 from config.json only: there it raises Unknown ModelOpt quant algo: MXFP8"
        yield Problem("modelopt-file-unread", "MXFP8 is described by hf_quant_config.json alone", "hf_quant_config.json", hint)
    if read.method in FP8_METHODS and read.flat.get(BLOCK) and read.flat.get(SCHEME) == "static":
        yield DYNAMIC.refusal(SCHEME, "static", read.source)


def _quark_conflicts(read: _Section) -> Iterator[Problem]:
    for key in ("exclude", "global_quant_config", "export") if read.method == "quark" else ():
        if read.raw.get(key) is None:
            yield Problem("quark-incomplete", f"a Quark export without {key}", where="quantization_config", hint="servers need it")


def _upper(value: object) -> str | None:
    return value.upper() if isinstance(value, str) else None
