"""The image of the Dockerfile and the script that tries it; a stand-in for docker runs the commands without a container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "docker.sh"
DOCKER = """#!/usr/bin/env bash
[ "$1" = run ] || exit 0
entry=fse-convert
while [ "$1" != image ]; do
  case $1 in
    --volume) cd "${2%:/data}" ;;
    --entrypoint) entry=$2 ;;
  esac
  shift
done
shift
exec "$entry" "$@"
"""


@pytest.mark.slow
def test_what_the_script_runs_in_the_image_works(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "DOCKER": str(docker), "IMAGE": "image", "PATH": path, "TMPDIR": str(tmp_path)}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "storage: passed" in done.stdout
    assert "restored to original" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["docker"], "the script left something behind"


def test_where_nothing_can_build_it_says_so() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env={**os.environ, "DOCKER": "false"}, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("false cannot build here")


def test_the_image_has_the_torch_of_the_tests_and_no_root() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    torch = [re.search(pattern, text) for pattern, text in ((r"TORCH=(\S+)", dockerfile), (r"torch==(\S+)", makefile))]
    assert torch[0]
    assert torch[1]
    assert torch[0][1] == torch[1][1]
    assert re.search(r"^USER [1-9]\d*$.*^ENTRYPOINT ", dockerfile, re.MULTILINE | re.DOTALL)


def test_the_build_sees_what_the_package_is_made_of() -> None:
    seen = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    needed = {"pyproject.toml", re.search(r'readme = "(.+)"', project)[1], re.search(r'license-files = \["(.+)"\]', project)[1]}  # type: ignore[index]
    assert seen == needed | {"fse_convert"}
