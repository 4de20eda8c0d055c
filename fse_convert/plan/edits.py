"""Which keys of config.json change with the width of experts, and what of config.json padding cannot make true."""

from __future__ import annotations

from collections.abc import Iterator

from fse_convert.checkpoint.reader import Checkpoint
from fse_convert.errors import NotConvertible, Problem
from fse_convert.model.description import Description
from fse_convert.model.families.family import PROJ_NAMES, SECTIONS, Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.families.width_keys import Width
from fse_convert.plan.plan import Plan
from fse_convert.servers.native import LaunchWidths
from fse_convert.sidecar.manifest import ConfigEdit

OTHER_NAMES = ("ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size_mlp", "moe_inter_dim")
"""Of Megatron, Llama 4 and DeepSeek's own inference code: no family's loader reads them for experts."""
WIDTH_NAMES = tuple(dict.fromkeys((*(w.key for f in FAMILIES for w in f.widths), *OTHER_NAMES)))
"""Names that some family or other, or another program, has for the width of experts."""

PARAMS = "params.json"
"""Mistral's own config (vLLM 0.33 transformers_utils/config.py:890-898, configs/mistral.py:286-302)."""


def config_edits(checkpoint: Checkpoint, description: Description, old: LaunchWidths, new: LaunchWidths) -> tuple[ConfigEdit, ...]:
    """Return the edit of every key from which a loader builds experts; a list, one width per layer, stays a list.

    Raises NotConvertible where config.json does not say a width such that it can be edited: the output would not load.
    """
    family, config = description.family, checkpoint.config
    if family is None:
        return ()
    edits: list[ConfigEdit] = []
    problems: list[Problem] = []
    if blocks := family.per_layer(config):
        message = f"{blocks} states the widths of experts layer by layer, where padding does not edit them"
        problems.append(Problem("config-key", message, "config.json"))
    if PARAMS in checkpoint.others and any(shard.name.startswith("consolidated") for shard in checkpoint.shards):
        message = "vLLM reads this file and not config.json where shards are called consolidated, and padding does not edit it"
        problems.append(Problem("config-key", message, PARAMS, f"pad a copy without {PARAMS}: vLLM then reads config.json"))
    for width in family.widths:
        was, will = (width.of(w.routed, w.shared, description.n_shared) for w in (old, new))
        stated = list(family.stated(config, width.key))
        if width.assumed and not width.optional and not stated:
            message = f"there is no {width.key}: loaders assume {width.assumed} and would not load the padded experts"
            problems.append(Problem("config-key", message, "config.json", _add(width, was, description.section)))
        for s in stated:
            if s.number != was or will is None:
                message = (
                    f"{s.path} is {s.value}: no one width of {width.share.value} that padding could change from {was} to {will}"
                )
                problems.append(Problem("config-key", message, "config.json"))
                continue
            value = [will] * len(s.value) if isinstance(s.value, list) else will
            edits.append(ConfigEdit(section=s.section, key=s.key, old=s.value, new=value))
    dense = next((w for w in family.widths if w.dense and family.value(config, w.dense_key) is None), None)
    if edits and dense and (layer := _dense_layer(checkpoint, family)):
        message = f"{dense.key} is the width of dense layers too: padding the experts would change it for {layer}"
        problems.append(Problem("config-key", message, "config.json"))
    if problems:
        raise NotConvertible(*problems)
    return tuple(sorted(edits, key=lambda e: SECTIONS.index(e.section)))


def _dense_layer(checkpoint: Checkpoint, family: Family) -> str:
    """Name a dense MLP that stands where other layers have a MoE block; empty if there is none."""
    heads = (name.rpartition(".")[0].rpartition(".") for name in checkpoint.tensors)
    return next((head for head, _, projection in heads if projection in PROJ_NAMES and family.pattern.fullmatch(head)), "")


def config_notes(plan: Plan) -> Iterator[Problem]:
    """Note what edits leave: a width that some loader assumes, and keys that still say the old width, perhaps of dense layers."""
    description, decision = plan.source.description, plan.decision
    family, config = description.family, plan.source.checkpoint.config
    if family is None or not decision.config_edits:
        return
    at = decision.at_source
    for w in family.widths:
        if w.optional and not any(family.stated(config, *(k.key for k in family.widths if k.share is w.share))):
            message = f"there is no {w.key}: a loader that assumes {w.assumed} would not load the padded experts"
            hint = _add(w, w.of(at.routed, at.shared, description.n_shared), description.section)
            yield Problem("config-default", message, "config.json", f"{hint}, and convert again")
    edited = {(e.section, e.key) for e in decision.config_edits}
    for s in family.stated(config, *WIDTH_NAMES):
        if s.number in (at.routed, at.shared) and (s.section, s.key) not in edited:
            message = f"{s.path} stays {s.number}: no loader that is known here builds experts of {family.name} from it"
            yield Problem("config-width-kept", message, "config.json")


def _add(width: Width, value: int | None, section: str) -> str:
    return f'add "{width.key}": {value} to {section or "the top level"}, as the tensors have it'
