"""Which files of an output hubs add and people edit once it is published, and no server reads: they may differ."""

from __future__ import annotations

import re

from fse_convert.checkpoint.names import SIDECAR

_EDITABLE = re.compile(
    r"(?i:(.*/)?(\.gitattributes|\.gitignore|(readme|licen[cs]e|copying|notice|use_policy)[\w-]*(\.txt)?"
    r"|[^/]*\.(md|rst|pdf|bib|cff|png|jpe?g|gif|svg|webp|ico|mp4|webm|ipynb)))"
)


def is_editable(name: str) -> bool:
    """Tell whether a file of an output may be added or edited after the conversion without harm: model card, licence, pictures."""
    return not name.startswith(f"{SIDECAR}/") and _EDITABLE.fullmatch(name) is not None
