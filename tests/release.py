#!/usr/bin/env python3
"""Check what a release consists of: the wheel's and the sdist's files, the demo from the wheel alone, tests from the sdist alone.

    python tests/release.py dist FOLDER 'torch==2.13.0'

``FOLDER`` is made anew, outside of any checkout: with an empty environment, the wheel in it and the sdist unpacked. The third
argument is the torch to install, since the wheel's own requirement takes the newest, with CUDA, several gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

CHECKOUT = Path(__file__).resolve().parents[1]
KINDS = {".py", ".j2", ".json", ".txt", ".typed"}
"""Suffixes of what the package consists of."""
DEMO = """
python -m fse_convert.testing demo/checkpoint --kind v4.1-flash --layers 1 --mtp 1 --experts 2
fse-convert demo/checkpoint demo/converted
fse-convert verify demo/converted --source demo/checkpoint
fse-convert restore demo/converted demo/original
fse-convert inspect demo/checkpoint --format markdown
fse-convert explain no-space
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
TESTS = ("tests/docs", "tests/examples", "tests/test_architecture.py", "tests/test_codes.py", "tests/report/test_schemas.py")
"""Those that read files beside the package."""


def wheel_files(wheel: Path) -> None:
    """Compare the wheel with the package: every file of it, and nothing else but metadata."""
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    package = (p.relative_to(CHECKOUT).as_posix() for p in (CHECKOUT / "fse_convert").rglob("*") if p.suffix in KINDS)
    if different := found ^ set(package):
        raise SystemExit(f"{wheel.name} is not the package: {sorted(different)}")
    print(f"{wheel.name}: {len(found)} files of the package, nothing else")


def run(folder: Path, *command: object) -> None:
    """Run a command in a folder, without what would lead its Python to the checkout. Raises CalledProcessError."""
    subprocess.run([str(c) for c in command], cwd=folder, check=True, env=ENVIRONMENT)


def main() -> None:
    """Check all of it; the first thing that is wrong ends it."""
    dist, folder, torch = Path(sys.argv[1]), Path(sys.argv[2]).absolute(), sys.argv[3]
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    wheel_files(wheel)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    run(folder, programs / "pip", "install", "--quiet", torch, wheel.absolute())
    run(folder, programs / "pip", "check")
    of = ("--pyproject", CHECKOUT / "pyproject.toml", "--output-file", dist.absolute() / "sbom.cdx.json", programs / "python")
    run(folder, sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", *of)
    where = "import fse_convert, sys; sys.exit(not fse_convert.__file__.startswith(sys.prefix))"
    run(folder, programs / "python", "-c", where)
    for line in DEMO.strip().splitlines():
        program, *arguments = line.split()
        run(folder, programs / program, *arguments)
    run(folder, "diff", "--recursive", "demo/checkpoint", "demo/original")
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    unpacked = folder / PurePosixPath(sdist.name.removesuffix(".tar.gz"))
    run(folder, programs / "pip", "install", "--quiet", f"{wheel.absolute()}[hub,test]")
    run(unpacked, programs / "python", "-m", "pytest", "-q", "--collect-only", "-m", "not peers", "--no-summary")
    run(unpacked, programs / "python", "-m", "pytest", "-q", "-m", "not slow and not peers", *TESTS)
    print(f"{wheel.name} and {sdist.name} are fit to publish")


if __name__ == "__main__":
    main()
