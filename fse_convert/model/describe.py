"""From tensor names and headers to layers: which experts there are, how each is stored, and where the configs disagree.

Layers come from the tensor names. Config values are hints: ``num_nextn_predict_layers`` says 1 in DeepSeek's 0731 and
0813 releases that hold mtp.0 to mtp.2 (vllm-project/vllm#41834).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.reader import Checkpoint, garbage_collection_paused
from fse_convert.errors import Problem, some
from fse_convert.model.config_against_tensors import conflicts, depth_conflicts, gaps, mtp_conflicts, unstated
from fse_convert.model.description import Description, first_of
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import find_family
from fse_convert.model.families.resemblance import resembling
from fse_convert.model.formats import NOT_GATHERED
from fse_convert.model.grouping import EXPERT_MODULE, Grouping, group_layers, seen
from fse_convert.model.hash_layers import table_conflicts
from fse_convert.model.layer_formats import LayerReader
from fse_convert.model.quantization import Quantization
from fse_convert.model.values import misstated

KERNEL_TENSOR = re.compile(r"\.shared_l[12]_weight(?:_scale)?$")
"""Names of the kernel layout: a checkpoint that has them is converted already."""
CONVERT_ORIGINAL = "convert the original checkpoint"


@garbage_collection_paused()
def describe(checkpoint: Checkpoint, quantization: Quantization, named: str = "") -> Description:
    """Describe the MoE layers of a checkpoint; never raises for what it does not understand, but records it.

    ``quantization``: what `read_quantization` made of the checkpoint's configs. ``named``: the family of a model type that no row
    has, as a user names it.
    """
    config = checkpoint.config
    family = find_family(config, named)
    model_type = str(config.get("model_type", ""))
    kernel = [n for n in checkpoint.tensors if ".shared_l" in n and KERNEL_TENSOR.search(n)]
    tensors = {n: info for n, info in checkpoint.tensors.items() if n not in kernel} if kernel else checkpoint.tensors
    converted = [Problem("already-converted", "tensors in the kernel layout", kernel[0], CONVERT_ORIGINAL)] if kernel else []
    if family is None:
        names = seen(info for info in tensors.values() if "expert" in info.name or EXPERT_MODULE.search(info.name))
        like = resembling(config, names)
        return Description(
            None, model_type, conflicts=quantization.conflicts, seen=names, outside=tuple(converted), like=like.name if like else ""
        )
    grouping = group_layers(family, tensors, family.number(config, *family.depth_keys))
    layers = LayerReader(quantization.block_hint, family).describe(grouping.layers)
    n_shared = family.shared_count(config) if any(m.shared for m in grouping.layers) else 0
    against = (
        *conflicts(family, config, quantization, layers, n_shared),
        *depth_conflicts(family, config, grouping),
        *mtp_conflicts(family, config, grouping),
        *table_conflicts(family, config, tensors),
        *(unstated(family, config, n_shared) if layers else ()),
    )
    lacking = gaps(family, config, grouping) if not (grouping.beyond or grouping.early) else ()
    if layers and (wrong := tuple(misstated(family, config))):  # values of a wrong type cannot be compared
        against, lacking = wrong, ()
    found = (*against, *quantization.conflicts, *_unheeded(family, model_type, named))
    return Description(
        family=family,
        model_type=model_type,
        section=family.section(config),
        n_shared=n_shared,
        layers=layers,
        conflicts=tuple(dict.fromkeys(found)),
        gaps=tuple(lacking),
        outside=(*converted, *_refusal(family), *_strays(family, grouping), *_empty(tensors)),
    )


def _empty(tensors: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Find weights and biases without elements of all modules but experts, whose formats tell; state of other kinds may be empty.

    No server loads them: vLLM 0.33 model_executor/model_loader/weight_utils.py (default_weight_loader) compares sizes.
    """
    empty = [t for t in tensors.values() if 0 in t.shape and t.name.endswith(("weight", "bias"))]
    others = [t for t in empty if not EXPERT_MODULE.search(t.name)]
    if others:
        message = f"{others[0].dtype} {list(others[0].shape)} has no elements"
        yield Problem("tensor-empty", message, first_of(t.name for t in others), NOT_GATHERED)


def _refusal(family: Family) -> Iterator[Problem]:
    if family.refused:
        message, hint = family.refused
        yield Problem("family-refused", message, "config.json", hint)


def _unheeded(family: Family, model_type: str, named: str) -> Iterator[Problem]:
    """Say that a family which a user named is not the one that the model type has."""
    if named not in ("", family.name):
        message = f"model type {model_type!r} is known as {family.name}, so {named} is not used"
        yield Problem("option-unused", message, "--family", "leave it out")


def _strays(family: Family, grouping: Grouping) -> Iterator[Problem]:
    if not grouping.strays:
        return
    patterns = seen(grouping.strays)
    names = some(f"{s.count} x {s.pattern} {list(s.example.shape)}" for s in patterns)
    more = f" and {len(grouping.strays) - 1} more" if grouping.strays[1:] else ""
    message = f"experts outside of the MoE blocks that {family.name} has: {names}"
    yield Problem("expert-outside", message, f"{patterns[0].example.name}{more}", "padding would leave them at their old width")
