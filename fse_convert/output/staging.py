"""How an output appears: written in a staging folder beside it, made durable, then renamed, once.

Until the rename there is no output; after it, there is a complete one. The staging folder is locked by the run that
writes it, and a dead run's lock goes with its process. What a dead run finished is in its journal, and the next run of
the same conversion resumes from there.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from fse_convert.checkpoint.folder import LocalFolder, Stamp
from fse_convert.errors import EnvironmentFailure, FseConvertError, UsageError, some
from fse_convert.output.copying import new_file, write_all
from fse_convert.output.journal import JOURNAL, Journal
from fse_convert.output.lock import LOCK, OUTPUT, Hold, locked, staging_lost, staging_root, sync_folder
from fse_convert.output.overwrite import appear, check_replaceable, finish_replacing, output_exists, replace_output
from fse_convert.output.resume import check_same_conversion, read_journals
from fse_convert.output.signals import handling

logger = logging.getLogger(__name__)


class Staging:
    """The folder in which an output is being made. Use `stage` to get one."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = staging_root(out)
        self.folder = self.root / OUTPUT
        self.old = self.root / "replaced"
        self.journal = Journal(self.root / JOURNAL, {}, {})
        self.replace = False
        self.hold: Hold | None = None

    def begun(self) -> bool:
        """Return whether some run, or a part of one, has a journal here."""
        return any(self.root.glob(f"{JOURNAL}*"))

    def held(self, names: Collection[str]) -> int:
        """Return the bytes that those of the files ``names`` already take that earlier runs wrote; hard links take none."""
        total = 0
        for name in names:
            with suppress(FileNotFoundError):  # another run may be publishing it
                info = os.lstat(self.folder / name)
                total += info.st_size if info.st_nlink == 1 else 0
        return total

    def path(self, name: str) -> Path:
        """Return the path of an output file while it is being made; its folders exist afterwards, and no file of that name."""
        path = self.folder / name
        for parent in reversed(PurePath(name).parents[:-1]):  # never the output's folder itself: if it is gone, the work is lost
            (self.folder / parent).mkdir(exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

    def look(self) -> LocalFolder:
        """Look at what is staged so far. Raises EnvironmentFailure when its folder is gone."""
        if not self.folder.is_dir():
            raise staging_lost("unfinished work was removed during the run", self.folder)
        return LocalFolder(self.folder)

    def stamp(self, name: str) -> Stamp:
        """Return what a staged file looks like now."""
        return Stamp.of(os.stat(self.folder / name))

    def check(self, read: LocalFolder, stamps: Mapping[str, Stamp]) -> None:
        """Refuse to go on when the folder that is read changed, or what is staged since it was looked at. For `publish`."""
        read.check_all()
        staged = self.look()
        check_staged(staged, staged.stamps, stamps)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file durably."""
        with new_file(self.path(name)) as fd:
            write_all(fd, data)

    def keep_only(self, names: Collection[str]) -> None:
        """Remove whatever lies in the output's folder and is none of these files: what a dead run or somebody else left there."""
        for folder, folders, inside in os.walk(self.folder):
            links = [n for n in folders if Path(folder, n).is_symlink()]
            for path in (Path(folder, name) for name in [*inside, *links]):
                if str(path.relative_to(self.folder)) not in names:
                    logger.info("%s: not of this conversion, removed", path)
                    path.unlink()

    def publish(self, check: Callable[[], None]) -> None:
        """Make every folder durable, then let the output appear by one rename; once it is there, nothing stops the rest.

        ``check``: called last before the rename; raises when what is staged is not what was proved. Raises UsageError when
        something is there that may not be replaced, EnvironmentFailure, OSError.
        """
        logger.info("publishing %s", self.out)
        for folder, _, _ in os.walk(self.folder, topdown=False):
            sync_folder(Path(folder))
        with handling(signal.SIG_IGN):  # once the output is there, none may turn success into a failure
            if self.hold:
                self.hold.check()
            check()
            if os.path.lexists(self.out):
                if not self.replace:
                    raise output_exists(self.out)
                check_replaceable(self.out)
                replace_output(self.folder, self.out, self.old)
            else:
                appear(self.folder, self.out)
            sync_folder(self.out.parent)
            _remove(self.root)  # the output is there and durable: what cannot be removed now, the next run removes


@contextmanager
def stage(
    out: Path, fingerprint: Mapping[str, Any] | None = None, *, restart: bool = False, part: str = "", replace: bool = False
) -> Iterator[Staging]:
    """Lock the staging folder of ``out`` and hand it over, with what earlier runs of the same ``fingerprint`` finished.

    Without a fingerprint, and with ``restart``, the folder is emptied first. ``part``: other parts of the same conversion
    may be writing too, each with a journal of its own. ``replace``: what is at ``out`` may be replaced. When the body
    fails for a reason that a second try may not have (the machine, an interrupt, an argument), the folder stays for that
    try; otherwise it is removed, unless it is shared.
    Raises Locked when another run holds it, UsageError when it is the rest of another conversion, or the output is there.
    """
    staging = Staging(out)
    staging.replace = replace
    with locked(staging.root, out, part) as staging.hold:
        _prepare(staging, fingerprint, restart=restart, part=part)
        try:
            yield staging
        except Exception as e:
            staging.hold.check()  # what went wrong may only be the consequence of this
            if isinstance(e, EOFError | FileNotFoundError):  # `reading` has already checked the source, so a staged file is meant
                raise staging_lost(f"a file of unfinished work was cut or removed during the run: {e}", staging.folder) from e
            kept = fingerprint is not None and (
                not isinstance(e, FseConvertError) or isinstance(e, EnvironmentFailure | UsageError)
            )
            if not (part or kept):
                _remove(staging.root)
            raise


@contextmanager
def reading(folder: LocalFolder) -> Iterator[None]:
    """Say of whatever fails that the folder which is read changed, if it did. Raises EnvironmentFailure, OSError."""
    try:
        yield
    except Exception:
        folder.check_all()
        raise


def _prepare(staging: Staging, fingerprint: Mapping[str, Any] | None, *, restart: bool, part: str) -> None:
    """Make an empty folder of the staging folder, or one with what earlier runs of the same ``fingerprint`` finished."""
    if not part:
        finish_replacing(staging.old, staging.out)
    if os.path.lexists(staging.out) and not staging.replace:  # it appeared while this run was planning
        if {item.name for item in staging.root.iterdir()} == {LOCK}:  # this run made the folder
            _remove(staging.root)
        raise output_exists(staging.out)
    found = {} if fingerprint is None or restart else read_journals(staging.root)
    check_same_conversion(staging.root, (old for old, _ in found.values()), fingerprint or {})
    if not found and not part:  # nothing here is of use
        _clear(staging.root)
    staging.folder.mkdir(exist_ok=bool(found or part))
    if fingerprint is not None:
        logger.info("%s: %s", staging.root, f"resuming after {', '.join(found)}" if found else "starting afresh")
        name = f"{JOURNAL}.{part}" if part else JOURNAL
        done = {file: record for _, files in found.values() for file, record in files.items()}
        staging.journal = Journal(staging.root / name, fingerprint, done)
        if name in found:
            staging.journal.resume()
        else:
            staging.journal.create()


def check_staged(staged: LocalFolder, found: Mapping[str, Stamp | int], expected: Mapping[str, Stamp | int]) -> None:
    """Refuse unfinished work whose files, by what was ``found`` of each, are not those that are ``expected``.

    Raises EnvironmentFailure `staging-lost`, OSError.
    """
    wrong = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    wrong |= {*staged.odd, *staged.hidden}
    if wrong:
        raise staging_lost(f"files of unfinished work changed, came or went during the run: {some(sorted(wrong))}", staged.root)


def _remove(root: Path) -> None:
    """Remove a staging folder, its lock last: whoever comes next may hold a new one at once, and keeps its folder."""
    with suppress(OSError):
        _clear(root)
        (root / LOCK).unlink(missing_ok=True)
        root.rmdir()


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.name == LOCK:  # held by this run
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
