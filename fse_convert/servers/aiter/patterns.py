"""vLLM's matching of module names against the lists of a quantisation config; every method has its own way.

Each function follows one function of vLLM 0.33 (0.29 to 0.32 are the same, except where the rules say otherwise).
vLLM's patterns are of the `regex` module; those that Python's `re` does not compile raise `UnclearError`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from fse_convert.servers.verdict import Outcome, because

Packed = Mapping[str, Sequence[str]]
"""Fused projections and the checkpoint's names of their shards, such as gate_up_proj of gate_proj and up_proj."""


class VerdictError(Exception):
    """A rule that ends the judging of a layer, or of a whole model, with this verdict."""

    outcome = Outcome.UNFUSED

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.verdict = because(self.outcome, code, message)


class NotFusedError(VerdictError):
    """A rule says no; the message is vLLM's."""


class ServerError(VerdictError):
    """vLLM raises here; the message is the exception's text."""

    outcome = Outcome.ERROR

    def __init__(self, message: str, code: str = "aiter-server-error") -> None:
        super().__init__(code, message)


class UnclearError(VerdictError):
    """A pattern or a value that cannot be judged; the message says why."""

    outcome = Outcome.UNKNOWN

    def __init__(self, message: str) -> None:
        super().__init__("aiter-config-unclear", message)


@dataclass(frozen=True, slots=True)
class Renames:
    """A model's renaming of checkpoint modules: regular expressions, substrings, prefixes and suffixes, in this order.

    The part of vLLM's ``WeightsMapper`` that ``get_rename_mapper`` keeps (models/utils.py): each rule is tried on the
    result of the ones before it, and replaces one occurrence (regular expressions: all).
    """

    regexes: tuple[tuple[str, str], ...] = ()
    substrings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        """Tell whether there is any rule."""
        return bool(self.regexes or self.substrings or self.prefixes or self.suffixes)

    def apply(self, name: str) -> str:
        """Return the module name that the server uses for a name in the checkpoint's config."""
        return _renamed(self, name)

    def apply_all(self, names: Iterable[str]) -> tuple[str, ...]:
        """Rename every entry of a list."""
        return tuple(self.apply(name) for name in names)

    def apply_keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the keys of a mapping; of two keys that become equal, the later one wins."""
        return {self.apply(name): value for name, value in values.items()}


@lru_cache(maxsize=1 << 16)  # every release of a server asks for the same thousands of names
def _renamed(rules: Renames, name: str) -> str:
    for pattern, new in rules.regexes:
        name = re.sub(pattern, new, name)
    for old, new in rules.substrings:
        name = name.replace(old, new, 1)
    for old, new in rules.prefixes:
        if name.startswith(old):
            name = new + name[len(old) :]
    for old, new in rules.suffixes:
        if name.endswith(old):
            name = name[: -len(old)] + new
    return name


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnclearError(f"the pattern {pattern!r} is not understood: {error}") from None


def is_regex(pattern: str, name: str) -> bool:
    """Tell whether a regular expression matches the whole name."""
    return _compiled(pattern).fullmatch(name) is not None


def shards(name: str, packed: Packed) -> list[str] | None:
    """Return the names of a fused projection's shards; None for a projection that is not fused."""
    projection = name.rpartition(".")[2]
    if projection not in packed:
        return None
    return [name.replace(projection, shard) for shard in packed[projection]]


def listed(name: str, patterns: Sequence[str], packed: Packed) -> bool:
    """Tell whether a list of exclusions covers a projection; raises ServerError where its shards disagree.

    ``should_ignore_layer`` of quantization/quark/utils.py: an entry is ``re:`` and a regular expression, which need not reach the
    name's end, else the exact name; the fused name comes first.
    """
    if _matches_any(name, patterns):
        return True
    parts = shards(name, packed)
    differ = f"Found different quantization schemes for the shards of {name}. vLLM requires all to use the same scheme."
    return parts is not None and _all_or_none([_matches_any(part, patterns) for part in parts], differ)


def _all_or_none(by_shard: Sequence[bool], differ: str) -> bool:
    """Return what holds for every shard of a projection; raises ServerError with ``differ`` where it holds for some."""
    if any(by_shard) and not all(by_shard):
        raise ServerError(differ, "aiter-shards-differ")
    return all(by_shard)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    matched = [bool(_compiled(p[3:]).match(name)) if p.startswith("re:") else p == name for p in patterns]
    return any(matched)  # all are tried, since one that is not understood leaves the answer open


def specs(value: object) -> Mapping[str, Mapping[str, Any]]:
    """Return those entries of a ``layer_quant_config`` that are objects; none where it is something else."""
    if not isinstance(value, Mapping):
        return {}
    return {key: spec for key, spec in value.items() if isinstance(key, str) and isinstance(spec, Mapping)}


def quark_layer_config(name: str, configs: Mapping[str, Any]) -> Any:
    """Return the scheme that Quark's ``layer_quant_config`` gives a module, None where no entry is for it.

    ``get_layer_quant_config_from_name`` of quantization/quark/quark.py: the first entry wins; without a ``*`` the
    module's name has to be part of the entry's, not the other way round, and ``re:`` means nothing.
    """
    fitting = (config for key, config in configs.items() if (fnmatchcase(name, key) if "*" in key else name in key))
    return next(fitting, None)


def fp8_skipped(name: str, ignored: Sequence[str], packed: Packed) -> bool:
    """Tell whether an FP8 config leaves a module unquantised; raises ServerError where its shards disagree.

    ``is_layer_skipped`` of quantization/utils/quant_utils.py in its mode "exact". A name with "experts" in it counts as
    listed when it is part of an entry: so ``shared_experts.down_proj``, but not ``shared_expert.down_proj``.
    """
    parts = shards(name, packed)
    if parts is not None:
        differ = f"Detected some but not all shards of {name} are quantized. All shards of fused layers to have the same precision."
        return name in ignored or _all_or_none([part in ignored for part in parts], differ)
    if "experts" in name:
        return any(name in entry for entry in ignored)
    return name in ignored


def modelopt_excluded(name: str, excluded: Sequence[str], packed: Packed) -> bool:
    """Tell whether ModelOpt leaves a module unquantised: as FP8 lists do, or by part of the name, or by shell pattern.

    ``is_layer_excluded`` of quantization/modelopt.py.
    """
    partly = ((entry != name and entry in name) or fnmatchcase(name, entry) for entry in excluded)
    return fp8_skipped(name, excluded, packed) or any(partly)


def modelopt_entries(excluded: Iterable[str]) -> list[str]:
    """Split entries such as ``module*`` into the module and ``module.*``, as ModelOpt configs are before renaming.

    ``apply_vllm_mapper`` of quantization/modelopt.py.
    """
    result: list[str] = []
    for entry in excluded:
        if len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            result += [entry[:-1], f"{entry[:-1]}.*"]
        else:
            result.append(entry)
    return result


def layer_index(prefix: str) -> int:
    """Return the one number in a module's name (``extract_layer_index`` of models/utils.py)."""
    numbers = []
    for part in prefix.split("."):
        try:
            numbers.append(int(part))
        except ValueError:
            continue
    if len(numbers) != 1:
        raise ServerError(f"layer name {prefix} should only contain one integer")
    return numbers[0]
