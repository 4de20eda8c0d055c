"""What tensor parallelism asks of the width of experts: whole scale blocks on every rank, by server, format and kind of expert.

Rank r gets rows ``[r w, (r + 1) w)`` of gate and up and the same columns of down, ``w`` being the width divided by the number of
ranks (vLLM 0.33 model_executor/layers/fused_moe/routed_experts.py:518-600; SGLang 0.5.23 layers/moe/fused_moe_triton/layer.py:788).
Both refuse a width that the number of ranks does not divide (fused_moe/config.py:1352; layer.py:427). With expert parallelism
routed experts are not cut at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm

from fse_convert.model.description import ExpertGroup
from fse_convert.model.formats import StorageKind
from fse_convert.model.quantization import FP8_METHODS, Quantization
from fse_convert.servers.routed_fp8 import unserved
from fse_convert.servers.subject import Subject

ENGINES = ("vLLM", "SGLang")
MXFP4 = frozenset({StorageKind.MXFP4})
FP4 = MXFP4 | {StorageKind.NVFP4}
FP8 = frozenset({StorageKind.FP8_BLOCK})


class Load(str, Enum):
    """What becomes of experts whose slices are so wide.

    ``UNSERVED``: the server cannot serve the model at any width. ``WHOLE``: every rank holds whole blocks.
    ``REFINED``: the server makes its scale blocks finer while loading, and only some
    kernels take them. ``PADDED``: the server pads every rank itself. ``REFUSED``: it raises an error. ``WRONG``: it loads, and
    columns get the scales of others.
    """

    UNSERVED = "unserved"
    WHOLE = "whole"
    REFINED = "refined"
    PADDED = "padded"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class SliceRule:
    """What a server makes of slices that do not hold whole blocks.

    ``kinds``: the formats that it is about. ``shared``: of shared experts, else of routed ones. ``methods``, ``model_types``: only
    under these (empty: any). ``finest``: the smallest block that scales are refined to (0: never refined). ``config_block``: the
    config's FP8 block counts too, whatever the experts are stored as.
    """

    engine: str
    kinds: frozenset[StorageKind]
    shared: bool
    partial: Load
    source: str
    methods: tuple[str, ...] = ()
    model_types: frozenset[str] = frozenset()
    finest: int = 0
    config_block: bool = False


LING_3 = frozenset({"bailing_hybrid", "bailing_moe_v3_vl"})
GPT_OSS = frozenset({"gpt_oss"})
SLICE_RULES: tuple[SliceRule, ...] = (
    SliceRule(
        "vLLM", FP8, shared=False, partial=Load.REFUSED, methods=FP8_METHODS, finest=32,
        source="0.33 model_executor/layers/fused_moe/oracle/fp8.py:292-321",
    ),
    SliceRule(
        "vLLM", FP8, shared=True, partial=Load.PADDED, methods=FP8_METHODS,
        model_types=LING_3 | {"deepseek_v4", "deepseek_v41", "dots3_note", "dots3_note_text"},
        source="0.33 models/deepseek_v4/nvidia/model.py:1171, models/dots3_note/nvidia/model.py:64, bailing_moe_v3.py:299-320",
    ),
    SliceRule(
        "vLLM", MXFP4, shared=False, partial=Load.PADDED, methods=("mxfp4", "gpt_oss_mxfp4", "quark"), model_types=GPT_OSS,
        source="0.33 model_executor/models/gpt_oss.py:577-586, 792-805 (ranks are cut at whole blocks of 32)",
    ),
    SliceRule(
        "vLLM", FP4, shared=False, partial=Load.WRONG,
        source="0.33 model_executor/layers/fused_moe/oracle/mxfp4.py:837-917 (nothing checks; offsets of scales are rounded down)",
    ),
    SliceRule(
        "SGLang", FP8, shared=True, partial=Load.PADDED, methods=FP8_METHODS, model_types=LING_3,
        source="0.5.23 models/bailing_moe_v3.py:646-700",
    ),
    SliceRule(
        "SGLang", MXFP4, shared=False, partial=Load.PADDED, methods=("mxfp4",), model_types=GPT_OSS,
        source="0.5.23 models/gpt_oss.py:964-1007 (ranks are cut at whole blocks of 32)",
    ),
    SliceRule(
        "SGLang", MXFP4, shared=False, partial=Load.REFUSED, methods=FP8_METHODS, config_block=True,
        source="0.5.23 layers/quantization/fp8.py:1588-1601 (checked before the experts' own format is looked at)",
    ),
    SliceRule(
        "SGLang", FP4, shared=False, partial=Load.WRONG, source="0.5.23 layers/quantization/mxfp4.py:455-550 (nothing checks)"
    ),
)  # fmt: skip
"""Rules that differ from the usual one, the first that fits decides."""
USUAL = {
    "vLLM": "0.33 model_executor/layers/quantization/utils/fp8_utils.py:1315-1372, modelopt.py:1325",
    "SGLang": "0.5.23 layers/quantization/fp8.py:592-612, 1588-1601, layers/moe/cutlass_moe.py:151",
}
"""Where the usual rule was read: slices without whole blocks are refused."""


@dataclass(frozen=True, slots=True)
class Slices:
    """One kind of experts of a model on one server's ranks.

    ``width``: of all of them together; ``rank``: of one rank's slice, rounded down; ``multiple``: what that must be a multiple of;
    ``source``: where the server's rule was read.
    """

    engine: str
    shared: bool
    width: int
    rank: int
    multiple: int
    load: Load
    source: str


def slices(checkpoint: Subject, engine: str, tp: int) -> tuple[Slices, ...]:
    """Say how a server's ranks would load the experts of a checkpoint as it is: one answer per kind and width of experts."""
    found = (_slices(checkpoint, engine, group, tp, shared=shared) for group, shared in _groups(checkpoint))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Multiples:
    """What the widths of one routed expert and of the whole shared MLP must be multiples of."""

    routed: int = 1
    shared: int = 1

    def of_one(self, n_shared: int) -> int:
        """Return the multiple of one expert's width where the shared MLP is ``n_shared`` of them wide."""
        per_expert = self.shared // gcd(self.shared, n_shared)  # n w is a multiple of m wherever w is one of m / gcd(m, n)
        return lcm(self.routed, per_expert)


def rank_multiples(checkpoint: Subject, tp: int, engines: Iterable[str] = ENGINES) -> Multiples:
    """Return the multiples at which all ranks of all servers hold whole blocks.

    A server that pads shared experts by itself asks nothing of their width; one that cuts routed experts at whole blocks asks for
    these, and that the ranks divide it.
    """
    routed, of_shared = 1, 1
    for engine in engines:
        for group, shared in _groups(checkpoint):
            rule = _rule(checkpoint, engine, group, shared=shared)
            block = _multiple(group, rule, checkpoint.quantization)
            pads = rule is not None and rule.partial is Load.PADDED
            if shared:
                of_shared = lcm(of_shared, 1 if pads else tp * block)
            else:
                routed = lcm(routed, tp, block) if pads else lcm(routed, tp * block)
    return Multiples(routed, of_shared)


def _groups(checkpoint: Subject) -> Iterable[tuple[ExpertGroup, bool]]:
    for layer in checkpoint.description.layers:
        if layer.routed:
            yield layer.routed, False
        if layer.shared:
            yield layer.shared, True


def _slices(checkpoint: Subject, engine: str, group: ExpertGroup, tp: int, *, shared: bool) -> Slices:
    rule = _rule(checkpoint, engine, group, shared=shared)
    multiple = _multiple(group, rule, checkpoint.quantization)
    return Slices(
        engine=engine,
        shared=shared,
        width=group.width,
        rank=group.width // tp,
        multiple=multiple,
        load=Load.UNSERVED if engine in unserved(checkpoint) else _load(group, rule, multiple, tp),
        source=rule.source if rule else USUAL[engine],
    )


def _rule(checkpoint: Subject, engine: str, group: ExpertGroup, *, shared: bool) -> SliceRule | None:
    kind, model_type, method = group.gate.kind, checkpoint.description.model_type, checkpoint.quantization.method
    return next(
        (
            rule
            for rule in SLICE_RULES
            if (rule.engine, rule.shared) == (engine, shared)
            and kind in rule.kinds
            and (not rule.model_types or model_type in rule.model_types)
            and (not rule.methods or method in rule.methods)
        ),
        None,
    )


def _multiple(group: ExpertGroup, rule: SliceRule | None, quantization: Quantization) -> int:
    """Return the elements of width that must stay together: scale blocks as they are stored, and as the config has them."""
    config = quantization.block if rule and rule.config_block else None
    return lcm(*(f.width_block(role) for role, f in group.formats.items()), *(config or ()))


def _load(group: ExpertGroup, rule: SliceRule | None, multiple: int, tp: int) -> Load:
    if group.width % tp:
        return rule.partial if rule and rule.shared and rule.partial is Load.PADDED else Load.REFUSED
    rank = group.width // tp
    if rank % multiple == 0:
        return Load.WHOLE
    if rule is None:
        return Load.REFUSED
    finer_block = gcd(multiple, rank, group.hidden)  # the largest square that blocks, slices and hidden size are whole numbers of
    return Load.REFINED if rule.finest and finer_block >= rule.finest else rule.partial
