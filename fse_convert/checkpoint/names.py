"""Names of the files of a checkpoint and of an output, which the locale must be able to spell."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

from fse_convert.errors import EnvironmentFailure, Problem

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
SIDECAR = "fse"
"""Folder of an output that holds the kernel layout and the manifest."""
MANIFEST = f"{SIDECAR}/manifest.json"
SIDECAR_INDEX = f"{SIDECAR}/{INDEX}"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key that puts shard 2 before shard 10, as vLLM's loader orders files."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]


def check_spelling(name: str) -> None:
    """Refuse a UTF-8 name that this locale reads as another: the index and the output spell it in UTF-8."""
    with suppress(UnicodeDecodeError):
        utf8 = os.fsencode(name).decode("utf-8")
        if utf8 != name:
            message = f"the locale's encoding, {sys.getfilesystemencoding()}, cannot spell this file name"
            hint = "set PYTHONUTF8=1, or a UTF-8 locale: LC_ALL=C.UTF-8"
            raise EnvironmentFailure(Problem("locale-encoding", message, utf8, hint))
