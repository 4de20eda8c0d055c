"""Build the virtual environments in which the peers' published code runs on a CPU.

    python tests/peers/make_env.py (sglang|vllm) DEST [--find-links DIR]

Standard library only, so that it runs before anything is installed. A stamp inside DEST holds a digest of the recipe: a second
run with the same recipe changes nothing, and a changed recipe builds DEST anew. Two runs for one DEST wait for each other.

pip takes its indexes from its own configuration. torch is asked for as a plain version: where an index with CPU builds is
configured (`PIP_EXTRA_INDEX_URL`), `+cpu` sorts higher and is taken; elsewhere the CUDA build comes, which works but is large.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
STAMP = ".fse-peer-stamp"


@dataclass(frozen=True)
class Step:
    """One call of `pip install`."""

    packages: tuple[str, ...]
    no_deps: bool = False


@dataclass(frozen=True)
class Recipe:
    """What one peer needs, in the order in which it is installed."""

    constraints: str
    steps: tuple[Step, ...]
    check: str

    def digest(self) -> str:
        """Return what identifies the finished environment: recipe, pins and interpreter."""
        parts = [
            self.constraints,
            (HERE / self.constraints).read_text(encoding="utf-8"),
            json.dumps([[step.packages, step.no_deps] for step in self.steps]),
            f"{sys.version_info.major}.{sys.version_info.minor}",
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# fmt: off
# vLLM's wheel is the CUDA one; its compiled parts are never loaded. `--no-deps` keeps the CUDA packages it names away.
RECIPES = {
    "vllm": Recipe(
        constraints="env_vllm.txt",
        steps=(
            Step(("torch==2.13.0",)),
            Step((
                "numpy", "safetensors", "transformers", "regex", "cachetools", "psutil", "sentencepiece",
                "requests", "tqdm", "blake3", "py-cpuinfo", "pyyaml", "einops", "cloudpickle", "msgspec",
                "pyzmq", "pillow", "pybase64", "cbor2", "pydantic", "prometheus_client", "aiohttp", "tiktoken",
                "partial-json-parser", "protobuf", "openai", "fastapi", "starlette", "mcp", "oss-harmony",
                "uvloop", "ninja",
            )),
            Step((
                "xgrammar", "apache-tvm-ffi", "llguidance", "outlines_core", "lm-format-enforcer",
                "interegular", "compressed-tensors", "loguru", "depyf", "astor", "dill", "mistral_common",
                "pydantic-extra-types", "pycountry", "opencv-python-headless", "lark", "setproctitle", "ijson",
                "gguf",
            ), no_deps=True),
            Step(("vllm==0.33.0",), no_deps=True),
        ),
        check="import vllm, torch; print(vllm.__version__, torch.__version__)",
    ),
    # The wheels of triton, torchvision and SGLang are CUDA builds: imported, never launched. sgl-deep-gemm cannot be imported
    # without CUDA libraries: its Python files come from `wheels.py`.
    "sglang": Recipe(
        constraints="env_sglang.txt",
        steps=(
            Step(("torch==2.13.0", "numpy==2.4.6")),
            Step((
                "transformers==5.19.0", "openai==2.8.0", "orjson", "psutil", "pybase64", "requests", "packaging", "pillow",
                "starlette", "msgspec", "pyzmq", "tqdm", "ipython", "pydantic", "aiohttp", "dill", "sentencepiece==0.2.1",
                "einops", "gguf==0.19.0", "partial-json-parser", "loguru", "setuptools", "safetensors",
            )),
            Step((
                "triton==3.9.0", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0",
                "sglang==0.5.23",
            ), no_deps=True),
        ),
        check="from importlib.metadata import version; import torch; print(version('sglang'), torch.__version__)",
    ),
}
# fmt: on


def interpreter(dest: Path) -> Path:
    """Return the Python of the environment at `dest`."""
    return dest / "bin" / "python"


def is_ready(dest: Path, recipe: Recipe) -> bool:
    """Tell whether `dest` was built to the end by this recipe."""
    stamp = dest / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == recipe.digest() and interpreter(dest).exists()


@contextlib.contextmanager
def locked(dest: Path) -> Iterator[None]:
    """Hold the lock of one environment; other processes that want the same one wait."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with (dest.parent / f".{dest.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(dest: Path, recipe: Recipe, find_links: list[str]) -> None:
    """Make the environment from scratch; the stamp is written last."""
    if dest.exists() and any(dest.iterdir()) and not (dest / "pyvenv.cfg").is_file():
        raise SystemExit(f"{dest} is not empty and is no virtual environment: not touched")
    (dest / STAMP).unlink(missing_ok=True)
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(dest)
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for step in recipe.steps:
        command = [str(interpreter(dest)), "-m", "pip", "install", "--quiet", "-c", str(HERE / recipe.constraints)]
        command += ["--no-deps"] * step.no_deps
        for place in find_links:
            command += ["--find-links", place]
        subprocess.run([*command, *step.packages], check=True, env=environment)
    subprocess.run([str(interpreter(dest)), "-c", recipe.check], check=True, env=environment, cwd=dest)
    (dest / STAMP).write_text(recipe.digest() + "\n", encoding="utf-8")


def ensure(name: str, dest: Path, find_links: list[str] | None = None) -> Path:
    """Return the interpreter of the environment at `dest`, built first where it is missing or outdated."""
    recipe = RECIPES[name]
    if not is_ready(dest, recipe):
        with locked(dest):
            if not is_ready(dest, recipe):
                build(dest, recipe, find_links or [])
    return interpreter(dest)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the environment in which a peer's published code runs on a CPU.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("dest", type=Path)
    parser.add_argument("--find-links", action="append", default=[], help="folder of wheels to look in as well")
    args = parser.parse_args()
    print(ensure(args.name, args.dest.absolute(), args.find_links))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
