"""What all tests share: small synthetic checkpoints, made once, and ways to run the command and read its output."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fse_convert.codes import all_codes
from fse_convert.errors import Problem
from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.verification.findings import Mismatch

SMALL = {"hidden": 512, "width": 384, "layers": 2, "experts": 3, "vocab": 64}
"""Small enough for a test of milliseconds; 384 is no multiple of 512 but one of 128, as 2304 is."""

CODES: set[str] = set()
"""Codes that the package made in this process, and in its workers."""
ELSEWHERE = {
    "import-failed", "locale-encoding", "no-working-folder", "output-lost", "output-mounted", "reload-unsupported", "torch-missing",
}  # fmt: skip
"""Codes that tests see in processes of their own, inside vLLM, or where something is mounted."""


def pytest_configure() -> None:
    """Note every code that the package makes; have reports as wide as off any terminal, which workers of pytest narrow."""
    os.environ.pop("COLUMNS", None)

    def noting(make: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Problem | Mismatch, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            maker = sys._getframe(1)
            for frame in (maker, maker.f_back):  # `replace` stands between
                if frame and str(frame.f_globals.get("__name__")).startswith("fse_convert."):
                    CODES.add(self.code)

        return noted

    for kind in (Problem, Mismatch):
        kind.__init__ = noting(kind.__init__)  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker noted."""
    CODES.update(getattr(node, "workeroutput", {}).get("codes", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run of all tests, as `make fast` and `make test` are, in which a code was never made."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["codes"] = sorted(CODES)
        return
    option, named = session.config.option, session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    everything = not named and not option.keyword and option.markexpr in ("", "not slow and not peers")
    if everything and exitstatus == 0 and (missing := all_codes().keys() - CODES - ELSEWHERE):
        print(f"\nno test makes the codes {', '.join(sorted(missing))}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases by their data, where pytest would number them; other objects need an id of their own."""
    return None if val is None or isinstance(val, (str, bool, int, float, Enum)) else described(val)


def described(val: object) -> str | None:
    """The words of a piece of data, or None where it holds anything else."""
    if isinstance(val, BaseException):
        return f"{type(val).__name__} {val}".strip()
    if isinstance(val, bytes):
        return repr(val)[1:]
    if isinstance(name := getattr(val, "name", None), str):  # a member of an enum, a target
        return name
    if isinstance(val, dict):
        words = [None if (word := described(value)) is None else f"{key} {word}" for key, value in val.items()]
    elif isinstance(val, (list, tuple)):
        words = [described(value) for value in val]
    elif isinstance(val, set):
        words = sorted(str(value) for value in val)
    elif isinstance(val, partial):
        words = [described(value) for value in val.args]
    else:
        return str(val) if val is None or isinstance(val, (str, int, float)) else None
    if None in words:
        return None
    return textwrap.shorten(", ".join(map(str, words)) or "nothing", 120, placeholder="...")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a small checkpoint of a kind, once per session and set of knobs; never write into it."""
    known: dict[str, Path] = {}

    def make(kind: str = "v4.1-flash", **knobs: Any) -> Path:
        key = json.dumps([kind, knobs], sort_keys=True)
        if key not in known:
            extra = {"engram_rows": 64} if kind == "v4.1-flash" else {}
            known[key] = make_checkpoint(tmp_path_factory.mktemp(kind) / "source", kind, **{**SMALL, **extra, **knobs})
        return known[key]

    return make


@pytest.fixture
def source(made: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Make a private copy of a small checkpoint, to be damaged."""

    def copy(kind: str = "v4.1-flash", **knobs: Any) -> Path:
        return Path(shutil.copytree(made(kind, **knobs), tmp_path / "source"))

    return copy


@pytest.fixture(scope="session")
def converted(made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Convert a small checkpoint for a target with options, once per session; never write into it."""
    from fse_convert.cli import main

    known: dict[str, Path] = {}

    def convert(target: str = "megamoe-512", kind: str = "v4.1-flash", *options: str, **knobs: Any) -> Path:
        key = json.dumps([target, kind, options, knobs], sort_keys=True)
        if key not in known:
            out = tmp_path_factory.mktemp("converted") / "out"
            with pytest.raises(SystemExit) as stopped:
                main([str(made(kind, **knobs)), str(out), "--target", target, "-q", *options])
            assert not stopped.value.code
            known[key] = out
        return known[key]

    return convert


@pytest.fixture
def output(converted: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Make a private copy of a conversion, to be damaged; arguments as `converted` takes them."""

    def copy(*target_kind_options: str, **knobs: Any) -> Path:
        return Path(shutil.copytree(converted(*target_kind_options, **knobs), tmp_path / "out"))

    return copy


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""
    from fse_convert.cli import main

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(stopped.value.code or 0), out, err

    return call


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative name."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="session")
def digest() -> Callable[[Path], dict[str, str]]:
    """`digests`, as a fixture."""
    return digests
