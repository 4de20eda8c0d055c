"""Contradictions between the configs and the stored tensors: widths, counts, formats, and experts that are missing.

Headers are right; servers believe the config. What configs say against each other of the quantisation is found where they are read
(`fse_convert.model.quantization`), and where one server reads them wrongly in `fse_convert.servers.hazards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fse_convert.errors import Problem, counted, some
from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.exclusion_lists import covered
from fse_convert.model.families.family import EVERY_LAYER, MOE_WORDS, Family
from fse_convert.model.families.width_keys import Share
from fse_convert.model.formats import MXFP8_BLOCK, StorageKind
from fse_convert.model.grouping import Grouping
from fse_convert.model.moe import LayerKind, MoELayer
from fse_convert.model.quantization import BLOCK, FP8_METHODS, Quantization
from fse_convert.model.values import TOP_K, unexpected

UNFIT = frozenset({
    "config-value", "config-width", "config-layers", "config-dense", "config-block", "config-hidden", "config-experts",
    "block-size-invalid", "ignore-not-a-list", "quantization-not-an-object",
})  # fmt: skip
"""Codes of conflicts by which no server that believes the config would load the tensors: such a checkpoint is broken."""
LOAD_CONFLICTS = UNFIT | {"config-expert-dtype", "quantization-method", "config-readings", "quark-incomplete"}
"""The same, with those that a change of the config alone may mend, and those that some loader does not read."""
OTHER_CODES = ("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "aqlm", "hqq", "eetq", "gguf")
"""Methods that store weights as codes of their own: none of them reads FP8 blocks, MXFP4 or NVFP4."""
ROUTED_ALONE = ("mxfp4", "gpt_oss_mxfp4")
"""Methods that quantise routed experts and no other module (vLLM 0.33 layers/quantization/mxfp4.py)."""
WITH_LISTS = (
    *FP8_METHODS, "quark", "mxfp8", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "awq", "awq_marlin", "gptq", "gptq_marlin",
    "compressed-tensors", "auto-round", "inc", *ROUTED_ALONE,
)  # fmt: skip
"""Methods that quantise every linear layer, or those they list, but for those that they list as left out."""
UNSTATED = "config-unstated"
INCOMPLETE = "is the checkpoint complete?"
DRAFT = "a draft model exported by itself: no class of a server loads it as a main model; take the checkpoint that it drafts for"
MOST_LAYERS = 10_000
"""No model has more layers; a config may say anything."""


def conflicts(
    family: Family, config: Mapping[str, Any], quantization: Quantization, layers: Sequence[LayerDescription], n_shared: int
) -> Iterator[Problem]:
    """Compare what the configs say with what the headers hold."""
    yield from _number_conflicts(family, config, layers, n_shared)
    yield from _list_conflicts(family, config, layers)
    yield from _top_k_conflicts(family, config, layers)
    yield from dense_conflicts(family, config, [d.layer for d in layers if d.layer.kind is LayerKind.DECODER])
    yield from _expert_dtype_conflicts(quantization, layers)
    yield from _block_conflicts(quantization, layers)
    yield from _method_conflicts(quantization, layers)


def _number_conflicts(
    family: Family, config: Mapping[str, Any], layers: Sequence[LayerDescription], n_shared: int
) -> Iterator[Problem]:
    decoder = [d for d in layers if d.layer.kind is LayerKind.DECODER]
    routed, shared = _common(d.routed.width for d in layers if d.routed), _common(d.shared.width for d in layers if d.shared)
    # Where only some layers have another number of experts, that is a gap.
    count = _common(d.layer.count for d in decoder if d.layer.routed or d.routed)
    whose, inputs = ("shared", (d.shared for d in layers)) if family.shared else ("routed", (d.routed for d in layers))
    hidden = _common(group.hidden for group in inputs if group)
    shown: list[tuple[str, tuple[str | None, ...], int | None, str]] = [
        ("config-conflict", family.mtp_keys, len(layers) - len(decoder) or None, "MTP layers"),
        ("config-experts", family.n_routed_keys, count, "routed experts per decoder layer"),
        ("config-hidden", (family.hidden_key,), hidden, f"as the input of the {whose} experts"),
    ]
    for code, keys, actual, what in shown:
        for s in family.stated(config, *keys):
            if s.number is not None and actual is not None and s.number != actual:
                yield Problem(code, f"{s.path} is {s.value}, the tensors show {actual} {what}", "config.json")
    readings = (*_width_readings(family, config, routed, shared), *_product_readings(family, config, routed, shared, n_shared))
    for reading in readings:
        if not reading.right:
            others = [r.key for r in readings if r.right and r.of_shared == reading.of_shared and r.key != reading.key]
            hint = f"loaders that read {others[0]} load these experts" if others else ""
            yield Problem("config-readings" if others else "config-width", reading.message, "config.json", hint)


def _list_conflicts(family: Family, config: Mapping[str, Any], layers: Sequence[LayerDescription]) -> Iterator[Problem]:
    """Compare lists of several widths, one per layer, with each layer's own (SGLang 0.5.23 models/hunyuan.py:142-147)."""
    decoder = [d for d in layers if d.layer.kind is LayerKind.DECODER] if family.lists == "layer" else []
    for s in family.stated(config, *_routed_widths(family)):
        stated = s.value if isinstance(s.value, list) and s.number is None else []
        for d in decoder:
            if d.routed and d.layer.index < len(stated) and stated[d.layer.index] != d.routed.width:
                message = f"{s.path} is {stated[d.layer.index]} for {d.layer.name}, the tensors show {d.routed.width}"
                yield Problem("config-width", message, "config.json")


def _routed_widths(family: Family) -> tuple[str, ...]:
    return tuple(w.key for w in family.widths if w.share is Share.ROUTED)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a loader makes of one key: a width of routed or shared experts, which the tensors bear out or not."""

    key: str
    of_shared: bool
    right: bool
    message: str


def _width_readings(family: Family, config: Mapping[str, Any], routed: int | None, shared: int | None) -> Iterator[_Reading]:
    """Compare the keys that state the width of a routed expert, or of the whole shared MLP."""
    for w in (*family.widths, *family.readings):
        actual = None if w.share is Share.ONE_SHARED else w.of(routed, shared, 1)
        for s in family.stated(config, w.key) if actual is not None else ():
            if s.number is not None:
                message = f"{s.path} is {s.value}, the tensors show {actual} as the width of {w.share.value}"
                yield _Reading(w.key, w.share is not Share.ROUTED, s.number == actual, message)


def _product_readings(
    family: Family, config: Mapping[str, Any], routed: int | None, shared: int | None, n_shared: int
) -> Iterator[_Reading]:
    """Compare the width of one shared expert, times their number, with the width of the shared MLP."""
    if shared is None or not family.n_shared_keys:
        return
    each = [w.key for w in (*family.widths, *family.readings) if w.share is Share.ONE_SHARED]
    parts = [(s.path, s.number) for s in family.stated(config, *each)]
    if not any(family.stated(config, *(w.key for w in family.widths if w.share is not Share.ROUTED))):
        parts.append((family.widths[0].key, routed))
    counts = {n_shared, *(s.number for s in family.stated(config, *family.n_shared_keys) if s.number is not None)}
    for (key, width), n in product(parts, sorted(counts)):
        if width is not None:
            message = f"{key} x {n} shared is {width * n}, the shared experts are {shared} wide"
            yield _Reading(key.rpartition(".")[2], True, shared == width * n, message)


def unstated(family: Family, config: Mapping[str, Any], n_shared: int) -> Iterator[Problem]:
    """Find sizes of the model that config.json does not state: loaders take a default of their own, or raise."""
    widths = tuple(w.key for w in family.widths if w.share is Share.ROUTED and not w.optional)
    shared = family.n_shared_keys if n_shared else ()
    own = [w for w in family.widths if n_shared and w.share is not Share.ROUTED]
    shared_widths = tuple(w.key for w in own) if any(w.assumed and not w.optional for w in own) else ()
    for keys in ((family.hidden_key,), family.depth_keys, widths, family.n_routed_keys, shared, shared_widths):
        if keys and not any(family.stated(config, *keys)):
            yield Problem(UNSTATED, f"there is no {' or '.join(keys)}", "config.json", "state what the tensors have")


def _top_k_conflicts(family: Family, config: Mapping[str, Any], layers: Sequence[LayerDescription]) -> Iterator[Problem]:
    """Find tokens that would pass no routed expert, or more than any layer has; a model without routed experts says 0."""
    most = max((d.layer.count for d in layers), default=0)
    for s in family.stated(config, *TOP_K):
        if s.number is not None and most and not 1 <= s.number <= most:
            yield unexpected(s.path, s.value, f"1 to {most}, the routed experts of a layer")


def dense_conflicts(family: Family, config: Mapping[str, Any], decoder: Sequence[MoELayer]) -> Iterator[Problem]:
    """Find layers with experts that a server would build without, as the config says, and lists too short to say of every layer."""
    rule = family.sparse or EVERY_LAYER
    expected, depth = expected_layers(family, config, decoder), family.number(config, *family.depth_keys)
    if depth is None or family.per_layer(config):
        return
    lists = (*_routed_widths(family), *TOP_K, *family.n_shared_keys) if family.lists == "layer" else ()
    for s in family.stated(config, *rule.words, rule.step, *lists):
        if isinstance(s.value, list | str) and len(s.value) < depth:
            yield unexpected(s.path, s.value, f"an entry for each of {depth} layers")
    dense = [m.name for m in decoder if expected is not None and m.index not in expected and m.index < depth]
    if dense:
        stated = family.stated(config, *rule.words, rule.first, rule.last, rule.step, rule.dense, rule.listed)
        said = ", ".join(s.path for s in stated if s.value != 1 or s.path.rpartition(".")[2] != rule.step)
        message = f"experts in layers that the config says are dense, by {said}: {some(dense)}"
        yield Problem("config-dense", message, "config.json", "make these keys say which layers have experts: servers believe them")


def depth_conflicts(family: Family, config: Mapping[str, Any], grouping: Grouping) -> Iterator[Problem]:
    """Compare the numbers of layers in the config with what the tensors show: only an MTP layer has MTP tensors."""
    depth, key = family.number(config, *family.depth_keys), family.depth_keys[0]
    marks = "MTP tensors (enorm, hnorm, eh_proj)"
    for layers, what in ((grouping.beyond, f"have no {marks} and are decoder layers"), (grouping.early, f"have {marks}")):
        if layers:
            message = f"{key} is {depth}, but these layers {what}: {some(layers)}"
            hint = f"set {key} to {grouping.depth}, the number of decoder layers" if grouping.depth else DRAFT
            yield Problem("config-layers", message, "config.json", hint)
    stated = list(family.stated(config, key))
    for other in stated[1:]:
        if other.value != stated[0].value:
            message = f"{other.path} is {other.value}, but {stated[0].path} is {stated[0].value}"
            hint = f"set both to {grouping.depth}, the number of decoder layers: loaders disagree on which one they read"
            yield Problem("config-layers", message, "config.json", hint)


def mtp_conflicts(family: Family, config: Mapping[str, Any], grouping: Grouping) -> Iterator[Problem]:
    """Find MTP layers that are promised and not there, and those that a loader of the main model would not pass over.

    vLLM 0.29 to 0.33 passes over the layers from ``num_hidden_layers`` on, as many as the config promises: model_executor/models/
    utils.py:575-597 of 0.33. MTP layers that have a prefix of their own it passes over by that.
    """
    promised = family.number(config, *family.mtp_keys)
    lost = set(range(promised or 0)) - grouping.mtp
    if promised and grouping.layers and (not grouping.drafts or (lost and len(grouping.mtp) >= promised)):
        which = f"MTP layer {some(map(str, sorted(lost)))}" if grouping.drafts else "the experts or the MLP of an MTP layer"
        message = f"{family.mtp_key} is {promised}, but no tensor is of {which}"
        hint = "servers load the model, but no drafter: if a file with the MTP layer was lost, download it again"
        yield Problem("mtp-missing", message, "config.json", hint)
    counted = family.mtp_assumed if promised is None else promised
    last = max(grouping.mtp, default=-1)
    if family.mtp is None and not (grouping.beyond or grouping.early) and last >= counted:
        stated = f"is {promised}" if promised is not None else "is not there"
        message = f"{family.mtp_key} {stated}, but layer {grouping.depth + last} is an MTP layer"
        yield Problem("mtp-unskipped", message, "config.json", f"set {family.mtp_key} to {last + 1}")


def _common(values: Iterable[int]) -> int | None:
    """Return the one value that all have; None where they differ or there is none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _expert_dtype_conflicts(quantization: Quantization, layers: Sequence[LayerDescription]) -> Iterator[Problem]:
    written = quantization.expert_dtype
    kinds = {d.routed.gate.kind for d in layers if d.routed and d.layer.kind is LayerKind.DECODER}
    known = [kind.facts.expert_dtype for kind in StorageKind]
    read = written is not None and (written in known or quantization.method in FP8_METHODS)
    if read and any(kind.facts.expert_dtype != written for kind in kinds):
        stored, right = ", ".join(sorted(kind.value for kind in kinds)), {kind.facts.expert_dtype for kind in kinds}
        message = f"expert_dtype is {written!r}, the routed experts are stored as {stored}"
        hint = f'set expert_dtype to "{right.pop()}" where it stands' if len(right) == 1 and None not in right else ""
        yield Problem("config-expert-dtype", message, "config.json", hint)


def _block_conflicts(quantization: Quantization, layers: Sequence[LayerDescription]) -> Iterator[Problem]:
    """Compare ``weight_block_size`` with the FP8 blocks that the scales show."""
    block = quantization.block
    unread = quantization.method not in FP8_METHODS or any(p.code == "block-size-invalid" for p in quantization.conflicts)
    if block is None and unread:
        return
    fp8 = (f for d in layers for g in d.groups for f in g.formats.values() if f.kind.facts.expert_dtype == "fp8")
    odd = {f.label: f.block for f in fp8 if f.block not in (block, MXFP8_BLOCK)}
    for label, stored in sorted(odd.items()):
        key = quantization.block_key or BLOCK
        message = f"{f'{key} is {list(block)}' if block else f'there is no {key}'}, experts are stored as {label}"
        hint = "servers believe the config and would not load these scales"
        if stored and len(odd) == 1:
            hint = f"set {key} to {list(stored)}: servers believe it"
        yield Problem("config-block", message, "config.json", hint)


def _method_conflicts(quantization: Quantization, layers: Sequence[LayerDescription]) -> Iterator[Problem]:
    routed = [(f"{d.layer.name}.experts", d.routed) for d in layers if d.routed]
    shared = [(d.layer.shared.name, d.shared) for d in layers if d.shared and d.layer.shared]
    quantised = sorted({group.label for _, group in routed + shared if not _plain(group)})
    if not quantization.quantized:
        if quantised:
            message = f"no quantization_config, but experts are stored as {', '.join(quantised)}"
            yield Problem("quantization-missing", message, "config.json", "servers would load the model as unquantised")
        return
    kinds = {f.kind for _, group in routed + shared for f in group.formats.values()}
    if quantization.method in FP8_METHODS:
        kinds -= {StorageKind.MXFP4}  # DeepSeek-V4's routed experts, of which ``expert_dtype`` tells
    unlike = [kind for kind in kinds if kind.facts.written and kind.facts.written.isdisjoint(quantization.weights)]
    if quantised and (quantization.method in OTHER_CODES or (quantization.weights and unlike)):
        says = ", ".join(filter(None, (quantization.method, *sorted(quantization.weights))))
        message = f"{quantization.source} says {says}, but experts are stored as {', '.join(quantised)}"
        where, hint = quantization.source.partition(":")[0], "make it say how the experts are stored: servers believe it"
        yield Problem("quantization-method", message, where, hint)
    if quantization.method in WITH_LISTS:
        yield from _exclusion_conflicts(quantization, "routed experts", routed)
        yield from _exclusion_conflicts(quantization, "shared experts", shared if quantization.method not in ROUTED_ALONE else [])


def _exclusion_conflicts(quantization: Quantization, what: str, groups: Sequence[tuple[str, ExpertGroup]]) -> Iterator[Problem]:
    """Compare which modules a method leaves out with which are stored unquantised."""
    left_out, targets = quantization.left_out, quantization.targets
    plain = [(name, group) for name, group in groups if _plain(group)]
    stale = [(name, group) for name, group in plain if not covered(left_out, name, _modules(group))]
    if targets is not None:
        stale = [(name, group) for name, group in stale if covered(targets, name, _modules(group))]
    if stale:
        where, group = stale[0]
        stored = f"{what} are stored as {group.label} in {counted(len(stale), 'layer')} and are not excluded"
        message = f"{quantization.source} says {quantization.method}, but {stored}"
        yield Problem("quantization-stale", message, where, "servers would ask for scales")
    if quantization.method in FP8_METHODS and quantization.moe_quant_algo is None:
        kept = {n: group for n, group in groups if not _plain(group) and covered(quantization.ignore, n, _modules(group))}
        if kept:
            entries = [e for e in quantization.ignore if any(covered([e], n, _modules(group)) for n, group in kept.items())]
            message = f"{quantization.ignore_key} excludes {what} of {counted(len(kept), 'layer')}, which are stored quantised"
            hint = f"servers that match these entries load them as unquantised: remove {some(entries)}"
            yield Problem("quantization-excluded", message, next(iter(kept)), hint)


def _plain(group: ExpertGroup) -> bool:
    return all(f.kind is StorageKind.PLAIN for f in group.formats.values())


def _modules(group: ExpertGroup) -> tuple[str, ...]:
    """Name the matrices of the first expert, and the stacks."""
    return replace(group, experts=group.experts[:1]).modules


def gaps(family: Family, config: Mapping[str, Any], grouping: Grouping) -> Iterator[Problem]:
    """Find MoE layers that are missing, and layers that lack shared experts or have another number of routed ones than they should.

    A gap *inside* of a layer's experts shows by itself; a lost last expert or a lost layer (a lost shard, an interrupted save)
    shows only beside the other layers and the config. Where layers have routed experts, and none of them as many as the config
    says, they are believed. Loaders build MTP layers with as many as decoder layers have, where no key of their own says
    otherwise (vLLM 0.33 deepseek_mtp.py:324, glm4_moe_mtp.py:260).
    """
    if family.per_layer(config):
        return  # every layer has a number of experts of its own, perhaps none
    decoder, mtp = ([m for m in grouping.layers if m.kind is kind] for kind in LayerKind)
    written = family.number(config, *family.n_routed_keys)
    yield from _layer_gaps(family, config, grouping, decoder, written or 0)
    counts = Counter(m.count for m in decoder if m.count and _countable(m))
    usual = written or 0 if written in counts or not counts else counts.most_common(1)[0][0]
    yield from _count_gaps(decoder, usual)
    yield from _count_gaps(mtp, family.number(config, family.mtp_routed_key) or usual)
    bare = [m.name for m in grouping.layers if m.shared is None and not (m.unknown or m.twins)]
    if bare and _shared_promised(family, config, grouping.layers):
        message = f"{len(bare)} of {len(grouping.layers)} layers have no shared experts, which the model has: {some(bare)}"
        yield Problem("shared-missing", message, bare[0], INCOMPLETE)


def _layer_gaps(
    family: Family, config: Mapping[str, Any], grouping: Grouping, decoder: Sequence[MoELayer], written: int
) -> Iterator[Problem]:
    """Find decoder layers without experts; where none has any, only if the config promises more than the 1 of a dense Jamba."""
    expected = expected_layers(family, config, decoder)
    if not decoder and (written < 2 or grouping.strays or expected == set()):
        return
    missing = sorted((expected or set()) - {m.index for m in decoder})
    if missing or not decoder:
        which = f"{some(map(str, missing))} ({len(missing)} of {len(missing) + len(decoder)})" if missing else "of any number"
        message = f"no experts in decoder layers {which}, which the config says have some"
        yield Problem("layers-missing", message, "config.json", INCOMPLETE)


def _shared_promised(family: Family, config: Mapping[str, Any], layers: Sequence[MoELayer]) -> bool:
    """Tell whether every layer should have shared experts: by the config, else because the family, or any layer, has them."""
    keys = family.n_shared_keys or tuple(w.key for w in family.widths if w.share is not Share.ROUTED)
    stated = [s.number for s in family.stated(config, *keys)]
    if stated or not family.shared:
        return bool(family.shared and stated[0])
    return not keys or any(m.shared for m in layers)


def expected_layers(family: Family, config: Mapping[str, Any], decoder: Sequence[MoELayer]) -> set[int] | None:
    """Return the numbers of the decoder layers that have experts by the config; None where it does not say.

    Where the key of the first such layer is left out, the first one that is there counts as the first.
    """
    rule, count = family.sparse, family.number(config, *family.depth_keys)
    words = next((s.value for s in family.stated(config, *(rule or EVERY_LAYER).words)), None)
    if isinstance(words, list | str) and words and len(words) >= (count or 0):
        return {i for i, word in enumerate(words[:count]) if isinstance(word, str) and word in MOE_WORDS}
    if count is None or rule is None:
        return None
    count = min(count, MOST_LAYERS)
    listed = family.value(config, rule.listed)
    if isinstance(listed, list):
        return {i for i in listed if type(i) is int and i < count}
    step = family.value(config, rule.step)
    if isinstance(step, list):
        return {i for i in range(min(count, len(step))) if step[i]}
    if step is not None and (type(step) is not int or step < 1):
        return None
    first = family.number(config, rule.first) if rule.first else 0
    last = family.number(config, rule.last)
    dense = family.value(config, rule.dense)
    start = min((m.index for m in decoder), default=0) if first is None else first
    end = count if last is None or last < 0 else min(last + 1, count)
    kept = {i for i in dense if type(i) is int} if isinstance(dense, list) else set()
    return {i for i in range(start, end) if (i + rule.ahead) % (step or 1) == 0 and i not in kept}


def _count_gaps(layers: Sequence[MoELayer], usual: int) -> Iterator[Problem]:
    """Find layers with another number of routed experts than ``usual``."""
    whole = [m for m in layers if _countable(m)]
    fewer, more = [m for m in whole if m.count < usual], [m for m in whole if m.count > usual]
    for code, odd, hint in (("experts-missing", fewer, INCOMPLETE), ("experts-extra", more, "are they of another model?")):
        if odd:
            where = f"{odd[0].count} routed experts in {some(m.name for m in odd)}, expected {usual}"
            kind = "MTP" if odd[0].kind is LayerKind.MTP else "decoder"
            message = f"{len(odd)} of {len(whole)} {kind} layers have another number of routed experts: {where}"
            yield Problem(code, message, odd[0].name, hint)


def _countable(layer: MoELayer) -> bool:
    """Tell whether the number of routed experts shows: one between others may be missing, or what holds them not understood."""
    if layer.routed:
        return layer.routed[-1].name.endswith(f".{len(layer.routed) - 1}")
    return bool(layer.count) or not (layer.stacked or layer.unknown)
