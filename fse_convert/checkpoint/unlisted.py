"""Shards that the index does not list: what they are follows from their headers.

A file name never makes one another model's; one like those of listed shards only keeps a shard from being taken for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache

from fse_convert.checkpoint.header import Header, TensorInfo
from fse_convert.checkpoint.left_out import Kind
from fse_convert.checkpoint.names import INDEX
from fse_convert.errors import Problem, some

IGNORED = "servers that read the index ignore it"
LEFTOVER = Kind(
    "shards that the index does not list, with the names and shapes of tensors that stand in listed ones",
    f"a leftover: {IGNORED}; compare the bytes before you remove it",
)
VARIANT = Kind("shards that the index does not list, with other forms of tensors that stand in listed ones", IGNORED)
FOREIGN = Kind("safetensors files that the index does not list, with no tensor of this model's names", IGNORED)
DRAFTERS = Kind("drafters that the index does not list", "servers take a drafter from a folder of its own, and ignore it here")
DRAFTER = re.compile(r"(?:.*\.)?(?:fc\.weight|midlayer\..*|d2t|t2d|(?:eagle|medusa)\w*\..*)")
"""Tensors of EAGLE's heads (vLLM 0.33 model_executor/models/llama_eagle3.py:242-428) and Medusa's, which no model has."""
NUMBERED = re.compile(r"\d+")
LAYER = re.compile(r"(?P<before>(?:.*?\.)??)\d+\.(?P<after>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Judged:
    """``left``: files that are no part of the checkpoint. ``explained``: absent shards that ``problems`` explain already."""

    left: Mapping[str, Kind]
    problems: tuple[Problem, ...]
    explained: frozenset[str]


def judge_unlisted(
    unlisted: Mapping[str, Header], weight_map: Mapping[str, str], present: Mapping[str, TensorInfo], absent: Sequence[str]
) -> Judged:
    """Tell leftovers, shards that the index forgot, and an index of another save apart.

    ``unlisted``: headers by file name. ``present``: the tensors of listed shards; ``absent``: listed shards that are not there.
    """
    if not unlisted:
        return Judged({}, (), frozenset())
    sought = {t for t, shard in weight_map.items() if shard in absent}
    renamed = {n: h for n, h in unlisted.items() if sought.intersection(_names(h))}
    held = {t for h in renamed.values() for t in _names(h)}
    if renamed and sought <= held:
        stale = _stale(renamed, absent, exact=sought == held - present.keys(), alone=not present and len(unlisted) == 1)
        rest = {n: h for n, h in unlisted.items() if n not in renamed}
        judged = judge_unlisted(rest, weight_map, present, ())
        return Judged(judged.left, (stale, *judged.problems), frozenset(absent))
    patterns = {_pattern(n) for n in set(weight_map.values())}

    @cache
    def known() -> frozenset[str]:
        return frozenset(part for t in weight_map for part in _parts(t))

    left: dict[str, Kind] = {}
    problems = []
    for name, header in unlisted.items():
        nowhere = [t.name for t in header.tensors if t.name not in present]
        if not nowhere:
            same = all(_form(present[t.name]) == _form(t) for t in header.tensors)
            left[name] = LEFTOVER if same else VARIANT
        elif name in renamed:
            count = len(sought.intersection(nowhere))
            message = f"the index does not list this shard, and looks for {count} of its tensors in {some(absent)}"
            hint = "keep it: finish the download, or rewrite the index if it is of an earlier save"
            problems.append(Problem("shard-unlisted", message, name, hint))
        elif not any("mtp." in n for n in nowhere) and any(map(DRAFTER.fullmatch, nowhere)):
            left[name] = DRAFTERS
        elif _pattern(name) not in patterns and _is_foreign(nowhere, known):
            left[name] = FOREIGN
        else:
            message = f"the index does not list this shard; {len(nowhere)} of its tensors stand nowhere else, {nowhere[0]} first"
            hint = (
                "if it is of another model, such as a drafter, move it to a folder of its own; "
                f"if its tensors are this model's, rewrite {INDEX} to list them"
            )
            problems.append(Problem("shard-unlisted", message, name, hint))
    return Judged(left, tuple(problems), frozenset())


def _stale(files: Mapping[str, Header], absent: Sequence[str], *, exact: bool, alone: bool) -> Problem:
    """Describe an index whose absent shards' tensors stand in ``files``. ``alone``: no other shard is there."""
    message = f"lists {some(absent)}, which the folder does not have; their tensors stand in {some(files)}, which it does not list"
    hint = "keep the shards, and rewrite the index to list them"
    if alone:
        hint = f"keep {next(iter(files))}, and move the index out of the folder: one file needs none"
    elif len(files) == len(absent) == 1 and exact:
        hint = f"rename {next(iter(files))} to {absent[0]}"
    return Problem("index-stale", message, INDEX, hint)


def _names(header: Header) -> Iterable[str]:
    return (t.name for t in header.tensors)


def _form(t: TensorInfo) -> tuple[str, tuple[int, ...]]:
    return t.dtype, t.shape


def _pattern(name: str) -> str:
    """Return a name with every number in it as one."""
    return NUMBERED.sub("0", name)


def _is_foreign(names: Iterable[str], known: Callable[[], Set[str]]) -> bool:
    """Tell whether tensors are another model's: they have layers, whose names begin and end otherwise than all of this one's."""
    parts = [_parts(name) for name in names]
    if not any(parts) or any("mtp." in both for both in parts):
        return False
    return known().isdisjoint(part for both in parts for part in both)


def _parts(name: str) -> tuple[str, ...]:
    """Return what stands before and after the first number in a tensor's name, other numbers as one; nothing without a number."""
    match = LAYER.fullmatch(name)
    return (match["before"], _pattern(match["after"])) if match else ()
