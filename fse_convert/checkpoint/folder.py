"""Where a checkpoint's files are read from: a local folder here; anything that can list files and read byte ranges elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from fse_convert.checkpoint.followed_paths import linked_folders
from fse_convert.checkpoint.left_out import Kind, find_clutter
from fse_convert.checkpoint.names import check_spelling
from fse_convert.errors import EnvironmentFailure, InvalidCheckpoint, Problem, naming, some

LARGEST_WHOLE = 256 << 20
"""Bytes of a file that is read as a whole: an index of a million tensors has 100 MiB."""
STILL_WRITTEN = "wait until nothing writes to the source, then start again"


class Folder(Protocol):
    """Read access to a checkpoint's files by relative POSIX name."""

    @property
    def label(self) -> str:
        """How messages name it."""

    @property
    def files(self) -> dict[str, int]:
        """Every file with its size in bytes, nested ones included, in sorted order; without clutter."""

    @property
    def clutter(self) -> dict[str, Kind]:
        """What is there and by its name never part of a checkpoint: files, and folders with a slash at the end."""

    @property
    def odd(self) -> list[str]:
        """What is there but is no readable file: never part of the checkpoint."""

    @property
    def workers(self) -> int:
        """How many reads at once are worthwhile."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range; shorter when the file ends."""


class Stamp(NamedTuple):
    """What tells a file from a changed one: size in bytes, time of the last change in ns, inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, info: os.stat_result) -> Stamp:
        """Return the stamp of a file that was looked at."""
        return cls(size=info.st_size, mtime_ns=info.st_mtime_ns, inode=info.st_ino)


class LocalFolder:
    """A folder on this machine; files may be symlinks, as in a hub cache's snapshot."""

    workers = 8

    def __init__(self, root: Path) -> None:
        self.root = root
        if not root.is_dir():
            message = "not a folder" if root.exists() else "no such folder"
            raise InvalidCheckpoint(Problem("no-such-folder", message, str(root), _hint_for(root)))

    @property
    def label(self) -> str:
        """The path as given."""
        return str(self.root)

    @cached_property
    def _scan(self) -> tuple[dict[str, Stamp], dict[str, Kind], list[str]]:
        files: dict[str, Stamp] = {}
        left: dict[str, Kind] = {}
        odd: list[str] = []
        for folder, names, leaves in os.walk(self.root, onerror=_refuse):
            within = {n: _relative(folder, n, self.root) for n in (*names, *leaves)}
            kinds = {n: found[1] for n in within if (found := find_clutter(n))}
            left |= {within[n] + "/" * (n in names): kind for n, kind in kinds.items()}
            links = linked_folders(Path(folder), names)
            odd += [within[n] for n in links if n not in kinds]
            names[:] = sorted(n for n in names if n not in links and n not in kinds)
            for name in (within[n] for n in leaves if n not in kinds):
                check_spelling(name)
                try:
                    info = os.stat(self.root / name)
                except OSError as e:
                    if e.errno not in (errno.ENOENT, errno.ELOOP):
                        raise
                    odd.append(name)
                    continue
                if stat.S_ISREG(info.st_mode):
                    files[name] = Stamp.of(info)
                else:
                    odd.append(name)
        return dict(sorted(files.items())), dict(sorted(left.items())), sorted(odd)

    @cached_property
    def files(self) -> dict[str, int]:
        """Every regular file with its size; symlinks are followed."""
        return {name: stamp.size for name, stamp in self.stamps.items()}

    @property
    def stamps(self) -> dict[str, Stamp]:
        """What every regular file looked like when the folder was first looked at."""
        return self._scan[0]

    def check(self, name: str, info: os.stat_result | None = None) -> None:
        """Refuse a file that is no longer what it was when the folder was first looked at.

        ``info``: of an open descriptor; without it the path is looked at. Raises EnvironmentFailure, OSError.
        """
        now = info or os.stat(self.path(name))
        if Stamp.of(now) != self.stamps[name]:
            message = "this file changed while the checkpoint was being read"
            raise EnvironmentFailure(Problem("source-changed", message, name, STILL_WRITTEN))

    def check_all(self) -> None:
        """Refuse a folder in which a file changed, came or went meanwhile. Raises EnvironmentFailure, OSError."""
        now = LocalFolder(self.root).stamps
        changed = sorted(n for n in {*now, *self.stamps} if now.get(n) != self.stamps.get(n))
        if changed:
            message = "this file changed, came or went while the checkpoint was being read"
            raise EnvironmentFailure(Problem("source-changed", message, some(changed), STILL_WRITTEN))

    @property
    def odd(self) -> list[str]:
        """What is neither a regular file nor a plain folder: dangling links, linked folders, pipes, sockets."""
        return self._scan[2]

    @property
    def clutter(self) -> dict[str, Kind]:
        """What is by its name never part of a checkpoint."""
        return self._scan[1]

    @cached_property
    def hidden(self) -> list[str]:
        """The files of `clutter`, and whatever its folders hold, in sorted order: never part of the checkpoint, but there."""
        found = [n for n in self.clutter if not n.endswith("/")]
        for top in (n for n in self.clutter if n.endswith("/")):
            if (self.root / top.rstrip("/")).is_symlink():
                found.append(top.rstrip("/"))
            for folder, names, leaves in os.walk(self.root / top, onerror=_refuse):
                links = linked_folders(Path(folder), names)
                found += [_relative(folder, n, self.root) for n in (*leaves, *links)]
        return sorted(found)

    def path(self, name: str) -> Path:
        """Return the path of a file of this folder."""
        return self.root / name

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range of a file; all of it by default, which is for JSON: raises InvalidCheckpoint above `LARGEST_WHOLE`."""
        if length is None and self.files[name] > LARGEST_WHOLE:
            message = f"{self.files[name]:,} bytes; JSON of a checkpoint has at most {LARGEST_WHOLE:,}"
            raise InvalidCheckpoint(Problem("json-too-large", message, name, "download it again"))
        with naming(self.path(name)), self.path(name).open("rb") as f:
            f.seek(offset)
            return f.read(-1 if length is None else length)


def _hint_for(root: Path) -> str:
    """Say what to give instead of a path that is no folder: of a file its folder, of a name of the Hub what it takes."""
    if root.exists():
        return f"give its folder: {root.parent}"
    if root.parts[0] == "hf:":
        return f"only a source may lie on the Hub; download this: hf download {'/'.join(root.parts[1:])} --local-dir FOLDER"
    if len(root.parts) == 2 and not root.is_absolute() and not root.parent.exists():
        return f"give the folder that holds config.json and the safetensors files; for a model on the Hub: hf://{root}"
    return "give the folder that holds config.json and the safetensors files"


def _refuse(error: OSError) -> NoReturn:
    """Raise: a folder that cannot be listed must not pass for an empty one."""
    raise error


def _relative(folder: str, leaf: str, root: Path) -> str:
    return os.path.relpath(os.path.join(folder, leaf), root).replace(os.sep, "/")
