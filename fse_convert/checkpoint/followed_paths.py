"""Which links and names of a checkpoint are followed: links to files are, wherever they lead; links to folders are not.

Of the names in an index those of shards beside it are followed, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path, PurePosixPath

from fse_convert.checkpoint.names import INDEX, SUFFIX
from fse_convert.errors import Problem, some


def linked_folders(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those of a folder's own folders that are links, which are not followed."""
    return {name for name in names if (folder / name).is_symlink()}


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


def link_notes(root: Path, names: Iterable[str]) -> list[Problem]:
    """Say which files are links to something outside of the checkpoint."""
    outside = [name for name in names if not is_own(root, name)]
    message = "a link to a file outside of the checkpoint, whose content a conversion copies"
    return [Problem("link-copied", message, some(outside), "remove it unless it belongs to the model")] if outside else []
