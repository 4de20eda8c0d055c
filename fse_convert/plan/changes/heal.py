"""All mends of defects that only config.json or the headers have: no value of the model changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from fse_convert.model.quantization import read_quantization
from fse_convert.plan.changes import heal_fp8, heal_quark
from fse_convert.plan.changes.change import FormatChange, changed_config
from fse_convert.plan.changes.config_places import quark_section
from fse_convert.servers.subject import Subject

Heal = Callable[[Subject], FormatChange | None]

QUARK: tuple[Heal, ...] = (
    heal_quark.export,
    heal_quark.exclude,
    heal_quark.experts_pattern,
    heal_quark.scheme,
    heal_quark.module_names,
    heal_quark.shared_excluded,
    heal_quark.shared_unlisted,
    heal_quark.gates,
    heal_quark.scale_labels,
    heal_quark.weight_labels,
)
"""Mends of what AMD Quark wrote into config.json."""
FP8: tuple[Heal, ...] = (
    heal_fp8.ignored,
    heal_fp8.expert_dtype,
    heal_fp8.scales,
)
HEALS = QUARK + FP8
"""Each mends one defect, or returns None where the headers do not prove it. A list is there before entries are taken off it."""


def heals(subject: Subject, but: Collection[str] = ()) -> tuple[FormatChange, ...]:
    """Return every mend that a checkpoint needs, in the order in which they are to be made; none of those named in ``but``.

    Each is worked out from the config as those before it leave it, so that two may edit one key: `changed_config` with all their
    edits in this order is the healed config. To make fewer of them, ask again. No two change the same tensor.
    """
    found: list[FormatChange] = []
    for heal in HEALS if quark_section(subject.quantization) else FP8:
        change = heal(subject)
        if change and change.name not in but:
            found.append(change)
            subject = with_config(subject, change)
    return tuple(found)


def with_config(subject: Subject, change: FormatChange) -> Subject:
    """Return a subject whose config has been changed, and whose tensors are those of the source, as the next change needs it."""
    config = changed_config(subject.config, change.config)
    return replace(subject, config=config, quantization=read_quantization(config, subject.quant_config))
