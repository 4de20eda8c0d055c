"""Asks vLLM's own code about AITER shared-expert fusion, in the environment of the newest release."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.peers import wheels

DRIVER = Path(__file__).parent / "drivers" / "aiter_driver.py"


def ask_vllm(request: dict[str, Any], python: Path, sources: Path | None = None) -> dict[str, Any]:
    """Run the driver, on the environment's vLLM or on the sources of another release."""
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"} | ({"PYTHONPATH": str(sources)} if sources else {})
    command = [str(python), str(DRIVER)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.rpartition("@@@")[2])
    return answers


class Sources(wheels.Peer):
    """All Python files of a release, kept apart from the few that other tests use."""

    def __str__(self) -> str:
        return f"{super().__str__()}-sources"


def sources_of(release: str) -> Path:
    """Return the folder with the Python files of a release."""
    return wheels.fetch(Sources("vllm", f"{release}.0", ("*.py", "*.json")))
