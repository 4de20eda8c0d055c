"""Which names and links are followed: shards beside their index, files inside of their folder, names that the locale can spell."""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from contextlib import suppress
from pathlib import Path, PurePosixPath

from fse_convert.checkpoint.names import INDEX, SUFFIX
from fse_convert.errors import EnvironmentFailure, Problem, some


def unsafe_shards(listed: Set[str]) -> tuple[set[str], list[Problem]]:
    """Return the file names of an index that are not followed, and the problems that they are."""
    outside = sorted(n for n in listed if not _is_inside(n))
    problems = [
        Problem("index-path", f"weight_map leads outside of the checkpoint: {name!r}", INDEX, "do not trust this checkpoint")
        for name in outside
    ]
    elsewhere = sorted(n for n in listed - set(outside) if "/" in n or not n.endswith(SUFFIX))
    if elsewhere:
        message = f"weight_map names {some(elsewhere)}: servers read safetensors files beside the index only"
        hint = "move or convert these files, and name them in weight_map without a folder"
        problems.append(Problem("index-path", message, INDEX, hint))
    return {*outside, *elsewhere}, problems


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and "\\" not in name and "\0" not in name and ".." not in path.parts


def leads_out(root: Path, name: str) -> bool:
    """Tell whether a file of a folder is a link to something outside of it."""
    return not (root / name).resolve().is_relative_to(root.resolve())


def is_own(root: Path, name: str) -> bool:
    """Tell whether a file lies in its folder, or among the blobs of the hub cache that the folder lies in."""
    return not leads_out(root, name) or (root / name).resolve().parent == root.resolve().parent.parent / "blobs"


def check_spelling(name: str) -> None:
    """Refuse a UTF-8 name that this locale reads as another: the index and the output spell it in UTF-8."""
    with suppress(UnicodeDecodeError):
        utf8 = os.fsencode(name).decode("utf-8")
        if utf8 != name:
            message = f"the locale's encoding, {sys.getfilesystemencoding()}, cannot spell this file name"
            hint = "set PYTHONUTF8=1, or a UTF-8 locale: LC_ALL=C.UTF-8"
            raise EnvironmentFailure(Problem("locale-encoding", message, utf8, hint))
