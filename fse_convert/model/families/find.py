"""The family of a model: by its model type, or by the name that a user gave. All rows together are `FAMILIES`.

Sources: model files of vLLM 0.33, SGLang 0.5.23 and transformers 5.24, named per row; transformers' ``conversion_mapping.py`` says
how checkpoints spell names that its modules spell differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fse_convert.model.families.family import SECTIONS, Family, place
from fse_convert.model.families.routed_only import ROUTED_ONLY
from fse_convert.model.families.stacked_only import STACKED_ONLY
from fse_convert.model.families.with_shared import WITH_SHARED

FAMILIES: tuple[Family, ...] = (*WITH_SHARED, *ROUTED_ONLY, *STACKED_ONLY)
MTP_LAYERS = "|".join(dict.fromkeys(family.mtp for family in FAMILIES if family.mtp))
"""What stands before the number of an MTP layer in some family, as a regular expression."""


def find_family(config: Mapping[str, Any], named: str = "") -> Family | None:
    """Find the family by ``model_type``, in any section of config.json; where no row has it, by the name that a user gave.

    None when there is neither.
    """
    types = [str(place(config, name).get("model_type")) for name in SECTIONS]
    found = next((family for written in types for family in FAMILIES if written in family.model_types), None)
    return found or next((family for family in FAMILIES if family.name == named), None)
