"""SGLang's environment, its earlier releases, and the run of a driver there; what was computed once, by any worker, is kept."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.peers import make_env, wheels

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ENVIRONMENT = Path(os.environ.get("FSE_PEERS_SGLANG", REPOSITORY / ".peers" / "sglang"))
SGLANG_0_5_21 = wheels.Peer("sglang", "0.5.21", ("sglang/*.py", "sglang/kernels/jit/*", "sglang-*.dist-info/METADATA"))
SGLANG_0_5_22 = wheels.Peer("sglang", "0.5.22", ("sglang/*.py", "sglang/kernels/jit/*", "sglang-*.dist-info/METADATA"))
RELEASES = {"0.5.21": SGLANG_0_5_21, "0.5.22": SGLANG_0_5_22, "0.5.23": None}  # None: the environment's own
OURS = {"SGLANG_PLUGINS", "FSE_CONVERT_SGLANG"}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def once(answer: Path, compute: Callable[[], Any]) -> Any:
    """Return what a file of JSON holds; the first worker that asks computes it."""
    with locked(answer):
        if not answer.exists():
            answer.write_text(json.dumps(compute()), encoding="utf-8")
    return json.loads(answer.read_text(encoding="utf-8"))


def published(peer: wheels.Peer) -> Path:
    try:
        return wheels.fetch(peer)
    except wheels.PeerUnavailable as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def run_driver(
    driver: str, *arguments: object, folder: Path, given: str = "", path: Sequence[Path | str] = (), **variables: str
) -> Any:
    """Run a driver in SGLang's environment, in ``folder``, and return its answer; ``path``: what it imports from first."""
    published(wheels.SGL_DEEP_GEMM_0_2_3)
    python = make_env.ensure("sglang", ENVIRONMENT)
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {"FSE_PEERS_DIR": str(wheels.cache_dir()), "PYTHONWARNINGS": "ignore"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, [*path, REPOSITORY])), **variables}
    command = [str(python), str(HERE / "drivers" / f"{driver}.py"), *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert "@@@" in done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("@@@")[2])
