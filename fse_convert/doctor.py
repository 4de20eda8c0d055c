"""What this machine has, and what that means. No server is imported: versions come from the metadata of packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import fse_convert
from fse_convert.errors import EnvironmentFailure, FseConvertError, environment, limits, size
from fse_convert.output.copying import shares_blocks
from fse_convert.output.free_space import existing_home, free_space
from fse_convert.servers.judge import ALL_TARGETS
from fse_convert.servers.release_names import find_named

DISTRIBUTIONS = {
    "torch": ("torch",),
    "huggingface_hub": ("huggingface_hub",),
    "DeepGEMM": ("sgl-deep-gemm", "deep-gemm"),
    "vLLM": ("vllm",),
    "SGLang": ("sglang",),
    "AITER": ("amd-aiter", "aiter"),
}
"""What is looked for, and the packages that may bring it, in the order of preference."""
SERVERS = {"vLLM": "-aiter", "SGLang": "-slots"}
"""Servers with target rows, and how the name of their row ends on ROCm."""
PLUGINS = (
    ("vLLM plugin", "vllm.general_plugins", "VLLM_PLUGINS", "gives vLLM --load-format fse"),
    ("SGLang plugin", "sglang.srt.plugins", "SGLANG_PLUGINS", "SGLang loads it by itself; FSE_CONVERT_SGLANG=off turns it off"),
)
"""Entry points of this package: name, group, the server's allow-list, and what it is good for."""
MEANINGS = {
    "torch": ("", "only inspect, targets, explain and --dry-run work without it: pip install torch"),
    "huggingface_hub": ("hf:// addresses work", "hf:// addresses need it: pip install 'huggingface_hub>=1.0'"),
    "DeepGEMM": ("", "only verify --level kernel needs it: pip install 'sgl-deep-gemm>=0.2.1', or the one that vLLM brings"),
}
"""What it means that something is installed, and that it is not."""
SM100 = 10
"""Major compute capability of the GPUs that MegaMoE runs on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for: its version or form, None where it is not here, and what that means.

    ``target``: the row of an installed server, empty where there is none.
    """

    name: str
    found: str | None
    meaning: str = ""
    target: str = ""


def versions() -> dict[str, str | None]:
    """Return the version of everything that is looked for, by name; None for what is not installed."""
    here = {name: next(filter(None, map(_version, packages)), None) for name, packages in DISTRIBUTIONS.items()}
    return {"fse-convert": fse_convert.__version__, "Python": platform.python_version(), "Linux": platform.release()} | here


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def examine(place: Path) -> Iterator[Finding]:
    """Yield what is here, and what it means for inspecting, converting, proving and serving.

    ``place``: the folder in which an output would lie.
    """
    found = versions()
    gpu, rocm = _gpu()
    for name, version in found.items():
        if name in SERVERS:
            yield _server(name, version, rocm=rocm)
        else:
            yes, no = MEANINGS.get(name, ("", ""))
            yield Finding(name, version, no if version is None else yes)
        if name == "torch":
            yield gpu
    yield from (_plugin(*row) for row in PLUGINS)
    yield from _place(place)


def _gpu() -> tuple[Finding, bool]:
    """Look at the first GPU through torch; return also whether torch is built for ROCm."""
    try:
        with limits():
            import torch

            from fse_convert.verification.gpu_kernel import describe_device
    except EnvironmentFailure as e:
        return Finding("GPU", None, f"not known: {e}"), False
    name, capability, trouble = describe_device()
    rocm = torch.version.hip is not None
    if capability is None:
        return Finding("GPU", None, f"{trouble}; converting and proving need none, except for verify --level kernel"), rocm
    if rocm:
        architecture = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        return Finding("GPU", f"{name}, {architecture}", "shared experts fuse by AITER or by slots, not by MegaMoE"), rocm
    runs = "MegaMoE and verify --level kernel run on it"
    meaning = runs if capability[0] == SM100 else "neither MegaMoE nor verify --level kernel runs on it: they need SM100"
    return Finding("GPU", f"{name}, SM{capability[0]}{capability[1]}", meaning), rocm


def _server(name: str, version: str | None, *, rocm: bool) -> Finding:
    """Find the target row of an installed server."""
    if version is None:
        return Finding(name, None)
    try:
        row = find_named(f"{name}-{version}{SERVERS[name] if rocm else ''}", ALL_TARGETS)
    except FseConvertError as e:
        problem = e.problems[0]
        return Finding(name, version, f"{problem.message}; {problem.hint}")
    return Finding(name, version, f"--target {row.name}; it is started with {row.started_with}", row.name)


def _plugin(name: str, group: str, allowed: str, use: str) -> Finding:
    """Look for this package's own entry point, and whether the server's allow-list lets it in."""
    entry = next((e for e in metadata.entry_points(group=group, name="fse-convert")), None)
    if entry is None:
        return Finding(name, None, "no entry point: install the package, not only its source (pip install .)")
    listed = os.environ.get(allowed)
    if listed is not None and entry.name not in listed.split(","):
        return Finding(name, None, f"{allowed} leaves it out: add {entry.name}")
    return Finding(name, "yes", use)


def _place(place: Path) -> Iterator[Finding]:
    """Look at the file system on which an output would lie."""
    home = existing_home(place / "OUT")
    try:
        with environment(home):
            free, shares = free_space(home), shares_blocks(home)
    except EnvironmentFailure as e:
        yield Finding("disk", None, f"{e}; {e.problems[0].hint}")
        return
    if shares:
        meaning = "unchanged shards share their blocks with a source on the same file system (reflink)"
    else:
        meaning = "no reflink: unchanged shards are copied, or linked with --link hard"
    yield Finding("disk", f"{size(free)} free in {home}", meaning)
