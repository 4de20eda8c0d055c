"""Where an output may appear, and what it may replace there: with --overwrite an earlier output, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

from fse_convert.checkpoint.editable_files import is_editable
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import Problem, UsageError, size, some
from fse_convert.output.copying import exchange
from fse_convert.output.lock import is_held, staging_root
from fse_convert.output.mounts import mount_of


def check_output(source: Path, out: Path, *, overwrite: bool, replaceable: bool = True) -> None:
    """Refuse an output that is, holds or lies in the source, and one that exists unless it may be overwritten.

    ``overwrite`` replaces an empty folder or an output of this tool, nothing else; ``replaceable``: whether to suggest it.
    """
    if out.name in ("", ".."):
        raise UsageError(Problem("output-unnamed", "the output needs a name of its own", str(out), "give the name of a new folder"))
    real_source, real_out = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if real_out == real_source or real_source in real_out.parents or real_out in real_source.parents:
        message = f"the output must lie apart from the source {source}"
        raise UsageError(Problem("output-overlaps", message, str(out), "the source is never written; choose a folder beside it"))
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise output_exists(out, replaceable=replaceable)
    check_replaceable(out)


def check_replaceable(out: Path) -> None:
    """Refuse to replace anything but an output of this tool or an empty folder, and a mount point. Raises UsageError."""
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file()):
        hint = "remove it yourself if that is what you want"
        message = "--overwrite replaces only an output of fse-convert or an empty folder"
        raise UsageError(Problem("output-foreign", message, str(out), hint))
    foreign = _foreign(out)
    if foreign:
        message = f"--overwrite would delete files that the conversion did not write: {some(foreign)}"
        raise UsageError(Problem("output-foreign", message, str(out), "move them away first"))
    if mount_of(out) != mount_of(out.parent):  # a Btrfs subvolume is of the same mount, and of another device
        message = "a file system is mounted here: it cannot be replaced by a rename"
        raise UsageError(Problem("output-mounted", message, str(out), "give a folder inside of it"))


def _foreign(out: Path) -> list[str]:
    """Return the files of an output that its manifest does not list; none where it lists no files or cannot be read."""
    try:
        listed = json.loads((out / MANIFEST).read_bytes()).get("files")
    except (OSError, ValueError, AttributeError):
        return []
    if not isinstance(listed, dict):
        return []
    return sorted(n for n in LocalFolder(out).files if n not in listed and n != MANIFEST and not is_editable(n))


def output_exists(out: Path, *, replaceable: bool = True) -> UsageError:
    """Return the error for an output that is there."""
    try:
        check_replaceable(out)
    except (UsageError, OSError):
        replaceable = False
    hint = "choose another folder" + (", or --overwrite to replace an earlier output" if replaceable else "")
    return UsageError(Problem("output-exists", "the output exists already", str(out), hint), *left_behind(out))


def left_behind(out: Path) -> tuple[Problem, ...]:
    """Say what a run that was cut off left in the staging folder of an output that exists; nothing while a run holds it."""
    root = staging_root(out)
    if not root.is_dir() or is_held(root):
        return ()
    sizes = [info.st_size for folder, _, names in os.walk(root) for n in names if (info := os.lstat(Path(folder, n))).st_nlink == 1]
    hint = "remove it, unless a conversion with --overwrite is to go on from there"
    return (Problem("left-behind", f"a run that was cut off left {size(sum(sizes))}", str(root), hint),)


def appear(folder: Path, out: Path) -> None:
    """Let a finished folder appear as the output, by one rename. Raises UsageError when something is there, OSError."""
    try:
        os.rename(folder, out)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise output_exists(out) from e
        raise


def replace_output(folder: Path, out: Path, old: Path) -> None:
    """Let a finished folder take the place of the output: by one exchange, or where there is none with ``old`` in between."""
    if exchange(folder, out):
        return
    os.rename(out, old)
    try:
        appear(folder, out)
    except OSError:
        os.rename(old, out)
        raise


def finish_replacing(old: Path, out: Path) -> None:
    """Bring back the output that a dead run was replacing, or remove it where the new one is there."""
    if old.exists() and out.exists():
        shutil.rmtree(old)
    elif old.exists():
        os.rename(old, out)
